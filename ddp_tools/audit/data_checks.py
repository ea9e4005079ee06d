"""Checks of the audit on the samples that ranks train on.

`judge` calls each with the notes of all ranks, in the driver process. Needs no torch.
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

_FEWEST = 8  # samples of a rank: the same order twice is then hardly chance


class _Dataset(NamedTuple):
    """The key that groups the passes of a rank: whether it trained, and on which dataset."""

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
    """In training, no two ranks use the same samples."""
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
        seen = f"each rank trained on its own draws, with replacement, {count} passes"
        return Finding(OK, seen)
    padding = f"; {most_padded} used twice, as padding to equal shards" if most_padded else ""
    return Finding(OK, f"each rank trained on its own shard, {count} passes{padding}")


def _same_inputs(ranks: list[Notes]) -> Finding | None:
    """Find equal batches on all ranks, by the inputs of the wrapped model."""
    calls = list(zip(*(select(notes, Inputs) for notes in ranks), strict=False))
    equal = [at_once[0] for at_once in calls if len({note.digest for note in at_once}) == 1]
    if len({note.digest for note in equal}) < 2 or len(equal) * 2 <= len(calls):
        return None
    seen = f"all ranks were given the same batch at {len(equal)} of the first {len(calls)} calls"
    cure = "seed the generator that draws the batches by rank: seed + rank"
    return Finding(FAIL, f"{short_line(equal[0].at)}: {seen}", cure)


def _batches_by_hand(ranks: list[Notes]) -> Finding:
    """The finding if batches came from no loader."""
    unseen = "no training pass over a DataLoader was seen on all ranks"
    if all(select(notes, Inputs) for notes in ranks):
        unseen += "; the inputs of the ranks' models differ"
    return Finding(UNKNOWN, unseen)


def _draws_repeatedly(passes: tuple[Pass, ...]) -> bool:
    """Whether ranks drew samples with replacement, so that two may use the same ones by chance."""
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
    """Judge one training pass; None if its shards are correct.

    shared: how many samples more than one rank used; different: how many any rank used.
    """
    first = passes[0]
    at = short_line(first.begun)
    drawn = sum(len(note.samples) for note in passes)
    drawn_once = sum(len(set(note.samples)) for note in passes)
    # A sampler that pads gives each rank but one at most one sample of another rank.
    allowed = different / 2 if first.iterable else len(passes) - 1
    if first.iterable and drawn >= 2 * drawn_once > 0:
        seen = f"{at}: each worker of a rank gives all its samples"
        return Finding(FAIL, seen, "also shard them by get_worker_info().id")
    if _draws_repeatedly(passes):
        least = min(len(note.samples) for note in passes)
        if min(least, different) < _FEWEST:
            return Finding(UNKNOWN, f"{at}: too few samples, drawn with replacement, to compare")
        draws = Counter(tuple(sorted(note.samples[:least], key=str)) for note in passes)
        if len(draws) == len(passes):
            return None
        seen = f"{at}: {max(draws.values())} ranks drew the same {least} samples"
        cure = "give each rank its own generator, with seed + rank, or one draw of which each "
        return Finding(FAIL, seen, f"{cure}rank takes every world_size-th")
    if datasets_differ(ranks):
        return _shares_of_many_datasets(first)
    if shared > allowed:
        cure = "sampler=DistributedSampler(dataset) in the training loader, without shuffle"
        if first.iterable:
            cure = "shard the samples by rank"
        elif all(note.sampler == "DistributedSampler" for note in passes):
            cure = "the same dataset, split and seed on all ranks: random_split(..., generator="
            cure += "torch.Generator().manual_seed(0)); in DistributedSampler one seed, "
            cure += "num_replicas and each rank's own rank"
        seen = f"{shared} of {different} samples were trained on by more than one rank"
        return Finding(FAIL, f"{at}: {seen}", cure)
    return None


def _shares_of_many_datasets(note: Pass) -> Finding:
    """Judge a pass over datasets in which an index gives a different sample on each rank."""
    at = short_line(note.begun)
    if note.sampler != "DistributedSampler":
        return Finding(OK, f"{at}: each rank has its own samples under the same indices")
    return Finding(
        FAIL,
        f"{at}: the ranks' datasets differ: one index is a different sample on each rank",
        "make the same dataset on all ranks: seed before it is made, or read it from one file",
    )


def coverage(ranks: list[Notes]) -> Finding:
    """A complete training pass of all ranks together uses all samples of the dataset."""
    if samples(ranks).verdict != OK:
        return Finding(UNKNOWN, "checked only if 'sharding' is ok")
    most_left_out, count = 0, 0
    for passes in common_passes(ranks, trained=True):
        dealt = all(note.sampler == "DistributedSampler" and note.complete for note in passes)
        if not dealt or len({note.own_size for note in passes}) > 1:
            continue  # another sampler may leave samples out on purpose
        size = passes[0].own_size or 0
        left_out = size - sum(len(note.samples) for note in passes)
        # The most that drop_last leaves out: of each rank's loader, and of the sampler.
        of_loaders = sum(max(note.batch_size - 1, 0) for note in passes)
        if left_out > of_loaders + len(passes) - 1:
            seen = f"{left_out} of {size} samples were trained on by no rank"
            cure = "DistributedSampler(dataset), which takes rank and world size from the group"
            return Finding(FAIL, f"{short_line(passes[0].begun)}: {seen}", cure)
        most_left_out, count = max(most_left_out, left_out), count + 1
    if not count:
        trained = [note for note in select(ranks[0], Pass) if note.steps]
        dealt = any(note.sampler == "DistributedSampler" for note in trained)
        seen = "no complete training pass with a DistributedSampler was seen"
        return Finding(UNKNOWN if dealt else NOT_APPLICABLE, seen)
    rest = f"; {most_left_out} left out, as by drop_last" if most_left_out else ""
    return Finding(OK, f"the ranks together used all samples, {count} passes{rest}")


def order(ranks: list[Notes]) -> Finding:
    """Each training pass has a different order."""
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
            return Finding(NOT_APPLICABLE, "no training pass over a dataset with indices")
        least_words = f"two training epochs of several batches, with {_FEWEST} samples per rank"
        return Finding(UNKNOWN, f"fewer than {least_words}")
    return Finding(OK, f"{epochs} epochs, each in a different order")


def _same_order(note: Pass) -> Finding:
    """Judge a pass whose order a later one repeated."""
    at = short_line(note.begun)
    if note.shuffles:
        dealt = note.sampler == "DistributedSampler"
        own = "" if dealt else ", and an __iter__ that uses the epoch"
        cure = f"sampler.set_epoch(epoch) before each epoch{own}; no new seed in between"
        return Finding(FAIL, f"{at}: two epochs had the same order", cure)
    seen = f"two epochs had the same order, and {note.sampler} does not shuffle: intended?"
    return Finding(UNKNOWN, f"{at}: {seen}")
