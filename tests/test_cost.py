"""What a step costs: each part of it is charged for its own time, and measuring leaves no trace in the model."""

import time
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers.lessons.wrap_the_model import cost
from ddp_helpers.lessons.wrap_the_model.figures import cost_of_steps
from ddp_helpers.notebook.drawing import Picture
from ddp_helpers.rank.step import Step

FLAGS = Namespace(precision="float32", compile=False)
DELAY = 0.1  # seconds: far more than a step of the small model takes


@pytest.fixture
def group():
    """A process group of one, on one thread: on a busy machine two wait for each other for longer than DELAY."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def late(call):
    """The same call, DELAY later."""

    def delayed(*arguments):
        time.sleep(DELAY)
        return call(*arguments)

    return delayed


def late_all_reduce(state, bucket):
    time.sleep(DELAY)
    return allreduce_hook(state, bucket)


def small_step(wrap=True, hook=allreduce_hook):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LogSoftmax(dim=1))
    if wrap:
        model = DDP(model, gradient_as_bucket_view=True)
        model.register_comm_hook(None, hook)
    return Step(model, torch.optim.Adadelta(model.parameters()), FLAGS)


def batches():
    numbers = torch.Generator().manual_seed(2)
    for _ in range(9):
        yield torch.randn(8, 6, generator=numbers), torch.randint(5, (8,), generator=numbers)


def slow(step, part):
    """The step and its batches, with DELAY in one of its parts."""
    if part == "forward and backward":
        step.loss = late(step.loss)
    if part == "optimizer":
        step.update = late(step.update)
    return step, (late(lambda batch: batch)(batch) if part == "data" else batch for batch in batches())


@pytest.mark.parametrize("part", [None, *cost.PARTS])
def test_each_part_is_charged_for_its_own_time(part, group):
    step = small_step(hook=late_all_reduce if part == "communication" else allreduce_hook)
    step, source = slow(step, part)
    found = cost.in_turns({"only": lambda: cost.parts(step, source)}, rounds=5)["only"]
    assert {name for name, seconds in found.items() if seconds > DELAY / 2} == ({part} if part else set())
    assert sum(found.values()) < 2 * DELAY  # nothing is counted twice


@pytest.mark.parametrize("wrap", [True, False], ids=["DDP", "no DDP"])
def test_measuring_trains_as_plain_steps_do(wrap, group):
    measured, plain, left_alone = small_step(wrap), small_step(wrap), small_step(wrap)
    source = batches()
    for images, labels in batches():
        assert cost.parts(measured, source)["communication"] == 0 or wrap
        plain.optimizer.zero_grad()
        F.nll_loss(plain.model(images), labels).backward()
        plain.optimizer.step()
    weights = [torch.cat([p.flatten() for p in step.model.parameters()]) for step in (measured, plain, left_alone)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_settings_take_turns_and_the_warm_up_does_not_count(group):
    order = []

    def measure(name):
        order.append(name)
        return dict.fromkeys(cost.PARTS, 100.0 if len(order) <= 2 else float(len(order)))

    found = cost.in_turns({"a": lambda: measure("a"), "b": lambda: measure("b"), "other ranks'": None}, 3, warm_up=1)
    assert "".join(order) in ("abbaabba", "baabbaab")
    assert set(found) == {"a", "b"}
    turns = {name: [place for place, who in enumerate(order, 1) if who == name and place > 2] for name in "ab"}
    assert {name: parts["data"] for name, parts in found.items()} == {name: turns[name][1] for name in "ab"}


def test_batches_do_not_end():
    source = cost.endless([1, 2])
    assert [next(source) for _ in range(5)] == [1, 2, 1, 2, 1]


def of(*seconds):
    return dict(zip(cost.PARTS, seconds, strict=True))


def test_no_part_is_negative_and_the_sum_stays():
    steps = [of(1, 10, -3, 2), of(1, 9, -2, 2), of(1, 8, 1, 2)]
    assert cost.medians(steps) == of(1, 7, 0, 2)
    assert cost.medians([of(1, 10, 3, 2)]) == of(1, 10, 3, 2)


def test_the_figure_tells_its_numbers():
    rows = {"1 rank": of(0.001, 0.01, 0, 0.001), "2 ranks": of(0.001, 0.01, 0.012, 0.001)}
    picture = cost_of_steps({"global batch 64": rows}, "1 rank", "a machine", "a remark")
    assert isinstance(picture, Picture)
    texts = [text.get_text() for ax in picture.figure.axes for text in ax.texts]
    assert ["12 ms" in texts[0], "24 ms" in texts[1], "0.50" in texts[1]] == [True] * 3
    assert "2 ranks 24 ms" in picture.alt and "communication 12.0" in picture.alt and "a machine" in picture.alt
