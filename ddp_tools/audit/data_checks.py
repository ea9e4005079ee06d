"""Checks of the audit on the samples that ranks train and test on.

`judge` calls each with the notes of all ranks, in the learner's process. Needs no torch.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ddp_tools.audit.notes import (
    OK,
    RED,
    UNSEEN,
    Communication,
    FileWritten,
    Finding,
    Inputs,
    Notes,
    Pass,
    datasets_differ,
    select,
    short_line,
)
from ddp_tools.audit.rank_checks import end

# With each of these a script may bring counts together: to broadcast them in turn, or to send
# them, is right, too.
_REDUCES = re.compile("all_|reduce|gather|broadcast|i?send|i?recv|batch_isend")


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


def _common_passes(ranks: list[Notes], trained: bool) -> Iterator[tuple[Pass, ...]]:
    """For each pass that all ranks made over a dataset, the notes of all ranks."""
    first, *others = (_passes_by_dataset(notes) for notes in ranks)
    for dataset, passes in first.items():
        if dataset.trained == trained and all(dataset in other for other in others):
            yield from zip(passes, *(other[dataset] for other in others), strict=False)


def samples(ranks: list[Notes]) -> Finding:
    """In training, no two ranks take the same samples."""
    most_padded, count = 0, 0
    for passes in _common_passes(ranks, trained=True):
        sets = [set(note.samples) for note in passes]
        takers = Counter(sample for samples_of_rank in sets for sample in samples_of_rank)
        shared = sum(ranks_of_sample > 1 for ranks_of_sample in takers.values())
        if finding := _finding_of_pass(passes, shared, len(takers), ranks):
            return finding
        most_padded, count = max(most_padded, shared), count + 1
    if not count:
        return _batches_by_hand(ranks)
    padding = f"; {most_padded} taken twice, to make the shares equal" if most_padded else ""
    return Finding(OK, f"each rank trained on a share of its own, {count} passes{padding}")


def _batches_by_hand(ranks: list[Notes]) -> Finding:
    """Judge what a wrapped model was called with, where no loader gave it."""
    unseen = "no training pass over a DataLoader was seen on all ranks"
    inputs = [[note.digest for note in select(notes, Inputs)] for notes in ranks]
    calls = list(zip(*inputs, strict=False))
    equal = [number for number, digests in enumerate(calls, 1) if len({*digests}) == 1]
    if len({*inputs[0]}) > 1 and len(equal) * 2 > len(calls):
        at = short_line(select(ranks[0], Inputs)[equal[0] - 1].at)
        seen = (
            f"all ranks were given the same batch at {len(equal)} of the first {len(calls)} calls"
        )
        return Finding(RED, f"{at}: {seen}", "seed what draws the batches by rank: seed + rank")
    if calls and not equal:
        unseen += f"; the ranks' batches differ at the first {len(calls)} calls of the model"
    return Finding(UNSEEN, unseen)


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
        return Finding(RED, seen, "share them by get_worker_info().id, too")
    repeats = drawn > drawn_once + len(passes)
    if shared > allowed and repeats and not first.iterable:
        reason = "samples are drawn with replacement, so shares cannot be told apart"
        return Finding(UNSEEN, f"{at}: {reason}")
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
        return Finding(RED, f"{at}: {seen}", cure)
    return None


def _shares_of_many_datasets(note: Pass) -> Finding:
    """Judge a pass over datasets in which a number stands for another sample on each rank."""
    at = short_line(note.begun)
    if note.sampler != "DistributedSampler":
        return Finding(OK, f"{at}: each rank has samples of its own under the same numbers")
    return Finding(
        RED,
        f"{at}: shares of datasets that differ: one number is another sample on each rank",
        "make the same dataset on all ranks: seed before it is made, or read it from one file",
    )


def coverage(ranks: list[Notes]) -> Finding:
    """A whole training pass of all ranks together takes all samples of the dataset."""
    if samples(ranks).verdict != OK:
        return Finding(UNSEEN, "looked at only where 'samples' is ok")
    most_left_out, count = 0, 0
    for passes in _common_passes(ranks, trained=True):
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
            return Finding(RED, f"{short_line(passes[0].begun)}: {seen}", cure)
        most_left_out, count = max(most_left_out, left_out), count + 1
    if not count:
        return Finding(UNSEEN, "no whole training pass with a DistributedSampler was seen")
    rest = f"; {most_left_out} left out, as by drop_last" if most_left_out else ""
    return Finding(OK, f"the ranks together took all samples, {count} passes{rest}")


def order(ranks: list[Notes]) -> Finding:
    """Each training pass has an order of its own."""
    epochs = 0
    for dataset, passes in _passes_by_dataset(ranks[0]).items():
        several_batches = [note for note in passes if note.batches > 1]
        if not dataset.trained or dataset.iterable or len(several_batches) < 2:
            continue
        for earlier, later in pairwise(several_batches):
            least = min(len(earlier.samples), len(later.samples))
            if earlier.samples[:least] == later.samples[:least]:
                return _same_order(earlier)
        epochs += len(several_batches)
    if not epochs:
        return Finding(UNSEEN, "fewer than two training epochs")
    return Finding(OK, f"{epochs} epochs, each in another order")


def _same_order(note: Pass) -> Finding:
    """Judge a pass whose order the next one repeated."""
    at = short_line(note.begun)
    if note.sampler == "DistributedSampler" and note.shuffles:
        cure = "sampler.set_epoch(epoch) before each epoch"
        return Finding(RED, f"{at}: two epochs had the same order", cure)
    seen = f"each epoch has the same order, and {note.sampler} does not shuffle: meant so?"
    return Finding(UNSEEN, f"{at}: {seen}")


def evaluation(ranks: list[Notes]) -> Finding:
    """In evaluation, each sample is looked at once, or all of them by each rank."""
    if leak := _tested_samples_of_others(ranks):
        return leak
    findings = []
    for passes in _common_passes(ranks, trained=False):
        if not passes[0].iterable and all(note.complete for note in passes):
            findings.append((len(passes[0].samples), _evaluation_pass(passes)))
    for _, finding in findings:
        if finding.verdict == RED:
            return finding
    if not findings:
        return Finding(UNSEEN, "no pass without steps was seen on all ranks")
    # Of several passes the largest: a small one may have the rest that does not divide.
    return max(findings, key=lambda pair: pair[0])[1]


def _tested_samples_of_others(ranks: list[Notes]) -> Finding | None:
    """Find samples that one rank trains on and another tests, of a dataset that each has split.

    None where a rank tests what it trains on itself, as for the training accuracy.
    """
    trained: list[set[int | str]] = []
    tested: list[set[int | str]] = []
    at = ""
    for notes in ranks:
        parts = [note for note in select(notes, Pass) if note.is_part and not note.iterable]
        training = [note for note in parts if note.steps]
        testing = [note for note in parts if not note.steps]
        both = {note.dataset for note in training} & {note.dataset for note in testing}
        pairs = [
            {sample for note in notes_of if note.dataset in both for sample in note.samples}
            for notes_of in (training, testing)
        ]
        if not both or pairs[0] & pairs[1]:
            return None
        trained.append(pairs[0])
        tested.append(pairs[1])
        at = at or short_line(next(note.begun for note in testing if note.dataset in both))
    all_tested = {sample for samples_of_rank in tested for sample in samples_of_rank}
    leaked = all_tested & {sample for samples_of_rank in trained for sample in samples_of_rank}
    if not leaked:
        return None
    count = len(all_tested)
    seen = f"{at}: {len(leaked)} of {count} tested samples are trained on by another rank"
    cure = "one split for all ranks: random_split(..., generator=torch.Generator().manual_seed(0))"
    return Finding(RED, seen, cure)


def _evaluation_pass(passes: tuple[Pass, ...]) -> Finding:
    """Judge one pass over a test set."""
    first, count = passes[0], len(passes)
    at, size = short_line(first.begun), first.dataset_size or 0
    times = Counter(sample for note in passes for sample in note.samples)
    if len({frozenset(note.samples) for note in passes}) == 1:
        if _is_strided(first, count):
            seen = f"{at}: all ranks take samples 0, {count}, … and none the rest"
            return Finding(RED, seen, "begin the share at rank")
        if len(times) == first.own_size:  # a part of a dataset may be the whole test set
            size = first.own_size
        if len(times) < size:
            same = f"all ranks test the same {len(times)} of {size} samples: meant so?"
            return Finding(UNSEEN, f"{at}: {same}")
        all_of_them = f"each rank tests all {size} samples"
        return Finding(OK, f"{at}: {all_of_them} (right, but the ranks share no work)")
    if twice := sum(looks > 1 for looks in times.values()):
        seen = f"{at}: {twice} of {len(times)} samples count more than once"
        share = "Subset(dataset, range(rank, len(dataset), world_size))"
        return Finding(RED, seen, f"{share} in place of a sampler that pads")
    return Finding(OK, f"{at}: {len(times)} of {size} samples, each once")


def _is_strided(note: Pass, ranks: int) -> bool:
    """Whether a share begins with two samples that lie as many apart as there are ranks."""
    if len(note.samples) < 2:
        return False
    first, second = note.samples[:2]
    return isinstance(first, int) and second == first + ranks


def metrics(ranks: list[Notes]) -> Finding:
    """What ranks find on shares of the test set is summed or gathered, until the run ends."""
    trained = {note.dataset_size for note in select(ranks[0], Pass) if note.steps}
    if end(ranks).verdict == OK:
        for passes in _common_passes(ranks, trained=False):
            first = passes[0]
            is_test_set = first.dataset_size and first.dataset_size not in trained
            if is_test_set and _keeps_shares_apart(passes, ranks):
                at = short_line(first.begun)
                return Finding(
                    RED,
                    f"{at}: each rank tests a share, and nothing is reduced or gathered afterwards",
                    "dist.all_reduce of the sums and of the number of samples, then divide",
                )
    question = "is each printed number a sum over all ranks?"
    return Finding(UNSEEN, f"what is printed is not followed: {question}")


def _keeps_shares_apart(passes: tuple[Pass, ...], ranks: list[Notes]) -> bool:
    """Whether each rank tested a share of its own, and nothing brought their counts together."""
    shares = {frozenset(note.samples) for note in passes}
    since = min(note.since for note in passes)
    afterwards = [[note for note in notes if note.time >= since] for notes in ranks]
    calls = [call for notes in afterwards for call in select(notes, Communication)]
    reduced = any(_REDUCES.match(call.name) for call in calls)
    # Each wrote a file, from which somebody may gather.
    wrote_files = all(select(notes, FileWritten) for notes in afterwards)
    is_share = len(shares) == len(passes) and passes[0].complete
    return is_share and not reduced and not wrote_files
