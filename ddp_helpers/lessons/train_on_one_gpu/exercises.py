"""The exercises of notebook 01: the best speed-up, an accuracy, a pass of training.

`lessons.check` asks them for verdicts, in the learner's process; no ranks.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddp_helpers.lessons.exercise import Exercise

Batches = list[tuple[Tensor, Tensor]]  # images and labels

# ---- the oracles: a bound, a test, and a training loop to mend


def best_speed_up(p: float) -> float:
    """Compute old time over new time, if a share p of the old time costs nothing any more."""
    return 1 / (1 - p)


def accuracy(
    model: nn.Module,
    batches: Batches,
    set_mode: bool = True,
    weigh_batches: bool = True,
) -> float:
    """Compute the share of the images whose highest score is at their label.

    Each switch that is off is a plausible mistake.
    """
    if set_mode:
        model.eval()
    total, count = 0.0, 0
    for images, labels in batches:
        right = model(images).argmax(dim=1) == labels
        weight = len(labels) if weigh_batches else 1
        total += right.double().mean().item() * weight
        count += weight
    return total / count


def train_pass(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    set_mode: bool = True,
    clear_gradients: bool = True,
    weigh_batches: bool = True,
) -> float:
    """Train for one pass; return the mean loss of an image.

    Each switch that is off is one of the faults that the stub has.
    """
    if set_mode:
        model.train()
    total, count = 0.0, 0
    for images, labels in batches:
        if clear_gradients:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        weight = len(labels) if weigh_batches else 1
        total += loss.item() * weight
        count += weight
    return total / count


# ---- the cases


class _Doubling(nn.Module):
    """Stands for dropout, without chance: in training it doubles and reverses the scores."""

    def forward(self, scores: Tensor) -> Tensor:
        return 2 * scores.flip(1) if self.training else scores


class _Model(nn.Sequential):
    """A model that a verdict shows by this name; so do the two classes below."""

    def __repr__(self) -> str:
        return "model"


class _Descent(SGD):
    def __repr__(self) -> str:
        return "optimizer"


class _Batches(Batches):
    def __repr__(self) -> str:
        return "batches"


def _model_and_batches(seed: int, training: bool) -> tuple[_Model, _Batches]:
    """Make a model in one of its two modes, and batches of 8, 8 and 2 images of 3 numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Model(nn.Linear(3, 4), _Doubling())
        batches = ((torch.randn(size, 3), torch.randint(4, (size,))) for size in (8, 8, 2))
        return model.train(training), _Batches(batches)


def _training_case(seed: int, training: bool) -> tuple[_Model, _Descent, _Batches]:
    """Make the arguments of one call of train_pass."""
    model, batches = _model_and_batches(seed, training)
    return model, _Descent(model.parameters(), lr=0.5), batches


# ---- the exercises


def _old_time_over_p(p: float) -> float:
    """A mistake: the old time divided by what is saved."""
    return 1 / p if p else 1.0


_without_clearing = partial(train_pass, clear_gradients=False)
_without_mode = partial(train_pass, set_mode=False)
_SPEED_UP_TRAPS = {
    "What is left of the old time is 1 - p; divide the old time, 1, by it.": _old_time_over_p,
    "That is the time that is left; the speed-up is the old time divided by it.": lambda p: 1 - p,
}

_WEIGH = "The last batch is smaller: count each batch by its number of images."
_TRAIN_TRAPS = {
    "Gradients add up from batch to batch: clear them.": _without_clearing,
    "The pass before this one was a test: in which mode is the model?": _without_mode,
    _WEIGH: partial(train_pass, weigh_batches=False),
    "Two faults are left: one before the loop, one in it.": (
        partial(train_pass, set_mode=False, clear_gradients=False)
    ),
    "Two faults are left: one before the loop, one in what is returned.": (
        partial(train_pass, set_mode=False, weigh_batches=False)
    ),
    "Two faults are left: one in it, one in what is returned.": (
        partial(train_pass, clear_gradients=False, weigh_batches=False)
    ),
    "None of the three faults is mended yet.": (
        partial(train_pass, set_mode=False, clear_gradients=False, weigh_batches=False)
    ),
}
_ACCURACY_TRAPS = {
    "Dropout must be off in a test: call model.eval().": partial(accuracy, set_mode=False),
    _WEIGH: partial(accuracy, weigh_batches=False),
    "Two things are missing: the mode, and the sizes of the batches.": (
        partial(accuracy, set_mode=False, weigh_batches=False)
    ),
}

EXERCISES = [
    Exercise(best_speed_up, [(0.5,), (0.2,), (0.0,)], _SPEED_UP_TRAPS),
    Exercise(
        accuracy,
        [_model_and_batches(seed, training) for seed in (3, 4) for training in (True, False)],
        _ACCURACY_TRAPS,
    ),
    Exercise(
        train_pass,
        [_training_case(seed, training) for seed in (1, 2) for training in (False, True)],
        _TRAIN_TRAPS,
    ),
]
