"""Exercises of notebook 01: the best speed-up, a pass of training, an accuracy."""

from collections.abc import Callable
from functools import partial
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddp_helpers.lessons.exercise import Exercise

Batches = list[tuple[Tensor, Tensor]]

# ---- the exercises: a bound, a training loop to mend, and a test


def best_speed_up(p: float) -> float:
    """Old time divided by new time, if a share p of the old time costs nothing any more."""
    return 1 / (1 - p)


def train_pass(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    clear: bool = True,
    mode: bool = True,
    weigh: bool = True,
) -> float:
    """Train for one pass; returns the mean loss of an image. Each switch that is off is one of the faults to mend."""
    model.train(mode or model.training)
    total, count = 0.0, 0
    for images, labels in batches:
        if clear:
            optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        n = len(labels) if weigh else 1
        total, count = total + loss.item() * n, count + n
    return total / count


def accuracy(model: nn.Module, batches: Batches, mode: bool = True, weigh: bool = True) -> float:
    """Share of the images whose highest score is at their label. Each switch that is off is a plausible mistake."""
    model.train(model.training and not mode)
    total, count = 0.0, 0
    for images, labels in batches:
        n = len(labels) if weigh else 1
        right = (model(images).argmax(dim=1) == labels).double().mean().item()
        total, count = total + right * n, count + n
    return total / count


class Doubling(nn.Module):
    """Stands for dropout, without chance: in training it doubles the scores and turns their order round."""

    def forward(self, x: Tensor) -> Tensor:
        """The scores, as they are in evaluation."""
        return 2 * x.flip(1) if self.training else x


def called(name: str, kind: type) -> type:
    """A subclass that a verdict shows by a short name."""
    return type(name, (kind,), {"__repr__": lambda self: name})


Model, Descent, Some = called("model", nn.Sequential), called("optimizer", SGD), called("batches", list)


def case(seed: int, training: bool, optimized: bool) -> tuple:
    """The arguments of one call: a model in one of its two modes, an optimizer if it is needed, batches of 8, 8, 2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model(nn.Linear(3, 4), Doubling(), nn.LogSoftmax(dim=1)).train(training)
        batches = Some((torch.randn(size, 3), torch.randint(4, (size,))) for size in (8, 8, 2))
    return (model, Descent(model.parameters(), lr=0.5), batches) if optimized else (model, batches)


def without(oracle: Callable, *switches: str) -> Callable:
    """The answer with some of its switches off: a plausible mistake."""
    return partial(oracle, **dict.fromkeys(switches, False))


WEIGH = "The last batch is smaller: count each batch by its number of images."
FAULTS = {"mode": "before the loop", "clear": "in it", "weigh": "in what is returned"}
TWO_LEFT = {
    f"Two faults are left: one {FAULTS[one]}, one {FAULTS[other]}.": without(train_pass, one, other)
    for one, other in combinations(FAULTS, 2)
}
EXERCISES = [
    Exercise(
        best_speed_up,
        [(0.5,), (0.2,), (0.0,)],
        {
            "What is left of the old time is 1 - p; divide the old time, 1, by it.": lambda p: 1 / p if p else 1.0,
            "That is the time that is left; the speed-up is the old time divided by it.": lambda p: 1 - p,
        },
    ),
    Exercise(
        train_pass,
        [case(seed, training, optimized=True) for seed in (1, 2) for training in (False, True)],
        {
            "Gradients add up from batch to batch: clear them.": without(train_pass, "clear"),
            "The pass before this one was a test: in which mode is the model?": without(train_pass, "mode"),
            WEIGH: without(train_pass, "weigh"),
            **TWO_LEFT,
            "None of the three faults is mended yet.": without(train_pass, *FAULTS),
        },
    ),
    Exercise(
        accuracy,
        [case(seed, training, optimized=False) for seed in (3, 4) for training in (True, False)],
        {
            "Dropout must be off in a test: call model.eval().": without(accuracy, "mode"),
            WEIGH: without(accuracy, "weigh"),
            "Two things are missing: the mode, and the sizes of the batches.": without(accuracy, "mode", "weigh"),
        },
    ),
]
