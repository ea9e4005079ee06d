"""A job of 1,536 ranks in one process: each sample is somebody's, and what is drawn says its numbers."""

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from torch.utils.data import DistributedSampler

from ddp_helpers import ROOT
from ddp_helpers.lessons.plot_the_scaling import predict, simulate
from ddp_helpers.lessons.plot_the_scaling.figures import SCALES, scale
from ddp_helpers.lessons.plot_the_scaling.predict import BUCKET, Step
from ddp_helpers.lessons.plot_the_scaling.prediction import assumptions, prediction
from ddp_helpers.lessons.plot_the_scaling.simulate import Cover

TRAIN, TEST, RANKS = 60_000, 10_000, 1536


@pytest.fixture(scope="module")
def summit():
    """256 nodes with 6 ranks each."""
    return simulate.places(256, 6)


@pytest.fixture(scope="module")
def shards(summit):
    return simulate.shards(TRAIN, summit)


# ---- who is who


def test_each_rank_reads_its_own_place(summit):
    assert [me.rank for me in summit] == list(range(RANKS))
    assert [me.local_rank for me in summit] == [rank % 6 for rank in range(RANKS)]
    assert {me.world_size for me in summit} == {RANKS}


# ---- coverage


def test_training_shards_hold_every_sample_and_pad_as_little_as_they_can(shards):
    assert simulate.cover(shards, TRAIN) == Cover(missing=0, extra=1440, smallest=40, largest=40)
    seen = np.bincount(np.concatenate(shards), minlength=TRAIN)
    assert (seen == 1).sum() == TRAIN - 1440 and (seen == 2).sum() == 1440  # none is there three times


def test_evaluation_shards_hold_every_sample_once(summit):
    assert simulate.cover(simulate.evaluation_shards(TEST, summit), TEST) == Cover(0, 0, smallest=6, largest=7)
    sampled = [list(DistributedSampler(range(TEST), RANKS, me.rank, shuffle=False)) for me in summit]
    assert simulate.cover(sampled, TEST) == Cover(0, -TEST % RANKS, 7, 7), "the control: a sampler counts some twice"


def test_control_one_rank_that_forgot_set_epoch_is_found(summit, shards):
    other = list(simulate.sampler(TRAIN, summit[7], epoch=0))
    found = simulate.cover([*shards[:7], other, *shards[8:]], TRAIN)
    assert 30 < found.missing <= 40 and found.extra == 1440 + found.missing


def test_control_one_rank_that_died_is_found(shards):
    found = simulate.cover(shards[1:], TRAIN)
    assert 38 <= found.missing <= 40 and found.extra == 1440 - 40 + found.missing


