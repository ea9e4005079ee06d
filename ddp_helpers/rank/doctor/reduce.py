"""The check of the all-reduce: the group, its sum and its speed, each within the limit."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.rank.doctor.case import Case, Red
from ddp_helpers.rank.group import backend_class


def check_reduce(case: Case) -> str:
    """An all-reduce gives the right sum on every rank; how fast it was. Red where a part of it blocks."""
    case.together("all-reduce")
    # NCCL hangs or aborts where two ranks hold one GPU, or one holds none: gloo can still say what is wrong.
    backend = "nccl" if case.count("gpus") == case.size else "gloo"
    device = torch.device(case.device if backend == "nccl" else "cpu")
    large = torch.full((2**26 if backend == "nccl" else 2**22,), case.rank + 1.0, device=device)  # 256 or 16 MB
    sizes = {"4 B": 1, "64 kB": 2**14, "1 MB": 2**18, "16 MB": 2**22, "256 MB": 2**26}
    sizes = {name: n for name, n in sizes.items() if n <= len(large)}
    try:
        in_time(case, device, "init", partial(form, case, device))
        name, wrong = in_time(case, device, "first all-reduce", partial(sum_up, case, large))
        took = [
            in_time(
                case,
                device,
                f"all-reduce of {size}",
                partial(seconds_of, large[:n], 100 if n < 2**18 else 5),
            )
            for size, n in sizes.items()
        ]
        case.together("sums")  # nobody leaves while a peer still needs an answer
    finally:
        if dist.is_initialized() and not case.blocked:
            with suppress(Exception):  # what was wrong before counts
                in_time(case, device, "end", dist.destroy_process_group)
    if wrong:
        raise Red(f"the sum of {case.size} ranks is {wrong[0]:g}, not {case.size * (case.size + 1) / 2:g}")
    times = ", ".join(f"{size} {1e3 * seconds:.3g} ms" for size, seconds in zip(sizes, took, strict=True))
    busbw = f"{large.nbytes / took[-1] * 2 * (case.size - 1) / case.size / 1e9:.2f} GB/s"
    return "" if case.rank else f"right sums over {name}; {times}; busbw {busbw}"


def in_time(case: Case, device: torch.device, what: str, call: Callable[[], Any]) -> Any:
    """Call it with this GPU as the current one. Raises Red, with the interface, where it blocks."""

    def work() -> Any:
        with torch.accelerator.device_index(device.index):  # each thread has a current GPU
            return call()

    try:
        # NCCL can block inside a call that torch's limit does not end; where that ends one, it says more.
        return case.within(case.args.timeout + 1, work)
    except TimeoutError:
        library = "NCCL" if device.type == "cuda" else "gloo"
        debug = "NCCL_DEBUG=INFO says where it waits"
        variable = f"{library.upper()}_SOCKET_IFNAME"
        known = ", ".join(name for _, name in socket.if_nameindex())
        now = os.environ.get(variable) or f"not set, and there are {known}"
        seen = f"{library}'s {what} is not over after {case.args.timeout} s; {variable} is {now}"
        cure = f"export {variable}= the interface between the nodes, open for all ports: ip -brief address"
        if library == "NCCL":
            alone = f"{debug}; on one host NCCL_P2P_DISABLE=1 does without direct copies"
            cure = alone if case.count("hosts") == 1 else f"{cure}; {debug}"
        raise Red(seen, cure) from None


def form(case: Case, device: torch.device) -> None:
    """Form the group of all ranks: NCCL's for a GPU, else gloo's; every rank calls it."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # an error, in place of an abort
    group = {
        "store": dist.PrefixStore("group", case.store),
        "rank": case.rank,
        "world_size": case.size,
    }
    group["timeout"] = timedelta(seconds=case.args.timeout)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, device_id=device_id, **group)


def sum_up(case: Case, large: Tensor) -> tuple[str, list[float]]:
    """All-reduce it; return the backend's class, and a wrong sum if there is one. Every rank calls it."""
    limit = timedelta(seconds=case.args.timeout)
    dist.all_reduce(large, async_op=True).wait(limit)  # with a limit NCCL waits here, too, and raises
    wrong = large[large != case.size * (case.size + 1) / 2][:1].tolist()  # also what is not a number
    large.zero_()  # sums of sums would overflow below
    return backend_class(large.device), wrong


def seconds_of(total: Tensor, times: int) -> float:
    """Measure the mean time of so many all-reduces of this tensor; every rank calls it."""
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(total)
    total[0].item()  # waits for a GPU, once for all
    return (time.perf_counter() - begin) / times
