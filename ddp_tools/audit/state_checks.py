"""Parts of the audit's checks on state other than weights: buffers, copies, reduced numbers.

`training_checks` and `judge` call them in the driver process, with the notes of all ranks. Needs
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

_ROUNDING = 1e-3  # of a count of correct answers that was divided in float32
_TensorsType = TypeVar("_TensorsType", bound=Tensors)


def at_once(
    ranks: list[Notes], kind: type[_TensorsType], *whens: str
) -> Iterator[tuple[_TensorsType, ...]]:
    """The ranks' notes of the same moment: after the same number of steps, or at a good end."""
    ended_well = end(ranks).verdict == OK
    for when in whens:
        noted = [[note for note in select(notes, kind) if note.when == when] for notes in ranks]
        for notes_at_once in zip(*noted, strict=False):
            as_far = len({note.steps for note in notes_at_once}) == 1
            if ended_well if when == "end" else as_far:
                yield notes_at_once


def buffers(ranks: list[Notes], apart: list[tuple[int, Buffers, str]]) -> Finding | None:
    """Judge the differing buffers, as `buffers_apart` lists them; None if there are none."""
    wraps = select(ranks[0], Wrap)
    unsure = None
    for rank, note, name in apart:
        wrap = wraps[note.model]
        seen = f"{short_line(wrap.at)}: weights are equal, but rank {rank}'s buffer {name} differs "
        seen += "from rank 0's"
        if not wrap.broadcasts and name not in note.transient:
            cure = "all_reduce the values that change it, in the layer; for BatchNorm: "
            cure += "SyncBatchNorm.convert_sync_batchnorm(model), or broadcast_buffers=True"
            return Finding(FAIL, f"{seen}: broadcast_buffers is False", cure)
        why = "it is in no state_dict: intended?"
        if wrap.broadcasts:
            why = "DDP sends rank 0's before each forward pass, so the other ranks' changes are "
            why += "lost: intended? Else all_reduce the values that change it"
        unsure = unsure or Finding(UNKNOWN, f"{seen}; {why}")
    return unsure


def buffers_apart(ranks: list[Notes]) -> Iterator[tuple[int, Buffers, str]]:
    """The buffers that differ from rank 0's: the rank, its note, the name."""
    for first, *others in at_once(ranks, Buffers, "forward", "epoch", "end"):
        for rank, note in enumerate(others, 1):
            yield from ((rank, note, name) for name in names_apart(note, first))


def copies(ranks: list[Notes], of_source: set[str]) -> tuple[Finding | None, str]:
    """Judge copies of the wrapped models; also return a text on copies that only some ranks have.

    of_source: the names of buffers that differ in the wrapped models, which `buffers` judges.
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
                seen = f"{which} has a different {names[0]} on rank {rank} than on rank 0"
                if any(_has_changed(notes, note) for notes, note in zip(ranks, last, strict=True)):
                    cure = "change it equally on all ranks, or make it on rank 0 only"
                    return Finding(FAIL, f"weights are equal, but {seen}", cure), alone
                unsure = unsure or Finding(UNKNOWN, f"{seen}, and nothing changes it: intended?")
    return unsure, alone


def _has_changed(notes: Notes, last: Copy) -> bool:
    """Whether a rank's copy changed between the time it was found and the end."""
    same = [note for note in select(notes, Copy) if note.model == last.model]
    earlier = [note for note in same if note.when == "begin"]
    return any(note.bits != last.bits for note in earlier[-1:])


# ---- reduced numbers


def unequal_counts(counts: Sequence[int]) -> str:
    """Describe how many samples each rank took in a pass, if the numbers are unequal."""
    each = " and ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
    return f"the ranks took unequal numbers, {each} samples"


def averages(ranks: list[Notes]) -> Finding | None:
    """Judge numbers that are reduced after a pass in which the ranks had unequal counts.

    None if there are none, or the counts are also reduced.
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
    """A rank's sums of a few numbers between the end of this pass and the start of the next."""
    rest = notes[next(i for i, note in enumerate(notes) if note is of_pass) + 1 :]
    index = next((i for i, note in enumerate(rest) if isinstance(note, Pass)), len(rest))
    until = rest[index].since if index < len(rest) else float("inf")  # type: ignore[attr-defined]
    calls = select(rest[:index], Communication)
    return [call for call in calls if call.adds and call.numbers and call.time <= until]


def _has(calls: list[list[Communication]], counts: list[int]) -> bool:
    """Whether each rank also sends its own count."""
    return all(
        any(count in call.numbers for call in calls_of_rank)
        for calls_of_rank, count in zip(calls, counts, strict=True)
    )


def _are_means(values: tuple[float, ...], counts: list[int]) -> bool:
    """Whether the numbers are certainly unequal accuracies: correct answers divided by samples."""
    products = [value * count for value, count in zip(values, counts, strict=True)]
    whole = all(abs(product - round(product)) < _ROUNDING for product in products)
    broken = all(abs(value - round(value)) > _ROUNDING for value in values)
    return whole and broken and len({*values}) > 1
