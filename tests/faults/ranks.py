"""Ranks that start at once: forked from a process that has imported torch, then as real as any."""

import multiprocessing
import os
import runpy
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from real import LIMIT

from ddp_helpers.launch.launchers import free_port
from ddp_helpers.rank.resume import weight_digest
from faults.inject import inject, models

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.nn.parallel", "torch.optim", "torchvision.datasets", "faults.inject"]
)


def rank_main(script, args, env, log, fault):
    """What the forked process does: become the script."""
    os.environ |= env
    # A DataLoader's workers are forked, as under torchrun. A forkserver of the rank's own would import torch again, and
    # outlive a rank that is killed.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)  # OMP_NUM_THREADS was read when torch was imported
    with Path(log).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(script), *map(str, args)]
    if fault:
        inject(*fault)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:  # a rank that leaves by itself says why, and with which weights
        print(f"\nleft: {end}; weights: {' '.join(map(weight_digest, models()))}", flush=True)
        raise


@dataclass
class Ended:
    """How the ranks of a run ended: exit statuses (-9 for SIGKILL), seconds from the harm, what each said."""

    statuses: list[int | None]
    seconds: float
    said: list[str]


@dataclass
class Ranks:
    """The ranks of one run. `fault`: (rank, fault, moment, number), for that rank only."""

    script: Path
    args: tuple
    size: int
    folder: Path
    fault: tuple | None = None
    env: dict = field(default_factory=dict)
    processes: list = field(default_factory=list)

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.note, port, self.begin = self.folder / "harm.time", free_port(), time.time()
        self.note.unlink(missing_ok=True)
        for rank in range(self.size):
            mine = (*self.fault[1:], str(self.note)) if self.fault and self.fault[0] in (rank, "all") else None
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            env["MASTER_ADDR"] = "127.0.0.1"
            env = {name: str(value) for name, value in (env | self.env).items() if value is not None}
            log = self.folder / f"rank{rank}.log"
            log.write_text("")
            process = FORK.Process(target=rank_main, args=(self.script, self.args, env, log, mine))
            process.start()
            self.processes.append(process)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(LIMIT)

    def wait(self, but=()):
        """Wait until all ranks have left, but for those that hang; how they ended, None for one that is still there."""
        end = time.monotonic() + LIMIT
        watched = [process for rank, process in enumerate(self.processes) if rank not in but]
        for process in watched:
            process.join(max(0, end - time.monotonic()))
        harm = float(self.note.read_text()) if self.note.exists() else self.begin
        said = [(self.folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(self.size)]
        return Ended([process.exitcode for process in self.processes], time.time() - harm, said)


def run(script, *args, size=2, folder, fault=None, kill=None, env=None, but=()):
    """Run a script on so many ranks to its end. `kill`: (seconds, ranks), to be killed from outside after so long."""
    with Ranks(script, args, size, folder, fault, env or {}) as ranks:
        if kill:
            time.sleep(kill[0])
            ranks.note.write_text(str(time.time()))
            for rank in kill[1]:
                ranks.processes[rank].kill()
        return ranks.wait(but)
