"""Exercises of notebook 06: an epoch's line, the same training, and a plain script made to run on ranks."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.lessons.exercise import Exercise, Project
from ddp_helpers.lessons.run_script import CLOSE, Run, attend, far

PLAIN = ROOT / "notebooks" / "signals.py"
RANKS, EPOCHS, TRAIN = (1, 2, 3), 2, 960


def epoch_line(totals: list[tuple]) -> dict[str, float]:
    """Loss and accuracy of all ranks together, from each rank's (sum of losses, right answers, samples)."""
    loss, right, samples = (sum(column) for column in zip(*totals, strict=True))
    return {"loss": loss / samples, "accuracy": right / samples}


def same_training(one: dict, other: dict) -> bool:
    """Whether two runs of mnist_ddp take the same steps on the same data, up to rounding and dropout."""
    return global_batch(one) == global_batch(other) and rest_agrees(one, other)


def global_batch(run: dict) -> int:
    """Compute the images in a step of all ranks together from the flag that the run was given."""
    return number(run) * (run["world_size"] if "batch_size_per_rank" in run else 1)


def number(run: dict) -> int:
    """Return what the run was given for its batch, by either flag."""
    return run["batch_size"] if "batch_size" in run else run["batch_size_per_rank"]


def rest_agrees(one: dict, other: dict) -> bool:
    """Whether two runs have the same number of epochs, learning rate and seed."""
    return all(one[name] == other[name] for name in ("epochs", "lr", "seed"))


def means(totals: list[tuple]) -> dict[str, float]:
    """A mistake: the mean of the ranks' means."""
    parts = [(loss / samples, right / samples) for loss, right, samples in totals]
    loss, accuracy = (sum(column) / len(parts) for column in zip(*parts, strict=True))
    return {"loss": loss, "accuracy": accuracy}


def my_ddp_script() -> Path:
    """The path of signals.py, made DDP."""
    return ROOT / "notebooks" / "solutions" / "signals_ddp.py"


def judge(answer: Callable[[], Path]) -> list[str]:
    """A line for each thing that is still wrong with the script whose path `answer` returns."""
    script = Path(answer()).resolve()
    if not script.is_file():
        return [f"there is no file {script}: return the path of your script"]
    if script.read_text() == PLAIN.read_text():
        return ["the script is still the plain one"]
    runs = {ranks: Run(script, "--epochs", EPOCHS, ranks=ranks, watched=True) for ranks in RANKS}
    attend(*runs.values())
    wrong: list[str] = []
    for ranks, run in runs.items():
        if why := run.complaint():
            return [f"on {ranks} rank{'s' * (ranks > 1)}: {why}"]
        wrong += mistakes(run, runs[RANKS[0]])
    return list(dict.fromkeys(wrong))[:3]


def mistakes(many: Run, one: Run) -> list[str]:
    """A line for each mistake that shows in the run on many ranks, held against the run on one."""
    wrong, notes = [], many.notes()
    orders = [[indices for size, indices in each.passes if size == TRAIN] for each in notes]
    first, second = ([order[epoch] for order in orders if len(order) > epoch] for epoch in (0, 1))
    if sorted(chain(*first)) != [*range(TRAIN)]:
        wrong.append("the ranks do not share the training set out: give its loader a DistributedSampler")
    elif first == second:
        wrong.append("epoch 2 has the order of epoch 1: tell the sampler which epoch it is")
    savers, (alone, *_) = [each.saved[-1] for each in notes if each.saved], one.notes()
    if not savers or not alone.saved:
        return [*wrong, "nothing is saved: let rank 0 do it at the end"]
    if len(savers) > 1:
        wrong.append("more than one rank saves, into one file: let rank 0 do it")
    if any(name.startswith("module.") for name in savers[0]):
        wrong.append("the saved names begin with module.: save the model inside the wrapper")
    elif far(savers[0], alone.saved[-1]) > CLOSE:
        wrong.append("the weights are not those of one rank: do ranks share --batch-size? who calls the wrapper?")
    lines, right = epoch_lines(many), epoch_lines(one)
    if len(lines) != EPOCHS:
        wrong.append(f"{len(lines)} lines for {EPOCHS} epochs: let one rank print")
    elif right and lines != right:
        wrong.append(f"the ranks count {lines[0]!r}, one counts {right[0]!r}: each test point once, then a sum")
    return wrong


def epoch_lines(run: Run) -> list[str]:
    """The lines of a run, from any rank, that tell of an epoch."""
    return [line for rank in range(len(run.ends)) for line in run.said(rank) if line.startswith("epoch ")]


ALONE = {"world_size": 1, "batch_size": 128, "epochs": 2, "lr": 1.0, "seed": 1}
OF_EACH = {"world_size": 2, "batch_size_per_rank": 64, "epochs": 2, "lr": 1.0, "seed": 1}

EXERCISES = [
    Exercise(
        epoch_line,
        [([(10.0, 6, 10), (2.0, 2, 2)],), ([(3.0, 4, 8), (5.0, 8, 8), (1.0, 1, 4)],), ([(2.0, 3, 4)],)],
        {
            "The shards differ in size, so the mean of the ranks' means is not it: add up first, divide once.": means,
            "Divide by the number of samples, not of ranks.": lambda totals: {
                "loss": sum(loss for loss, _, _ in totals) / len(totals),
                "accuracy": sum(right for _, right, _ in totals) / len(totals),
            },
            "That is rank 0's shard alone, as if all_reduce had been forgotten.": lambda totals: means(totals[:1]),
        },
    ),
    Exercise(
        same_training,
        [
            (ALONE, ALONE | {"world_size": 2}),
            (ALONE, OF_EACH),
            (ALONE, OF_EACH | {"batch_size_per_rank": 128}),
            (ALONE, ALONE | {"world_size": 4, "seed": 2}),
            (ALONE, ALONE | {"world_size": 4, "lr": 0.5}),
            (ALONE, ALONE | {"epochs": 3}),
        ],
        {
            "batch_size_per_rank is of each rank: a step takes so many from every one of them.": (
                lambda one, other: number(one) == number(other) and rest_agrees(one, other)
            ),
            "batch_size is of all ranks together, whatever their number.": lambda one, other: (
                number(one) * one["world_size"] == number(other) * other["world_size"] and rest_agrees(one, other)
            ),
            "Another seed, learning rate or number of epochs is another training.": lambda one, other: (
                global_batch(one) == global_batch(other)
            ),
            "The number of ranks may differ: that is the point of the proof.": lambda one, other: one == other,
        },
    ),
    Project(my_ddp_script, [], {}, judge),
]
