"""Checks of the audit on test sets: who tests which samples, and how metrics are reduced.

`judge` calls each with the notes of all ranks, in the driver process. Needs no torch.
"""

import re
from collections import Counter

from ddp_tools.audit.data_checks import common_passes
from ddp_tools.audit.distances import names_apart
from ddp_tools.audit.notes import (
    FAIL,
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    Buffers,
    Communication,
    EvalMode,
    FileWritten,
    Finding,
    Notes,
    Pass,
    select,
    short_line,
)
from ddp_tools.audit.rank_checks import end
from ddp_tools.audit.state_checks import at_once, unequal_counts

# Calls that reduce or gather counts; those of the second may, as when ranks broadcast in turn.
_REDUCES = re.compile("all_|reduce|gather")
_MAY_REDUCE = re.compile("broadcast|i?send|i?recv|batch_isend")


def evaluation(ranks: list[Notes]) -> Finding:
    """In evaluation, each sample counts once, or every rank tests all samples."""
    if leak := _tested_samples_of_others(ranks):
        return leak
    findings = []
    for passes in common_passes(ranks, trained=False):
        if not passes[0].iterable and all(note.complete for note in passes):
            findings.append((len(passes[0].samples), _evaluation_pass(passes)))
    for _, finding in findings:
        if finding.verdict == FAIL:
            return finding
    if apart := _tested_models_apart(ranks):
        return apart
    if not findings:
        return _evaluation_of_some(ranks)
    # The largest of several passes: a small one may test the remainder that does not divide.
    return max(findings, key=lambda pair: pair[0])[1]


def _tested_models_apart(ranks: list[Notes]) -> Finding | None:
    """Judge models that differ in a buffer when the ranks start a test, as with BatchNorm."""
    for first, *others in at_once(ranks, Buffers, "test"):
        for rank, note in enumerate(others, 1):
            if names := names_apart(note, first):
                seen = f"{short_line(first.at)}: at the test rank {rank}'s {names[0]} differs from "
                seen += "rank 0's: each rank tests a different model"
                cure = "Broadcast rank 0's buffers before the test, or reduce them over the ranks"
                return Finding(UNKNOWN, f"{seen}. {cure}")
    return None


def _evaluation_of_some(ranks: list[Notes]) -> Finding:
    """Judge a test that some ranks did not make, or that none completed."""
    tests = [_without_peeks(notes) for notes in ranks]
    testers = [rank for rank, passes in enumerate(tests) if passes]
    whole = [note for passes in tests for note in passes if note.complete and not note.iterable]
    if not testers:
        by_hand = [note for note in select(ranks[0], EvalMode) if note.steps]
        if by_hand:
            seen = f"{short_line(by_hand[0].at)}: a model is put into eval mode, but no pass over a"
            question = "which rank tests which samples?"
            return Finding(UNKNOWN, f"{seen} DataLoader follows: {question}")
        return Finding(NOT_APPLICABLE, "no pass over a DataLoader without steps")
    if len(testers) > 1 or not whole:
        seen = "no complete pass without steps over a dataset was seen on all ranks"
        return Finding(UNKNOWN, seen)
    last = whole[-1]
    count, seen = len({*last.samples}), f"{short_line(last.begun)}: rank {testers[0]} alone tests"
    if count not in (last.own_size, last.dataset_size):
        return Finding(UNKNOWN, f"{seen} {count} of {last.own_size} samples: intended?")
    return Finding(OK, f"{seen} all {count} samples")


def _without_peeks(notes: Notes) -> list[Pass]:
    """Select passes without steps, except a look at one batch of a training set."""
    trained = {note.dataset for note in select(notes, Pass) if note.steps}
    tests = [note for note in select(notes, Pass) if not note.steps]
    return [t for t in tests if t.complete or t.batches > 1 or t.dataset not in trained]


