"""The audit's checks on notes made by hand: certain faults are FAIL, possible intentions unknown."""

from array import array

import pytest
import torch
import torch.nn.functional as F
from audited import table

from ddp_tools.audit.command import RANKS, report
from ddp_tools.audit.loss_terms import divisor_of
from ddp_tools.audit.notes import (
    FAIL,
    NOT_APPLICABLE,
    OK,
    SKIPPED,
    UNKNOWN,
    Buffers,
    Collective,
    Copy,
    End,
    Join,
    Loss,
    Pass,
    PointToPoint,
    RandomUse,
    Row,
    Save,
    Step,
    Stopped,
    TimeUp,
    Weights,
    Wrap,
    differ,
)
from ddp_tools.audit.one_rank import compare_with_one_rank
from ddp_tools.audit.restart import compare_restarted

NAN = float("nan")
STEPPED = Step(sums=[[1.0, 1.0]])
DRAWN = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
OTHERS = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5]
EVEN, ODD = [*range(0, 32, 2)], [*range(1, 32, 2)]


def rows_of(*ranks):
    """The rows of notes made by hand, of ranks that came to their end."""
    return table([[*notes, End(status=0, time=9)] for notes in ranks])


def shares(of_ranks, **fields):
    """The passes of ranks over these samples."""
    common = {"dataset_size": 32, "own_size": 32, "batch_size": 4, "batches": 4, "complete": True, "begun": "it.py:1"}
    return [Pass(**common | fields, samples=samples) for samples in of_ranks]


# ---- losses, samples, test sets

SCORES, CLASSES = torch.zeros(6, 5, requires_grad=True), torch.tensor([0, 1, 2, -100, 3, -100])
TERMS = F.cross_entropy(SCORES, CLASSES, reduction="none")


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        (F.cross_entropy(SCORES, CLASSES), 4),  # two do not count
        (TERMS[CLASSES >= 0].mean(), 4),
        (TERMS.sum() / (CLASSES >= 0).sum(), 4),
        (TERMS.mean() * torch.tensor(3.0) / 2, 4),
        (TERMS.sum() * 2 / torch.tensor(109), 54.5),  # right: times the ranks, by the terms of all
        (F.mse_loss(SCORES, torch.ones(6, 5)), 30),
        (F.mse_loss(SCORES, torch.ones(6, 5), reduction="sum"), 1),
        (F.cross_entropy(SCORES, CLASSES, weight=torch.arange(5.0)), None),
        (TERMS.sum() / 4 + SCORES.mean(), None),
        (TERMS.sum() / SCORES.exp().sum(), None),
        (2 / TERMS.sum(), None),
        (SCORES[0, 0], None),
    ],
)
def test_the_number_by_which_a_loss_divides_is_read_from_its_graph(loss, divisor):
    assert divisor_of(loss) == divisor


def divided(*divisors):
    """Ranks whose losses are divided by these numbers: of each backward pass, that of each rank."""
    begin = Wrap(), Step(sums=[[1.0, 1.0]], wrapped_parameters=1)
    losses = [[Loss(divisor=each, at="it.py:5") for each in of_rank] for of_rank in zip(*divisors, strict=True)]
    return [[*begin, *of_rank] for of_rank in losses]


def looks(batches, dataset):
    """Ranks that look at some batches of a dataset, and then train on their shares of dataset 1."""
    trained = shares([EVEN, ODD], dataset=1, steps=4)
    look = Pass(samples=[0], batches=batches, dataset=dataset, complete=False)
    return [[look, share] for share in trained]


def draws(*of_ranks):
    """Ranks that draw these samples with replacement."""
    return [[one] for one in shares(of_ranks, steps=4, with_replacement=True)]


def orders(shuffles, *of_epochs):
    """Ranks of which one takes samples in these orders, as a sampler of their own gives them, the other the rest."""
    deals = [shares([one, [n ^ 1 for n in one]], steps=4, sampler="Mine", shuffles=shuffles) for one in of_epochs]
    return zip(*deals, strict=True)


