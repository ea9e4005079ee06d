"""Ranks that start at once: forked from a process that has imported torch, then as real as any."""

import multiprocessing
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from real import LIMIT

from ddp_helpers.launch.forked_script import ForkedScript
from faults.inject import inject

# What the course sets for its own ranks, and a rank that is started by hand lacks.
BARE = dict.fromkeys(
    (
        "GLOO_SOCKET_IFNAME",
        "LOCAL_WORLD_SIZE",
        "NCCL_SOCKET_IFNAME",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    )
)


@contextmanager
def harmed(fault, note, rank):
    """The block in which a rank runs its script: with a fault planted, if it is this rank's."""
    # A DataLoader's workers are forked, as under torchrun. A forkserver of the rank's own would import torch again.
    multiprocessing.set_start_method("fork", force=True)
    if fault and fault[0] in (rank, "all"):
        inject(*fault[1:], str(note))
    yield


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

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.note, self.begin = self.folder / "harm.time", time.time()
        self.note.unlink(missing_ok=True)
        given = {name: None if value is None else str(value) for name, value in self.env.items()}
        self.forked = ForkedScript(
            self.script,
            *self.args,
            ranks=self.size,
            limit=4 * LIMIT,
            env=BARE | {"OMP_NUM_THREADS": "1"} | given,
            folder=Path.cwd(),
            logs=self.folder,
            around=partial(harmed, self.fault, self.note),
        )
        return self

    def __exit__(self, *_):
        self.forked.end()

    def wait(self, but=()):
        """Wait until all ranks have left, but for those that hang; how they ended, None for one that is still there."""
        end = time.monotonic() + LIMIT
        for rank in {*range(self.size)} - {*but}:
            self.forked.wait(max(0, end - time.monotonic()), rank)
        harm = float(self.note.read_text()) if self.note.exists() else self.begin
        said = [(self.folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(self.size)]
        return Ended(self.forked.statuses(), time.time() - harm, said)


def run(script, *args, size=2, folder, fault=None, kill=None, env=None, but=()):
    """Run a script on so many ranks to its end. `kill`: (seconds, ranks), to be killed from outside after so long."""
    with Ranks(script, args, size, folder, fault, env or {}) as ranks:
        if kill:
            time.sleep(kill[0])
            ranks.note.write_text(str(time.time()))
            for rank in kill[1]:
                ranks.forked.send_signal(rank, signal.SIGKILL)
        return ranks.wait(but)
