"""The exercises of notebook 02: a mean over ranks, which rank is missing, the ring all-reduce.

`lessons.check` asks them for verdicts. The first and the last run on ranks that `on_ranks` forks,
where every rank calls the answer; the other runs in the learner's process.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ddp_helpers.lessons.exercise import Answer, Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, call_with_own_case, on_ranks, sum_over_ranks

# ---- a mean over ranks


def mean_over_ranks(mine: float) -> float:
    """Compute the mean of all ranks' numbers; every rank calls it with its own."""
    return sum_over_ranks(mine) / dist.get_world_size()


def _number_of_rank_0(number: float) -> float:
    """A mistake: rank 0's number, on every rank."""
    copy = torch.tensor(number)
    dist.broadcast(copy, 0)
    return copy.item()


def _mean_of_two(number: float) -> float:
    """A mistake: the sum is divided by 2, whatever the number of ranks."""
    return sum_over_ranks(number) / 2


def _unchanged(number: float) -> float:
    """A mistake: each rank's own number."""
    return number


_MEAN_TRAPS = {
    "The default of all_reduce is the sum: divide it by the world size.": sum_over_ranks,
    "The group may have any size: ask for it with dist.get_world_size().": _mean_of_two,
    "That is rank 0's number on every rank: all ranks' numbers count.": _number_of_rank_0,
    "Each rank gives its own number back: all_reduce leaves the sum in the tensor.": _unchanged,
}

# ---- which rank is missing


def missing_ranks(
    lines: Sequence[str],
    world_size: int,
    pattern: str = r"^Hello from rank (\d+) of",
) -> list[int]:
    """List the ranks, in order, whose number stands in no line at the place that the pattern says.

    pattern: a regular expression with one group; another one than the default is a mistake.
    """
    present = {int(number) for line in lines for number in re.findall(pattern, line)}
    return [rank for rank in range(world_size) if rank not in present]


def _hello(rank: int, world_size: int) -> str:
    """Compose the line that `simple_ddp` prints, on nodes of four ranks."""
    local_rank = rank % 4
    return f"Hello from rank {rank} of {world_size}, local rank {local_rank}, started by slurm"


def _all_after_the_number_of_lines(lines: Sequence[str], world_size: int) -> list[int]:
    """A mistake: it takes the number of lines for the first rank that is missing."""
    return list(range(sum("Hello" in line for line in lines), world_size))


def _all_ranks(lines: Sequence[str], world_size: int) -> list[int]:
    """A mistake: no rank, a number, is among the ranks that are present, which are texts."""
    return list(range(world_size))


_by_first_digit = partial(missing_ranks, pattern=r"^Hello from rank (\d)")
_by_local_rank = partial(missing_ranks, pattern=r"local rank (\d+)")
_MISSING_CASES = [
    ([_hello(3, 4), "rank 3 on cpu: output -0.85", _hello(0, 4)], 4),
    ([_hello(rank, 12) for rank in (10, 0, 2)], 12),
    ([_hello(0, 2), _hello(1, 2), "all 2 ranks hold the same model"], 2),
    ([_hello(rank, 8) for rank in (6, 4, 7, 5)], 8),
    ([_hello(1, 3), "waiting for rank 2", _hello(0, 3)], 3),
]
_MISSING_TRAPS: dict[str, Answer] = {
    "The number of lines says how many came, not who.": _all_after_the_number_of_lines,
    "A rank can have more than one digit.": _by_first_digit,
    "That is the local rank, which starts again on every node.": _by_local_rank,
    "Other lines name ranks, too, and the hello lines also local ranks: count neither.": (
        partial(missing_ranks, pattern=r"rank (\d+)")
    ),
    "Other lines name ranks, too: only a rank that says hello has come.": (
        partial(missing_ranks, pattern=r"^.*?rank (\d+)")
    ),
    "What a regular expression finds is a string: make it int.": _all_ranks,
}

# ---- the ring

Pieces = list[torch.Tensor]
_RING_PATIENCE = 5.0  # seconds for a case, of which a hang takes all
_BLOCKED = (
    "Every rank waits in dist.send until its neighbour receives, and the neighbour sends as well: "
    "begin the send with dist.isend, receive, then wait() for it."
)
_NOBODY_SENDS = (
    "A rank waits for a message that nobody sends to it: send to rank + 1, receive from rank - 1."
)
_COLLECTIVE = "Build it from dist.isend and dist.recv alone: no collective does the work for you."
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "all_to_all")


def ring_all_reduce(pieces: Pieces) -> None:
    """Leave in each piece its sum over all ranks; every rank calls it with as many as ranks."""
    _ring(pieces)


def _begin_send(tensor: torch.Tensor, rank: int) -> dist.Work:
    """Begin to send a tensor to a rank, and return the handle to wait with."""
    sending = dist.isend(tensor, rank)
    assert sending is not None, "only a process outside of the group gets none"
    return sending