def deals(taken, sampler="DistributedSampler"):
    """Ranks that take so many of the 16 samples of each."""
    of_ranks = [samples[:taken] for samples in (EVEN, ODD)]
    return [[one] for one in shares(of_ranks, steps=1, sampler=sampler, batch_size=3)]


def two_tests(tested, dataset, *reduced_at):
    """Ranks that train and test twice, and reduce something at these times: they test at 4 and at 8."""
    trained = [EVEN[:8], ODD[:8]]
    epochs = [shares(trained, dataset=1, steps=4, since=since, time=since + 1) for since in (1, 5)]
    tested = [shares(tested, dataset=dataset, since=since, time=since + 1) for since in (3, 7)]
    calls = [Collective(name="all_reduce", counts=True, time=at, at="it.py:9") for at in reduced_at]
    return [[*passes, *calls] for passes in zip(epochs[0], tested[0], epochs[1], tested[1], strict=True)]


def shares_of_a_test(call, longer=0):
    """Ranks that each test a share of 8, the first of some more, and then make a call."""
    trained = shares([EVEN[:8], ODD[:8]], dataset=1, steps=4, since=1, time=2)
    tested = shares([EVEN[: 8 + longer], ODD[:8]], dataset=2, since=3, time=4)
    return [[*passes, call] for passes in zip(trained, tested, strict=True)]


def call(name, kind=Collective, **fields):
    return kind(name=name, time=5, at="it.py:9", **fields)


def joins(rank, world_size):
    return [[Join(rank=0, world_size=2, at="it.py:1")], [Join(rank=rank, world_size=world_size, at="it.py:1")]]


def gathers(*lines, name="all_gather"):
    return [Collective(name=name, size=[1], at="it.py:5", callers=[f"it.py:{line}"]) for line in lines]


