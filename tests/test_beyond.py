"""What notebooks 14 and 15 count with, in one process, and what they draw of it; they do so on two ranks."""

import re

import pandas as pd
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from real import LIMIT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ddp_helpers import ROOT
from ddp_helpers.lessons import measure, on_ranks
from ddp_helpers.lessons.shard_the_model.collectives import SENT, sent_counts
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
    assert (row["parameters"], row["held"], row["as DDP"]) == (5, 45, "to the bit")
    assert row["speed"] == 0.5
    assert measure.table_row(results, "DDP")["sent"] == 16
    assert measure.table_row(results, "other rate")["as DDP"] == "weights off by 2e-03"
    measure.print_rows(results)
    told = capsys.readouterr().out
    assert told.count(" 16.00 MB ") == 2 and re.search(r"\bnan MB\b.*\b0\.50\b", told)


def test_the_figure_tells_memory_and_bytes_and_what_nobody_counted(results):
    table = pd.DataFrame({name: measure.table_row(results, name) for name in ("DDP", "FSDP2")}).T.infer_objects()
    picture = memory_and_bytes(table, "2 ranks")
    picture.figure.draw_without_rendering()
    assert re.findall(r"FSDP2|\d+%", picture.figure.get_suptitle()) == ["FSDP2", "90%"]
    assert "2 ranks" in picture.alt and "FSDP2 holds 45.0 MB, sends nan MB" in picture.alt
    assert [text.get_text().strip() for text in picture.figure.axes[1].texts] == ["16.0", "not counted"]


# ---- what is sent when

NAMES = {"allreduce_": "all-reduce", "all_reduce": "all-reduce", "broadcast_": "broadcast"}
NAMES |= {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}


def cut(way, model):
    """The model as a way has it, and its optimizer; every rank calls it."""
    if way == "tensor parallel":
        plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        plan |= {name: RowwiseParallel() for name in ("out", "down")}
        for block in model.blocks:
            parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    elif "FSDP2" in way:
        for part in [*(model.blocks if way == "FSDP2" else []), model]:
            fully_shard(part)
    else:
        model = DistributedDataParallel(model)
    zero = (ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.SGD})
    make, options = zero if way == "ZeRO" else (torch.optim.SGD, {})
    return model, make(model.parameters(), lr=0.1, foreach=False, **options)


def counted(way, model, text):
    """Collectives of forward, of backward and of the optimizer's step, by kind; every rank calls it."""
    model, optimizer = cut(way, model)
    counts = {}
    for _ in range(3):  # DDP sorts its buckets anew in the second step
        for phase in ("forward", "backward", "step"):
            with CommDebugMode() as count:
                if phase == "forward":
                    loss = F.cross_entropy(model(text).flatten(0, 1), text.flatten())
                else:
                    (loss.backward if phase == "backward" else optimizer.step)()
            counts[phase] = {NAMES[str(name).split(".")[-1]]: many for name, many in count.get_comm_counts().items()}
    return counts


def test_what_is_drawn_to_be_sent_is_what_two_ranks_send(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    from letters import Net, sentences

    ways, [text, _] = [*SENT, "FSDP2, uncut blocks"], sentences(1, seed=1)[:]
    counts, other = on_ranks.on_ranks(
        2, lambda: {way: counted(way, Net(256, depth=2), text) for way in ways}, patience=LIMIT
    )
    assert counts == other and counts.pop("FSDP2, uncut blocks") != counts["FSDP2"]
    assert counts == {way: sent_counts(way) for way in SENT}


def gathered(model, text):
    """Bytes of the copies that a step of one whole FSDP2 unit holds, and of its parameters; every rank calls it."""
    size = measure.nbytes(model.parameters())
    saved = measure.SavedTensors(cut("FSDP2, uncut blocks", model)[0])
    with saved:
        F.cross_entropy(saved.model(text).flatten(0, 1), text.flatten()).backward()
    return saved.most["copies"], size


def test_weights_that_are_gathered_all_at_once_are_copies(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    from letters import Net, sentences

    [text, _] = sentences(1, seed=1)[:]
    copies, size = on_ranks.on_ranks(2, lambda: gathered(Net(256, depth=2), text), patience=LIMIT)[0]
    assert size <= copies < 1.1 * size
