"""How busy the device is while something runs on it."""

import shutil
import subprocess
import time
from collections.abc import Callable

import psutil
import torch


def busy(work: Callable[[], object], device: torch.device, cpus: int) -> str:
    """Repeat the work for two seconds, and say how busy the device was."""
    if device.type == "cuda":
        return busy_gpu(work, device)
    process, begin = psutil.Process(), time.perf_counter()
    before = process.cpu_times()
    for_two_seconds(work)
    used = sum(process.cpu_times()[:2]) - sum(before[:2])  # user and system
    return f"{used / (time.perf_counter() - begin):.2f} of {cpus} CPUs busy"


def busy_gpu(work: Callable[[], object], device: torch.device) -> str:
    """The same, read with nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi on this machine"
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", gpu, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=200"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as watcher:
        for_two_seconds(work)
        watcher.terminate()
        seen = [int(line) for line in watcher.stdout.read().split() if line.isdigit()]
    return f"GPU busy {sum(seen) / len(seen):.0f} % of the time" if seen else "nvidia-smi gives no utilisation here"


def for_two_seconds(work: Callable[[], object]) -> None:
    """Repeat the work: a reading needs a while."""
    end = time.perf_counter() + 2
    while time.perf_counter() < end:
        work()