ROWS = [  # a row, its verdict, what it must say, and the notes
    # a loss that ranks divide by other numbers; a last batch that is smaller is meant so
    ("gradients", OK, "equal on all ranks", divided(*[(4, 4)] * 3)),
    ("gradients", OK, "equal on all ranks", divided((54.5, 54.5000001))),
    ("gradients", FAIL, "mean of unequal means", divided((4, 5), (4, 5), (4, 4))),
    ("gradients", UNKNOWN, "mean of unequal means", divided((4, 4), (4, 4), (4, 3))),
    # a look at one batch of the training set is no test
    ("evaluation", NOT_APPLICABLE, "", looks(1, dataset=1)),
    ("evaluation", UNKNOWN, "", looks(2, dataset=1)),
    ("evaluation", UNKNOWN, "", looks(1, dataset=2)),
    # ranks that draw the same samples with one seed
    ("sharding", FAIL, "", draws(DRAWN, DRAWN)),
    ("sharding", FAIL, "", draws(DRAWN, DRAWN[::-1])),
    ("sharding", OK, "", draws(DRAWN, OTHERS)),
    ("sharding", UNKNOWN, "", draws(DRAWN[:4], DRAWN[:4])),
    # an order that comes twice is red for any sampler that promises another
    ("shuffle", FAIL, "", orders(True, EVEN, ODD[::-1], EVEN)),
    ("shuffle", OK, "", orders(True, EVEN, ODD[::-1], EVEN[::-1])),
    ("shuffle", UNKNOWN, "", orders(False, EVEN, ODD[::-1], EVEN)),
    ("shuffle", OK, "", orders(False, EVEN, ODD[::-1], EVEN[::-1])),
    # samples that no rank takes
    ("coverage", OK, "", deals(16)),
    ("coverage", OK, "left out", deals(14)),  # drop_last of the loader
    ("coverage", FAIL, "", deals(8)),  # as if there were four ranks
    ("coverage", NOT_APPLICABLE, "", deals(8, "SubsetRandomSampler")),
    # a test set is known by what is never trained on
    ("metrics", FAIL, "", two_tests((EVEN[8:], ODD[8:]), 1)),  # the other part of a random_split
    ("metrics", FAIL, "", two_tests((EVEN, ODD), 2)),  # as large as the training set
    ("metrics", OK, "", two_tests((EVEN, ODD), 2, 4, 8)),
    ("metrics", UNKNOWN, "", two_tests((EVEN, ODD), 2, 6)),  # the loss of the next epoch
    ("metrics", FAIL, "", two_tests((EVEN, ODD), 2, 4, 6)),  # that of the first epoch alone
    ("metrics", OK, "", two_tests((range(32), range(32)), 2)),
    ("metrics", NOT_APPLICABLE, "", two_tests((EVEN[:8], ODD[:8]), 1)),  # the training accuracy
    # shares of a test set may be brought together by other calls, and unequal ones gathered for a mean of means
    ("metrics", FAIL, "", shares_of_a_test(call("barrier"))),
    ("metrics", OK, "", shares_of_a_test(call("all_reduce", counts=True))),
    ("metrics", UNKNOWN, "", shares_of_a_test(call("broadcast"))),
    ("metrics", UNKNOWN, "", shares_of_a_test(call("isend", PointToPoint))),
    ("metrics", UNKNOWN, "rank 0 9 and rank 1 8 samples", shares_of_a_test(call("all_gather"), longer=1)),
    ("metrics", OK, "", shares_of_a_test(call("all_reduce", adds=True, counts=True), longer=1)),
    # what has no number of samples may be a mean of each rank's share, also where these are of one size
    *[("metrics", UNKNOWN, "mIoU", shares_of_a_test(call(n, numbers=[0.5]))) for n in ("all_reduce", "all_gather")],
    ("metrics", OK, "", shares_of_a_test(call("gather_object", numbers=[0.5, 8.0], lengths=[-1, -1]))),
    ("metrics", UNKNOWN, "", shares_of_a_test(call("gather_object", numbers=[0.5, 9.0], lengths=[21]))),  # classes
    ("metrics", OK, "", shares_of_a_test(call("all_gather", lengths=[8]))),  # of each sample
    ("metrics", OK, "", shares_of_a_test(call("all_reduce", lengths=[16]))),  # a place for each sample
    ("metrics", OK, "", shares_of_a_test(call("all_gather", lengths=[9]), longer=1)),  # padded
    # what init_process_group is given is held against the launch
    ("launch", OK, "", joins(rank=1, world_size=2)),
    ("launch", FAIL, "", joins(rank=0, world_size=2)),
    ("launch", FAIL, "", joins(rank=1, world_size=1)),
    # calls of other lines that meet are told with their callers
    ("collectives", FAIL, "call 1 pairs", [gathers(40, 41, 42), gathers(42)]),
    ("collectives", FAIL, "call 2: rank 0", [gathers(40, 41, 42), gathers(42)]),
    ("collectives", FAIL, "it.py:5 (from it.py:40)", [gathers(40, 41, 42), gathers(42)]),
    ("collectives", UNKNOWN, "", [gathers(40), gathers(42)]),  # a wrong number, or the same by two ways
    ("collectives", OK, "", [gathers(40, name="broadcast"), gathers(42, name="broadcast")]),
]


@pytest.mark.parametrize(("row", "verdict", "seen", "notes"), ROWS, ids=[f"{row[0]}, {row[1]}" for row in ROWS])
def test_a_row_is_red_where_it_is_certain_and_no_other_is(row, verdict, seen, notes):
    rows = rows_of(*notes)
    assert rows[row].verdict == verdict and seen in rows[row].seen, rows[row]
    others = [one.name for one in rows.values() if one.verdict == FAIL and one.name != row]
    assert not others, rows


@pytest.mark.parametrize(("complete", "told"), [(True, "equal shards"), (False, "leave the loop early")])
def test_batches_are_counted_in_the_pass_in_which_ranks_part(complete, told):
    notes = []
    for rank, batches in enumerate((2, 3)):
        passes = [shares([EVEN], steps=1)[0], Pass(steps=1, samples=[], batches=batches, complete=complete)]
        notes.append([*passes, Pass(steps=1, samples=[], batches=9 + rank), *gathers(1)[rank:]])
    row = rows_of(*notes)["collectives"]
    assert "rank 0 had 2, rank 1 had 3 batches" in row.cure and told in row.cure, row


