"""The check of the all-reduce: the group, its sum and its speed, within a limit.

The doctor calls it on every rank, after all have connected. It needs torch.
"""

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.rank.device import is_real_gpu
from ddp_helpers.rank.doctor.case import Case, CheckFailed, capture, one_line

_SIZES = {"4 B": 1, "64 kB": 2**14, "1 MB": 2**18, "16 MB": 2**22, "256 MB": 2**26}  # in floats


def find_sum(case: Case) -> str:
    """Check that an all-reduce gives the right sum on this rank, and measure how fast it is."""
    device = torch.device(case.device if case.plan["on GPUs"] else "cpu")
    try:
        # NCCL can block inside a call that torch's timeout does not end; if torch ends one, its
        # error says more.
        return case.within(case.args.timeout + 5, lambda: _form_and_reduce(case, device))
    except Exception as error:
        variable = f"{'NCCL' if device.type == 'cuda' else 'GLOO'}_SOCKET_IFNAME"
        interfaces = ", ".join(name for _, name in socket.if_nameindex())
        setting = os.environ.get(variable) or "not set"
        line = f"{one_line(error)}; {variable} is {setting}, and there are {interfaces}"
        raise CheckFailed(line) from error


def _form_and_reduce(case: Case, device: torch.device) -> str:
    """Form the group of all ranks, and all-reduce tensors of all sizes; every rank calls it."""
    on_gpu = device.type == "cuda"
    is_simulated = on_gpu and not is_real_gpu(device)  # a simulated GPU has no speed
    if on_gpu:
        torch.cuda.set_device(device)  # each thread has a current GPU
    # An error instead of an abort; torchrun has set it to 1 for its ranks.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", case.store),
        rank=case.rank,
        world_size=case.size,
        timeout=timedelta(seconds=case.args.timeout),
        device_id=device if on_gpu else None,
    )
    try:
        most = 2**26 if on_gpu and not is_simulated else 2**22
        large = torch.full((most,), case.rank + 1.0, device=device)
        dist.all_reduce(large)
        right = case.size * (case.size + 1) / 2
        wrong = large[large != right][:1].tolist()  # including NaN
        large.zero_()  # sums of sums would overflow below
        sizes = {name: large[:floats] for name, floats in _SIZES.items() if floats <= len(large)}
        seconds = {name: _seconds_of(part) for name, part in sizes.items() if not is_simulated}
        name = type(dist.distributed_c10d._get_default_group()._get_backend(device)).__name__
    finally:
        capture(dist.destroy_process_group)  # an earlier error counts
    if wrong:
        raise CheckFailed(f"the sum of {case.size} ranks is {wrong[0]:g}, not {right:g}")
    if case.rank:
        return ""
    if is_simulated:
        return f"right sums over {name}; simulated GPUs, so no speed"
    speeds = ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in seconds.items())
    busbw = large.nbytes / [*seconds.values()][-1] * 2 * (case.size - 1) / case.size / 1e9
    return f"right sums over {name}; {speeds}; busbw {busbw:.2f} GB/s"


def _seconds_of(total: Tensor) -> float:
    """Measure the mean seconds of an all-reduce of this tensor; every rank calls it."""
    times = 100 if len(total) < 2**18 else 5
    for round in (1, times):  # the first call of a size sets it up
        begin = time.perf_counter()
        for _ in range(round):
            dist.all_reduce(total)
        total[0].item()  # waits for a GPU, once for all
    return (time.perf_counter() - begin) / times
