"""Check a learner's function on real ranks: on each, a trial compares its results.

Lessons build their exercises on ranks with `on_real_ranks`. In a `%%ranks` cell the trial runs on
the ranks of the cell; otherwise on two, then on three, and on more if a trial asks for them, all
forked from the driver process.
"""

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons.calls import (
    COLLECTIVES,
    OUTSIDE,
    RETURNED,
    WAIT,
    CallLog,
    RankState,
    read_log,
)
from ddp_helpers.lessons.comparison import Comparison, difference, explanations
from ddp_helpers.lessons.exercise import Answer, JudgedExercise

SIZES = (2, 3)
# How long a rank of a cell waits for the verdicts of the others: less than the cell's limit, which
# ends all ranks without a verdict.
_PATIENCE = timedelta(seconds=10)
Trial = Callable[[Answer, CallLog], Iterator[Comparison]]

_HINTS = {  # by a part of an error's text, for all exercises, searched before their own
    "'NoneType' object is not callable": "Return the function itself: do not call it.",
    "'NoneType' object has no attribute 'wait'": (
        "Only isend, irecv and a collective with async_op=True return something to wait for."
    ),
    "operand type(s) for /: 'NoneType'": "A collective returns None: its result is in the tensor.",
    "SIGABRT": "Does each buffer have the dtype and the size of the message for it?",
    "a leaf Variable that requires grad": (
        "torch.distributed writes into the tensor: pass parameter.data."
    ),
}


def on_real_ranks(
    trial: Trial, hints: Mapping[str, str] = {}, sizes: tuple[int, ...] = SIZES
) -> JudgedExercise:
    """Make the exercise that has the name of its trial.

    hints: by a part of an error's text, the hint for this error; sizes: the numbers of ranks that
    it is tried on. The verdict is the first comparison that differs, from the lowest rank on which
    it does.
    """

    def judge(answer: Answer) -> list[str]:
        with TemporaryDirectory() as folder:
            if dist.is_initialized() and dist.get_world_size() > 1:
                return _in_cell(trial, answer, Path(folder), hints)
            of_sizes = (_try_on(size, trial, answer, Path(folder), hints) for size in sizes)
            return next(filter(None, of_sizes), [])

    return JudgedExercise(trial.__name__, judge)


def _in_cell(
    trial: Trial,
    answer: Answer,
    logs: Path,
    hints: Mapping[str, str],
) -> list[str]:
    """Return the first mistake on the ranks of a cell; each rank calls it, and gets the same.

    Only a rank that an error stops, or that waits in vain for another, returns its own mistake;
    the cell's limit ends the ranks that then wait.
    """
    rank = dist.get_rank()
    try:
        return _first_mistake(trial, answer, logs, _PATIENCE)
    except _LeftAlone:
        seconds = _PATIENCE.total_seconds()
        return [SAME_CALLS, f"rank {rank} is done, but {seconds:g} s later not every rank is"]
    except NotImplementedError:
        raise
    except Exception as error:
        return _failure(error, [read_log(logs / f"rank{rank}")], hints)


def _try_on(
    size: int,
    trial: Trial,
    answer: Answer,
    folder: Path,
    hints: Mapping[str, str],
) -> list[str]:
    """Return the first mistake of an answer on `size` ranks, in lines; none if it is right."""
    (logs := folder / str(size)).mkdir()

    def work() -> list[str]:
        # Newer torch has new names for two collectives; the old ones do the same.
        warnings.simplefilter("ignore", FutureWarning)
        return _first_mistake(trial, answer, logs)

    try:
        return on_ranks(size, work)[0]
    except NotImplementedError:
        raise
    except Exception as error:
        states = [read_log(logs / f"rank{rank}") for rank in range(size)]
        *hint, fact = _failure(error, states, hints)
        return [*hint, f"on {size} ranks: {fact}"]


class _LeftAlone(Exception):
    """Another rank did not report its result."""