# ---- weights


def noted(kind, folder, when, numbers, rank=0, bits=32, **fields):
    """A note of two tensors with these numbers, and the file that has them."""
    path = folder / f"{rank}-{when}-{fields.get('model', 0)}.f{bits}"
    path.write_bytes(array("d" if bits == 64 else "f", numbers).tobytes())
    half = len(numbers) // 2
    parts = numbers[:half], numbers[half:]
    sums = [[sum(part), sum(map(abs, part))] for part in parts]
    common = {"names": ["w", "v"], "bits": [str(part) for part in parts], "sizes": [half, len(numbers) - half]}
    return kind(when=when, sums=sums, file=str(path), **common | fields)


@pytest.mark.parametrize(
    ("bits", "last", "gradient", "verdict", "seen"),
    [
        (32, [0.0, 0.0, 1.0, 1.0], 1.0, OK, "differ by 0 of"),
        (32, [0.0, 0.0, 1.0, 1.0002], 1.0, OK, "of the distance trained"),
        (
            32,
            [0.0, 0.0, 1.02, 0.98],
            1.0,
            UNKNOWN,
            "differ by 0.02 of the distance trained: is it accumulated rounding",
        ),  # the sums are equal
        (32, [0.0, 0.0, 1.02, 0.98], 1.1, FAIL, "gradients of the first step differ"),
        (32, [0.0, 0.0, 2.0, 0.0], 1.0, FAIL, "differ by 1 of the distance trained"),
        (64, [0.0, 0.0, 1.0, 1.000001], 1.0, OK, "of the distance trained"),
        (64, [0.0, 0.0, 1.0, 1.0002], 1.0, FAIL, "of the distance trained"),
        (32, None, 1.0, UNKNOWN, "did not change"),
    ],
)
def test_one_rank_compares_weights_whose_differences_cancel(bits, last, gradient, verdict, seen, tmp_path):
    still, of_one = [0.0] * 4, [0.0, 0.0, 1.0, 1.0] if last else [0.0] * 4
    runs = []
    for number, samples in enumerate(([0, 1, 2, 3], [0, 2], [1, 3])):
        (folder := tmp_path / str(number)).mkdir()
        ends = noted(Weights, folder, "end", (last or still) if number else of_one, bits=bits)
        step = Step(sums=[[gradient if number else 1.0, 1.0]])
        trained = Pass(steps=1, samples=samples, batch_size=len(samples))
        runs.append([noted(Weights, folder, "begin", still, bits=bits), step, trained, ends, End(status=0)])
    row = compare_with_one_rank(runs[0], runs[1:])
    assert row.verdict == verdict and seen in row.seen, row


@pytest.mark.parametrize(
    ("rates", "notes", "verdict"),
    [
        ([0.1, 0.1, 0.01], [RandomUse(state="a")], UNKNOWN),  # ReduceLROnPlateau, perhaps: dropout makes another loss
        ([0.1, 0.1, 0.01], [], FAIL),
        ([0.1, 0.09, 0.08], [RandomUse(state="a")], FAIL),  # it counts
    ],
)
def test_a_rate_that_drops_at_once_may_follow_a_loss_that_dropout_makes_another(rates, notes, verdict):
    alone = [*notes, *(Step(sums=[(1.0, 1.0)], rates=[rate]) for rate in rates), End(status=0, steps=3)]
    other = [*notes, *(Step(sums=[(1.0, 1.0)], rates=[rate]) for rate in (0.1, rates[1], 0.05)), End(status=0, steps=3)]
    row = compare_with_one_rank(alone, [other] * RANKS)
    assert (row.verdict, "at step 3" in row.seen) == (verdict, True), row


def test_a_run_on_one_rank_that_the_limit_ended_says_so():
    row = compare_with_one_rank([TimeUp(function="step", limit=240)], [[End(status=0)]] * RANKS)
    assert row.verdict == UNKNOWN and "--limit 240 ended the run" in row.seen, row


