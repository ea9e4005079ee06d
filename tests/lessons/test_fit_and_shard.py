"""The memory and bytes that notebooks 14 and 15 count, in one process and on two ranks, and what they draw of it."""

import re
import sys

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from real import LIMIT
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_helpers import ROOT
from ddp_helpers.launch import forked_call
from ddp_helpers.lessons import measure
from ddp_helpers.lessons.side_by_side import KINDS, memory_and_bytes

BATCH, WIDE = 32, 50


def stack():
    return nn.Sequential(nn.Linear(20, WIDE), nn.ReLU(), nn.Linear(WIDE, 10))


@pytest.fixture
def batch():
    return torch.randn(BATCH, 20), torch.randint(10, (BATCH,))


def test_activations_are_those_of_one_batch_at_a_time(batch):
    model, by_hand = stack(), 4 * BATCH * (20 + WIDE + 10) + 8 * BATCH  # and the labels
    saved = measure.SavedTensors(model)
    with saved:
        for _ in range(3):
            F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert 0 <= saved.most["activations"] - by_hand <= 16
    twice = measure.SavedTensors(model)
    with twice:
        loss = sum(F.cross_entropy(model(batch[0] + more), batch[1]) for more in (0, 1))
        loss.backward()
    assert twice.most["activations"] > 1.8 * by_hand


def test_weights_saved_in_another_precision_are_copies(batch):
    model = stack()
    saved = measure.SavedTensors(model)
    with saved, torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert saved.most["copies"] == 2 * WIDE * 10  # the first layer's are not needed: images have no gradient
    plain = measure.SavedTensors(model)
    with plain:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert plain.most["copies"] == 0 and plain.most["activations"] > saved.most["activations"]


@pytest.fixture
def results():
    """What `measure_methods` returns of two ways; notebooks 14 and 15 run it on ranks, and compare with formulas."""
    memory = dict.fromkeys(KINDS, 10e6)
    ddp = {"memory": memory, "ms": [100.0] * 5, "sent": 16e6, "weights off": 0, "gradient off": 0, "allocated": None}
    changed = {"memory": memory | {"parameters": 5e6}, "ms": [200.0, 190, 200, 210, 200], "sent": measure.sent_bytes()}
    return {"DDP": ddp, "FSDP2": ddp | changed, "other rate": ddp | {"weights off": 2e-3}}


def test_a_row_has_megabytes_and_speeds_in_ddps(results, capsys):
    row = measure.table_row(results, "FSDP2")
    assert (row["parameters"], row["held"]) == (5, 45)
    assert row["speed"] == 0.5
    assert measure.table_row(results, "DDP")["sent"] == 16
    measure.print_rows(results)
    told = capsys.readouterr().out
    assert told.count(" sends 16.00 MB ") == 2 and "weights off by 2e-03" in told
    assert re.search(r"MB, 0\.50 of DDP's speed", told) and "nan" not in told, "bytes that nobody counted"


def test_the_figure_tells_memory_and_bytes_and_what_nobody_counted(results):
    table = pd.DataFrame({name: measure.table_row(results, name) for name in ("DDP", "FSDP2")}).T.infer_objects()
    picture = memory_and_bytes(table, "2 ranks")
    picture.figure.draw_without_rendering()
    assert re.findall(r"FSDP2|\d+%", picture.figure.get_suptitle()) == ["FSDP2", "90%"]
    assert "2 ranks" in picture.alt and "FSDP2 holds 45.0 MB, sends nan MB" in picture.alt
    assert [text.get_text().strip() for text in picture.figure.axes[1].texts] == ["16.0", "not counted"]


# ---- on two ranks, the model of the notebooks

DEPTH, TEXTS = 3, 6


def counted():
    """Bytes by kind of a step of DDP, of FSDP2 blocks first, and of FSDP2 as one unit; every rank calls it."""
    from letters import Net, sentences

    def take_step(model, optimizer, text, following):
        F.cross_entropy(model(text).flatten(0, 1), following.flatten()).backward()
        optimizer.step()

    def ddp():
        return DistributedDataParallel(Net(256, DEPTH), gradient_as_bucket_view=True)

    def fsdp():
        model = Net(256, DEPTH)
        for block in model.blocks:  # so a block is gathered at a time
            fully_shard(block)
        return fully_shard(model)

    def all_at_once():
        return fully_shard(Net(256, DEPTH))

    batches = [sentences(TEXTS, seed=dist.get_rank())[:]] * 2
    memory = {}
    for make in (ddp, fsdp, all_at_once):

        def make_both(make=make):
            model = make()
            return model, torch.optim.AdamW(model.parameters())

        memory[make.__name__] = measure.measure_methods({"one": (make_both, take_step)}, batches)["one"]["memory"]
    return memory


def test_what_is_counted_of_ddp_and_fsdp2_is_what_a_count_by_hand_gives(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    memory, _ = forked_call.on_ranks(2, counted, patience=LIMIT)
    outermost = (64 + 2 * 128) * 256  # weights, without biases
    weights = DEPTH * 12 * 256**2 + outermost
    activations = 4 * TEXTS * 64 * (DEPTH * 16 * 256 + 128)  # which no way cuts
    stays = {"parameters": 4 * weights, "gradients": 4 * weights, "optimizer state": 8 * weights}
    half = {kind: size // 2 for kind, size in stays.items()}
    by_hand = {
        "ddp": stays | {"activations": activations, "copies": 0},
        "fsdp": half | {"activations": activations, "copies": 4 * (12 * 256**2 + outermost)},
        "all_at_once": half | {"activations": activations, "copies": 4 * weights},
    }
    for way, kinds in by_hand.items():
        assert memory[way] == pytest.approx(kinds, rel=0.07), way


def sent_in_a_step(sends):
    """The bytes that a step of this rank sends, which all-reduces a number or talks to nobody."""

    def make():
        model = nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def take_step(model, optimizer, inputs, targets):
        F.mse_loss(model(inputs), targets).backward()
        if sends:
            dist.all_reduce(torch.ones(1))
        optimizer.step()

    batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 3
    return measure.measure_methods({"one": (make, take_step)}, batches)["one"]["sent"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a socket")
def test_what_a_step_sends_is_its_own_bytes_alone():
    assert forked_call.on_ranks(2, lambda: sent_in_a_step(False), patience=LIMIT) == [0, 0]
    assert min(forked_call.on_ranks(2, lambda: sent_in_a_step(True), patience=LIMIT)) > 0, "the control"


# ---- float16 and its scaler, which 15 names in a fold


def left_out():
    """Whether a step changes the weights, and halves the scale, without and with one infinite gradient on rank 1."""
    torch.manual_seed(1)
    model = fully_shard(stack(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    seen = []
    for spoilt in (False, True):
        before, scale = measure.flat_vector(model.parameters()), scaler.get_scale()
        loss = F.cross_entropy(model(torch.randn(BATCH, 20)).float(), torch.randint(10, (BATCH,)))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if spoilt and dist.get_rank() == 1:
            model[0].weight.grad.to_local()[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        seen.append((torch.equal(measure.flat_vector(model.parameters()), before), scaler.get_scale() < scale))
    return seen


def test_one_infinite_gradient_on_one_rank_leaves_the_step_out_on_both():
    assert forked_call.on_ranks(2, left_out, patience=LIMIT) == [[[False, False], [True, True]]] * 2
