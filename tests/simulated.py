"""Programs on simulated GPUs, for tests."""

import fcntl
import os
import shutil
import subprocess
import sys

import pytest
import torch
from real import LIMIT, fail_in_ci

from ddp_helpers import ROOT
from ddp_tools.simulated_gpus.build import build

FORKED = ROOT / "tests" / "gpus" / "forked_programs.py"


def built(shared):
    """A cache with the simulated GPUs of this torch, in a folder of all the processes that test; one of them builds."""
    if shutil.which("g++") is None or torch.version.cuda is None:
        fail_in_ci("simulated GPUs need g++, and torch's wheel for CUDA")
    (home := shared / "a home: it's").mkdir(exist_ok=True)  # LD_PRELOAD would cut its path
    with (shared / "simulated_gpus.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("XDG_CACHE_HOME", str(home))
        build()
    return home


def start(cache, words, gpus=2, memory_mb=64, **env):
    """Start a command on simulated GPUs, in a session of its own."""
    lean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    lean |= {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = ["--memory-mb", str(memory_mb), "--beside-real-gpus"]
    command = [sys.executable, "-m", "ddp_helpers", "gpus", str(gpus), *options, "--", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=lean | env, start_new_session=True, **pipes)


def run(cache, words, **options):
    """Run a command on simulated GPUs to its end."""
    process = start(cache, words, **options)
    out, err = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(words, process.returncode, out, err)
