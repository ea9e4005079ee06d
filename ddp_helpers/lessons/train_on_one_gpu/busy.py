"""How busy a device is while it trains. Notebook 01 calls it, in its own process; no ranks."""

import shutil
import subprocess
import time
from collections.abc import Callable

import torch

_QUERY = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader", "--loop-ms=200"]


def busy(device: torch.device, train: Callable[..., object], *arguments: object) -> str:
    """Call train(*arguments) again and again for a second; say what was busy in that time.

    The CPUs: this process's CPU time, divided by the time on the wall. A GPU: what nvidia-smi says
    of it, where there is one.
    """
    monitor = None
    if device.type == "cuda" and shutil.which("nvidia-smi"):
        uuid = torch.cuda.get_device_properties(device).uuid  # this GPU, of all on the node
        query = [*_QUERY, f"--id=GPU-{uuid}"]
        monitor = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    begin, used = time.perf_counter(), time.process_time()
    while time.perf_counter() < begin + 1:
        train(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
    share = (time.process_time() - used) / (time.perf_counter() - begin)
    text = f"{share:.2f} of {torch.get_num_threads()} CPUs busy"
    if monitor:
        monitor.terminate()
        readings, _ = monitor.communicate()
        text += f"; GPU busy, every 0.2 s: {', '.join(readings.splitlines())}"
    return text
