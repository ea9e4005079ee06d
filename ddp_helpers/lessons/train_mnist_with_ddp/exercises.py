"""The exercises of notebook 06: an epoch's line, the same training, a plain script made DDP.

`lessons.check` asks them for verdicts, in the learner's process. The last one starts the learner's
script on ranks of its own, and compares what they did with the run on one rank.
"""

import operator
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_helpers import ROOT
from ddp_helpers.lessons.exercise import Answer, Exercise, Project
from ddp_helpers.lessons.run_script import (
    WEIGHT_TOLERANCE,
    LearnerRun,
    wait_for_runs,
    weight_distance,
)

if TYPE_CHECKING:
    from ddp_helpers.lessons.script_notes import RankNotes

# ---- an epoch's line


def epoch_line(totals: list[tuple]) -> dict[str, float]:
    """Compute loss and accuracy of all ranks together.

    totals: of each rank the sum of its losses, its right answers, and its samples.
    """
    loss, right, samples = (sum(column) for column in zip(*totals, strict=True))
    return {"loss": loss / samples, "accuracy": right / samples}


def _mean_of_means(totals: list[tuple]) -> dict[str, float]:
    """A mistake: the mean of the ranks' means."""
    losses = [loss / samples for loss, _, samples in totals]
    accuracies = [right / samples for _, right, samples in totals]
    return {
        "loss": sum(losses) / len(totals),
        "accuracy": sum(accuracies) / len(totals),
    }


def _sums_by_ranks(totals: list[tuple]) -> dict[str, float]:
    """A mistake: the sums are divided by the number of ranks."""
    return {
        "loss": sum(loss for loss, _, _ in totals) / len(totals),
        "accuracy": sum(right for _, right, _ in totals) / len(totals),
    }


def _rank_0_alone(totals: list[tuple]) -> dict[str, float]:
    """A mistake: the line of rank 0's shard."""
    return _mean_of_means(totals[:1])


_LINE_CASES = [
    ([(10.0, 6, 10), (2.0, 2, 2)],),
    ([(3.0, 4, 8), (5.0, 8, 8), (1.0, 1, 4)],),
    ([(2.0, 3, 4)],),
]
_ADD_UP_FIRST = "The shards differ in size, so the mean of the ranks' means is not it: "
_ADD_UP_FIRST += "add up first, divide once."
_LINE_TRAPS = {
    _ADD_UP_FIRST: _mean_of_means,
    "Divide by the number of samples, not of ranks.": _sums_by_ranks,
    "That is rank 0's shard alone, as if all_reduce had been forgotten.": _rank_0_alone,
}

# ---- the same training

_Flags = Mapping[str, float]  # of a run: its flags by name, and its world_size


def same_training(one: _Flags, other: _Flags) -> bool:
    """Whether two runs take the same steps on the same data.

    Rounding and dropout may differ.
    """
    return _global_batch(one) == _global_batch(other) and _rest_agrees(one, other)


def _global_batch(flags: _Flags) -> float:
    """Compute the images in a step of all ranks together."""
    ranks = flags["world_size"] if "batch_size_per_rank" in flags else 1
    return _batch_flag(flags) * ranks


def _batch_flag(flags: _Flags) -> float:
    """Return the number that says the batch: of all ranks, or of each."""
    return flags["batch_size"] if "batch_size" in flags else flags["batch_size_per_rank"]


def _rest_agrees(one: _Flags, other: _Flags) -> bool:
    """Whether two runs have the same number of epochs, learning rate and seed."""
    return all(one[name] == other[name] for name in ("epochs", "lr", "seed"))


def _same_with_batch_per_rank(one: _Flags, other: _Flags) -> bool:
    """A mistake: batch_size is taken for the batch of each rank."""
    batches = [_batch_flag(flags) * flags["world_size"] for flags in (one, other)]
    return batches[0] == batches[1] and _rest_agrees(one, other)


_ONE_RANK = {"world_size": 1, "batch_size": 128, "epochs": 2, "lr": 1.0, "seed": 1}
_PER_RANK = {"world_size": 2, "batch_size_per_rank": 64, "epochs": 2, "lr": 1.0, "seed": 1}
_SAME_CASES = [
    (_ONE_RANK, _ONE_RANK | {"world_size": 2}),
    (_ONE_RANK, _PER_RANK),
    (_ONE_RANK, _PER_RANK | {"batch_size_per_rank": 128}),
    (_ONE_RANK, _ONE_RANK | {"world_size": 4, "seed": 2}),
    (_ONE_RANK, _ONE_RANK | {"world_size": 4, "lr": 0.5}),
    (_ONE_RANK, _ONE_RANK | {"epochs": 3}),
]
_SAME_TRAPS = {
    "batch_size_per_rank is of each rank: a step takes so many from every one of them.": (
        lambda one, other: _batch_flag(one) == _batch_flag(other) and _rest_agrees(one, other)
    ),
    "batch_size is of all ranks together, whatever their number.": _same_with_batch_per_rank,
    "Another seed, learning rate or number of epochs is another training.": (
        lambda one, other: _global_batch(one) == _global_batch(other)
    ),
    "The number of ranks may differ: that is the point of the proof.": operator.eq,
}

