"""The audit on what ranks hold beside weights: buffers, copies of the model, means of unequal counts; on one rank."""

from array import array

import pytest
from real import LIMIT

from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_tools.audit.command import RANKS, WITNESS
from ddp_tools.audit.judge import judge
from ddp_tools.audit.notes import (
    OK,
    RED,
    UNSEEN,
    Buffers,
    Collective,
    Copy,
    End,
    Pass,
    Step,
    Weights,
    Wrap,
    read_notes,
)
from ddp_tools.audit.one_rank import compare_with_one_rank

SOUND = """
import copy, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(4), persistent=KEPT)
    def forward(self, x):
        if self.training:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)
            self.codes.mul_(0.9).add_(mean)
        return x + self.codes
class Shadow(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = copy.deepcopy(model)
    def update(self, model):
        for old, new in zip(self.inner.parameters(), model.parameters()):
            old.data.lerp_(new.data, 0.1)
def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    loader = DataLoader(data, BATCH // world_size, sampler=DistributedSampler(data))
    test = DataLoader(Subset(data, range(rank, 15, world_size)), 4)
    model = nn.Sequential(nn.Linear(4, 4), NORM, Codebook(), nn.Linear(4, 2))
    ddp_model = DDP(model, broadcast_buffers=BROADCAST)
    ema, shadow = AveragedModel(model), Shadow(model)
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        ddp_model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp_model(x), y)
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
            shadow.update(model)
        ema.eval()
        right = sum((ema(x).argmax(1) == y).sum() for x, y in test)
        counts = torch.tensor([float(right), len(test.dataset)])
        dist.all_reduce(counts)
    dist.destroy_process_group()
main()
"""
ALL, MINE = "            dist.all_reduce(mean)\n", ""
ONE_RANK = {"BATCH": "1", "NORM": "nn.Identity()", "BROADCAST": "True", "KEPT": "True"}
NORM = ("NORM", "nn.BatchNorm1d(4)")
OFF = ("BROADCAST", "False")
MEAN = ("torch.tensor([float(right), len(test.dataset)])", "torch.tensor([float(right) / len(test.dataset)])")
FAULTS = {  # the lines that are replaced; the row, its verdict, and what it says
    "sound": ([], "replicas", OK, ["equal on all ranks"]),
    "sound, BatchNorm": ([NORM], "replicas", OK, ["equal on all ranks"]),
    "sound, not broadcast": ([OFF], "replicas", OK, ["equal on all ranks"]),
    "own codes": ([OFF, (ALL, MINE)], "replicas", RED, ["buffer 2.codes", "broadcast_buffers is False"]),
    "own codes, kept apart": ([OFF, (ALL, MINE), ("KEPT", "False")], "replicas", UNSEEN, ["2.codes", "no state_dict"]),
    "codes of rank 0": ([(ALL, MINE)], "replicas", UNSEEN, ["buffer 2.codes", "rank 0's before each"]),
    "EMA of rank 0": (
        [("            ema.update", "            rank or ema.update")],
        "replicas",
        RED,
        ["AveragedModel made at it.py:", "on rank 1"],
    ),
    "EMA on rank 0 alone": (
        [
            ("AveragedModel(model), Shadow(model)", "None if rank else AveragedModel(model), Shadow(model)"),
            ("            ema.update", "            rank or ema.update"),
            ("        ema.eval()", "        ema = (ema or model).eval()"),
        ],
        "replicas",
        OK,
        ["only rank 0 has the AveragedModel made at it.py:"],
    ),
    "shadow of rank 0": (
        [("            shadow.update", "            rank or shadow.update")],
        "replicas",
        RED,
        ["the Sequential made at it.py:21", "on rank 1"],
    ),
    "another teacher": (
        [("teacher = copy.deepcopy(model)", "teacher = copy.deepcopy(model)\n    teacher[0].bias.data += rank")],
        "replicas",
        UNSEEN,
        ["the Sequential made at it.py:", "0.bias", "meant so?"],
    ),
    "mean of means": ([MEAN], "metrics", RED, ["rank 0 8 and rank 1 7 samples", "own means"]),
    "mean of losses": (
        [("torch.tensor([float(right), len(test.dataset)])", "loss.detach()")],
        "metrics",
        UNSEEN,
        ["rank 0 8 and rank 1 7 samples", "is it a sum?"],
    ),
}


def script(changes, folder, batch=8):
    text = SOUND
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    for name, value in (ONE_RANK | {"BATCH": str(batch)}).items():
        text = text.replace(name, value)
    folder.mkdir()
    (folder / "it.py").write_text(text)
    return folder


def start(folder, ranks=RANKS):
    """Start the witnesses on forked ranks: torch is imported once for all of them."""
    for name in ("notes", "work"):
        (folder / name).mkdir()
    words = (folder / "notes", LIMIT, folder / "it.py")
    return LearnerRun(WITNESS, *words, ranks=ranks, folder=folder / "work", limit=LIMIT + 30)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    home, names = tmp_path_factory.mktemp("weights"), [*FAULTS]
    for first in range(0, len(names), 3):
        some = names[first : first + 3]
        wait_for_runs(*(start(script(FAULTS[name][0], home / name)) for name in some))
    return {name: {row.name: row for row in judge(read_notes(home / name / "notes", RANKS))} for name in names}


