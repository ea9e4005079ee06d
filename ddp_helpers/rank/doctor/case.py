"""What a check looks at: one rank, and the store in which all ranks leave notes for each other.

The doctor makes one `Case` on every rank. It needs torch.
"""

import os
import platform
import re
import socket
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from socket import create_connection
from threading import Thread
from time import monotonic, sleep
from typing import TypeVar

import torch.distributed as dist

from ddp_helpers.rank.launchers import LAUNCHERS, stop

_LONGEST = 600  # characters of an error that a row can hold
Value = TypeVar("Value")


class CheckFailed(Exception):
    """A check has failed: what was seen, and the cure if it is not the check's usual one."""


def _shorten(text: str) -> str:
    """Leave out the middle of a text that is too long for a row."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def capture_trouble(call: Callable[[], Value]) -> tuple[Value | None, list[str]]:
    """Call a function, and catch the line with which it stops or fails; any rank calls it.

    Returns its value, or None, and the line, perhaps with a cure behind it.
    """
    stderr = StringIO()
    try:
        with redirect_stderr(stderr):
            return call(), []
    except CheckFailed as red:
        return None, list(red.args)
    except SystemExit:  # stop has printed its line
        return None, [stderr.getvalue().strip()]
    except Exception as error:  # whatever it is, this rank must come to the next check
        return None, [_shorten(reason(error) or type(error).__name__)]


def check_address(seconds: float) -> None:
    """Stop with one line where nobody knows the name in MASTER_ADDR; every rank calls it.

    PyTorch would tell of it in pages of C++. A new name may come late: it is asked for so many
    seconds, at most 30.
    """
    address = os.environ.get("MASTER_ADDR")
    end = monotonic() + min(seconds, 30)
    while address:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if monotonic() > end:
                stop(
                    f"MASTER_ADDR={address} has no address ({error}): "
                    "export the name or address of rank 0's node"
                )
        sleep(0.5)


def reason(error: Exception) -> str:
    """Give an error's text as one line without C++ frames; NCCL's reason is in its last line."""
    text = re.split(r"\n(?:Exception raised from|frame #)", str(error))[0]
    return " ".join(text.split())


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
    gpu: str = ""  # the card's own name: cuda:0 is another one where a process is shown one GPU
    trouble: list[str] = field(default_factory=list)  # with the device
    node: str = ""
    cpus: list[int] = field(default_factory=list)  # on which this process may run
    lost: list[int] = field(default_factory=list)  # ranks that were waited for already
    blocked: bool = False  # a call never came back: its thread would hold this process at its end

    def count(self, note: str) -> int:
        """Count the ranks that left this note."""
        return self.store.add(note, 0)

    def first(self, name: str, value: str = "") -> str:
        """Broadcast rank 0's value; every rank calls it, with the value that it would give."""
        if self.rank == 0:
            self.store.set(name, value)
        return self.store.get(name).decode()

    def come(self, name: str, seconds: float, value: str = "") -> list[int]:
        """Leave a value and wait until all ranks have; every rank calls it.

        Returns the ranks that have not after so many seconds.
        """
        self.store.set(f"{name} of {self.rank}", value)
        self.store.add(f"{name} came", 1)
        end = monotonic() + seconds
        while self.count(f"{name} came") < self.size and monotonic() < end:
            sleep(0.01 + self.size / 50_000)  # one store answers all ranks
        return [rank for rank in range(self.size) if not self.store.check([f"{name} of {rank}"])]

    def together(self, name: str) -> None:
        """Wait until all ranks are here; every rank calls it. Raises Red where one is lost."""
        timeout = self.args.timeout
        # Who has itself waited in vain for so long comes a little later.
        self.lost = self.lost or self.come(name, timeout + 2)
        if self.lost:
            ranks = ", ".join(map(str, self.lost))
            raise CheckFailed(f"rank {ranks} of {self.size} missing after {timeout} s")

    def within(self, seconds: float, call: Callable[[], Value]) -> Value:
        """Call a function in a thread, and return its value.

        Raises what it raises, or TimeoutError after so many seconds; it runs on then.
        """
        values: list[Value] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                values.append(call())
            except BaseException as error:  # SystemExit, too: it is not a time-out
                errors.append(error)

        thread = Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if not (values or errors):
            self.blocked = True
            raise TimeoutError
        if errors:
            raise errors[0]
        return values[0]

    def meet(self) -> None:
        """Find the store that rank 0, or torchrun, keeps; every rank calls it.

        Raises Red if nobody answers, and SystemExit where the address is not known.
        """
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        variables = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if not (address and port.isdecimal() and 0 < int(port[:9]) < 2**16):
            cure = "export both, the same for all ranks, before srun or mpirun"
            raise CheckFailed(f"{variables}: no meeting point", cure)
        timeout = self.args.timeout
        check_address(timeout)
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

        def answers() -> bool:
            _, trouble = capture_trouble(lambda: create_connection((address, int(port)), 1).close())
            return not trouble

        def connect() -> dist.Store:
            while not is_host and not answers():
                sleep(0.1)  # TCPStore would tell of its attempts in a page of C++
            limit = timedelta(seconds=timeout)
            return dist.TCPStore(address, int(port), None, is_host, limit, wait_for_workers=False)

        try:  # a stranger that holds the port and never answers would hold TCPStore for ever
            store, trouble = self.within(timeout, lambda: capture_trouble(connect))
        except TimeoutError:
            store, trouble = None, ["no answer: is it running, and is the port no stranger's?"]
        if store is None:
            state = "cannot listen" if is_host else "is not there"
            cure = "export another MASTER_PORT, the same for all ranks"
            raise CheckFailed(f"{variables}: rank 0 {state} ({trouble[0]})", cure)
        # No other job has these keys.
        start = " ".join(os.environ[name] for name in LAUNCHERS.get(self.launcher, ())[:-3])
        self.store = dist.PrefixStore(f"doctor {start}", store)
        self.store.set_timeout(timedelta(seconds=timeout))
