"""The name of what computes."""

import platform
from pathlib import Path

import torch


def chip(device: torch.device) -> str:
    """The name of the GPU, or of the processor where the system tells it. Any process may call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