@pytest.mark.parametrize(
    ("off", "verdict"),
    [(0.0, OK), (1e-7, OK), (1e-2, FAIL)],  # rounding on a rank; what its sums do not show
)
def test_replicas_whose_sums_are_equal_are_compared(off, verdict, tmp_path):
    ranks = []
    for rank in range(RANKS):
        begin = noted(Weights, tmp_path, "begin", [0.0] * 4, rank)
        end = noted(Weights, tmp_path, "end", [1.0 + off * rank, 1.0 - off * rank, 1.0, 1.0], rank)
        ranks.append([Wrap(at="it.py:1"), begin, end])
    row = rows_of(*ranks)["replicas"]
    assert row.verdict == verdict and ("a different w from" in row.seen) == (verdict == FAIL), row


@pytest.mark.parametrize(
    ("totals", "told"),
    [((1.0, 1.0), False), ((1.0, 2.0), True), ((1.0, NAN), True), ((NAN, 1.0), True), ((NAN, NAN), False)],
)
def test_a_number_that_is_none_differs_from_one_that_is(totals, told):
    assert differ(*([(total, abs(total))] for total in totals)) == told


TESTED = {"begun": "it.py:1", "dataset_size": 10, "complete": True, "batches": 2}
COUNTS = [[0.0, 2.0, 4.0, 6.0, 8.0, 9.0], [1.0, 3.0, 5.0, 7.0]]


@pytest.mark.parametrize(
    ("numbers", "adds", "verdict", "seen"),
    [
        ([[5 / 6], [3 / 4]], True, FAIL, "rank 0 6 and rank 1 4 samples"),  # 5 of 6, 3 of 4
        ([[500 / 6], [75.0]], True, UNKNOWN, "is it a sum?"),  # 75.0 might be a sum
        ([[50.0], [75.0]], True, UNKNOWN, "is it a sum, or a mean"),  # percents
        ([[0.3712], [0.5301]], True, UNKNOWN, "is it a sum?"),  # a loss
        ([[5 / 6], [3 / 4]], False, UNKNOWN, "is it a sum, or a mean"),  # gathered, or the best of all
        ([[2.2272, 6.0], [2.1204, 4.0]], True, OK, ""),  # the counts are sent, too
    ],
)
def test_a_mean_of_the_means_of_unequal_counts_is_told(numbers, adds, verdict, seen):
    ranks = []
    for samples, values in zip(COUNTS, numbers, strict=True):
        call = Collective(name="all_reduce", at="it.py:2", time=2, numbers=values, adds=adds)
        ranks.append([Pass(samples=samples, since=0, time=1, **TESTED), call])
    row = rows_of(*ranks)["metrics"]
    assert row.verdict == verdict and seen in row.seen, row


def test_a_copy_is_not_judged_where_the_run_failed_and_a_buffer_is_the_first_that_differs(tmp_path):
    ranks = []
    for rank in range(RANKS):
        weights = [noted(Weights, tmp_path, when, [0.0] * 4, rank) for when in ("begin", "end")]
        (of_copy := tmp_path / f"copy{rank}").mkdir()
        made = {"class_name": "Net", "made": "it.py:3"}
        copies = [noted(Copy, of_copy, when, [1.0, 1.0, 1.0, rank], rank, **made) for when in ("begin", "end")]
        buffers = noted(Buffers, of_copy, "epoch", [1.0, 1.0, 1.0, rank], rank, model=1)
        wraps = [Wrap(at="it.py:1"), Wrap(at="it.py:2", broadcasts=False)]
        ranks.append([*wraps, *weights, *copies, buffers])
    row = rows_of(*ranks)["replicas"]
    assert row.verdict == FAIL and "it.py:2: weights are equal, but rank 1's buffer v differs" in row.seen, row
    row = table([notes[:-1] for notes in ranks])["replicas"]  # without an end
    assert row.verdict == UNKNOWN and "Net" not in row.seen, row


# ---- a run that is started again


