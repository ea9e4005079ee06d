"""What notebook 12 counts with, on one process and on two ranks, and what it draws."""

import json

import pandas as pd
import pytest
import test_diagrams
import torch
import torch.nn.functional as F
from torch import nn

from ddp_helpers.lessons.go_beyond_ddp import measure
from ddp_helpers.lessons.go_beyond_ddp.figures import KINDS, QUESTIONS, choose, memory_and_speed, who_holds
from ddp_helpers.notebook import launch

BATCH, WIDE = 32, 50

# Two ranks train a small stack in four ways; rank 0 prints what was counted.
RANKS = """
import json, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_helpers.lessons.go_beyond_ddp.measure import race

def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

def ddp(lr=0.001):
    wrapped = DDP(model(), gradient_as_bucket_view=True)
    return wrapped, torch.optim.Adam(wrapped.parameters(), lr=lr)

def zero():
    wrapped, _ = ddp()
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.001)

def fsdp():
    whole = model()
    for layer in (whole[0], whole[2], whole):
        fully_shard(layer)
    return whole, torch.optim.Adam(whole.parameters(), lr=0.001)

dist.init_process_group("gloo")
numbers = torch.Generator().manual_seed(2 + dist.get_rank())
batches = [tuple(torch.randn(16, 512, generator=numbers) for _ in "xy") for _ in range(4)]
ways = {"DDP": ddp, "ZeRO": zero, "FSDP2": fsdp, "other rate": lambda: ddp(0.002)}
results = race({name: (make, step) for name, make in ways.items()}, batches)
print(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
"""


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
    size, found = 4 * (20 * WIDE + WIDE + WIDE * 10 + 10), measure.held(model, optimizer)
    assert found["parameters"] == found["gradients"] == size
    assert 0 <= found["optimizer state"] - slots * size <= 16  # and a counter for each of the four
    optimizer.zero_grad()
    assert measure.held(model, optimizer)["gradients"] == 0


def test_activations_are_those_of_one_batch_at_a_time(batch):
    model, by_hand = stack(), 4 * BATCH * (20 + WIDE + 10) + 8 * BATCH  # and the labels
    saved = measure.Saved(model)
    with saved:
        for _ in range(3):
            F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert 0 <= saved.most["activations"] - by_hand <= 16
    twice = measure.Saved(model)
    with twice:
        loss = sum(F.cross_entropy(model(batch[0] + more), batch[1]) for more in (0, 1))
        loss.backward()
    assert twice.most["activations"] > 1.8 * by_hand


def test_weights_saved_in_another_precision_are_copies(batch):
    model = stack()
    saved = measure.Saved(model)
    with saved, torch.autocast("cpu", dtype=torch.bfloat16):
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert saved.most["copies"] == 2 * WIDE * 10  # the first layer's are not needed: images have no gradient
    plain = measure.Saved(model)
    with plain:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert plain.most["copies"] == 0 and plain.most["activations"] > saved.most["activations"]


def test_without_gloo_nobody_counts_what_is_sent():
    assert measure.sent() is None


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    script = tmp_path_factory.mktemp("beyond") / "ranks.py"
    script.write_text(RANKS)
    done = launch.run(script, ranks=2, timeout=150)
    return [json.loads(done.of(rank)[-1]) for rank in (0, 1)]


def test_sharded_ways_equal_ddp_to_the_bit_and_another_rate_does_not(results):
    for rank in results:
        assert rank["DDP"]["weights off"] == rank["ZeRO"]["weights off"] == rank["FSDP2"]["weights off"] == 0
        assert rank["other rate"]["weights off"] > 1e-4
        assert all(way["apart"] == 0 and way["gradient off"] < 1e-6 for way in rank.values())


def test_a_row_has_megabytes_and_speeds_in_ddps(results):
    found = measure.row(results[0], "FSDP2")
    assert found["held"] == pytest.approx(sum(results[0]["FSDP2"]["memory"].values()) / 1e6)
    assert found["low"] <= found["speed"] <= found["high"] and found["as DDP"] == "to the bit"
    assert measure.row(results[0], "DDP")["speed"] == 1
    assert measure.row(results[0], "other rate")["as DDP"].startswith("weights off by ")


