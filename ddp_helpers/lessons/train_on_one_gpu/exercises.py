"""The exercises of notebook 01: the best speedup, an accuracy, a pass of training.

`lessons.check` asks them for verdicts, in the driver process; no ranks.
"""

from collections.abc import Iterator
from copy import deepcopy
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddp_helpers.lessons.comparison import Comparison, difference, explanations
from ddp_helpers.lessons.exercise import Answer, Exercise, JudgedExercise, same
from ddp_helpers.lessons.run_script import WEIGHT_TOLERANCE, weight_distance

Batches = list[tuple[Tensor, Tensor]]  # images and labels

# ---- the best speedup


def best_speed_up(p: float) -> float:
    """Compute old time over new time, if a share p of the old time no longer costs anything."""
    return 1 / (1 - p)


_SPEED_UP_TRAPS: dict[str, Answer] = {
    "A part 1 - p of the old time is left; divide the old time, 1, by it.": (
        lambda p: 1 / p if p else 1.0
    ),
    "That is the time that is left; the speedup is the old time divided by it.": lambda p: 1 - p,
}

# ---- a test, and a training loop to fix


class _Doubling(nn.Module):
    """Replaces dropout, without chance: in training it doubles and reverses the scores."""

    def forward(self, scores: Tensor) -> Tensor:
        return 2 * scores.flip(1) if self.training else scores


def _models_and_batches() -> Iterator[tuple[nn.Module, Batches]]:
    """Make a model in each of its modes, and batches of 8, 8 and 2 images of 3 numbers."""
    for training in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(3, 4), _Doubling()).train(training)
            sizes = (8, 8, 2)
            yield model, [(torch.randn(size, 3), torch.randint(4, (size,))) for size in sizes]


_WEIGH = "The last batch is smaller: count each batch by its number of images."


def accuracy(model: nn.Module, batches: Batches) -> float:
    """Compute the share of the images whose highest score is at their label."""
    model.eval()
    return _share_right(model, batches)


def _share_right(model: nn.Module, batches: Batches) -> float:
    """Compute the accuracy in the model's current mode."""
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return (model(images).argmax(dim=1) == labels).double().mean().item()


def _judge_accuracy(answer: Answer) -> list[str]:
    """Say what is wrong with an accuracy; nothing if it is right."""
    for model, batches in _models_and_batches():
        known = {
            "Dropout must be off in a test: call model.eval().": (
                _share_right(deepcopy(model).train(), batches)
            ),
            _WEIGH: mean(accuracy(deepcopy(model), [batch]) for batch in batches),
        }
        right = accuracy(deepcopy(model), batches)
        told = Comparison("the share", answer(model, batches), right, known)
        if text := difference(told):
            return [*explanations(told)[:1], text]
    return []


def train_pass(model: nn.Module, optimizer: Optimizer, batches: Batches) -> float:
    """Train for one pass; return the mean loss per image."""
    model.train()
    total, count = 0.0, 0
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(labels)
        count += len(labels)
    return total / count


def _judge_pass(answer: Answer) -> list[str]:
    """Say which fault of the stub is left; nothing if all three are fixed."""
    for model, batches in _models_and_batches():
        right_model = deepcopy(model)
        right = train_pass(right_model, SGD(right_model.parameters(), lr=0.5), batches)
        loss = answer(model, SGD(model.parameters(), lr=0.5), batches)
        if weight_distance(model.state_dict(), right_model.state_dict()) > WEIGHT_TOLERANCE:
            cure = "The pass before this one was a test: in which mode is the model?"
            if model.training:
                cure = "Do gradients add up from batch to batch? Clear them."
            return [cure, "The weights are not those of a correct pass."]
        if not same(loss, right):
            return [_WEIGH, f"train_pass gives {loss}, and should give {right:.4g}."]
    return []


EXERCISES = [
    Exercise(best_speed_up, [(0.5,), (0.2,), (0.0,)], _SPEED_UP_TRAPS),
    JudgedExercise("accuracy", _judge_accuracy),
    JudgedExercise("train_pass", _judge_pass),
]