def _ring(
    pieces: Pieces,
    *,
    steps: int | None = None,
    sends: Callable[[int, int], int] = lambda rank, step: rank - step,
    shift: int = -1,
    always_add: bool = False,
) -> None:
    """Go round the ring; what differs from the default is a mistake.

    steps: how many, all if None. sends: the piece that a rank sends in a step. shift: from that
    piece to the one that what arrives is meant for. always_add: in the second half, too.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(2 * (size - 1) if steps is None else min(steps, size - 1)):
        sent = sends(rank, step) % size
        place = (sent + shift) % size
        arrived = torch.empty_like(pieces[place])
        sending = _begin_send(pieces[sent], (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        sending.wait()
        if step < size - 1 or always_add:
            arrived += pieces[place]
        pieces[place].copy_(arrived)


def _whole_tensors(pieces: Pieces) -> None:
    """A mistake: each rank passes on all pieces of every other rank, and adds them up."""
    rank, size = dist.get_rank(), dist.get_world_size()
    passed = torch.cat(pieces)
    total, arrived = passed.clone(), torch.empty_like(passed)
    for _ in range(size - 1):
        sending = _begin_send(passed, (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        sending.wait()
        passed = arrived.clone()
        total += passed
    pieces[:] = total.chunk(size)


def _all_reduced(pieces: Pieces) -> None:
    """A mistake: a collective for each piece."""
    for piece in pieces:
        dist.all_reduce(piece)


def _blocking_ring(pieces: Pieces) -> None:
    """A mistake: every rank sends before it receives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size - 1):
        dist.send(pieces[(rank - step) % size], (rank + 1) % size)
        dist.recv(pieces[(rank - step - 1) % size], (rank - 1) % size)


def _other_way_round(pieces: Pieces) -> None:
    """A mistake: each rank waits for the rank that it sends to."""
    after = (dist.get_rank() + 1) % dist.get_world_size()
    for piece in pieces[1:]:
        sending = _begin_send(piece, after)
        dist.recv(piece, after)
        sending.wait()


def _refuse_collective(*_: object, **__: object) -> None:
    """Stand for a collective, on a rank that is to do without it."""
    raise RuntimeError(_COLLECTIVE)


def _go_round(answer: Callable[[Pieces], None], *numbers: tuple[float, ...]) -> dict[str, list]:
    """Call an answer on as many ranks as there are rows of numbers: a trial.

    Returns each rank's pieces afterwards, and how many numbers it sent that a ring need not send.
    Raises TimeoutError, with the likely mistake, where ranks wait for each other.
    """
    size = len(numbers)
    sent: list[int] = []

    def noting(send: Callable) -> Callable:
        def noted(tensor: torch.Tensor, *args: object, **options: object) -> object:
            sent.append(tensor.numel())
            return send(tensor, *args, **options)

        return noted

    def rank_work() -> tuple[list[float], int]:
        pieces = list(torch.tensor(numbers[dist.get_rank()]).split(1))
        stand_ins: dict[str, Any] = dict.fromkeys(_COLLECTIVES, _refuse_collective)
        stand_ins |= {name: noting(getattr(dist, name)) for name in ("send", "isend")}
        with patch.multiple(dist, **stand_ins):
            answer(pieces)
        dist.barrier()  # or who is done early leaves while its message is on its way
        return torch.cat(pieces).tolist(), max(0, sum(sent) - 2 * (size - 1))

    try:
        done = on_ranks(size, rank_work, _RING_PATIENCE)
    except TimeoutError:
        names = getattr(getattr(answer, "__code__", None), "co_names", ())
        raise TimeoutError(_BLOCKED if "send" in names else _NOBODY_SENDS) from None
    return {"sums": [sums for sums, _ in done], "sent too many": [excess for _, excess in done]}


_RING_TRAPS: dict[str, Answer] = {
    "Each rank has the whole sum of one piece so far: hand the sums round, in as many steps.": (
        lambda pieces: _ring(pieces, steps=dist.get_world_size() - 1)
    ),
    "In the second half whole sums arrive: put each in the place of yours, and do not add.": (
        lambda pieces: _ring(pieces, always_add=True)
    ),
    "In each step send another piece: the one that has just arrived.": (
        lambda pieces: _ring(pieces, sends=lambda rank, step: rank)
    ),
    "What arrives is the piece that the rank before you sent, not the one that you sent.": (
        lambda pieces: _ring(pieces, shift=0)
    ),
    "The sums are right, but whole tensors go round: send one piece in a step, and add to it.": (
        _whole_tensors
    ),
    _COLLECTIVE: _all_reduced,
    _BLOCKED: _blocking_ring,
    _NOBODY_SENDS: _other_way_round,
}

EXERCISES = [
    OnRanks(
        mean_over_ranks,
        [((1.0,), (2.0,), (6.0,)), ((4.0,),), ((-1.0,), (4.0,))],
        _MEAN_TRAPS,
        call_with_own_case,
    ),
    Exercise(missing_ranks, _MISSING_CASES, _MISSING_TRAPS),
    OnRanks(
        ring_all_reduce,
        [
            ((1.0, 2.0, 3.0), (10.0, 20.0, 30.0), (100.0, 200.0, 300.0)),
            ((1.0, -2.0), (0.5, 4.0)),
            (
                (1.0, 2.0, 3.0, 4.0),
                (5.0, 6.0, 7.0, 8.0),
                (1.0, 0.0, 1.0, 0.0),
                (9.0, 9.0, 9.0, 9.0),
            ),
        ],
        _RING_TRAPS,
        _go_round,
    ),
]
