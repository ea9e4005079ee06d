"""The check of the all-reduce: the group, its sum and its speed, each within the limit.

The doctor calls it on every rank, after all have met. It needs torch.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.rank.doctor.case import Case, CheckFailed, Value

_SIZES = {"4 B": 1, "64 kB": 2**14, "1 MB": 2**18, "16 MB": 2**22, "256 MB": 2**26}  # in floats


def check_reduce(case: Case) -> str:
    """Check that an all-reduce gives the right sum on every rank, and measure how fast it is.

    Raises Red where a part of it blocks.
    """
    case.together("all-reduce")
    # NCCL hangs or aborts where two ranks hold one GPU, or one holds none: gloo can still say what
    # is wrong.
    on_gpus = case.count("gpus") == case.size
    device = torch.device(case.device if on_gpus else "cpu")
    large = torch.full((2**26 if on_gpus else 2**22,), case.rank + 1.0, device=device)
    sizes = {name: floats for name, floats in _SIZES.items() if floats <= len(large)}
    seconds = []
    try:
        in_time(case, device, "init", partial(_form, case, device))
        name, wrong = in_time(case, device, "first all-reduce", partial(_sum_up, case, large))
        for size, floats in sizes.items():
            times = 100 if floats < 2**18 else 5
            measure = partial(_seconds_of, large[:floats], times)
            seconds.append(in_time(case, device, f"all-reduce of {size}", measure))
        case.together("sums")  # nobody leaves while a peer still needs an answer
    finally:
        if dist.is_initialized() and not case.blocked:
            with suppress(Exception):  # what was wrong before counts
                in_time(case, device, "end", dist.destroy_process_group)
    if wrong:
        right = case.size * (case.size + 1) / 2
        raise CheckFailed(f"the sum of {case.size} ranks is {wrong[0]:g}, not {right:g}")
    if case.rank:
        return ""
    pairs = zip(sizes, seconds, strict=True)
    speeds = ", ".join(f"{size} {1e3 * each:.3g} ms" for size, each in pairs)
    busbw = large.nbytes / seconds[-1] * 2 * (case.size - 1) / case.size / 1e9
    return f"right sums over {name}; {speeds}; busbw {busbw:.2f} GB/s"


def backend_class(device: torch.device) -> str:
    """Name the class that moves tensors of this device between ranks, such as ProcessGroupNCCL."""
    group = dist.distributed_c10d._get_default_group()
    return type(group._get_backend(device)).__name__


def in_time(case: Case, device: torch.device, action: str, call: Callable[[], Value]) -> Value:
    """Call a function with this GPU as the current one, and return its value.

    Raises Red, with the interface, where it blocks. action: what it does, for that line.
    """

    def work() -> Value:
        with torch.accelerator.device_index(device.index):  # each thread has a current GPU
            return call()

    try:
        # NCCL can block inside a call that torch's limit does not end; where that ends one, it
        # says more.
        return case.within(case.args.timeout + 1, work)
    except TimeoutError:
        pass
    library = "NCCL" if device.type == "cuda" else "gloo"
    variable = f"{library.upper()}_SOCKET_IFNAME"
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    setting = os.environ.get(variable) or f"not set, and there are {interfaces}"
    seen = f"{library}'s {action} is not over after {case.args.timeout} s; {variable} is {setting}"
    cure = f"export {variable}= the interface between the nodes, open for all ports"
    cure = f"{cure}: ip -brief address"
    if library == "gloo":
        raise CheckFailed(seen, cure)
    debug = "NCCL_DEBUG=INFO says where it waits"
    if case.count("hosts") == 1:
        raise CheckFailed(
            seen, f"{debug}; on one host NCCL_P2P_DISABLE=1 does without direct copies"
        )
    raise CheckFailed(seen, f"{cure}; {debug}")


def _form(case: Case, device: torch.device) -> None:
    """Form the group of all ranks: NCCL's for a GPU, else gloo's; every rank calls it."""
    # An error, in place of an abort; torchrun has set it to 1 for its ranks.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", case.store),
        rank=case.rank,
        world_size=case.size,
        timeout=timedelta(seconds=case.args.timeout),
        device_id=device if on_gpu else None,
    )


def _sum_up(case: Case, large: Tensor) -> tuple[str, list[float]]:
    """All-reduce a tensor of rank + 1, and set it to zero; every rank calls it.

    Returns the backend's class, and a wrong sum if there is one.
    """
    limit = timedelta(seconds=case.args.timeout)
    # With a limit NCCL waits here, too, and raises.
    dist.all_reduce(large, async_op=True).wait(limit)
    right = case.size * (case.size + 1) / 2
    wrong = large[large != right][:1].tolist()  # also what is not a number
    large.zero_()  # sums of sums would overflow below
    return backend_class(large.device), wrong


def _seconds_of(total: Tensor, times: int) -> float:
    """Measure the mean seconds of so many all-reduces of this tensor; every rank calls it."""
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(total)
    total[0].item()  # waits for a GPU, once for all
    return (time.perf_counter() - begin) / times
