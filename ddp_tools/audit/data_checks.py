"""Checks of the audit on the samples that ranks train on.

`judge` calls each with the notes of all ranks, in the learner's process. Needs no torch.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from ddp_tools.audit.notes import (
    FAIL,
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    Finding,
    Inputs,
    Notes,
    Pass,
    datasets_differ,
    select,
    short_line,
)

_FEWEST = 8  # samples of a rank, whose order is hardly the same twice by accident


class _Dataset(NamedTuple):
    """What tells the passes of a rank apart: whether it trained, and on which dataset."""

    trained: bool
    size: int | None
    iterable: bool


def _passes_by_dataset(notes: Notes) -> dict[_Dataset, list[Pass]]:
    """Group the passes of a rank over its loaders."""
    passes: dict[_Dataset, list[Pass]] = {}
    for note in select(notes, Pass):
        dataset = _Dataset(note.steps > 0, note.dataset_size, note.iterable)
        passes.setdefault(dataset, []).append(note)
    return passes


def common_passes(ranks: list[Notes], trained: bool) -> Iterator[tuple[Pass, ...]]:
    """For each pass that all ranks made over a dataset, the notes of all ranks."""
    first, *others = (_passes_by_dataset(notes) for notes in ranks)
    for dataset, passes in first.items():
        if dataset.trained == trained and all(dataset in other for other in others):
            yield from zip(passes, *(other[dataset] for other in others), strict=False)


def samples(ranks: list[Notes]) -> Finding:
    """In training, no two ranks take the same samples."""
    most_padded, count, drawn = 0, 0, False
    for passes in common_passes(ranks, trained=True):
        sets = [set(note.samples) for note in passes]
        takers = Counter(sample for samples_of_rank in sets for sample in samples_of_rank)
        shared = sum(ranks_of_sample > 1 for ranks_of_sample in takers.values())
        if finding := _finding_of_pass(passes, shared, len(takers), ranks):
            return finding
        drawn = drawn or _draws_repeatedly(passes)
        most_padded, count = max(most_padded, shared), count + 1
    if finding := _same_inputs(ranks):
        return finding
    if not count:
        return _batches_by_hand(ranks)
    if drawn:
        seen = f"each rank trained on draws of its own, with replacement, {count} passes"
        return Finding(OK, seen)
    padding = f"; {most_padded} taken twice, to make the shares equal" if most_padded else ""
    return Finding(OK, f"each rank trained on a share of its own, {count} passes{padding}")


def _same_inputs(ranks: list[Notes]) -> Finding | None:
    """Find the same batches on all ranks, in what the wrapped model was called with."""
    calls = list(zip(*(select(notes, Inputs) for notes in ranks), strict=False))
    equal = [at_once[0] for at_once in calls if len({note.digest for note in at_once}) == 1]
    if len({note.digest for note in equal}) < 2 or len(equal) * 2 <= len(calls):
        return None
    seen = f"all ranks were given the same batch at {len(equal)} of the first {len(calls)} calls"
    cure = "seed what draws the batches by rank: seed + rank"
    return Finding(FAIL, f"{short_line(equal[0].at)}: {seen}", cure)


def _batches_by_hand(ranks: list[Notes]) -> Finding:
    """Say what is known of batches that no loader gave."""
    unseen = "no training pass over a DataLoader was seen on all ranks"
    if all(select(notes, Inputs) for notes in ranks):
        unseen += "; what the ranks' models were called with differs"
    return Finding(UNKNOWN, unseen)


def _draws_repeatedly(passes: tuple[Pass, ...]) -> bool:
    """Whether ranks have drawn samples with replacement, so that they may share some by chance."""
    drawn = sum(len(note.samples) for note in passes)
    drawn_once = sum(len(set(note.samples)) for note in passes)
    repeats = drawn > drawn_once + len(passes) and not passes[0].iterable
    return repeats or any(note.with_replacement for note in passes)


def _finding_of_pass(
    passes: tuple[Pass, ...],
    shared: int,
    different: int,
    ranks: list[Notes],
) -> Finding | None:
    """Judge one training pass; None if its shares are sound.

    shared: samples that more than one rank took; different: samples that any rank took.
    """
    first = passes[0]
    at = short_line(first.begun)
    drawn = sum(len(note.samples) for note in passes)
    drawn_once = sum(len(set(note.samples)) for note in passes)
    # A sampler that pads gives each rank but one at most one sample of another's.
    allowed = different / 2 if first.iterable else len(passes) - 1
    if first.iterable and drawn >= 2 * drawn_once > 0:
        seen = f"{at}: each worker of a rank gives all its samples"
        return Finding(FAIL, seen, "share them by get_worker_info().id, too")
    if _draws_repeatedly(passes):
        least = min(len(note.samples) for note in passes)
        if min(least, different) < _FEWEST:
            return Finding(UNKNOWN, f"{at}: too few samples, drawn with replacement, to compare")
        draws = Counter(tuple(sorted(note.samples[:least], key=str)) for note in passes)
        if len(draws) == len(passes):
            return None
        seen = f"{at}: {max(draws.values())} ranks drew the same {least} samples"
        cure = "a generator of its own on each rank, of seed + rank, or one draw of which each "
        return Finding(FAIL, seen, f"{cure}rank takes every world_size-th")
    if datasets_differ(ranks):
        return _shares_of_many_datasets(first)
    if shared > allowed:
        cure = "sampler=DistributedSampler(dataset) in the training loader, without shuffle"
        if first.iterable:
            cure = "share the samples by rank"
        elif all(note.sampler == "DistributedSampler" for note in passes):
            cure = "the same dataset, split and seed on all ranks: random_split(..., generator="
            cure += "torch.Generator().manual_seed(0)); one seed, num_replicas and a rank of its "
            cure += "own in DistributedSampler"
        seen = f"{shared} of {different} samples were trained on by more than one rank"
        return Finding(FAIL, f"{at}: {seen}", cure)
    return None


def _shares_of_many_datasets(note: Pass) -> Finding:
    """Judge a pass over datasets in which a number stands for another sample on each rank."""
    at = short_line(note.begun)
    if note.sampler != "DistributedSampler":
        return Finding(OK, f"{at}: each rank has samples of its own under the same numbers")
    return Finding(
        FAIL,
        f"{at}: shares of datasets that differ: one number is another sample on each rank",
        "make the same dataset on all ranks: seed before it is made, or read it from one file",
    )


def coverage(ranks: list[Notes]) -> Finding:
    """A whole training pass of all ranks together takes all samples of the dataset."""
    if samples(ranks).verdict != OK:
        return Finding(UNKNOWN, "looked at only where 'sharding' is ok")
    most_left_out, count = 0, 0
    for passes in common_passes(ranks, trained=True):
        dealt = all(note.sampler == "DistributedSampler" and note.complete for note in passes)
        if not dealt or len({note.own_size for note in passes}) > 1:
            continue  # another sampler may leave samples out on purpose
        size = passes[0].own_size or 0
        left_out = size - sum(len(note.samples) for note in passes)
        # What drop_last may leave out: of each rank's loader, and of the sampler.
        of_loaders = sum(max(note.batch_size - 1, 0) for note in passes)
        if left_out > of_loaders + len(passes) - 1:
            seen = f"{left_out} of {size} samples were trained on by no rank"
            cure = "DistributedSampler(dataset): it knows the number of ranks, and this one's"
            return Finding(FAIL, f"{short_line(passes[0].begun)}: {seen}", cure)
        most_left_out, count = max(most_left_out, left_out), count + 1
    if not count:
        trained = [note for note in select(ranks[0], Pass) if note.steps]
        dealt = any(note.sampler == "DistributedSampler" for note in trained)
        seen = "no whole training pass with a DistributedSampler was seen"
        return Finding(UNKNOWN if dealt else NOT_APPLICABLE, seen)
    rest = f"; {most_left_out} left out, as by drop_last" if most_left_out else ""
    return Finding(OK, f"the ranks together took all samples, {count} passes{rest}")


def order(ranks: list[Notes]) -> Finding:
    """Each training pass has an order of its own."""
    epochs = 0
    for dataset, passes in _passes_by_dataset(ranks[0]).items():
        ordered = [note for note in passes if note.batches > 1 and len(note.samples) >= _FEWEST]
        if not dataset.trained or dataset.iterable or len(ordered) < 2:
            continue
        for earlier, later in combinations(ordered, 2):
            least = min(len(earlier.samples), len(later.samples))
            if earlier.samples[:least] == later.samples[:least]:
                return _same_order(earlier)
        epochs += len(ordered)
    if not epochs:
        passes = [note for note in select(ranks[0], Pass) if note.steps]
        only_streams = passes and all(note.iterable for note in passes)
        if only_streams or not passes:
            return Finding(NOT_APPLICABLE, "no training pass over a dataset with numbered samples")
        least_words = f"two training epochs of several batches, with {_FEWEST} samples on a rank"
        return Finding(UNKNOWN, f"fewer than {least_words}")
    return Finding(OK, f"{epochs} epochs, each in another order")


def _same_order(note: Pass) -> Finding:
    """Judge a pass whose order the next one repeated."""
    at = short_line(note.begun)
    if note.shuffles:
        dealt = note.sampler == "DistributedSampler"
        own = "" if dealt else ", and an __iter__ that uses the epoch"
        cure = f"sampler.set_epoch(epoch) before each epoch{own}; no new seed in between"
        return Finding(FAIL, f"{at}: two epochs had the same order", cure)
    seen = f"two epochs had the same order, and {note.sampler} does not shuffle: meant so?"
    return Finding(UNKNOWN, f"{at}: {seen}")
