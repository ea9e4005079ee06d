"""One rank under examination, and the key-value store that takes each rank's findings to rank 0.

The doctor makes one `Case` on every rank. It needs torch.
"""

import json
import os
import platform
import socket
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from ddp_helpers.rank.launchers import LAUNCHERS


class CheckFailed(Exception):
    """A check has failed; the message has the finding."""


def capture(call: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function; return its value and "", or None and the line with which it stopped.

    Any rank calls it, and then continues with the next check.
    """
    said = StringIO()
    try:
        with redirect_stderr(said):
            return call(), ""
    except SystemExit as end:  # the line was printed, or is the status
        return None, said.getvalue().strip() or str(end.code)
    except Exception as error:
        return None, one_line(error)


def one_line(error: Exception) -> str:
    """Return an error as one line without C++ frames; NCCL's reason is in its last line."""
    text = str(error).partition("\nException raised from")[0]
    return " ".join(text.split()) or repr(error)


@dataclass
class Case:
    """One rank of the job under examination."""

    launcher: str
    rank: int
    local_rank: int
    size: int
    args: Any  # the doctor's flags
    store: dist.Store = field(default_factory=dist.HashStore)
    host: str = field(default_factory=platform.node)
    device: str = "cpu"
    gpu: str = ""  # the card's UUID: cuda:0 differs by process if each sees one GPU
    plan: dict = field(default_factory=dict)  # for the checks that all ranks make together
    blocked: bool = False  # a call never returned: its thread would keep this process from exiting

    def tell(self, name: str, value: object) -> None:
        """Store a value for rank 0 to gather; every rank calls it."""
        self.store.set(f"{name} of {self.rank}", json.dumps(value))

    def gather(self, name: str, seconds: float) -> dict[int, Any]:
        """Wait for the ranks' values, and return those that have come; rank 0 calls it."""
        keys = [f"{name} of {rank}" for rank in range(self.size)]
        end = monotonic() + seconds
        while not self.store.check(keys) and monotonic() < end:  # wait() would warn in C++
            sleep(0.02)
        there = {rank: key for rank, key in enumerate(keys) if self.store.check([key])}
        return {rank: json.loads(self.store.get(key)) for rank, key in there.items()}

    def hear(self, name: str) -> Any:
        """Wait for a value that rank 0 stores; every rank calls it."""
        self.store.wait([name], timedelta(seconds=2 * self.args.timeout + 20))
        return json.loads(self.store.get(name))

    def within(self, seconds: float, call: Callable[[], Any]) -> Any:
        """Call a function in a thread, and return its value, or raise what it raises.

        Raises TimeoutError after `seconds`; the call then continues in its thread.
        """
        values: list[Any] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                values.append(call())
            except Exception as error:
                errors.append(error)

        thread = Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if not values:
            self.blocked = True
            raise TimeoutError(f"no answer after {seconds} s")
        return values[0]

    def meet(self) -> None:
        """Connect to the store of rank 0 or torchrun; every rank calls it."""
        if self.size == 1:
            return
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        variables = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if not (address and port):
            raise CheckFailed(f"{variables}: no rendezvous address")
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        seconds = self.args.timeout
        try:
            check_address(address, int(port), seconds, is_host)
            limit = timedelta(seconds=seconds)
            args = address, int(port), None, is_host, limit, False  # and does not wait for workers
            # Another program at the port may never answer.
            store = self.within(seconds, lambda: dist.TCPStore(*args))
        except Exception as error:
            state = (
                "cannot listen" if is_host else "does not answer, or another program has the port"
            )
            raise CheckFailed(f"{variables}: rank 0 {state} ({one_line(error)})") from error
        # No other job, and no earlier attempt, has these keys.
        names = [*LAUNCHERS.get(self.launcher, ())[:-3], "TORCHELASTIC_RESTART_COUNT"]
        start = " ".join(os.environ.get(name, "") for name in names)
        self.store = dist.PrefixStore(f"doctor {start}", store)


def check_address(address: str, port: int, seconds: float, is_host: bool) -> None:
    """Wait until the address resolves and the port accepts connections; every rank calls it.

    TCPStore would report its attempts in pages of C++. A new name may resolve late.
    """
    end = monotonic() + seconds
    while True:
        try:
            if is_host:
                socket.getaddrinfo(address, port)
            else:
                socket.create_connection((address, port), 1).close()
            return
        except OSError:
            if monotonic() > end:
                raise
        sleep(0.1)
