"""Log what a rank calls of torch.distributed, and on what it waits, in a file that outlives it.

The judges of notebook 16 call it: on every rank around a learner's function, and in the learner's
process afterwards, to say of ranks that never returned who waited for whom.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

NOBODY = -1  # the peer of a collective
POINT_TO_POINT = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)
_SENT_BY_NAME = ("input_tensor", "input_tensor_list", "input_list", "input", "tensor")
_PEER_BY_NAME = ("dst", "src", "group_dst", "group_src")
_CASE = "case"  # the line with which a log of one more call of a learner's function begins
_DROPPED = "dropped"  # the object to wait with is gone
_RETURNED = "returned"  # and the line that ends it


class Call(NamedTuple):
    """A call of torch.distributed: which, of how many numbers, and with which rank.

    peer: whom it names as the other side, or as the source of a broadcast; NOBODY if none.
    """

    name: str
    numbers: int
    peer: int

    def text(self) -> str:
        """Say it as in `isend of 4 numbers to rank 1`."""
        numbers = f"{self.numbers} number{'s' * (self.numbers != 1)}"
        if self.peer == NOBODY:
            return f"{self.name} of {numbers}"
        preposition = "to" if self.name in ("send", "isend") else "from"
        return f"{self.name} of {numbers} {preposition} rank {self.peer}"


class CallLog:
    """The calls of one rank, in their order, and what it is waiting for.

    calls: since the last `listening()` began; waited: the numbers of those that are complete.
    waits_for_earlier: how often a call from before that was waited for.
    events: the numbers of calls, and whatever a judge appends to tell what was before what.
    """

    def __init__(self, path: Path) -> None:
        """Make the log of this rank; the file is written line by line."""
        self._path = path
        self.calls: list[Call] = []
        self.waited: list[int] = []
        self.waits_for_earlier = 0
        self.events: list[int | str] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Log what is called inside, from an empty log on; every rank that is judged calls it."""
        self.calls, self.waited, self.events = [], [], []
        self.waits_for_earlier = 0
        self._write(_CASE)
        with ExitStack() as stack:
            for name in (*COLLECTIVES, *POINT_TO_POINT):
                if function := getattr(dist, name, None):
                    stack.enter_context(patch.object(dist, name, self._logged(name, function)))
            for name in ("P2POp", "batch_isend_irecv"):
                replacement = getattr(self, f"_{name}")(getattr(dist, name))
                stack.enter_context(patch.object(dist, name, replacement))
            yield
        self._write(_RETURNED)

    def named(self, *names: str) -> list[Call]:
        """List the calls of some names."""
        return [call for call in self.calls if call.name in names]

    def numbers_sent(self) -> int:
        """Add up the numbers that this rank gave to send and isend."""
        return sum(call.numbers for call in self.named("send", "isend"))

    def never_waited(self) -> list[Call]:
        """List the calls for which nobody waited, though they return before they are done."""
        return [call for place, call in enumerate(self.calls) if place not in self.waited]

    def _logged(self, name: str, function: Callable) -> Callable:
        """Wrap a function of torch.distributed so that its calls stand in the log."""
        signature = inspect.signature(function)

        @wraps(function)
        def logged(*arguments: Any, **options: Any) -> Any:
            given = signature.bind(*arguments, **options).arguments
            peer = _peer(given)
            size = dist.get_world_size()
            if peer is not None and not 0 <= peer < size:
                last = f"there are ranks 0 to {size - 1}"
                raise ValueError(f"{name} names rank {peer}, which does not exist: {last}")
            place = self._add(Call(name, _numbers(given), NOBODY if peer is None else peer))
            work = function(*arguments, **options)
            if isinstance(work, dist.Work):
                self._write("done")
                return _LoggedWork(self, place, work)
            self.complete(place, self.calls[place])
            return work

        return logged

    def _batch_isend_irecv(self, function: Callable) -> Callable:
        """Wrap the call that starts several sends and receives at once."""

        @wraps(function)
        def logged(operations: list) -> list:
            names = [operation.op.__name__ for operation in operations]
            places = [
                self._add(Call(name, operation.tensor.numel(), operation.peer))
                for name, operation in zip(names, operations, strict=True)
            ]
            works = function(operations)
            self._write("done")
            if len(works) != len(places):  # one for all of them
                return [_LoggedWork(self, place, works[0]) for place in places]
            return list(map(_LoggedWork, [self] * len(works), places, works))

        return logged

    def _P2POp(self, function: Callable) -> Callable:
        """Wrap the class of a planned send or receive, which takes torch's own functions only."""

        @wraps(function)
        def planned(op: Callable, *arguments: Any, **options: Any) -> Any:
            return function(inspect.unwrap(op), *arguments, **options)

        return planned

    def _add(self, call: Call) -> int:
        """Log a call that begins; return its number."""
        self.calls.append(call)
        self.events.append(len(self.calls) - 1)
        self._write(f"call {call.name} {call.numbers} {call.peer}")
        return len(self.calls) - 1

    def wait(self, call: Call) -> None:
        """Log that this rank begins to wait for a call that has returned already."""
        self._write(f"wait {call.name} {call.numbers} {call.peer}")

    def complete(self, place: int, call: Call) -> None:
        """Log that a call is complete."""
        if place < len(self.calls) and self.calls[place] is call:
            self.waited.append(place)
            self.events.append(f"waited {place}")
        else:
            self.waits_for_earlier += 1
        self._write("done")

    def drop(self, call: Call) -> None:
        """Log that nothing can wait for a call any more, though nothing has."""
        self._write(f"{_DROPPED} {call.name} {call.numbers} {call.peer}")

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")


