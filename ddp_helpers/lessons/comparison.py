"""Compare an answer's results with the expected ones: what differs, where, and by how much.

The trials of exercises on ranks make comparisons, on every rank; `ranks_judge` reports the first
that differs.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.lessons.exercise import same, short

_SHOWN = 4  # numbers of a tensor that are shown as they are


class Comparison(NamedTuple):
    """An answer's result on this rank, and the expected one.

    what: a noun, as in `the gradient of last.weight`; known: the results of common mistakes, by
    the hint for each.
    """

    what: str
    got: object
    expected: object
    known: Mapping[str, object] = {}


def at_most(what: str, got: int, most: int, hint: str) -> Comparison:
    """Compare a count with the largest right one; the hint is for any larger one."""
    return Comparison(what, got, min(got, most), {hint: got})


def difference(comparison: Comparison) -> str:
    """Return what differs and by how much; an empty text if nothing does."""
    what, got, expected, _ = comparison
    return "" if equal(got, expected) else f"{what}: {_got_and_expected(got, expected)}"


def explanations(comparison: Comparison) -> list[str]:
    """List the hints that fit a result: for known mistakes, then for a common factor."""
    _, got, expected, known = comparison
    hints = [hint for hint, value in known.items() if equal(got, value)]
    return [*hints, *_about_factor(got, expected)]


def equal(got: object, expected: object) -> bool:
    """Whether two results are equal, up to the rounding of sums in a different order."""
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        got, expected = _plain(got), _plain(expected)
        return got.shape == expected.shape and torch.allclose(got, expected, atol=1e-9)
    return not isinstance(expected, Tensor) and same(got, expected)


def _plain(tensor: Tensor) -> Tensor:
    """Take a tensor as numbers: without its graph, its precision and its device."""
    return tensor.detach().double().cpu()


def _about_factor(got: object, expected: object) -> list[str]:
    """Return a hint on the factor by which all numbers of a tensor are wrong, if there is one."""
    if not (isinstance(got, Tensor) and isinstance(expected, Tensor)):
        return []
    got, expected = _plain(got), _plain(expected)
    if got.shape != expected.shape or got.numel() < 2:  # one number always has a factor
        return []
    factor = float((got * expected).sum() / expected.square().sum())
    if not torch.allclose(got, expected * factor, atol=1e-9) or abs(factor) < 1e-6:
        return []
    if f"{factor:.4g}" == "1":
        return []
    sentence = f"Every number is {factor:.4g} times what it should be"
    size = dist.get_world_size()
    if abs(factor - size) < 1e-6:
        return [f"{sentence}: a sum over the {size} ranks, or the same thing added up on each?"]
    if abs(factor - 1 / size) < 1e-6:
        return [f"{sentence}: a mean over the {size} ranks, or one division too many?"]
    return [f"{sentence}."]


def _got_and_expected(got: object, expected: object) -> str:
    """Show both results; for a large tensor, the number that differs most, and its place."""
    if isinstance(got, list) and isinstance(expected, list) and len(expected) > _SHOWN:
        return _first_other(got, expected)
    if not (isinstance(got, Tensor) and isinstance(expected, Tensor)):
        return f"got {_short(got)}, expected {_short(expected)}"
    got, expected = _plain(got), _plain(expected)
    if got.shape != expected.shape:
        return f"got a tensor of shape {[*got.shape]}, expected {[*expected.shape]}"
    if got.numel() <= _SHOWN:
        return f"got {_short(got)}, expected {_short(expected)}"
    gaps = (got - expected).abs().nan_to_num(torch.inf)
    place = [int(index) for index in torch.unravel_index(gaps.argmax(), gaps.shape)]
    wrong = int((~torch.isclose(got, expected, atol=1e-9)).sum())
    one, other = got[tuple(place)].item(), expected[tuple(place)].item()
    return (
        f"got {one:.4g} at {place}, expected {other:.4g}; {wrong} of {got.numel()} numbers differ, "
        f"this one by {gaps.max():.2g}"
    )


def _first_other(got: list, expected: list) -> str:
    """Show where two lists first differ, and the items before that."""
    pairs = list(zip_longest(got, expected, fillvalue="nothing more"))
    place = next(number for number, (one, other) in enumerate(pairs) if not equal(one, other))
    after = f"after {_short(expected[:place][-2:])} " * (place > 0)
    return f"{after}got {_short(pairs[place][0])}, expected {_short(pairs[place][1])}"


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        if value.numel() > _SHOWN:
            return f"a tensor of shape {[*value.shape]}"
        value = [float(f"{number:.4g}") for number in value.detach().flatten().tolist()]
    return f"{value:.6g}" if isinstance(value, float) else " ".join(short(value).split())
