"""Name the hardware that the outputs of a notebook came from."""

import platform
import subprocess
import time

import torch

from ddp_helpers import ROOT, __version__
from ddp_helpers.rank.launchers import cpus_of_rank


def machine() -> str:
    """One line about this machine: processor, CPUs, GPUs, torch; the learner's process calls it and prints it."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU: ranks talk over gloo, on CPUs"
    processor = chip(torch.device("cpu"))
    return f"{processor}, {cpus_of_rank()} CPUs; {found}; torch {torch.__version__}, Python {platform.python_version()}"


def provenance() -> dict[str, str]:
    """Return the provenance of a measurement: machine, time and git revision."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"machine": machine(), "made_from": f"ddp_helpers {__version__}{revision()}", "started": started}


def revision() -> str:
    """The git revision of the helpers, and whether they differ from it; "" where they stand in no checkout."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""


def chip(device: torch.device) -> str:
    """The name of the GPU, or of the processor where the system tells it. Any process may call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
