"""Name the hardware that an output or a record came from.

It runs in the driver process; any process may call `chip`.
"""

import platform
import subprocess
import time

import torch

from ddp_helpers import ROOT, __version__
from ddp_helpers.launch.launchers import gpu_names
from ddp_helpers.rank.launchers import cpus_of_rank


def machine() -> str:
    """Return one line about this machine: processor, CPUs, GPUs, torch, Python."""
    gpus = gpu_names()
    devices = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU: ranks talk over gloo, on CPUs"
    processor = f"{chip(torch.device('cpu'))}, {cpus_of_rank()} CPUs"
    return f"{processor}; {devices}; torch {torch.__version__}, Python {platform.python_version()}"


def provenance() -> dict[str, str]:
    """Return where a measurement comes from: machine, time and git revision."""
    return {
        "machine": machine(),
        "made_from": f"ddp_helpers {__version__}{_revision()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _revision() -> str:
    """Return the git revision of the helpers, and whether they differ from it; "" without git."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    described = subprocess.run(git, capture_output=True, text=True, check=False)
    return f" ({described.stdout.strip()})" if described.returncode == 0 else ""


def chip(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor if the system names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