def _first_mistake(
    trial: Trial, answer: Answer, logs: Path, patience: timedelta | None = None
) -> list[str]:
    """Return the first difference, of the lowest rank that has it; all ranks call it.

    After each comparison the ranks gather the results, so that all stop at the same one. An error
    gets a note with its rank and its place. patience: how long a rank waits for the others, before
    it raises _LeftAlone.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # A separate group: in the answer's, this could match a collective that a rank has left out.
    group = dist.new_group(backend="gloo", timeout=patience)
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    log = CallLog(logs / f"rank{rank}")
    try:
        for comparison in chain(trial(log.listened(answer), log), _all_waited(log)):
            everyone: list[tuple[str, list[str]]] = [("", [])] * size
            told = difference(comparison), explanations(comparison)
            try:
                dist.all_gather_object(everyone, told, group)
            except RuntimeError as error:
                if patience and "timed out" in str(error).lower():
                    raise _LeftAlone from error
                raise
            for other, (text, _) in enumerate(everyone):
                if text:
                    return [*_explanation(everyone), f"on {size} ranks, rank {other}: {text}"]
    except Exception as error:
        error.add_note(f"rank {rank}{_place(error, answer)}")
        raise
    return []


def _all_waited(log: CallLog) -> Iterator[Comparison]:
    """At the end of a trial, compare the calls without a wait() with an empty list."""
    waits = log.never_waited()
    yield Comparison("calls that nobody waits for", waits, [], {_NOT_DONE: waits})


_NOT_DONE = "Wait for these calls: their values came in time by chance."


def _explanation(everyone: list[tuple[str, list[str]]]) -> list[str]:
    """Choose a hint that holds on all ranks, or on all that differ; nothing if none does."""
    differing = [hints for text, hints in everyone if text]
    for group in ([hints for _, hints in everyone], differing):
        for hint in differing[0]:
            if all(hint in hints for hints in group):
                return [hint]
    return []


def _failure(
    error: Exception,
    states: list[RankState],
    hints: Mapping[str, str],
) -> list[str]:
    """Say why the ranks did not finish: a hint, then which rank waits for which, or the error."""
    disagreement = _disagreement(states)
    if isinstance(error, TimeoutError):
        places = [_PLACES.get(state.place, "is in {}").format(state.call) for state in states]
        told = "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
        reason = disagreement or _why_ranks_wait(states)
        return [*filter(None, [reason]), f"time is up, and {told}"]
    known = [hint for part, hint in {**_HINTS, **hints}.items() if part in str(error)]
    if disagreement and ("by peer" in str(error) or isinstance(error, ChildProcessError)):
        return [*known[:1], disagreement]
    text = str(error).partition("\n")[0]
    place = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    first = known[:1] or [disagreement] * bool(disagreement)
    return [*first, f"{type(error).__name__}: {text}{place}"]


def _place(error: Exception, answer: Answer) -> str:
    """Name the learner's function that raised an error, and the line of its cell."""
    code = getattr(inspect.unwrap(answer), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    return "".join(f", line {frame.lineno}, in {frame.name}" for frame in own[-1:])


def _why_ranks_wait(states: list[RankState]) -> str:
    """Return a hint if all ranks are in one place or one has returned; else an empty text."""
    places = {state.place for state in states}
    if RETURNED in places:
        return _WAITING[RETURNED]
    if places == {"recv"} and any(call.name == "isend" for state in states for call in state.calls):
        return _SENDS_HAVE_BEGUN
    return _WAITING.get(places.pop(), "") if len(places) == 1 else ""


SAME_CALLS = "Do all ranks call the same collectives, in the same order?"
KEEP_AND_WAIT = "Keep what isend and irecv return, and call its wait()."
_PLACES = {
    WAIT: "is in wait() for {}",
    OUTSIDE: "is in no call of torch.distributed",
    RETURNED: "has returned",
}
_SENDS_HAVE_BEGUN = (
    f"Sends have started: does each rank receive from the rank that sends to it? {KEEP_AND_WAIT}"
)
_WAITING = {  # by where all ranks are, or one is
    "send": (
        "No rank reaches recv: send returns only when the receiver has taken the message. Start "
        "with isend, and wait for it after the recv."
    ),
    "recv": "All wait for a message that no rank has started to send: call isend before recv.",
    WAIT: (
        "A send ends when the receiver has taken the message: does every rank receive? "
        f"{KEEP_AND_WAIT}"
    ),
    OUTSIDE: "No rank is in a call of torch.distributed: does a loop end?",
    RETURNED: (
        "A rank that has returned sends and receives nothing more: has it made the call for which "
        f"the other waits? {KEEP_AND_WAIT}"
    ),
}


def _disagreement(states: list[RankState]) -> str:
    """Say at which collective two ranks first differ; an empty text if they do not.

    Sends and receives are left out, since they always differ.
    """
    first, *others = [
        [str(call) for call in state.calls if call.name in COLLECTIVES] for state in states
    ]
    for rank, calls in enumerate(others, 1):
        longest = max(len(first), len(calls))
        padded = [[*each, *["nothing more"] * (longest - len(each))] for each in (first, calls)]
        for number, (one, other) in enumerate(zip(*padded, strict=True), 1):
            if one != other:
                return (
                    f"The ranks disagree at collective {number}: rank 0 calls {one}, and rank "
                    f"{rank} {other}. All ranks must call the same ones in the same order."
                )
    return ""


# ---- what several trials use


def device() -> torch.device:
    """Return the device of the tensors that the backend of this group sends."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def random_numbers(seed: int, *shape: int) -> Tensor:
    """Make double-precision numbers that are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device())


def sum_of_all(tensor: Tensor) -> Tensor:
    """Compute the sum of a tensor over the ranks in a new one; every rank calls it."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total
