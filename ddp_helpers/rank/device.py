"""Pick this rank's device with the same function as the scripts.

The ranks of a notebook's cells and the doctor call it. It needs torch.
"""

import os
import sys

import torch


def pick_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim the GPU of this local rank, or the only one that it sees; the CPU if none can be used.

    Every rank calls it. Stops if there are fewer GPUs than ranks, or the given ones cannot be used.
    """
    count = 0 if no_cuda else torch.cuda.device_count()  # includes GPUs that CUDA cannot use
    given = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("SLURM_JOB_GPUS", ""))
    # The only one may be this rank's own, as with --gpus-per-task=1; torchrun's ranks all see it.
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    may_take_it = count == 1 and (may_share or "TORCHELASTIC_RUN_ID" not in os.environ)
    if count and local_rank >= count and not may_take_it:
        cure = f"start {count} on a node, or give --no-cuda"
        sys.exit(f"local rank {local_rank} has no GPU ({count} here): {cure}")
    device = torch.device("cuda", min(local_rank, count - 1)) if count else torch.device("cpu")
    why = f"torch {torch.__version__} sees none"
    try:
        if count:
            # The older of torch's two NCCL classes: it overlaps communication with computing.
            os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
            torch.cuda.set_device(device)
            torch.zeros(1, device=device).add_(1)  # too old a driver or GPU raises here
            return device
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    if given not in ("", "-1", "NoDevFiles") and not no_cuda:
        sys.exit(f"GPU {given} is given, but {why}: see nvidia-smi, or give --no-cuda")
    if count:
        print(f"the CPU is used, and not the GPU: {why}", file=sys.stderr, flush=True)
    return torch.device("cpu")


def is_real_gpu(device: torch.device) -> bool:
    """Return whether the device is a GPU that `ddp-course gpus` does not simulate on the CPU."""
    return device.type == "cuda" and "SIMULATED_GPUS" not in os.environ


def has_bf16(device: torch.device) -> bool:
    """Return whether the device has units for bfloat16.

    A processor without them emulates it, which is slower than float32.
    """
    if is_real_gpu(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = torch.cpu.get_capabilities()
    return any(units.get(name) for name in ("amx_bf16", "avx512_bf16", "arm_bf16"))
