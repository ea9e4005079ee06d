"""Log what a rank calls of torch.distributed, and on what it waits, in a file that outlives it.

`ranks_judge` makes a log on every rank, and reads the files in the learner's process to say of
ranks that never returned who waited for whom.
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
WAIT, OUTSIDE, RETURNED = "wait", "outside", "returned"  # where a rank is that is in no call


@dataclass(eq=False)
class Call:
    """A call of torch.distributed: of how many numbers, with which rank, and whether it is done."""

    name: str
    numbers: int
    peer: int | None
    done: bool = False

    def __str__(self) -> str:
        """Say it as in `isend of 4 numbers to rank 1`."""
        text = f"{self.name} of {self.numbers} number{'s' * (self.numbers != 1)}"
        if self.peer is None:
            return text
        return f"{text} {'to' if self.name in ('send', 'isend') else 'from'} rank {self.peer}"


class CallLog:
    """The calls of one rank since `listening()` began, in their order.

    waits_for_earlier: how often a call from before that was waited for; events: the calls as
    texts, `wait` where a rank waits for one, and whatever a trial appends to tell what was when;
    at_call: what a trial wants done whenever a call begins, to see what a tensor holds then.
    """

    def __init__(self, path: Path) -> None:
        """Make the log of this rank; each line of the file is a pair of JSON: place and call."""
        self._path = path
        self.calls: list[Call] = []
        self.begun: list[Call] = []  # all of them, of earlier listening, too
        self.events: list[str] = []
        self.waits_for_earlier = 0
        self.at_call: Callable[[Call], object] = lambda _: None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Log what is called inside, from an empty log on; every rank that is judged calls it."""
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
        """Wrap a function so that each of its calls is listened to."""

        @wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            with self.listening():
                return function(*arguments, **options)

        return called

    def names(self, *wanted: str) -> list[str]:
        """List the names of the calls, or of those that are wanted."""
        return [call.name for call in self.calls if not wanted or call.name in wanted]

    def numbers(self, *wanted: str) -> int:
        """Add up the numbers that this rank gave to calls of these names."""
        return sum(call.numbers for call in self.calls if call.name in wanted)

    def never_waited(self) -> list[str]:
        """List all calls so far that return before they are done, and that nobody waited for."""
        return [str(call) for call in self.begun if not call.done]

    def _logged(self, name: str, function: Callable) -> Callable:
        """Wrap a function of torch.distributed so that its calls stand in the log."""
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
        """Log a call that begins; raises ValueError if it names a rank that is not there."""
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
        """Log that this rank begins to wait for a call that has returned already."""
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
    """Wrap the class of a planned send or receive, which takes torch's own functions only."""

    @wraps(function)
    def planned(op: Callable, *arguments: Any, **options: Any) -> Any:
        return function(inspect.unwrap(op), *arguments, **options)

    return planned


class _LoggedWork:
    """What an asynchronous call returned, or the future of that; the log hears of wait()."""

    def __init__(self, log: CallLog, call: Call, work: Any) -> None:
        self._log, self._call, self._work = log, call, work

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Wait as torch's own object does."""
        self._log.begin_wait(self._call)
        result = self._work.wait(*arguments, **options)
        self._log.end_wait(self._call)
        return result

    def get_future(self) -> "_LoggedWork":
        """Return the future, whose wait() is heard, too."""
        return _LoggedWork(self._log, self._call, self._work.get_future())

    def then(self, callback: Callable) -> Any:
        """Hand the future on, as DDP's hooks do: whoever has the new one waits for it."""
        self._call.done = True
        return self._work.then(callback)

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


class RankState(NamedTuple):
    """What a log's file says of a rank: its calls since the log began, and where it is.

    place: the name of a call, or WAIT, OUTSIDE, RETURNED; call: that one, or the one that it waits
    for.
    """

    calls: list[Call]
    place: str
    call: Call | None


def read_log(path: Path) -> RankState:
    """Read the log of a rank, which may have been ended at any line."""
    calls: list[Call] = []
    place, call = OUTSIDE, None
    for line in path.read_text().splitlines() if path.exists() else ():
        place, given = json.loads(line)
        call = Call(**given) if given else None
        if call and place != WAIT:
            calls.append(call)
    return RankState(calls, place, call)
