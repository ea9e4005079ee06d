"""Checks of the audit on the test sets of a script, and on what ranks find on their shares.

`judge` calls each with the notes of all ranks, in the learner's process. Needs no torch.
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

# These bring counts together; so may the second, where ranks broadcast theirs in turn.
_REDUCES = re.compile("all_|reduce|gather")
_MAY_REDUCE = re.compile("broadcast|i?send|i?recv|batch_isend")


def evaluation(ranks: list[Notes]) -> Finding:
    """In evaluation, each sample is looked at once, or all of them by each rank."""
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
    # Of several passes the largest: a small one may have the rest that does not divide.
    return max(findings, key=lambda pair: pair[0])[1]


def _tested_models_apart(ranks: list[Notes]) -> Finding | None:
    """Judge models that differ in a buffer when the ranks begin to test, as by BatchNorm."""
    for first, *others in at_once(ranks, Buffers, "test"):
        for rank, note in enumerate(others, 1):
            if names := names_apart(note, first):
                seen = (
                    f"{short_line(first.at)}: rank {rank} tests with another {names[0]} than rank 0"
                )
                cure = "broadcast rank 0's buffers before the test, or sum up what they are made of"
                return Finding(UNKNOWN, f"{seen}: each rank tests a model of its own. {cure}")
    return None


def _evaluation_of_some(ranks: list[Notes]) -> Finding:
    """Judge a test that not all ranks have made, or none to its end."""
    tests = [_without_peeks(notes) for notes in ranks]
    testers = [rank for rank, passes in enumerate(tests) if passes]
    whole = [note for passes in tests for note in passes if note.complete and not note.iterable]
    if not testers:
        by_hand = [note for note in select(ranks[0], EvalMode) if note.steps]
        if by_hand:
            seen = (
                f"{short_line(by_hand[0].at)}: a model is put into eval mode, and no pass over a "
            )
            return Finding(UNKNOWN, f"{seen}DataLoader follows: who tests which samples?")
        return Finding(NOT_APPLICABLE, "no pass over a DataLoader without steps")
    if len(testers) > 1 or not whole:
        return Finding(UNKNOWN, "no whole pass without steps over a dataset was seen on all ranks")
    last = whole[-1]
    count, seen = len({*last.samples}), f"{short_line(last.begun)}: rank {testers[0]} alone tests"
    if count not in (last.own_size, last.dataset_size):
        return Finding(UNKNOWN, f"{seen} {count} of {last.own_size} samples: meant so?")
    return Finding(OK, f"{seen} all {count} samples")


def _without_peeks(notes: Notes) -> list[Pass]:
    """Select passes without steps, but not a look at one batch of what the rank trains on."""
    trained = {note.dataset for note in select(notes, Pass) if note.steps}
    tests = [note for note in select(notes, Pass) if not note.steps]
    return [t for t in tests if t.complete or t.batches > 1 or t.dataset not in trained]


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
    return Finding(FAIL, seen, cure)


def _evaluation_pass(passes: tuple[Pass, ...]) -> Finding:
    """Judge one pass over a test set."""
    first, count = passes[0], len(passes)
    at, size = short_line(first.begun), first.dataset_size or 0
    times = Counter(sample for note in passes for sample in note.samples)
    if len({frozenset(note.samples) for note in passes}) == 1:
        if _is_strided(first, count):
            seen = f"{at}: all ranks take samples 0, {count}, … and none the rest"
            return Finding(FAIL, seen, "begin the share at rank")
        if len(times) == first.own_size:  # a part of a dataset may be the whole test set
            size = first.own_size
        if len(times) < size:
            same = f"all ranks test the same {len(times)} of {size} samples: meant so?"
            return Finding(UNKNOWN, f"{at}: {same}")
        all_of_them = f"each rank tests all {size} samples"
        return Finding(OK, f"{at}: {all_of_them} (right, but the ranks share no work)")
    if twice := sum(looks > 1 for looks in times.values()):
        seen = f"{at}: {twice} of {len(times)} samples count more than once"
        share = "Subset(test_set, range(rank, len(test_set), world_size))"
        return Finding(FAIL, seen, f"{share}: no padding")
    if len(times) <= (first.own_size or 0):
        size = first.own_size or 0
    return Finding(OK, f"{at}: {len(times)} of {size} samples, each once")


def _is_strided(note: Pass, ranks: int) -> bool:
    """Whether a share begins with two samples that lie as many apart as there are ranks."""
    if len(note.samples) < 2:
        return False
    first, second = note.samples[:2]
    return isinstance(first, int) and second == first + ranks


def metrics(ranks: list[Notes]) -> Finding:
    """What ranks find on shares of a test set is summed or gathered, before training goes on."""
    if end(ranks).verdict != OK:
        return Finding(UNKNOWN, "see 'exit'")
    tests = [p for p in common_passes(ranks, trained=False) if not _trained_on(p[0], ranks[0])]
    if not tests:
        return Finding(NOT_APPLICABLE, "no test set was read on all ranks by a DataLoader")
    whole = [passes for passes in tests if all(note.complete for note in passes)]
    shares = [p for p in whole if len({frozenset(note.samples) for note in p}) == len(p)]
    if not whole:
        return Finding(UNKNOWN, "no test set was read to its end")
    if not shares:
        return Finding(OK, "all ranks test the same samples, so that each has the whole number")
    calls = [[_reduced_after(*pair) for pair in zip(p, ranks, strict=True)] for p in shares]
    apart = [passes for passes, of_ranks in zip(shares, calls, strict=True) if not of_ranks[0]]
    if apart:
        return _kept_apart(apart[0], ranks)
    for passes, of_ranks in zip(shares, calls, strict=True):
        counts = [len(note.samples) for note in passes]
        if call := _without_counts(counts, of_ranks, ranks):
            unequal = f"; {unequal_counts(counts)}" if len({*counts}) > 1 else ""
            seen = f"{call.name} at {short_line(call.at)}, without the number of samples{unequal}"
            question = "is it a sum, or a mean of each rank's share (mIoU, F1, loss)?"
            return Finding(UNKNOWN, f"{seen}: {question}")
    first = calls[0][0][0]
    seen = f"{first.name} at {short_line(first.at)}"
    return Finding(OK, f"after each test ranks bring numbers together: {seen}")


def _kept_apart(passes: tuple[Pass, ...], ranks: list[Notes]) -> Finding:
    """Judge a test of which nothing is reduced before training goes on."""
    seen = f"{short_line(passes[0].begun)}: each rank tests a share, and nothing is reduced or "
    if _may_come_together_later(passes, ranks):
        question = "gathered before training goes on: is each printed number one of all ranks?"
        return Finding(UNKNOWN, seen + question)
    cure = "dist.all_reduce of the sums and of the number of samples, then divide"
    return Finding(FAIL, f"{seen}gathered afterwards", cure)


def _without_counts(
    counts: list[int], calls: list[list[Communication]], ranks: list[Notes]
) -> Communication | None:
    """Find a call that may bring together means of shares.

    None is one of integers, which are counts, or one in which a rank gives its number of samples,
    too, or something of each sample; and none is, if a call has that number alone. counts: of the
    samples that each rank tested; calls: of each rank.
    """
    for count, calls_of_rank, notes in zip(counts, calls, ranks, strict=True):
        if any([*call.numbers] == [count] for call in calls_of_rank):
            continue
        # A sum over the samples of training may be brought together after the test.
        of_passes = {len(note.samples) for note in select(notes, Pass) if note.complete}
        for call in calls_of_rank:
            # A place for each sample of all ranks; or of one rank, with padding, to gather them.
            places = {sum(counts)} if call.adds else {count, max(counts), sum(counts)}
            if not (call.counts or of_passes & {*call.numbers} or places & {*call.lengths}):
                return call
    return None


def _trained_on(test: Pass, notes: Notes) -> bool:
    """Whether a rank trains on samples that it looks at here: its training accuracy."""
    trained = [note for note in select(notes, Pass) if note.steps and note.dataset == test.dataset]
    return any({*note.samples} & {*test.samples} for note in trained)


def _reduced_after(test: Pass, notes: Notes) -> list[Communication]:
    """What a rank reduces or gathers from the begin of a test on, until it trains again."""
    since = test.since
    trains = [note.since for note in select(notes, Pass) if note.steps and note.since > since]
    until = min(trains, default=float("inf"))
    calls = [call for call in select(notes, Communication) if since <= call.time < until]
    return [call for call in calls if _REDUCES.match(call.name)]


def _may_come_together_later(passes: tuple[Pass, ...], ranks: list[Notes]) -> bool:
    """Whether anything since a test may have brought the ranks' counts together."""
    since = min(note.since for note in passes)
    afterwards = [[note for note in notes if note.time >= since] for notes in ranks]
    calls = [call for notes in afterwards for call in select(notes, Communication)]
    # Each wrote a file, from which somebody may gather.
    wrote_files = all(select(notes, FileWritten) for notes in afterwards)
    return wrote_files or any(
        pattern.match(call.name) for call in calls for pattern in (_REDUCES, _MAY_REDUCE)
    )
