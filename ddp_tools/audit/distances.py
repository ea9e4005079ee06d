"""Compute the distance between the tensors of two notes, over all numbers. Needs no torch."""

import math
from array import array
from collections.abc import Sequence
from pathlib import Path

from ddp_tools.audit.notes import CLOSE, Tensors, differ

_PART = 1 << 16  # numbers that math.dist gets at once


def numbers_of(note: Tensors) -> Sequence[float]:
    """All numbers of the tensors, from the rank's file; without a file, their sums."""
    if not note.file:
        return [number for sums in note.sums for number in sums]
    numbers = array("d" if is_double(note) else "f")
    numbers.frombytes(Path(note.file).read_bytes())
    return numbers


def is_double(note: Tensors) -> bool:
    """Whether all tensors are float64, and so is their file."""
    return note.file.endswith(".f64")


def euclid(numbers: Sequence[float], others: Sequence[float]) -> float:
    """The Euclidean distance of two sequences of equal length, which may be very long."""
    parts = range(0, len(numbers), _PART)
    return math.hypot(*(math.dist(numbers[i : i + _PART], others[i : i + _PART]) for i in parts))


def names_apart(note: Tensors, other: Tensors) -> list[str]:
    """The names of the tensors that differ by more than rounding; [] if the names differ."""
    if note.names != other.names or note.sizes != other.sizes or note.bits == other.bits:
        return []
    both_files = note.file and other.file
    numbers, others = (numbers_of(each) if both_files else () for each in (note, other))
    apart, begin = [], 0
    for index, name in enumerate(note.names):
        end = begin + note.sizes[index] if both_files else begin
        part, other_part = numbers[begin:end], others[begin:end]
        far = euclid(part, other_part) > CLOSE * euclid(part, [0.0] * len(part))
        if far or differ([note.sums[index]], [other.sums[index]]):
            apart.append(name)
        begin = end
    return apart