def test_what_is_not_counted_is_told_as_nan(results, capsys):
    measure.tell({name: way | {"sent": None} for name, way in results[0].items()})
    assert capsys.readouterr().out.count("sends   nan MB a step") == 4


def test_shards_hold_their_share(results):
    size = 4 * 2 * (512 * 512 + 512)
    for rank in results:
        ddp, fsdp = rank["DDP"]["memory"], rank["FSDP2"]["memory"]
        assert ddp["parameters"] == ddp["gradients"] == size and ddp["copies"] == 0
        assert fsdp["parameters"] == fsdp["gradients"] == size / 2
        assert fsdp["copies"] == size / 2  # one of two layers at a time
        assert fsdp["activations"] == ddp["activations"] > 0
    states = [rank["ZeRO"]["memory"]["optimizer state"] for rank in results]
    assert 0 <= sum(states) - 2 * size <= 64 and max(states) < 0.6 * sum(states)


def test_the_kernel_counts_what_collectives_send(results):
    size = 4 * 2 * (512 * 512 + 512)
    for rank in results:
        if rank["DDP"]["sent"] is None:
            pytest.skip("this kernel does not count the bytes of a connection")
        assert 1 <= rank["DDP"]["sent"] / size < 1.1
        assert 1.9 < rank["FSDP2"]["sent"] / size < 2.2
    broadcasts = sum(rank["ZeRO"]["sent"] - rank["DDP"]["sent"] for rank in results)
    assert 0.9 < broadcasts / size < 1.2


def test_turns_are_timed_after_the_first(results):
    assert all(len(way["ms"]) == 3 and len(way["loss"]) == 4 for way in results[0].values())


# ---- its figures


@pytest.fixture
def table():
    row = dict.fromkeys(KINDS, 10.0) | {"held": 50.0, "sent": 16.0, "speed": 1.0, "low": 0.9, "high": 1.1}
    return pd.DataFrame({"DDP": row, "FSDP2": row | {"parameters": 5.0, "held": 45.0, "speed": 0.5, "low": 0.4}}).T


def test_the_figure_tells_memory_bytes_and_speed(table):
    picture = memory_and_speed(table, "2 ranks")
    picture.figure.draw_without_rendering()
    assert "2 ranks" in picture.alt and "FSDP2: MB of parameters 5.0" in picture.alt
    assert picture.figure.get_suptitle() == "FSDP2 holds the least: 90% of what DDP holds"
    assert "16.0 MB sent in a step; 0.50 of DDP's speed" in picture.alt


def test_bytes_that_nobody_counted_are_not_drawn_as_none(table):
    table["sent"] = float("nan")
    picture = memory_and_speed(table, "2 ranks")
    picture.figure.draw_without_rendering()
    assert picture.alt.count("not counted") == 2
    assert [text.get_text().strip() for text in picture.figure.axes[1].texts] == ["not counted"] * 2


def test_the_chart_names_every_way():
    picture = choose()
    for name in [name for _, name, _, _ in QUESTIONS] + ["tensor or pipeline parallel", "PowerSGD", "Join"]:
        assert name in picture.alt
    drawn_well(picture)


@pytest.mark.parametrize("size", [16e6, 4e9])
def test_the_picture_of_shards_is_of_its_numbers(size):
    picture = who_holds({"parameters": size, "gradients": size, "optimizer state": 2 * size})
    assert f"DDP {4 * size / 1e6:.0f} MB, ZeRO {3 * size / 1e6:.0f} MB, FSDP2 {2 * size / 1e6:.0f} MB" in picture.alt
    drawn_well(picture)


def drawn_well(picture):
    for check in ("texts_are_legible_and_on_the_page", "texts_do_not_overlap", "texts_do_not_cross_the_edges_of_boxes"):
        getattr(test_diagrams, f"test_{check}")((picture, []))
