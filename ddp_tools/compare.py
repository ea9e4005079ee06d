"""The command `compare`: compare the weights in two files of torch.save. Needs torch."""

import re
from collections.abc import Iterator, Mapping
from math import inf, isfinite
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from ddp_tools import PlainError

_AGREE, _DIFFER, _NOT_KNOWN = 0, 1, 3  # 2 is wrong usage
# Relative to a tensor's largest number. In float64, sums in a different order differ by less than
# the first, and a wrong step by more; in float32 a wrong step with a small learning rate may be as
# small as rounding, and rounding does not reach the second within a few steps.
_ROUNDING, _CERTAIN = 1e-10, 1e-3
_SINGLE = 1e-5  # one float32 among float64 causes less


def compare(first: Path, second: Path) -> int:
    """Print the largest difference and return the exit status. Raises PlainError.

    0: equal, or in float64 up to rounding; 1: they differ; 3: unknown, in less than float64.
    """
    one, two = _read(first), _read(second)
    if alone := sorted(one.keys() ^ two.keys()):
        print(f"only one of the files has {', '.join(alone[:4])}{', …' * (len(alone) > 4)}")
        return _DIFFER
    for name in one:
        if one[name].shape != two[name].shape:
            shapes = f"{[*one[name].shape]} and {[*two[name].shape]}"
            print(f"{name} has the shapes {shapes}")
            return _DIFFER
    apart = {name: _difference(one[name], two[name]) for name in one}
    print(f"{len(one)} tensors, {[*apart.values()].count(0)} of them equal to the bit")
    if not any(apart.values()):
        return _AGREE
    worst = max(apart, key=apart.__getitem__)
    kind = str(one[worst].dtype).removeprefix("torch.")
    print(f"largest difference: {apart[worst]:.2g} of the largest number, in {worst} ({kind})")
    unequal = [name for name in apart if apart[name]]
    if all(one[name].dtype == two[name].dtype == torch.float64 for name in unequal):
        agree = apart[worst] <= _ROUNDING
        hint = ": is there a float32 in it, such as .float()?" * (apart[worst] < _SINGLE)
        print("they agree up to rounding" if agree else f"they DIFFER by more than rounding{hint}")
        return _AGREE if agree else _DIFFER
    if apart[worst] > _CERTAIN:
        print("they DIFFER, unless rounding grew over many steps: compare after one to three steps")
        return _DIFFER
    print("not known: in this type a wrong step can be as small as rounding: train in float64")
    return _NOT_KNOWN


def _read(path: Path) -> dict[str, Tensor]:
    """Map the names in a file of torch.save to its tensors. Raises PlainError if it has none."""
    try:
        tensors = dict(_tensors(torch.load(path, map_location="cpu", weights_only=True)))
        reason = "it has no tensor"
    except (OSError, RuntimeError, EOFError, UnpicklingError, ValueError) as error:
        tensors = {}
        reason = getattr(error, "strerror", None) or str(error).partition(".")[0]
    if not tensors:
        cure = "give a file of torch.save with a state_dict"
        raise PlainError(f"{path} cannot be compared ({reason}): {cure}")
    return tensors


def _tensors(content: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in a file's content by name, without the prefixes of DDP and torch.compile."""
    if isinstance(content, Tensor):
        yield re.sub(r"(?<=\.)(module|_orig_mod)\.", "", name).strip("."), content
    elif isinstance(content, Mapping | list | tuple):
        pairs = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in pairs:
            yield from _tensors(value, f"{name}.{key}")


def _difference(one: Tensor, two: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest number in them."""
    if torch.equal(one, two):
        return 0.0
    one, two = one.double(), two.double()
    difference = (one - two).abs().max().item() / max(one.abs().max().item(), 1e-30)
    return difference if isfinite(difference) else inf
