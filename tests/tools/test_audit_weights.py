"""The audit on what ranks hold beside weights: buffers, copies of the model, means of unequal counts."""

import pytest
from audited import Script, audit_all, table
from changed_text import replaced

from ddp_tools.audit.notes import FAIL, OK, UNKNOWN

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
    loader = DataLoader(data, 8 // world_size, sampler=DistributedSampler(data))
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
DEFAULTS = {"NORM": "nn.Identity()", "BROADCAST": "True", "KEPT": "True"}
NORM = ("NORM", "nn.BatchNorm1d(4)")
OFF = ("BROADCAST", "False")
MEAN = ("torch.tensor([float(right), len(test.dataset)])", "torch.tensor([float(right) / len(test.dataset)])")
FAULTS = {  # the lines that are replaced; the row, its verdict, and what it says
    "sound": ([], "replicas", OK, ["equal on all ranks"]),
    "sound, BatchNorm": ([NORM], "replicas", OK, ["equal on all ranks"]),
    "sound, not broadcast": ([OFF], "replicas", OK, ["equal on all ranks"]),
    "own codes": ([OFF, (ALL, MINE)], "replicas", FAIL, ["buffer 2.codes", "broadcast_buffers is False"]),
    "own codes, kept apart": ([OFF, (ALL, MINE), ("KEPT", "False")], "replicas", UNKNOWN, ["2.codes", "no state_dict"]),
    "codes of rank 0": ([(ALL, MINE)], "replicas", UNKNOWN, ["buffer 2.codes", "rank 0's before each"]),
    "EMA of rank 0": (
        [("            ema.update", "            rank or ema.update")],
        "replicas",
        FAIL,
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
        FAIL,
        ["the Sequential made at it.py:21", "on rank 1"],
    ),
    "another teacher": (
        [("teacher = copy.deepcopy(model)", "teacher = copy.deepcopy(model)\n    teacher[0].bias.data += rank")],
        "replicas",
        UNKNOWN,
        ["the Sequential made at it.py:", "0.bias", "intended?"],
    ),
    "mean of means": ([MEAN], "metrics", FAIL, ["rank 0 8 and rank 1 7 samples", "own means"]),
    "mean of losses": (
        [("torch.tensor([float(right), len(test.dataset)])", "loss.detach()")],
        "metrics",
        UNKNOWN,
        ["rank 0 8 and rank 1 7 samples", "is it a sum?"],
    ),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    scripts = {}
    for name, (changes, *_) in FAULTS.items():
        text = replaced(SOUND, changes)
        for mark, usual in DEFAULTS.items():
            text = text.replace(mark, usual)
        scripts[name] = Script(text)
    return {name: table(notes) for name, notes in audit_all(scripts, tmp_path_factory.mktemp("weights")).items()}


@pytest.mark.parametrize("name", FAULTS)
def test_what_differs_beside_the_weights_is_told(name, tables):
    _, check, verdict, told = FAULTS[name]
    row = tables[name][check]
    assert row.verdict == verdict and all(word in row.seen for word in told), row
    reds = [row for row in tables[name].values() if row.verdict == FAIL]
    assert reds == [row] * (verdict == FAIL), reds
