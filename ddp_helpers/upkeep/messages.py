"""CUDA's own error messages, recorded where there is a GPU, for the readers who have none."""

import json
import subprocess
import sys

import torch

from ddp_helpers.notebook.machine import provenance
from ddp_helpers.notebook.screen import tidy
from ddp_helpers.rank.launchers import stop
from ddp_helpers.upkeep.keep import RESULTS

FILE = RESULTS / "cuda_messages.json"
CAUSES = {
    "a device that this process cannot see": "torch.cuda.set_device(torch.cuda.device_count())",
    "more memory than the GPU has": "torch.empty(2**50, dtype=torch.uint8, device='cuda')",
    "tensors of a GPU and of the CPU in one operation": "torch.ones(1, device='cuda') + torch.ones(2)",
    "a GPU's tensors, loaded where no GPU can be seen": """
import io, os, subprocess, sys
torch.save(torch.ones(1, device="cuda"), file := io.BytesIO())
load = "import io, sys, torch; torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=True)"
env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
sys.exit(subprocess.run([sys.executable, "-c", load], input=file.getvalue(), env=env).returncode)
""",
}


def message(code: str) -> str:
    """The error that this code ends with, in a process of its own: the line with its type, and what follows."""
    run = [sys.executable, "-c", f"import torch\n{code}"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stderr.splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith(" ")), default=-1)
    return tidy("\n".join(lines[last + 1 :]))


def record() -> None:
    """Write notebooks/results/cuda_messages.json; one process calls it, on a machine with a GPU. Stops without one."""
    if not torch.cuda.is_available():
        stop("messages: no GPU can be seen here, and CUDA's messages come from one: run it on a machine with a GPU")
    found = provenance() | {"messages": {cause: message(code) for cause, code in CAUSES.items()}}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {FILE}")