class _LoggedWork:
    """What an asynchronous call returned; the log hears of wait()."""

    def __init__(self, log: CallLog, place: int, work: dist.Work) -> None:
        self._log, self._place, self._work = log, place, work
        self._call, self._is_waited_for = log.calls[place], False

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Wait as torch's own object does."""
        self._is_waited_for = True
        self._log.wait(self._call)
        result = self._work.wait(*arguments, **options)
        self._log.complete(self._place, self._call)
        return result

    def __del__(self) -> None:
        if not self._is_waited_for:
            self._log.drop(self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _numbers(given: dict[str, Any]) -> int:
    """Count the numbers of the tensors that a call gives away; 0 for objects and barriers."""
    for name in _SENT_BY_NAME:
        if isinstance(value := given.get(name), Tensor):
            return value.numel()
        if isinstance(value, list) and all(isinstance(part, Tensor) for part in value):
            return sum(part.numel() for part in value)
    return 0


def _peer(given: dict[str, Any]) -> int | None:
    """Return the rank that a call names; None if none."""
    ranks = [given[name] for name in _PEER_BY_NAME if given.get(name) is not None]
    return ranks[0] if ranks else None


class RankState(NamedTuple):
    """What a log's file says of a rank: its calls in the last case, and where it waits."""

    calls: list[Call]
    dropped: list[Call]  # asynchronous ones that nothing can wait for any more
    waiting: Call | None
    in_wait: bool  # in wait(), and not in the call itself
    returned: bool  # the learner's function has ended


def read_log(path: Path) -> RankState:
    """Read the log of a rank, which may have been ended at any line."""
    lines = path.read_text().splitlines() if path.exists() else []
    calls: list[Call] = []
    dropped: list[Call] = []
    waiting: Call | None = None
    verb = ""
    for line in lines:
        kind, *rest = line.split()
        call = Call(rest[0], int(rest[1]), int(rest[2])) if len(rest) == 3 else None
        if call and kind == _DROPPED:
            dropped.append(call)
            continue
        verb, waiting = kind, call
        if verb == _CASE:
            calls, dropped = [], []
        elif call and verb == "call":
            calls.append(call)
    return RankState(calls, dropped, waiting, verb == "wait", verb == _RETURNED)