def told(first, last, *more):
    """The notes of a rank with one weight: its first gradient, its last weight, and what else was noted between."""
    begin = Wrap(), Weights(when="begin", names=["w"], sums=[[0.0, 0.0]], bits=["0"])
    end = Weights(when="end", names=["w"], sums=[[last, last]], bits=[str(last)])
    return [*begin, Step(sums=[[first, abs(first)]]), *more, end, End(status=0, time=9)]


@pytest.mark.parametrize(
    ("before", "again", "verdict", "seen"),
    [
        ("a s b", told(1 + 1e-7, 1.0001), UNKNOWN, "from the beginning"),  # another order of sums, another rounding
        ("a s b", told(2.0, 1.0001), OK, "close, not equal"),
        ("a s b", told(2.0, 2.0, RandomUse(state="b")), FAIL, "of the distance trained"),
        ("a s b", told(2.0, 2.0, RandomUse(state="c")), UNKNOWN, "with different random numbers: restore"),
        ("a s b", told(2.0, 2.0, RandomUse(state="a"), STEPPED), UNKNOWN, "with different random numbers"),
        ("a s", told(2.0, 2.0, RandomUse(state="b")), UNKNOWN, "cannot be compared"),
    ],
)
def test_a_restart_is_known_by_its_gradients_and_its_random_numbers(before, again, verdict, seen):
    notes = [Save() if word == "s" else RandomUse(state=word) for word in before.split()] + [STEPPED]
    row = compare_restarted(told(1.0, 1.0, *notes), told(1.0, 0.5, *notes[:2], Stopped()), [again] * RANKS)
    assert row.verdict == verdict and seen in row.seen, row


@pytest.mark.parametrize(
    ("again", "verdict", "seen"),
    [
        (
            "bcd",
            UNKNOWN,
            "trained past the end of the uninterrupted run",
        ),  # so many epochs more each time, which may be meant
        ("abc", FAIL, "different samples"),  # the epoch was not restored
        ("dbc", FAIL, "different samples"),
        ("bc", FAIL, "same samples"),
        ("", FAIL, "different samples"),  # none
    ],
)
def test_a_restart_that_trains_longer_is_not_compared(again, verdict, seen):
    passes = {name: Pass(steps=1, samples=[ord(name), 0], batch_size=2) for name in "abcd"}
    whole, stopped = (told(1.0, end, *(passes[name] for name in names)) for end, names in ((1.0, "abc"), (0.5, "a")))
    restarted = told(2.0, 2.0, *(passes[name] for name in again))
    row = compare_restarted(whole, [*stopped, Save(), Stopped()], [restarted] * RANKS)
    assert row.verdict == verdict and seen in row.seen, row


def test_a_run_that_went_on_from_the_checkpoint_of_the_one_before_is_told_so_and_not_that_it_saved_nothing():
    whole = told(1.0, 1.0, Save())
    for stopped, seen in ((told(2.0, 1.0), "find that run's checkpoint"), (told(1.0, 1.0), "no torch.save came")):
        row = compare_restarted(whole, stopped, [whole])
        assert row.verdict == UNKNOWN and seen in row.seen, row


def test_restarted_ranks_are_compared_with_each_other():
    notes = [Save(), RandomUse(state="b"), STEPPED]
    whole, stopped = told(1.0, 1.0, *notes), told(1.0, 0.5, *notes[:2], Stopped())
    row = compare_restarted(whole, stopped, [told(2.0, 1.0), told(2.0, 1.5)])
    assert row.verdict == FAIL and "the ranks differ" in row.seen and "all ranks load" in row.cure, row


# ---- the status


FAILED = Row("exit", FAIL, "rank 0 at it.py:7: no data", "read that rank's messages")


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([Row("exit", OK, ""), Row("rng", NOT_APPLICABLE, ""), Row("resume", SKIPPED, "")], 0),
        ([Row("exit", OK, ""), FAILED._replace(name="files"), Row("shuffle", UNKNOWN, "")], 1),
        ([Row("exit", OK, ""), Row("shuffle", UNKNOWN, "one epoch")], 3),
    ],
)
def test_the_status_says_whether_all_was_seen(rows, status, capsys):
    assert report(rows) == status
    assert ("these are unknown: shuffle" in capsys.readouterr().out) == (status == 3)
