"""What the witnesses of an audit have noted, and what a row of its table is."""

import json
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

OK, RED, UNSEEN = "ok", "RED", "not seen"
CLOSE = 1e-5  # sums over weights or gradients that differ by less, relative to their sizes, are equal
STEPS = 40  # batches of a pass in which samples are digested: the witness's number
Notes = list[dict]


class Row(NamedTuple):
    """One row: what was looked at, the verdict, what was seen, and the cure of a red one."""

    name: str
    verdict: str
    seen: str
    cure: str = ""


def read(folder: Path, ranks: int) -> list[Notes]:
    """The notes of each rank; none of a rank that never began. A line that is cut short is left out."""
    found = []
    for rank in range(ranks):
        path, notes = folder / f"rank{rank}.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                notes.append(json.loads(line))
            except json.JSONDecodeError:
                break
        found.append(notes)
    return found


def of(notes: Notes, *kinds: str) -> Notes:
    """The notes of these kinds, in order."""
    return [note for note in notes if note["kind"] in kinds]


def short(place: str) -> str:
    """A place without its folder: file:line."""
    return place.rpartition("/")[2] or "an unknown line"


def differ(one: list, other: list) -> bool:
    """Whether lists of sums differ by more than rounding."""
    pairs = zip_longest(one, other, fillvalue=(float("inf"), 0.0))
    return any(not abs(a[0] - b[0]) <= CLOSE * max(a[1], b[1], 1e-12) for a, b in pairs)


def contents(notes: Notes) -> dict[tuple, list[str]]:
    """The digests under which a rank was given each sample, in training."""
    found: dict[tuple, list[str]] = {}
    for note in of(notes, "pass"):
        if note["steps"] and 0 < len(note["rows"]) in (len(note["samples"]), STEPS * note["batch"]):
            for sample, digest in zip(note["samples"], note["rows"], strict=False):
                found.setdefault((note["whole"], sample), []).append(digest)
    return found


def unlike(ranks: list[Notes]) -> bool:
    """Whether a number stands for another sample on each rank, in datasets that give one sample for one number."""
    one, *others = (contents(notes) for notes in ranks)
    again = [digests for digests in one.values() if len(digests) > 1]
    shared = [{*digests} & {*other[key]} for other in others for key, digests in one.items() if key in other]
    return all(len({*digests}) == 1 for digests in again) and bool(again and shared) and not any(shared)
