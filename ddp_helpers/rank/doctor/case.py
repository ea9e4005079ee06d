"""What a check looks at: one rank, and the store in which all ranks leave what rank 0 judges.

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
    """A check has failed: what was seen."""


def capture(call: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function; return its value and "", or None and the line with which it stopped.

    Any rank calls it, which then comes to the next check.
    """
    said = StringIO()
    try:
        with redirect_stderr(said):
            return call(), ""
    except SystemExit as end:  # its line was printed, or is the status
        return None, said.getvalue().strip() or str(end.code)
    except Exception as error:
        return None, one_line(error)


def one_line(error: Exception) -> str:
    """Give an error's text as one line without C++ frames; NCCL's reason is in its last line."""
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
    gpu: str = ""  # the card's own name: cuda:0 is another one where a process is shown one GPU
    plan: dict = field(default_factory=dict)  # for what all ranks do together
    blocked: bool = False  # a call never came back: its thread would hold this process at its end

    def tell(self, name: str, value: object) -> None:
        """Leave what rank 0 gathers; every rank calls it."""
        self.store.set(f"{name} of {self.rank}", json.dumps(value))

    def gather(self, name: str, seconds: float) -> dict[int, Any]:
        """Wait for what the ranks tell, and return it for those that have; rank 0 calls it."""
        keys = [f"{name} of {rank}" for rank in range(self.size)]
        end = monotonic() + seconds
        while not self.store.check(keys) and monotonic() < end:  # wait() would warn in C++
            sleep(0.02)
        there = {rank: key for rank, key in enumerate(keys) if self.store.check([key])}
        return {rank: json.loads(self.store.get(key)) for rank, key in there.items()}

    def hear(self, name: str) -> Any:
        """Wait for what rank 0 has announced; every rank calls it."""
        self.store.wait([name], timedelta(seconds=2 * self.args.timeout + 20))
        return json.loads(self.store.get(name))

    def within(self, seconds: float, call: Callable[[], Any]) -> Any:
        """Call a function in a thread, and return its value, or raise what it raises.

        Raises TimeoutError after so many seconds; it runs on then.
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
        """Find the store that rank 0, or torchrun, keeps; every rank calls it."""
        if self.size == 1:
            return
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        variables = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if not (address and port):
            raise CheckFailed(f"{variables}: no meeting point")
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        seconds = self.args.timeout
        try:
            check_address(address, int(port), seconds, is_host)
            limit = timedelta(seconds=seconds)
            args = address, int(port), None, is_host, limit, False  # and waits for nobody
            # A stranger at the port may never answer.
            store = self.within(seconds, lambda: dist.TCPStore(*args))
        except Exception as error:
            state = "cannot listen" if is_host else "is not there, or the port is a stranger's"
            raise CheckFailed(f"{variables}: rank 0 {state} ({one_line(error)})") from error
        # No other job, and no attempt before this, has these keys.
        names = [*LAUNCHERS.get(self.launcher, ())[:-3], "TORCHELASTIC_RESTART_COUNT"]
        start = " ".join(os.environ.get(name, "") for name in names)
        self.store = dist.PrefixStore(f"doctor {start}", store)


def check_address(address: str, port: int, seconds: float, is_host: bool) -> None:
    """Wait until the address is known, and somebody listens there; every rank calls it.

    TCPStore would tell of its attempts in pages of C++. A new name may come late.
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
