"""Name this machine and its GPUs: prints as JSON what driver, CUDA, NCCL and torch say, or fails as CUDA does."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

HERE = Path(__file__).parent
QUERY = "name,driver_version,compute_cap,compute_mode,mig.mode.current,memory.total"


def lines(*command):
    """What a command says, if it is there."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    return []


def facts():
    """What the record says of the machine."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if not devices:
        sys.exit("torch sees none")
    for device in devices:
        torch.zeros(1, device=device).add_(1)  # too old a driver or GPU raises here
    return {
        "gpus": len(devices),
        "names": [torch.cuda.get_device_name(device) for device in devices],
        "simulated": "SIMULATED_GPUS" in os.environ,  # by `ddp-course gpus`
        "bf16": min(map(torch.cuda.get_device_capability, devices)) >= (8, 0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version(),
        "cudnn": torch.backends.cudnn.version(),
        "architectures": torch.cuda.get_arch_list(),
        "smi": lines("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"),
        "topology": lines("nvidia-smi", "topo", "-m"),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": torch.cpu.get_capabilities().get("cpu_name"),
        "revision": lines("git", "-C", HERE, "rev-parse", "HEAD"),
        "changed": lines("git", "-C", HERE, "status", "--short", "--untracked-files=no"),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