# ---- a plain script made DDP

PLAIN_SCRIPT = ROOT / "notebooks" / "signals.py"
RANKS = (1, 2, 3)  # of the runs of a script; the others are held against the first
_EPOCHS, _TRAIN_SAMPLES = 2, 960
_MOST = 3  # mistakes that are told at once


def my_ddp_script() -> Path:
    """Return the path of signals.py, made DDP."""
    return ROOT / "notebooks" / "solutions" / "signals_ddp.py"


def _judge(answer: Answer) -> list[str]:
    """List what is still wrong with the script whose path an answer returns, a line each."""
    script = Path(answer()).resolve()  # type: ignore[arg-type]  # whatever a learner returns
    if not script.is_file():
        return [f"there is no file {script}: return the path of your script"]
    if script.read_text() == PLAIN_SCRIPT.read_text():
        return ["the script is still the plain one"]
    flags = "--epochs", _EPOCHS
    runs = {ranks: LearnerRun(script, *flags, ranks=ranks, watched=True) for ranks in RANKS}
    wait_for_runs(*runs.values())
    mistakes: list[str] = []
    for ranks, run in runs.items():
        if complaint := run.complaint():
            return [f"on {ranks} rank{'s' * (ranks > 1)}: {complaint}"]
        mistakes += _mistakes(run, reference=runs[RANKS[0]])
    return list(dict.fromkeys(mistakes))[:_MOST]


def _mistakes(run: LearnerRun, reference: LearnerRun) -> list[str]:
    """List the mistakes that show in a run, held against the run on one rank."""
    notes, [reference_notes, *_] = run.notes(), reference.notes()
    mistakes = _sampling_mistakes(notes)
    saved = [rank.saved[-1] for rank in notes if rank.saved]
    if not saved or not reference_notes.saved:
        return [*mistakes, "nothing is saved: let rank 0 do it at the end"]
    mistakes += _saving_mistakes(saved, reference_notes.saved[-1])
    return mistakes + _printing_mistakes(_epoch_lines(run), _epoch_lines(reference))


def _sampling_mistakes(notes: list["RankNotes"]) -> list[str]:
    """List what is wrong with the training samples that the ranks went through in two epochs."""
    orders = []
    for rank in notes:
        orders.append([indices for size, indices in rank.passes if size == _TRAIN_SAMPLES])
    first, second = ([order[epoch] for order in orders if len(order) > epoch] for epoch in (0, 1))
    if sorted(chain(*first)) != [*range(_TRAIN_SAMPLES)]:
        return ["the ranks do not share the training set out: give its loader a DistributedSampler"]
    if first == second:
        return ["epoch 2 has the order of epoch 1: tell the sampler which epoch it is"]
    return []


def _saving_mistakes(saved: list[dict], reference: dict) -> list[str]:
    """List what is wrong with the weights that ranks saved; reference: those of the run on one."""
    mistakes = []
    if len(saved) > 1:
        mistakes.append("more than one rank saves, into one file: let rank 0 do it")
    if any(name.startswith("module.") for name in saved[0]):
        mistakes.append("the saved names begin with module.: save the model inside the wrapper")
    elif weight_distance(saved[0], reference) > WEIGHT_TOLERANCE:
        questions = "do ranks share --batch-size? who calls the wrapper?"
        mistakes.append(f"the weights are not those of one rank: {questions}")
    return mistakes


def _printing_mistakes(lines: list[str], reference: list[str]) -> list[str]:
    """List what is wrong with the lines about epochs; reference: those of the run on one rank."""
    if len(lines) != _EPOCHS:
        return [f"{len(lines)} lines for {_EPOCHS} epochs: let one rank print"]
    if reference and lines != reference:
        counts = f"the ranks count {lines[0]!r}, one counts {reference[0]!r}"
        return [f"{counts}: each test point once, then a sum"]
    return []


def _epoch_lines(run: LearnerRun) -> list[str]:
    """Collect the lines about epochs that any rank printed."""
    lines = chain.from_iterable(run.lines_of_rank(rank) for rank in range(len(run.exit_statuses)))
    return [line for line in lines if line.startswith("epoch ")]


EXERCISES = [
    Exercise(epoch_line, _LINE_CASES, _LINE_TRAPS),
    Exercise(same_training, _SAME_CASES, _SAME_TRAPS),
    Project(my_ddp_script, [], {}, _judge),
]
