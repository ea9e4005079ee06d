"""Pick this rank's device: a GPU that CUDA can use, by the local rank, or else the CPU.

The scripts, the cells of a notebook's ranks and the doctor call `pick_device` on every rank.
It needs torch.
"""

import os
import re
import sys
import warnings

import torch

from ddp_helpers.rank.launchers import stop


def pick_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim cuda:local_rank, or the CPU where CUDA can use no GPU; every rank calls it.

    Stops where the node has fewer GPUs than ranks, and where no GPU of those given can be used.
    """
    if no_cuda:
        return torch.device("cpu")
    names, why = usable_gpus()
    if not names:
        # The first counts before what Slurm says: empty, it hides all. Who trains on CPUs though
        # there are GPUs says --no-cuda; so do the jobs of the course's own Slurm, whose GPU slots
        # are no GPUs.
        variables = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE")
        named = (f"{name}={os.environ[name]}" for name in variables if name in os.environ)
        given = next(named, "=")
        if not given.endswith(("=", "=-1", "=NoDevFiles", "ON_NODE=0")):
            if why:
                stop(f"{given}, but {why}, or give --no-cuda")
            stop(
                f"{given}, but torch {torch.__version__} sees no GPU: "
                "install a torch for this driver's CUDA (nvidia-smi), "
                "give the container --nv, or give --no-cuda"
            )
        if why:
            print(f"{why}; until then the CPU is used", file=sys.stderr, flush=True)
        return torch.device("cpu")
    # The only GPU that is seen may be this rank's own, which is cuda:0 to all, as with Slurm's
    # --gpus-per-task=1. Ranks of torchrun all see the same ones.
    may_be_own = "TORCHELASTIC_RUN_ID" not in os.environ or may_share()
    if local_rank >= len(names) > int(may_be_own):
        stop(
            f"local rank {local_rank} has no GPU ({len(names)} here): start a rank for each GPU "
            f"(--nproc-per-node {len(names)}, --ntasks-per-node), or give --no-cuda"
        )
    device = torch.device("cuda", min(local_rank, len(names) - 1))
    torch.cuda.set_device(device)
    return device


def usable_gpus() -> tuple[list[str], str]:
    """Name the GPUs that CUDA can use, by their index, and tell why there are no more, if any are.

    It starts CUDA, which no process that is forked later could use then.
    """
    found = torch.cuda.device_count()  # NVML's count, also of GPUs that CUDA cannot use
    names: list[str] = []
    if not found:
        return names, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own of an old GPU, in several lines
        try:
            torch.cuda.init()
        except RuntimeError as error:  # its first sentence says why
            return names, (
                f"there are {found} GPU(s), and torch {torch.__version__} can use none "
                f"({str(error).partition('. ')[0]}): update the driver, or install a torch for the "
                "CUDA that nvidia-smi names"
            )
    built = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        if not runs_on((card.major, card.minor), built):
            return names, (
                f"{card.name} is sm_{card.major}{card.minor}, and this torch is built for "
                f"{' '.join(built)}: install a torch for this GPU"
            )
        names.append(card.name)
    return names, ""


def runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Tell whether code built for these architectures runs on a GPU of this capability.

    sm_ runs on the same major number, compute_ on any later one.
    """
    codes = re.findall(r"\b(sm|compute)_(\d+)\b", " ".join(built))
    own = 10 * capability[0] + capability[1]
    for kind, code in codes:
        if int(code) <= own and (kind == "compute" or int(code) // 10 == capability[0]):
            return True
    return not codes  # not NVIDIA's


def may_share() -> bool:
    """Tell whether NCCL, from 2.30 on, was told that ranks may share a GPU."""
    was_told = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return was_told and torch.cuda.nccl.version() >= (2, 30)