@pytest.mark.parametrize("name", FAULTS)
def test_what_differs_beside_the_weights_is_told(name, tables):
    _, check, verdict, told = FAULTS[name]
    row = tables[name][check]
    assert row.verdict == verdict and all(word in row.seen for word in told), row
    reds = [row for row in tables[name].values() if row.verdict == RED]
    assert reds == [row] * (verdict == RED), reds


def noted(kind, folder, when, numbers, rank=0, **fields):
    """A note of two tensors with these numbers, and the file that has them."""
    path = folder / f"{rank}-{when}-{fields.get('model', 0)}.f32"
    path.write_bytes(array("f", numbers).tobytes())
    half = len(numbers) // 2
    parts = numbers[:half], numbers[half:]
    sums = [[sum(part), sum(map(abs, part))] for part in parts]
    common = {"names": ["w", "v"], "bits": [str(part) for part in parts], "sizes": [half, len(numbers) - half]}
    return kind(when=when, sums=sums, file=str(path), **common | fields)


@pytest.mark.parametrize(
    ("last", "gradient", "verdict", "seen"),
    [
        ([0.0, 0.0, 1.0, 1.0], 1.0, OK, "are 0 of"),
        ([0.0, 0.0, 1.0, 1.0002], 1.0, OK, "of their way apart"),
        ([0.0, 0.0, 1.02, 0.98], 1.0, UNSEEN, "are 0.02 of their way apart: is it rounding"),  # the sums are equal
        ([0.0, 0.0, 1.02, 0.98], 1.1, RED, "gradients of the first step differ"),
        ([0.0, 0.0, 2.0, 0.0], 1.0, RED, "are 1 of their way apart"),
    ],
)
def test_one_rank_compares_weights_whose_differences_cancel(last, gradient, verdict, seen, tmp_path):
    both, shares = [], [[0, 1, 2, 3], [0, 2], [1, 3]]
    for number, share in enumerate(shares):
        (folder := tmp_path / str(number)).mkdir()
        begin = noted(Weights, folder, "begin", [0.0] * 4)
        end = noted(Weights, folder, "end", last if number else [0.0, 0.0, 1.0, 1.0])
        step = Step(sums=[[gradient if number else 1.0, 1.0]])
        trained = Pass(steps=1, samples=share, batch_size=len(share))
        both.append([begin, step, trained, end, End(status=0)])
    row = compare_with_one_rank(both[0], both[1:])
    assert row.verdict == verdict and seen in row.seen, row


@pytest.mark.parametrize(
    ("off", "verdict"),
    [(0.0, OK), (1e-7, OK), (1e-2, RED)],  # rounding on a rank; what its sums do not show
)
def test_replicas_whose_sums_are_equal_are_compared(off, verdict, tmp_path):
    ranks = []
    for rank in range(RANKS):
        begin = noted(Weights, tmp_path, "begin", [0.0] * 4, rank)
        end = noted(Weights, tmp_path, "end", [1.0 + off * rank, 1.0 - off * rank, 1.0, 1.0], rank)
        ranks.append([Wrap(at="it.py:1"), begin, end, End(status=0)])
    [row] = [row for row in judge(ranks) if row.name == "replicas"]
    assert row.verdict == verdict and ("another w than" in row.seen) == (verdict == RED), row


TESTED = {"begun": "it.py:1", "dataset_size": 10, "complete": True, "batches": 2}
COUNTS = [[0.0, 2.0, 4.0, 6.0, 8.0, 9.0], [1.0, 3.0, 5.0, 7.0]]


@pytest.mark.parametrize(
    ("numbers", "adds", "verdict", "seen"),
    [
        ([[5 / 6], [3 / 4]], True, RED, "rank 0 6 and rank 1 4 samples"),  # 5 of 6, 3 of 4
        ([[500 / 6], [75.0]], True, UNSEEN, "is it a sum?"),  # 75.0 might be a sum
        ([[0.3712], [0.5301]], True, UNSEEN, "is it a sum?"),  # a loss
        ([[5 / 6], [3 / 4]], False, OK, ""),  # gathered, or the best of all
        ([[5.0], [3.0]], True, OK, ""),
        ([[2.2272, 6.0], [2.1204, 4.0]], True, OK, ""),  # the counts are sent, too
    ],
)
def test_a_mean_of_the_means_of_unequal_counts_is_told(numbers, adds, verdict, seen):
    ranks = []
    for samples, values in zip(COUNTS, numbers, strict=True):
        call = Collective(name="all_reduce", at="it.py:2", time=2, numbers=values, adds=adds)
        ranks.append([Pass(samples=samples, since=0, time=1, **TESTED), call, End(status=0, time=3)])
    [row] = [row for row in judge(ranks) if row.name == "metrics"]
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
        ranks.append([*wraps, *weights, *copies, buffers, End(status=0)])
    [row] = [row for row in judge(ranks) if row.name == "replicas"]
    assert row.verdict == RED and "it.py:2: weights are equal, but rank 1 has another buffer v" in row.seen, row
    failed = [[note for note in notes if not isinstance(note, Buffers | End)] for notes in ranks]
    [row] = [row for row in judge(failed) if row.name == "replicas"]
    assert row.verdict == UNSEEN and "Net" not in row.seen, row
