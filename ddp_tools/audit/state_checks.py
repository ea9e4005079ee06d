"""Parts of the audit's rows on what ranks hold beside weights: buffers, copies, reduced numbers.

`training_checks` and `judge` call them in the learner's process, with the notes of all ranks. Needs
no torch.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ddp_tools.audit.distances import names_apart
from ddp_tools.audit.notes import (
    FAIL,
    OK,
    UNKNOWN,
    Buffers,
    Communication,
    Copy,
    Finding,
    Notes,
    Pass,
    Tensors,
    Wrap,
    select,
    short_line,
)
from ddp_tools.audit.rank_checks import end

_ROUNDING = 1e-3  # of a count of right answers, that was divided in float32
_TensorsType = TypeVar("_TensorsType", bound=Tensors)


def at_once(
    ranks: list[Notes], kind: type[_TensorsType], *whens: str
) -> Iterator[tuple[_TensorsType, ...]]:
    """The notes of all ranks that were made at one time, after as many steps or at a good end."""
    ended_well = end(ranks).verdict == OK
    for when in whens:
        noted = [[note for note in select(notes, kind) if note.when == when] for notes in ranks]
        for notes_at_once in zip(*noted, strict=False):
            as_far = len({note.steps for note in notes_at_once}) == 1
            if ended_well if when == "end" else as_far:
                yield notes_at_once


def buffers(ranks: list[Notes], apart: list[tuple[int, Buffers, str]]) -> Finding | None:
    """Judge the buffers that `buffers_apart` has listed; None if it is none."""
    wraps = select(ranks[0], Wrap)
    unsure = None
    for rank, note, name in apart:
        wrap = wraps[note.model]
        seen = f"{short_line(wrap.at)}: weights are equal, but rank {rank} has another buffer "
        seen += f"{name} than rank 0"
        if not wrap.broadcasts and name not in note.transient:
            cure = "all_reduce what changes it, in the layer; of BatchNorm: "
            cure += "SyncBatchNorm.convert_sync_batchnorm(model), or broadcast_buffers on"
            return Finding(FAIL, f"{seen}: broadcast_buffers is False", cure)
        why = "it is in no state_dict: meant so?"
        if wrap.broadcasts:
            why = "DDP sends rank 0's before each forward pass, so what the others put into "
            why += "theirs is lost: meant so? Else all_reduce what changes it"
        unsure = unsure or Finding(UNKNOWN, f"{seen}; {why}")
    return unsure


def buffers_apart(ranks: list[Notes]) -> Iterator[tuple[int, Buffers, str]]:
    """The buffers that another rank has other than rank 0: the rank, its note, the name."""
    for first, *others in at_once(ranks, Buffers, "forward", "epoch", "end"):
        for rank, note in enumerate(others, 1):
            yield from ((rank, note, name) for name in names_apart(note, first))


def copies(ranks: list[Notes], of_source: set[str]) -> tuple[Finding | None, str]:
    """Judge copies of the wrapped models; besides, which of them only some ranks have.

    of_source: the names of buffers that differ in the wrapped models, for which `buffers` answers.
    """
    unsure, alone = None, ""
    noted = [select(notes, Copy) for notes in ranks]
    of_ranks = [{(note.made, note.class_name): note for note in notes} for notes in noted]
    for key in dict.fromkeys(key for copies_of_rank in of_ranks for key in copies_of_rank):
        holders = [rank for rank, copies_of_rank in enumerate(of_ranks) if key in copies_of_rank]
        which = f"the {key[1]} made at {short_line(key[0])}"
        if len(holders) < len(ranks):
            who = " and ".join(f"rank {rank}" for rank in holders)
            alone += f"; only {who} has {which}"
            continue
        last = [copies_of_rank[key] for copies_of_rank in of_ranks]
        if end(ranks).verdict != OK or any(note.when != "end" for note in last):
            continue
        apart = [(rank, names_apart(note, last[0])) for rank, note in enumerate(last)]
        for rank, names in apart:
            if names := [n for n in names if n.removeprefix("module.") not in of_source]:
                seen = f"{which} has another {names[0]} on rank {rank} than on rank 0"
                if any(_has_changed(notes, note) for notes, note in zip(ranks, last, strict=True)):
                    cure = "change it on all ranks alike, or make it on rank 0 alone"
                    return Finding(FAIL, f"weights are equal, but {seen}", cure), alone
                unsure = unsure or Finding(UNKNOWN, f"{seen}, and nobody changes it: meant so?")
    return unsure, alone


def _has_changed(notes: Notes, last: Copy) -> bool:
    """Whether a rank's copy has other numbers at the end than when it was found."""
    same = [note for note in select(notes, Copy) if note.model == last.model]
    earlier = [note for note in same if note.when == "begin"]
    return any(note.bits != last.bits for note in earlier[-1:])


# ---- reduced numbers


def unequal_counts(counts: Sequence[int]) -> str:
    """Say how many samples each rank took in a pass in which they took unequal numbers."""
    each = " and ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
    return f"the ranks took unequal numbers, {each} samples"


def averages(ranks: list[Notes]) -> Finding | None:
    """Judge numbers that are reduced after a pass in which the ranks had unequal counts.

    None where there are none, or the counts are reduced, too.
    """
    unsure = None
    for passes in zip(*(select(notes, Pass) for notes in ranks), strict=False):
        counts = [len(note.samples) for note in passes]
        if len({note.begun for note in passes}) > 1 or len({*counts}) == 1 or not min(counts):
            continue
        calls = [_reduced(notes, note) for notes, note in zip(ranks, passes, strict=True)]
        if _has(calls, counts) or _has(calls, [note.batches for note in passes]):
            continue
        for calls_at_once in zip(*calls, strict=False):
            seen = f"{short_line(passes[0].begun)}: {unequal_counts(counts)}; "
            at = short_line(calls_at_once[0].at)
            numbers = [call.numbers for call in calls_at_once]
            if any(_are_means(values, counts) for values in zip(*numbers, strict=False)):
                cure = "all_reduce the sum and the number of samples, then divide"
                return Finding(FAIL, f"{seen}{at} adds up the ranks' own means", cure)
            if any(value % 1 for values in numbers for value in values):
                question = "is it a sum? A mean of the ranks' means is not the mean of all samples"
                unsure = unsure or Finding(UNKNOWN, f"{seen}{at} reduces a number: {question}")
    return unsure


def _reduced(notes: Notes, of_pass: Pass) -> list[Communication]:
    """The sums of few numbers that a rank asks for between this pass and the next one's end."""
    rest = notes[next(i for i, note in enumerate(notes) if note is of_pass) + 1 :]
    index = next((i for i, note in enumerate(rest) if isinstance(note, Pass)), len(rest))
    until = rest[index].since if index < len(rest) else float("inf")  # type: ignore[attr-defined]
    calls = select(rest[:index], Communication)
    return [call for call in calls if call.adds and call.numbers and call.time <= until]


def _has(calls: list[list[Communication]], counts: list[int]) -> bool:
    """Whether each rank sends its own count, too."""
    return all(
        any(count in call.numbers for call in calls_of_rank)
        for calls_of_rank, count in zip(calls, counts, strict=True)
    )


def _are_means(values: tuple[float, ...], counts: list[int]) -> bool:
    """Whether the numbers are, for certain, counts of right answers by samples, and not equal."""
    products = [value * count for value, count in zip(values, counts, strict=True)]
    whole = all(abs(product - round(product)) < _ROUNDING for product in products)
    broken = all(abs(value - round(value)) > _ROUNDING for value in values)
    return whole and broken and len({*values}) > 1
