"""Log a rank's calls of torch.distributed and its waits, in a file that outlives the rank.

`ranks_judge` makes a log on every rank. If ranks never return, it reads the files in the driver
process, and reports which rank waited for which.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

POINT_TO_POINT = ("send", "recv", "isend", "irecv")
_COLLECTIVE = re.compile("all_|barrier|broadcast|gather|monitored|reduce(?!_op)|scatter")
COLLECTIVES = [*filter(_COLLECTIVE.match, distributed_c10d.__all__)]
_SENT_BY_NAME = ("input_tensor", "input_tensor_list", "input_list", "input", "tensor")
_PEER_BY_NAME = ("dst", "src", "group_dst", "group_src")
WAIT, OUTSIDE, RETURNED = "wait", "outside", "returned"  # where a rank is, outside calls


@dataclass(eq=False)
class Call:
    """A call of torch.distributed: how many numbers, with which rank, and whether it is done."""

    name: str
    numbers: int
    peer: int | None
    done: bool = False

    def __str__(self) -> str:
        """Write it as in `isend of 4 numbers to rank 1`."""
        text = f"{self.name} of {self.numbers} number{'s' * (self.numbers != 1)}"
        if self.peer is None:
            return text
        return f"{text} {'to' if self.name in ('send', 'isend') else 'from'} rank {self.peer}"


class CallLog:
    """The calls of one rank since `listening()` started, in their order.

    Attributes:
        waits_for_earlier: the number of waits for calls from before that.
        events: the calls as texts, `wait` for each wait, and marks that a trial appends.
        at_call: a function that runs when a call starts, so that a trial sees its tensors then.
    """

    def __init__(self, path: Path) -> None:
        """Make the log of this rank; each line of the file is a JSON pair: place and call."""
        self._path = path
        self.calls: list[Call] = []
        self.begun: list[Call] = []  # all of them, with those of earlier listening
        self.events: list[str] = []
        self.waits_for_earlier = 0
        self.at_call: Callable[[Call], object] = lambda _: None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Log the calls in the block, from an empty log on; every rank of a trial calls it."""
        self.calls, self.events, self.waits_for_earlier = [], [], 0
        self._path.write_text("")
        with ExitStack() as stack:
            for name in (*COLLECTIVES, *POINT_TO_POINT):
                logged = self._logged(name, getattr(dist, name))
                stack.enter_context(patch.object(dist, name, logged))
            for name, replace in (("P2POp", _planned), ("batch_isend_irecv", self._batched)):
                stack.enter_context(patch.object(dist, name, replace(getattr(dist, name))))
            yield
        self._write(RETURNED)

    def listened(self, function: Callable) -> Callable:
        """Wrap a function so that it always runs inside `listening()`."""

        @wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            with self.listening():
                return function(*arguments, **options)

        return called

    def names(self, *wanted: str) -> list[str]:
        """List the names of the calls, or only of the wanted ones."""
        return [call.name for call in self.calls if not wanted or call.name in wanted]

    def numbers(self, *wanted: str) -> int:
        """Count the numbers that this rank gave to calls of these names."""
        return sum(call.numbers for call in self.calls if call.name in wanted)

    def never_waited(self) -> list[str]:
        """List all asynchronous calls so far for which no wait() was called."""
        return [str(call) for call in self.begun if not call.done]

    def _logged(self, name: str, function: Callable) -> Callable:
        """Wrap a function of torch.distributed so that its calls are logged."""
        signature = inspect.signature(function)

        @wraps(function)
        def logged(*arguments: Any, **options: Any) -> Any:
            given = signature.bind(*arguments, **options).arguments
            peers = [given[each] for each in _PEER_BY_NAME if given.get(each) is not None]
            call = self._add(Call(name, _numbers(given), peers[0] if peers else None))
            work = function(*arguments, **options)
            self._write(OUTSIDE)
            if isinstance(work, dist.Work):
                return _LoggedWork(self, call, work)
            call.done = True
            self.events.append("wait")
            return work

        return logged

    def _batched(self, function: Callable) -> Callable:
        """Wrap the call that starts several sends and receives at once."""

        @wraps(function)
        def logged(p2p_op_list: list) -> list:
            calls = [
                self._add(Call(each.op.__name__, each.tensor.numel(), each.peer))
                for each in p2p_op_list
            ]
            works = function(p2p_op_list)
            self._write(OUTSIDE)
            if len(works) == 1:  # one for all of them
                works = works * len(calls)
            return [_LoggedWork(self, *pair) for pair in zip(calls, works, strict=True)]

        return logged

    def _add(self, call: Call) -> Call:
        """Log a call that starts; raises ValueError if it names a rank that does not exist."""
        last = dist.get_world_size() - 1
        if call.peer is not None and not 0 <= call.peer <= last:
            raise ValueError(f"{call.name} names rank {call.peer}: there are ranks 0 to {last}")
        self.calls.append(call)
        self.begun.append(call)
        self.events.append(str(call))
        self.at_call(call)
        self._write(call.name, call)
        return call

    def begin_wait(self, call: Call) -> None:
        """Log that this rank starts to wait for a call that has already returned."""
        self.events.append("wait")
        self.waits_for_earlier += call not in self.calls
        self._write(WAIT, call)

    def end_wait(self, call: Call) -> None:
        """Log that a call is complete."""
        call.done = True
        self._write(OUTSIDE)

    def _write(self, place: str, call: Call | None = None) -> None:
        with self._path.open("a") as file:
            file.write(f"{json.dumps([place, call and asdict(call)], default=int)}\n")


def _planned(function: Callable) -> Callable:
    """Wrap the class of a planned send or receive, which accepts only torch's own functions."""

    @wraps(function)
    def planned(op: Callable, *arguments: Any, **options: Any) -> Any:
        return function(inspect.unwrap(op), *arguments, **options)

    return planned


class _LoggedWork:
    """The handle that an asynchronous call returned, or its future; its wait() is logged."""

    def __init__(self, log: CallLog, call: Call, work: Any) -> None:
        self._log, self._call, self._work = log, call, work

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Wait as torch's own object does."""
        self._log.begin_wait(self._call)
        result = self._work.wait(*arguments, **options)
        self._log.end_wait(self._call)
        return result

    def get_future(self) -> "_LoggedWork":
        """Return the future, whose wait() is also logged."""
        return _LoggedWork(self._log, self._call, self._work.get_future())

    def then(self, callback: Callable) -> Any:
        """Chain a callback, as DDP's hooks do: the caller then waits for the new future."""
        self._call.done = True
        return self._work.then(callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _numbers(given: dict[str, Any]) -> int:
    """Count the numbers in the tensors that a call sends; 0 for objects and barriers."""
    for name in _SENT_BY_NAME:
        if isinstance(value := given.get(name), Tensor):
            return value.numel()
        if isinstance(value, list) and all(isinstance(part, Tensor) for part in value):
            return sum(part.numel() for part in value)
    return 0


class RankState(NamedTuple):
    """A rank by its log file: its calls since the log started, and where it is.

    place: the name of a call, or WAIT, OUTSIDE, RETURNED; call: the call that the rank is in, or
    for which it waits.
    """

    calls: list[Call]
    place: str
    call: Call | None


def read_log(path: Path) -> RankState:
    """Read the log of a rank, which may have been killed at any line."""
    calls: list[Call] = []
    place, call = OUTSIDE, None
    for line in path.read_text().splitlines() if path.exists() else ():
        place, given = json.loads(line)
        call = Call(**given) if given else None
        if call and place != WAIT:
            calls.append(call)
    return RankState(calls, place, call)
