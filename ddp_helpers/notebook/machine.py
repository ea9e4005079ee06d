"""What hardware the outputs of a notebook came from."""

import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """One line about this machine: processor, CPUs, GPUs, torch; the learner's process calls it and prints it."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU: ranks talk over gloo, on CPUs"
    return f"{processor()}, {cpus} CPUs; {found}; torch {torch.__version__}, Python {platform.python_version()}"


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
