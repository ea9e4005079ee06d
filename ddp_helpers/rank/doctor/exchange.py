"""The checks that all ranks make together: the clocks, a file that all see, a sum and its speed."""

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.rank.doctor.case import Case, Red
from ddp_helpers.rank.doctor.checks import there


def check_clocks(case: Case) -> str:
    """The hosts' clocks agree, when all ranks look at them."""
    case.together("clocks")
    skew = (mine := time.time()) - float(case.first("clock", str(mine)))
    if abs(skew) > 1:
        raise Red(f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} rank 0")
    return "within a second of rank 0's"


def check_folder(case: Case) -> str:
    """Check that all ranks see what rank 0 writes into the run folder, and remove it."""
    folder = case.args.run_dir.absolute()
    if case.rank == 0:
        case.first("folder", str(folder))
        try:
            with NamedTemporaryFile(dir=there(folder), prefix=".doctor-") as file:
                case.first("file", file.name)
                case.together("file")
        except OSError as error:
            case.first("file")
            raise Red(f"{folder} cannot be written ({error.strerror})") from error
        return f"all ranks see what rank 0 wrote for {folder}"
    here, file, seen = folder == Path(case.first("folder")), case.first("file"), False
    for _ in range(20):  # a file system may take its time
        with suppress(OSError):
            seen = bool(here and (not file or Path(file).stat()))
        time.sleep(0 if seen else 0.1)
    if file:
        case.together("file")
    if not seen:
        raise Red(f"not in {folder}: the file that rank 0 wrote")
    return ""


def check_reduce(case: Case) -> str:
    """An all-reduce gives the right sum on every rank; how fast it was."""
    size, limit = case.size, timedelta(seconds=case.args.timeout)
    case.together("all-reduce")
    # NCCL hangs or aborts where two ranks hold one GPU, or one holds none: gloo can still say what is wrong.
    backend = "nccl" if case.count("gpus") == size else "gloo"
    device = torch.device(case.device if backend == "nccl" else "cpu")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # an error that can be caught, in place of an abort
    group = {"store": dist.PrefixStore("group", case.store), "rank": case.rank, "world_size": size, "timeout": limit}
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None, **group)
    try:
        large = torch.full((2**26 if backend == "nccl" else 2**22,), case.rank + 1.0, device=device)  # 256 or 16 MB
        dist.all_reduce(large, async_op=True).wait(limit)  # with a limit NCCL waits here, too, and raises
        wrong = large[large != size * (size + 1) / 2][:1].tolist()  # also what is not a number
        large.zero_()  # sums of sums would overflow below
        sizes = {"4 B": 1, "64 kB": 2**14, "1 MB": 2**18, "16 MB": 2**22, "256 MB": 2**26}
        took = {name: seconds_of(large[:n], 100 if n < 2**18 else 5) for name, n in sizes.items() if n <= len(large)}
        case.together("sums")  # nobody leaves while a peer still needs an answer
    finally:
        dist.destroy_process_group()
    if wrong:
        raise Red(f"the sum of {size} ranks is {wrong[0]:g}, not {size * (size + 1) / 2:g}")
    times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in took.items())
    busbw = f"{large.nbytes / [*took.values()][-1] * 2 * (size - 1) / size / 1e9:.2f} GB/s"
    return "" if case.rank else f"right sums over {backend}; {times}; busbw {busbw}"


def seconds_of(total: Tensor, times: int) -> float:
    """The mean time of so many all-reduces of this tensor, on a GPU by its own clock; every rank calls it."""
    if total.is_cuda:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    start = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(total)
    if total.is_cuda:
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times
    return (time.perf_counter() - start) / times