@pytest.mark.parametrize("per_node", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("length", [1, 13, 1000, 1001])
def test_two_nodes_with_an_odd_number_of_ranks(per_node, length):
    job = simulate.places(2, per_node)
    ranks = 2 * per_node
    for epoch in (1, 2):
        found = simulate.cover(simulate.shards(length, job, epoch), length)
        assert found == Cover(0, -length % ranks, -(-length // ranks), -(-length // ranks))
    exact = simulate.cover(simulate.evaluation_shards(length, job), length)
    assert exact == Cover(0, 0, length // ranks, -(-length // ranks))
    wrong = [me._replace(rank=me.local_rank) for me in job]  # the mistake that works on one node
    if length > per_node:
        assert simulate.cover(simulate.evaluation_shards(length, wrong), length).missing > 0


def test_fewer_samples_than_ranks(summit):
    assert simulate.cover(simulate.shards(100, summit), 100) == Cover(0, RANKS - 100, 1, 1)
    assert simulate.cover(simulate.evaluation_shards(100, summit), 100) == Cover(0, 0, 0, 1)


# ---- what the sampler costs


def test_a_sampler_holds_the_whole_order_whatever_its_share(summit):
    memory = {size: simulate.sampler_cost(size, summit[0], times=1)[1] for size in (TRAIN, 10 * TRAIN)}
    two = simulate.sampler_cost(TRAIN, simulate.places(2, 1)[0], times=1)[1]
    assert memory[TRAIN] == pytest.approx(two, rel=0.25), "it would be 768 times less, if it shared"
    assert memory[TRAIN] > 8 * TRAIN
    assert 8 < memory[10 * TRAIN] / memory[TRAIN] < 12


# ---- a step from assumptions


def test_a_step_is_the_sum_of_what_was_assumed():
    step = Step(compute=1, gradient_bytes=3 * BUCKET, bandwidth=BUCKET, latency=0.01, overlap=0, storage=1e12)
    assert step.seconds([1, 2, 4]) == pytest.approx([1, 1 + 3 * 2 * 0.01 + 3, 1 + 3 * 6 * 0.01 + 4.5])
    assert replace(step, tree=True).seconds(4) == pytest.approx(1 + 3 * 4 * 0.01 + 4.5)
    assert replace(step, overlap=0.5).seconds(4) == pytest.approx(1 + 3 * 6 * 0.01 + 4.5 - 0.5)
    assert replace(step, overlap=0.5, bandwidth=1e15, latency=0).seconds(4) == 1  # more than all cannot be hidden
    assert replace(step, strong=True).seconds(4) == pytest.approx(0.25 + 3 * 6 * 0.01 + 4.5)
    assert replace(step, batch_bytes=10, storage=4).seconds(4) == pytest.approx(10)  # reading is slower than the rest
    assert replace(step, batch_bytes=10, storage=4, strong=True).seconds(4) == pytest.approx(0.25 + 0.18 + 4.5)


def test_alone_is_the_measure_and_more_ranks_are_never_better():
    for change in ({}, {"overlap": 0}, {"strong": True}, {"tree": True}, {"storage": 1e10}):
        efficiency = replace(Step(), **change).efficiency(np.arange(1, RANKS + 1))
        assert efficiency[0] == 1 and (efficiency <= 1 + 1e-12).all() and (efficiency > 0).all()


@pytest.mark.parametrize(
    "change", [{"overlap": 0}, {"bandwidth": 2.3e9}, {"latency": 2e-5}, {"storage": 3e10}, {"strong": True}], ids=str
)
def test_each_assumption_carries_the_curve(change):
    assert Step().efficiency(RANKS) > 0.97 > replace(Step(), **change).efficiency(RANKS) + 0.1


# ---- figures


def test_the_far_prediction_names_what_it_assumes():
    for scaling, batch in (("strong", "global batch"), ("weak", "batch per rank")):
        model = predict.fit([1, 2, 4], [4.0, 2.1, 1.2], scaling)
        said = prediction(model, ([8], [0.7]), "here").figure.get_supxlabel().replace("\n", " ")
        assert {"scaling", "data", "bandwidth", "latency", "overlap"} < model.assumes.keys()
        assert batch in model.assumes["scaling"] and all(
            f"{what}: {told}" in said for what, told in model.assumes.items()
        )


def test_the_figures_draw_and_say_their_numbers(tmp_path):
    columns = {name: [1000.0, 10.0] for lines in SCALES.values() for name in lines}
    table = pd.DataFrame({"ranks": [1, RANKS], **columns})
    published = json.loads((ROOT / "notebooks" / "results" / "published.json").read_text())["efficiencies"]
    pictures = [scale(table, "made up"), assumptions({"as assumed": Step(), "alone": Step(overlap=0)}, published)]
    for number, picture in enumerate(pictures):
        assert picture.save(tmp_path / f"{number}.png").stat().st_size > 10_000
        assert all(text.get_fontsize() >= 10 for text in picture.figure.findobj(plt.Text) if text.get_text())
    assert "From 1 to 1,536 ranks" in pictures[0].alt and "env.json 1,000 to 10" in pictures[0].alt
    assert "alone: 72%" in pictures[1].alt and "published, DDP, Summit: 97%" in pictures[1].alt
