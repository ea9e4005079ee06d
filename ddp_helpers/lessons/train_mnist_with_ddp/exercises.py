"""Exercises of notebook 06."""

from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.lessons.exercise import Exercise, Project
from ddp_helpers.lessons.train_mnist_with_ddp import own_script


def epoch_line(totals: list[tuple]) -> dict[str, float]:
    """Loss and accuracy of all ranks together, from each rank's (sum of losses, right answers, samples)."""
    loss, right, samples = (sum(column) for column in zip(*totals, strict=True))
    return {"loss": loss / samples, "accuracy": right / samples}


def same_training(one: dict, other: dict) -> bool:
    """Whether two runs of mnist_ddp take the same steps on the same data, up to rounding and dropout."""
    sizes = {run["world_size"] * run["batch_size"] for run in (one, other)}
    return len(sizes) == 1 and all(one[flag] == other[flag] for flag in ("epochs", "lr", "seed"))


def _means(totals: list[tuple]) -> dict[str, float]:
    means = [(loss / samples, right / samples) for loss, right, samples in totals]
    loss, accuracy = (sum(column) / len(means) for column in zip(*means, strict=True))
    return {"loss": loss, "accuracy": accuracy}


def my_ddp_script() -> Path:
    """The path of signals.py, made DDP."""
    return ROOT / "notebooks" / "solutions" / "signals_ddp.py"


ALONE = {"world_size": 1, "batch_size": 128, "epochs": 2, "lr": 1.0, "seed": 1}

EXERCISES = [
    Exercise(
        epoch_line,
        [([(10.0, 6, 10), (2.0, 2, 2)],), ([(3.0, 4, 8), (5.0, 8, 8), (1.0, 1, 4)],), ([(2.0, 3, 4)],)],
        {
            "The shards differ in size, so the mean of the ranks' means is not it: add up first, divide once.": _means,
            "Divide by the number of samples, not of ranks.": lambda totals: {
                "loss": sum(loss for loss, _, _ in totals) / len(totals),
                "accuracy": sum(right for _, right, _ in totals) / len(totals),
            },
            "That is rank 0's shard alone, as if all_reduce had been forgotten.": lambda totals: _means(totals[:1]),
        },
    ),
    Exercise(
        same_training,
        [
            (ALONE, ALONE | {"world_size": 2, "batch_size": 64}),
            (ALONE, ALONE | {"world_size": 2}),
            (ALONE, ALONE | {"world_size": 4, "batch_size": 32, "seed": 2}),
            (ALONE, ALONE | {"world_size": 4, "batch_size": 32, "lr": 0.5}),
            (ALONE, ALONE | {"epochs": 3}),
        ],
        {
            "batch_size is per rank: what must agree is the global batch.": lambda one, other: all(
                one[flag] == other[flag] for flag in ("batch_size", "epochs", "lr", "seed")
            ),
            "Another seed, learning rate or number of epochs is another training.": lambda one, other: (
                one["world_size"] * one["batch_size"] == other["world_size"] * other["batch_size"]
            ),
            "The number of ranks may differ: that is the point of the proof.": lambda one, other: one == other,
        },
    ),
    Project(my_ddp_script, [], {}, own_script.judge),
]
