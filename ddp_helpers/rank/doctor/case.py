"""What a check looks at: one rank, and the store in which all ranks leave notes for each other."""

import os
import platform
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from socket import create_connection
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from ddp_helpers.rank.group import check_address, reason
from ddp_helpers.rank.launchers import name_of_start

WORDS = 600  # characters of an error that a row can hold


class Red(Exception):
    """A check has failed: what was seen, and the cure if it is not the check's usual one."""


def short(words: str) -> str:
    """The beginning and the end of words that are too long for a row."""
    return words if len(words) <= WORDS else f"{words[: WORDS // 2]} … {words[-WORDS // 2 :]}"


def overhear(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function; return its value, or the words with which it stops or fails; the process goes on. Any rank."""
    try:
        with redirect_stderr(StringIO()) as said:
            return call(), []
    except Red as red:
        return None, list(red.args)
    except SystemExit:  # stop has printed its line
        return None, [said.getvalue().strip()]
    except Exception as error:  # whatever it is, this rank must come to the next check
        return None, [short(reason(error) or type(error).__name__)]


@dataclass
class Case:
    """One rank of the job under examination."""

    launcher: str
    rank: int
    local_rank: int
    size: int
    args: Namespace
    store: dist.Store = field(default_factory=dist.HashStore)
    host: str = field(default_factory=platform.node)
    device: str = "cpu"
    gpu: str = ""  # its own number: cuda:0 is another one in each process that is shown one GPU only
    trouble: list[str] = field(default_factory=list)  # with the device
    node: str = ""
    cpus: list[int] = field(default_factory=list)  # on which this process may run
    lost: list[int] = field(default_factory=list)  # ranks that were waited for already
    blocked: bool = False  # a call never came back: its thread would hold this process at its end

    def count(self, note: str) -> int:
        """Count the ranks that left this note."""
        return self.store.add(note, 0)

    def first(self, name: str, mine: str = "") -> str:
        """Broadcast what rank 0 says; every rank calls it, with what it would say."""
        if self.rank == 0:
            self.store.set(name, mine)
        return self.store.get(name).decode()

    def come(self, name: str, seconds: float, value: str = "") -> list[int]:
        """Bring a value and wait until all ranks have; who has not after `seconds`. Every rank calls it."""
        self.store.set(f"{name} of {self.rank}", value)
        self.store.add(f"{name} came", 1)
        end = monotonic() + seconds
        while self.count(f"{name} came") < self.size and monotonic() < end:
            sleep(0.01 + self.size / 50_000)  # one store answers all ranks
        return [rank for rank in range(self.size) if not self.store.check([f"{name} of {rank}"])]

    def together(self, name: str) -> None:
        """Wait until all ranks are here; every rank calls it. Raises Red where one is lost."""
        # Who has itself waited in vain for so long comes a little later.
        self.lost = self.lost or self.come(name, self.args.timeout + 2)
        if self.lost:
            raise Red(f"rank {', '.join(map(str, self.lost))} of {self.size} missing after {self.args.timeout} s")

    def within(self, seconds: float, call: Callable[[], Any]) -> Any:
        """Call it in a thread; raises what it raises, or TimeoutError after `seconds`, and leaves it there."""
        came: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                came.append((call(), None))
            except BaseException as error:  # SystemExit, too: it is not a time-out
                came.append((None, error))

        thread = Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if not came:
            self.blocked = True
            raise TimeoutError
        value, error = came[0]
        if error:
            raise error
        return value

    def meet(self) -> None:
        """Find the store that rank 0, or torchrun, keeps; every rank calls it. Raises Red if nobody answers."""
        address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        place = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if not (address and port.isdecimal() and 0 < int(port[:9]) < 2**16):
            raise Red(f"{place}: no meeting point", "export both, the same for all ranks, before srun or mpirun")
        check_address(self.args.timeout)
        hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=self.args.timeout)

        def connect() -> dist.Store:
            while not hosts and overhear(lambda: create_connection((address, int(port)), 1).close())[1]:
                sleep(0.1)  # TCPStore would tell of its attempts in a page of C++
            return dist.TCPStore(address, int(port), None, hosts, limit, wait_for_workers=False)

        try:  # a stranger that holds the port and never answers would hold TCPStore for ever
            store, trouble = self.within(self.args.timeout, lambda: overhear(connect))
        except TimeoutError:
            store, trouble = None, ["no answer: is it running, and is the port no stranger's?"]
        if trouble:
            what = "cannot listen" if hosts else "is not there"
            raise Red(f"{place}: rank 0 {what} ({trouble[0]})", "export another MASTER_PORT, the same for all ranks")
        self.store = dist.PrefixStore(name_of_start(self.launcher), store)
        self.store.set_timeout(limit)
