"""Claim a device as the scripts do, and note in the store all that ranks must not share.

The doctor calls `arrive` on every rank, before the checks. It needs torch.
"""

import os
from contextlib import redirect_stderr
from io import StringIO

import torch

from ddp_helpers.rank.device import pick_device
from ddp_helpers.rank.doctor.case import Case, CheckFailed, capture_trouble


# NCCL was told that ranks may share a GPU.
MAY_SHARE = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def arrive(case: Case) -> None:
    """Claim a device, and leave a note of each thing that is this rank's; every rank calls it."""
    _, case.trouble = capture_trouble(lambda: _claim(case))
    case.cpus = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):  # Linux
        case.cpus = list(os.sched_getaffinity(0))
    # Several nodes may be pretended on one host.
    node = os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK")
    case.node = f"{case.host} {node}"
    notes = [f"local rank {case.node} {case.local_rank}"]
    notes += [f"cpu {case.node} {cpu}" for cpu in case.cpus]
    if case.store.add(f"host {case.host}", 1) == 1:
        notes.append("hosts")
    if case.gpu and (case.store.add(case.gpu, 1) == 1 or MAY_SHARE):
        notes.append("gpus")
    for note in notes:
        case.store.add(note, 1)


def _claim(case: Case) -> None:
    """Claim this rank's device. Raises Red where torch cannot use it; stops where there is none."""
    with redirect_stderr(StringIO()) as why:
        case.device = str(pick_device(case.local_rank, case.args.no_cuda))
    if why.getvalue():  # a script says it, and goes on
        raise CheckFailed(why.getvalue().strip())
    if case.device == "cpu":
        return
    card = torch.cuda.get_device_properties(case.device)
    case.gpu = f"GPU {card.uuid}{_mig_slice(case.device)} on {case.host}"


def _mig_slice(device: str) -> str:
    """Name the MIG slice behind cuda:N, as CUDA_VISIBLE_DEVICES does; "" where there is none.

    The driver's call gives a slice's own number (cuda.h); of the property that torch reads nothing
    is promised.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    _, _, index = device.partition(":")
    name = next(iter(names[int(index) :]), "").strip()
    return f" {name}" if name.startswith("MIG-") else ""
