"""Exercise 4 of notebook 16: each matrix has an owner, which alone takes Muon's step for it.

The function is the trial of the exercise that has its name; it runs on every rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_helpers.lessons.calls import CallLog
from ddp_helpers.lessons.comparison import Comparison, at_most
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.lessons.ranks_judge import random_numbers, sum_of_all

_SHAPES = [(6, 4), (4, 4), (3, 5), (4, 2), (2, 2)]
_BETA = 0.95  # of the momentum
_Step = Callable[[Tensor, Tensor, Tensor], None]


@torch.no_grad()
def _muon_step(matrix: Tensor, mean: Tensor, momentum: Tensor) -> None:
    """Take the step of the notebook's cell in the matrix's own precision, without bfloat16."""
    momentum.lerp_(mean, 1 - _BETA)
    x = mean.lerp(momentum, _BETA)
    if tall := len(x) > x.size(1):
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    rows, columns = matrix.shape
    matrix.add_(x.T if tall else x, alpha=-0.1 * max(1, rows / columns) ** 0.5)


def update_owned(answer: Answer, log: CallLog) -> Iterator[Comparison]:
    """Compare two steps with those of one rank: of five matrices, and of two, so a rank has none.

    Muon's step ignores a gradient's size, so a sum instead of a mean shows only in the momentum.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (5, 2):
        matrices = [nn.Parameter(random_numbers(7, *shape)) for shape in _SHAPES[:count]]
        alone = [matrix.detach().clone() for matrix in matrices]  # as one rank would step them
        due = [torch.zeros_like(matrix) for matrix in alone]  # its momenta
        owned = [*range(rank, count, size)]
        momenta: dict[Any, Any] = {}
        for number in (1, 2):
            own = [random_numbers(20 * number + rank, *shape) for shape in _SHAPES[:count]]
            before = [matrix.detach().clone() for matrix in matrices]
            old = [momentum.clone() for momentum in due]
            for place, gradient in enumerate(own):
                matrices[place].grad = gradient.clone()
                _muon_step(alone[place], sum_of_all(gradient) / size, due[place])
            stepped: list[Tensor] = []
            answer(matrices, momenta, _counted(stepped))
            what = f"in step {number}, matrices that this rank updates"
            yield at_most(what, len(stepped), len(owned), _ALL_STEP)
            known: dict[str, object] = {_ALL_KEEP: [*range(count)], _FORGOTTEN: []}
            yield Comparison("the keys of momenta on this rank", _keys(momenta), owned, known)
            for place, matrix in enumerate(matrices):
                of = f"matrix {place} (of rank {place % size})"
                momentum = momenta.get(place)  # None where another rank owns the matrix
                expected = due[place] if place in owned else None
                known = {
                    _SUM: due[place] * size,
                    _OWN_ROWS: old[place].lerp(own[place] / size, 1 - _BETA),
                    _UNDIVIDED: old[place].lerp(own[place], 1 - _BETA),
                }
                yield Comparison(
                    f"after step {number}, the momentum of {of}", momentum, expected, known
                )
                what, known = f"after step {number}, {of}", {_OLD: before[place]}
                yield Comparison(what, matrix, alone[place], known)
            known = {_TO_ALL: ["all_reduce", "broadcast"]}
            names = sorted({*log.names()})
            yield Comparison("collectives called", names, ["broadcast", "reduce"], known)
            numbers = sum(matrix.numel() for matrix in matrices)
            for name in ("reduce", "broadcast"):
                yield Comparison(f"numbers given to {name}", log.numbers(name), numbers)


def _counted(stepped: list[Tensor]) -> _Step:
    """Make the step that an answer calls; it notes the matrices that it is called for."""

    def muon_step(matrix: Tensor, mean: Tensor, momentum: Tensor) -> None:
        stepped.append(matrix)
        _muon_step(matrix, mean, momentum)

    return muon_step


def _keys(momenta: dict[Any, Any]) -> object:
    """List the numbers of the matrices whose momentum a rank keeps."""
    if all(isinstance(key, int) for key in momenta):
        return sorted(momenta)
    return sorted({type(key).__name__ for key in momenta})


_ALL_STEP = (
    "Newton-Schulz is the costly part, and the ranks share it: a rank calls muon_step for the "
    "matrices that it owns, and for no others."
)
_ALL_KEEP = (
    "This rank keeps a momentum for every matrix. The owner alone needs it: that is the memory "
    "which sharing saves."
)
_FORGOTTEN = (
    "No momentum is kept, so the next step lacks the gradients of this one: put it into "
    "`momenta` under the matrix's number, and make zeros only where there is none yet."
)
_SUM = (
    "The momentum is of the sum of the gradients, not of their mean. The weights do not show it, "
    "since Newton-Schulz divides by the size of its matrix. They will, when the job resumes with a "
    "different number of ranks."
)
_OWN_ROWS = (
    "The owner's gradient is of its own rows of the batch only: reduce brings it the sum over all "
    "ranks, before muon_step."
)
_UNDIVIDED = (
    "The owner's gradient is of its own rows of the batch only, undivided: reduce brings it the "
    "sum over all ranks, before muon_step."
)
_OLD = (
    "The matrix is as it was before. Its owner updates it, and all others need it from there, "
    "after muon_step: src is the owner's rank."
)
_TO_ALL = (
    "An all-reduce brings each mean to every rank, and only the owner needs it: dist.reduce, with "
    "the owner as dst."
)
