"""What a check looks at: one rank, and the store in which all ranks leave notes for each other."""

import io
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ddp_helpers.rank.topology import Topology, sign_in


class Red(Exception):
    """A check has failed: what was seen, and the cure if it is not the check's usual one."""


def usable() -> list[int]:
    """The CPUs on which this process may run."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@dataclass
class Case:
    """One rank of the job under examination."""

    me: Topology
    args: Namespace
    store: dist.Store = field(default_factory=dist.HashStore)
    host: str = field(default_factory=platform.node)
    cpus: list[int] = field(default_factory=usable)
    device: str = "cpu"
    gpu: str = ""  # its own number: cuda:0 is another one in each process that is shown one GPU only
    device_error: str = ""

    def arrive(self) -> None:
        """Leave a note of all that no other rank may have; every rank calls it."""
        self.place = f"{self.host} {self.me.node}"
        if self.store.add(f"host {self.host}", 1) == 1:
            self.store.add("hosts", 1)
        if self.gpu and self.store.add(f"gpu {self.host} {self.gpu}", 1) == 1:
            self.store.add("gpus", 1)
        for key in (f"local rank {self.place} {self.me.local_rank}", *(f"cpu {self.place} {cpu}" for cpu in self.cpus)):
            self.store.add(key, 1)

    def count(self, note: str) -> int:
        """How many ranks left this note."""
        return self.store.add(note, 0)

    def first(self, name: str, mine: str) -> str:
        """What rank 0 says here; every rank calls it, with what it would say."""
        if self.me.rank == 0:
            self.store.set(name, mine)
        return self.store.get(name).decode()

    def come(self, name: str) -> None:
        """Wait until all ranks are here; every rank calls it."""
        size = self.me.world_size
        if lost := sign_in(self.store, name, self.me.rank, size, self.args.timeout):
            raise Red(f"rank {', '.join(lost)} of {size} did not answer")


def overhear(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call gives, or the words with which it stops or fails, and which then end no process. Any rank."""
    said, words = io.StringIO(), []
    try:
        with redirect_stderr(said):
            return call(), words
    except Red as red:
        words = list(red.args)
    except (Exception, SystemExit) as error:  # whatever it is, this rank must come to the next check
        words = [" ".join(map(str, error.args)).partition("\n")[0] or type(error).__name__]
    finally:
        sys.stderr.writelines(line for line in said.getvalue().splitlines(True) if line.strip() not in words)
    return None, words
