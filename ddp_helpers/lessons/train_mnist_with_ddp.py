"""Notebook 06: its exercises, and the figure of an epoch's seconds."""

import matplotlib.pyplot as plt

from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.notebook.drawing import BLUE, GREY, ORANGE, Picture, described
from ddp_helpers.notebook.runs import Run


def launch_words(ranks: int, global_batch_size: int) -> list[str]:
    """The command that starts mnist_ddp.py on this machine, or no words if the batch cannot be shared evenly."""
    if global_batch_size % ranks:
        return []
    words = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "mnist_ddp.py"]
    return [*words, "--batch-size", str(global_batch_size // ranks)]


def epoch_line(totals: list[tuple]) -> dict[str, float]:
    """Loss and accuracy of all ranks together, from each rank's (sum of losses, right answers, samples)."""
    loss, right, samples = (sum(column) for column in zip(*totals, strict=True))
    return {"loss": loss / samples, "accuracy": right / samples}


def same_training(one: dict, other: dict) -> bool:
    """Whether two runs of mnist_ddp take the same steps on the same data, up to rounding and dropout."""
    sizes = {run["world_size"] * run["batch_size"] for run in (one, other)}
    return len(sizes) == 1 and all(one[flag] == other[flag] for flag in ("epochs", "lr", "seed"))


def _words(ranks: int, batch_size: object) -> list:
    return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "mnist_ddp.py", "--batch-size", batch_size]


def _means(totals: list[tuple]) -> dict[str, float]:
    means = [(loss / samples, right / samples) for loss, right, samples in totals]
    loss, accuracy = (sum(column) / len(means) for column in zip(*means, strict=True))
    return {"loss": loss, "accuracy": accuracy}


ALONE = {"world_size": 1, "batch_size": 128, "epochs": 2, "lr": 1.0, "seed": 1}

EXERCISES = [
    Exercise(
        launch_words,
        [(2, 128), (4, 64), (3, 64), (1, 64)],
        {
            "--batch-size is per rank: divide the global batch.": lambda ranks, size: (
                [] if size % ranks else _words(ranks, str(size))
            ),
            "What is left over would be lost: give no words where the batch cannot be shared.": lambda ranks, size: (
                _words(ranks, str(size // ranks))
            ),
            "A command is a list of words: turn each number into a string.": lambda ranks, size: (
                [] if size % ranks else [*_words(ranks, size // ranks)[:3], ranks, *_words(ranks, size // ranks)[4:]]
            ),
        },
    ),
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
]


def seconds_of_an_epoch(runs: list[Run]) -> Picture:
    """A bar a run: the seconds of its last epoch spent waiting for data, in steps, and in the test."""
    figure, ax = plt.subplots(figsize=(9.5, 1.6 + 0.7 * len(runs)), layout="constrained")
    labels = [f"{run.folder.name}\nworld size {run.row()['world_size']}, {run.row()['launcher']}" for run in runs]
    begins = [0.0] * len(runs)
    for part, colour in (("data", ORANGE), ("steps", BLUE), ("test", GREY)):
        seconds = [parts(run)[part] for run in runs]
        ax.barh(labels, seconds, left=begins, color=colour, label=part, height=0.6)
        begins = [begin + more for begin, more in zip(begins, seconds, strict=True)]
    for row, total in enumerate(begins):
        ax.text(total, row, f" {total:.1f} s", va="center")
    ax.margins(x=0.12)
    ax.set(title=f"Where an epoch's seconds went ({' and '.join(sorted({r.env['dataset'] for r in runs}))})")
    ax.set_xlabel("seconds")
    ax.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    told = "; ".join(f"{run.folder.name}: {describe(run)}" for run in runs)
    return described(figure, f"Seconds of the last epoch of each run. {told}.")


def parts(run: Run) -> dict[str, float]:
    """The seconds of the last epoch, by what they went into."""
    last = run.epochs[-1]
    return {"data": last["data_seconds"], "steps": last["seconds"] - last["data_seconds"], "test": last["test_seconds"]}


def describe(run: Run) -> str:
    """The same in words."""
    return ", ".join(f"{seconds:.1f} s {part}" for part, seconds in parts(run).items())
