"""What notebooks 14 and 15 count with, in one process, and what they draw of it; they do so on two ranks."""

import re

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from real import LIMIT
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_helpers import ROOT
from ddp_helpers.launch import forked_call
from ddp_helpers.lessons import measure
from ddp_helpers.lessons.side_by_side import KINDS, memory_and_bytes

BATCH, WIDE = 32, 50


def stack():
    return nn.Sequential(nn.Linear(20, WIDE), nn.ReLU(), nn.Linear(WIDE, 10))


def step(model, optimizer, images, labels):
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


@pytest.fixture
def batch():
    return torch.randn(BATCH, 20), torch.randint(10, (BATCH,))


def test_shared_memory_counts_once():
    one = torch.zeros(100)
    assert measure.nbytes([one, one[10:], one.view(10, 10)]) == 400
    assert measure.nbytes([one, one.clone()]) == 800
    assert measure.nbytes([]) == 0


@pytest.mark.parametrize(("make", "slots"), [(torch.optim.SGD, 0), (torch.optim.Adam, 2), (torch.optim.Adadelta, 2)])
def test_what_stays_is_counted_by_kind(make, slots, batch):
    model = stack()
    optimizer = make(model.parameters())
    step(model, optimizer, *batch)
    size, held = 4 * (20 * WIDE + WIDE + WIDE * 10 + 10), measure.held_bytes(model, optimizer)
    assert held["parameters"] == held["gradients"] == size
    assert 0 <= held["optimizer state"] - slots * size <= 16  # and a counter for each of the four
    optimizer.zero_grad()
    assert measure.held_bytes(model, optimizer)["gradients"] == 0


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
    assert (
        told.count(" 16.00 MB ") == 2 and "weights off by 2e-03" in told and re.search(r"\bnan MB\b.*\b0\.50\b", told)
    )


def test_the_figure_tells_memory_and_bytes_and_what_nobody_counted(results):
    table = pd.DataFrame({name: measure.table_row(results, name) for name in ("DDP", "FSDP2")}).T.infer_objects()
    picture = memory_and_bytes(table, "2 ranks")
    picture.figure.draw_without_rendering()
    assert re.findall(r"FSDP2|\d+%", picture.figure.get_suptitle()) == ["FSDP2", "90%"]
    assert "2 ranks" in picture.alt and "FSDP2 holds 45.0 MB, sends nan MB" in picture.alt
    assert [text.get_text().strip() for text in picture.figure.axes[1].texts] == ["16.0", "not counted"]


# ---- on two ranks, the model of the notebooks

DEPTH, TEXTS = 3, 6


def fsdp_is_counted():
    """Bytes by kind of a step of DDP and of FSDP2, blocks first; every rank calls it."""
    from letters import Net, sentences

    def fsdp():
        model = fully_shard_blocks(Net(256, DEPTH))
        return model, torch.optim.AdamW(model.parameters())

    def take_step(model, optimizer, text, following):
        F.cross_entropy(model(text).flatten(0, 1), following.flatten()).backward()
        optimizer.step()

    def ddp():
        model = DistributedDataParallel(Net(256, DEPTH), gradient_as_bucket_view=True)
        return model, torch.optim.AdamW(model.parameters())

    batches = [sentences(TEXTS, seed=dist.get_rank())[:]] * 2
    ways = measure.measure_methods({"DDP": (ddp, take_step), "FSDP2": (fsdp, take_step)}, batches)
    return {way: result["memory"] for way, result in ways.items()}


def fully_shard_blocks(model):
    """FSDP2 with a block gathered at a time; every rank calls it."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def test_what_is_counted_of_ddp_and_fsdp2_is_what_a_count_by_hand_gives(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    counted, _ = forked_call.on_ranks(2, fsdp_is_counted, patience=LIMIT)
    outermost = (64 + 2 * 128) * 256  # weights, without biases
    weights = DEPTH * 12 * 256**2 + outermost
    stays = {"parameters": 4 * weights, "gradients": 4 * weights, "optimizer state": 8 * weights}
    activations = 4 * TEXTS * 64 * (DEPTH * 16 * 256 + 128)  # which no way cuts
    by_hand = {kind: size // 2 for kind, size in stays.items()} | {"activations": activations}
    by_hand["copies"] = 4 * (12 * 256**2 + outermost)  # one block is gathered, and the outermost
    assert counted["FSDP2"] == pytest.approx(by_hand, rel=0.07)
    assert counted["DDP"] == pytest.approx(stays | {"activations": activations, "copies": 0}, rel=0.07)


def gathered(text):
    """Bytes of the copies that a step of one whole FSDP2 unit holds, and of its parameters; every rank calls it."""
    from letters import Net

    model = Net(256, depth=2)
    size = measure.nbytes(model.parameters())
    saved = measure.SavedTensors(fully_shard(model))
    with saved:
        F.cross_entropy(saved.model(text).flatten(0, 1), text.flatten()).backward()
    return saved.most["copies"], size


def test_weights_that_are_gathered_all_at_once_are_copies(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    from letters import sentences

    [text, _] = sentences(1, seed=1)[:]
    copies, size = forked_call.on_ranks(2, lambda: gathered(text), patience=LIMIT)[0]
    assert size <= copies < 1.1 * size