def _tested_samples_of_others(ranks: list[Notes]) -> Finding | None:
    """Find samples that one rank trains on and another tests, if each rank split the dataset.

    None if a rank tests its own training samples, as for the training accuracy.
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
    return Finding(FAIL, seen, cure)


def _evaluation_pass(passes: tuple[Pass, ...]) -> Finding:
    """Judge one pass over a test set."""
    first, count = passes[0], len(passes)
    at, size = short_line(first.begun), first.dataset_size or 0
    times = Counter(sample for note in passes for sample in note.samples)
    if len({frozenset(note.samples) for note in passes}) == 1:
        if _is_strided(first, count):
            seen = f"{at}: all ranks take samples 0, {count}, … and none the rest"
            return Finding(FAIL, seen, "start the shard at rank, as in range(rank, n, world_size)")
        if len(times) == first.own_size:  # a subset of a dataset may be the complete test set
            size = first.own_size
        if len(times) < size:
            same = f"all ranks test the same {len(times)} of {size} samples: intended?"
            return Finding(UNKNOWN, f"{at}: {same}")
        all_of_them = f"each rank tests all {size} samples"
        return Finding(OK, f"{at}: {all_of_them} (correct, but the ranks share no work)")
    if twice := sum(looks > 1 for looks in times.values()):
        seen = f"{at}: {twice} of {len(times)} samples count more than once"
        share = "Subset(test_set, range(rank, len(test_set), world_size))"
        return Finding(FAIL, seen, f"{share}: no padding")
    if len(times) <= (first.own_size or 0):
        size = first.own_size or 0
    return Finding(OK, f"{at}: {len(times)} of {size} samples, each once")


def _is_strided(note: Pass, ranks: int) -> bool:
    """Whether the first two indices of a shard differ by the number of ranks."""
    if len(note.samples) < 2:
        return False
    first, second = note.samples[:2]
    return isinstance(first, int) and second == first + ranks


def metrics(ranks: list[Notes]) -> Finding:
    """Results on shards of a test set are summed or gathered before training continues."""
    if end(ranks).verdict != OK:
        return Finding(UNKNOWN, "see 'exit'")
    tests = [p for p in common_passes(ranks, trained=False) if not _trained_on(p[0], ranks[0])]
    if not tests:
        return Finding(NOT_APPLICABLE, "no test set was read on all ranks by a DataLoader")
    whole = [passes for passes in tests if all(note.complete for note in passes)]
    shares = [p for p in whole if len({frozenset(note.samples) for note in p}) == len(p)]
    if not whole:
        return Finding(UNKNOWN, "no test set was read completely")
    if not shares:
        return Finding(OK, "all ranks test the same samples, so each has the complete result")
    calls = [[_reduced_after(*pair) for pair in zip(p, ranks, strict=True)] for p in shares]
    apart = [passes for passes, of_ranks in zip(shares, calls, strict=True) if not of_ranks[0]]
    if apart:
        return _kept_apart(apart[0], ranks)
    for passes, of_ranks in zip(shares, calls, strict=True):
        counts = [len(note.samples) for note in passes]
        if call := _without_counts(counts, of_ranks, ranks):
            unequal = f"; {unequal_counts(counts)}" if len({*counts}) > 1 else ""
            seen = f"{call.name} at {short_line(call.at)}, without the number of samples{unequal}"
            question = "is it a sum, or a mean of each rank's shard (mIoU, F1, loss)?"
            return Finding(UNKNOWN, f"{seen}: {question}")
    first = calls[0][0][0]
    seen = f"{first.name} at {short_line(first.at)}"
    return Finding(OK, f"after each test the ranks reduce or gather their results: {seen}")


def _kept_apart(passes: tuple[Pass, ...], ranks: list[Notes]) -> Finding:
    """Judge a test whose results are not reduced before training continues."""
    seen = f"{short_line(passes[0].begun)}: each rank tests a shard, and nothing is reduced or "
    if _may_come_together_later(passes, ranks):
        question = "gathered before training continues: does each printed number cover all ranks?"
        return Finding(UNKNOWN, seen + question)
    cure = "dist.all_reduce of the sums and of the number of samples, then divide"
    return Finding(FAIL, f"{seen}gathered afterwards", cure)


def _without_counts(
    counts: list[int], calls: list[list[Communication]], ranks: list[Notes]
) -> Communication | None:
    """Find a call that may reduce or gather means of shards.

    Not a call of integers, which are counts; nor one in which a rank also gives its number of
    samples, or a value per sample; and no call at all if one has that number alone.

    counts: how many samples each rank tested; calls: each rank's.
    """
    for count, calls_of_rank, notes in zip(counts, calls, ranks, strict=True):
        if any([*call.numbers] == [count] for call in calls_of_rank):
            continue
        # A sum over the training samples may be reduced after the test.
        of_passes = {len(note.samples) for note in select(notes, Pass) if note.complete}
        for call in calls_of_rank:
            # A value per sample of all ranks; or per sample of one rank, with padding, to gather.
            places = {sum(counts)} if call.adds else {count, max(counts), sum(counts)}
            if not (call.counts or of_passes & {*call.numbers} or places & {*call.lengths}):
                return call
    return None


def _trained_on(test: Pass, notes: Notes) -> bool:
    """Whether a rank tests its training samples, as for the training accuracy."""
    trained = [note for note in select(notes, Pass) if note.steps and note.dataset == test.dataset]
    return any({*note.samples} & {*test.samples} for note in trained)


def _reduced_after(test: Pass, notes: Notes) -> list[Communication]:
    """A rank's calls that reduce or gather, from the start of a test until it trains again."""
    since = test.since
    trains = [note.since for note in select(notes, Pass) if note.steps and note.since > since]
    until = min(trains, default=float("inf"))
    calls = [call for call in select(notes, Communication) if since <= call.time < until]
    return [call for call in calls if _REDUCES.match(call.name)]


def _may_come_together_later(passes: tuple[Pass, ...], ranks: list[Notes]) -> bool:
    """Whether the ranks' counts may have been combined at any time after a test."""
    since = min(note.since for note in passes)
    afterwards = [[note for note in notes if note.time >= since] for notes in ranks]
    calls = [call for notes in afterwards for call in select(notes, Communication)]
    # Each wrote a file, from which results may be gathered.
    wrote_files = all(select(notes, FileWritten) for notes in afterwards)
    return wrote_files or any(
        pattern.match(call.name) for call in calls for pattern in (_REDUCES, _MAY_REDUCE)
    )
