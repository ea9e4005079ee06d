"""Programs on GPUs, for tests: a command on simulated ones, or many that one process starts."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch
from real import LIMIT, fail_in_ci, until

from ddp_helpers import ROOT
from ddp_helpers.launch.processes import marked_processes
from ddp_tools.simulated_gpus.build import build

FORKED = ROOT / "tests" / "gpus" / "forked_programs.py"
MARK, COUNTER = "PROGRAMS_OF_A_TEST", count()
SERVER = FORKED.with_name("program_server.py")
# How NCCL's words for two ranks on one GPU begin, in the release that torch brings.
IS_SHARED = (
    "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1"
    if torch.cuda.nccl.version() >= (2, 30)
    else "Duplicate GPU detected"
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", "--nproc-per-node")


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


def start(cache, words, gpus=2, memory_mb=64, stdin=None, **env):
    """Start a command on simulated GPUs, in a session of its own."""
    lean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    lean |= {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = ["--memory-mb", str(memory_mb), "--beside-real-gpus"]
    command = [sys.executable, "-m", "ddp_helpers", "gpus", str(gpus), *options, "--", *map(str, words)]
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=lean | env, start_new_session=True, **pipes)


def run(cache, words, **options):
    """Run a command on simulated GPUs to its end."""
    process = start(cache, words, **options)
    out, err = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@dataclass
class Program:
    """A program that was started: its process, and the file with what it says."""

    pid: int
    log: Path

    def said(self) -> str:
        """All that it and its ranks have said so far."""
        return self.log.read_text(errors="replace")

    def has_ended(self) -> bool:
        """Tell whether it has ended."""
        return self.log.with_suffix(".status").exists()

    def kill_ranks(self) -> None:
        """Kill what torchrun has started."""
        for rank in psutil.Process(self.pid).children() if not self.has_ended() else ():
            rank.kill()

    def kill(self) -> None:
        """Kill it, if it has not ended, and what it has started."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for each in [process, *process.children(recursive=True)] if not self.has_ended() else ():
                each.kill()

    def ended(self) -> float:
        """When it ended, once it has."""
        return self.log.with_suffix(".status").stat().st_mtime

    def status(self) -> int:
        """Wait for its end."""
        until(self.has_ended, f"the end of {self.log}")
        return int(self.log.with_suffix(".status").read_text())


@dataclass
class Programs:
    """Programs of Python on GPUs. `program_server.py` starts them, with this mark in their environment."""

    server: subprocess.Popen
    mark: str
    env: dict[str, str] = field(default_factory=dict)  # of each program, beside what it is given
    started: list[Program] = field(default_factory=list)

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, log: Path, words: tuple, **env: object) -> Program:
        """Start Python with these words; what it says goes to log, in whose folder it runs."""
        log.with_suffix(".status").unlink(missing_ok=True)
        given = self.env | {name: str(value) for name, value in env.items()}
        asked = {"words": [*map(str, words)], "log": str(log), "cwd": str(log.parent), "env": given}
        print(json.dumps(asked), file=self.server.stdin, flush=True)
        self.started.append(Program(int(self.server.stdout.readline()), log))
        return self.started[-1]

    def torchrun(self, ranks: int, log: Path, *words: object, **env: object) -> Program:
        """Start a script on so many ranks with torchrun."""
        return self.start(log, (*TORCHRUN, ranks, *words), **env)

    def end(self) -> None:
        """End all that is left: each has the server's environment."""
        for process in marked_processes(self.mark, MARK):
            with suppress(psutil.NoSuchProcess):
                if process.pid != self.server.pid:  # which ends then, and takes its folder away
                    process.kill()
        self.server.communicate()


def programs(cache, gpus):
    """Programs on so many simulated GPUs, forked from one process that has torch: else each takes seconds to begin."""
    mark = f"{os.getpid()}.{next(COUNTER)}"
    words, options = [sys.executable, FORKED, SERVER], {"stdin": subprocess.PIPE, MARK: mark}
    return Programs(start(cache, words, gpus, 2048, **options), mark)
