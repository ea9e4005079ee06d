"""The exercises of 06 and 06b: an epoch's line, the same training, a script made DDP, counts.

`lessons.check` asks them for verdicts, in the driver process. The checker of the last one, which
has its name, starts the learner's script on ranks, and compares the results with one rank's.
"""

import operator
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import mean

from ddp_helpers import ROOT
from ddp_helpers.lessons.comparison import Comparison, difference
from ddp_helpers.lessons.exercise import Answer, Exercise, JudgedExercise
from ddp_helpers.lessons.ranks_judge import SAME_CALLS
from ddp_helpers.lessons.run_script import (
    WEIGHT_TOLERANCE,
    LearnerRun,
    wait_for_runs,
    weight_distance,
)

# ---- an epoch's line


def epoch_line(totals: list[tuple]) -> dict[str, float]:
    """Compute loss and accuracy of all ranks together.

    totals: for each rank, the sum of its losses, its right answers, and its samples.
    """
    loss, right, samples = (sum(column) for column in zip(*totals, strict=True))
    return {"loss": loss / samples, "accuracy": right / samples}


def _mean_of_means(totals: list[tuple]) -> dict[str, float]:
    """A mistake: the mean of the ranks' means."""
    lines = [epoch_line([of_rank]) for of_rank in totals]
    return {name: mean(line[name] for line in lines) for name in lines[0]}


_LINE_CASES = [
    ([(10.0, 6, 10), (2.0, 2, 2)],),
    ([(3.0, 4, 8), (5.0, 8, 8), (1.0, 1, 4)],),
    ([(2.0, 3, 4)],),
]
_ADD_UP_FIRST = "The shards differ in size, so the mean of the ranks' means is wrong: "
_ADD_UP_FIRST += "add up first, divide once."
_LINE_TRAPS = {
    _ADD_UP_FIRST: _mean_of_means,
    "Divide by the number of samples, not of ranks.": (
        lambda totals: epoch_line([(loss, right, 1) for loss, right, _ in totals])
    ),
}

# ---- the same training

_Flags = dict[str, float]  # of a run: its flags by name, and its world_size


def same_training(one: _Flags, other: _Flags) -> bool:
    """Whether two runs take the same steps on the same data.

    Rounding and dropout may differ.
    """
    return _steps(one) == _steps(other)


def _steps(flags: _Flags) -> tuple[float, ...]:
    """Return what decides the steps of a run: the batch of all its ranks, and three flags."""
    batch = flags.get("batch_size") or flags["batch_size_per_rank"] * flags["world_size"]
    return batch, flags["epochs"], flags["lr"], flags["seed"]


def _per_rank(flags: _Flags) -> _Flags:
    """Return the flags of a run whose batch_size is mistaken for the per-rank batch."""
    return flags | {"batch_size": _steps(flags | {"world_size": 1})[0] * flags["world_size"]}


_ONE_RANK = {"world_size": 1, "batch_size": 128, "epochs": 2, "lr": 1.0, "seed": 1}
_PER_RANK = {"world_size": 2, "batch_size_per_rank": 64, "epochs": 2, "lr": 1.0, "seed": 1}
_SAME_CASES = [
    (_ONE_RANK, _ONE_RANK | {"world_size": 2}),
    (_ONE_RANK, _PER_RANK),
    (_PER_RANK, _ONE_RANK),
    (_ONE_RANK, _PER_RANK | {"batch_size_per_rank": 128}),
    (_ONE_RANK, _ONE_RANK | {"world_size": 4, "seed": 2}),
    (_ONE_RANK, _ONE_RANK | {"world_size": 4, "lr": 0.5}),
    (_ONE_RANK, _ONE_RANK | {"epochs": 3}),
]
_SAME_TRAPS = {
    "batch_size_per_rank is of one rank: a step takes that many from each rank.": (
        lambda one, other: same_training(one | {"world_size": 1}, other | {"world_size": 1})
    ),
    "batch_size is of all ranks together, for any number of ranks.": (
        lambda one, other: same_training(_per_rank(one), _per_rank(other))
    ),
    "A different seed, learning rate or number of epochs is a different training.": (
        lambda one, other: _steps(one)[0] == _steps(other)[0]
    ),
    "The number of ranks may differ: that is the point of the proof.": operator.eq,
}

# ---- 06b, 1: the counts of loss_and_metrics in a batch


def count_in_batch(scores: list[list[float]], labels: list[int]) -> dict[str, float]:
    """Count the samples, and those whose label is the best class, or one of the two best."""
    best = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in scores]
    ranked = list(zip(best, labels, strict=True))
    accuracy = sum(label == order[0] for order, label in ranked)
    top2 = sum(label in order[:2] for order, label in ranked)
    return {"samples": len(labels), "accuracy": accuracy, "top2": top2}


def _means(scores: list[list[float]], labels: list[int]) -> dict[str, float]:
    """A mistake: shares of the batch instead of sums."""
    counts = count_in_batch(scores, labels)
    return {name: n / (1 if name == "samples" else len(labels)) for name, n in counts.items()}


def _second_alone(scores: list[list[float]], labels: list[int]) -> dict[str, float]:
    """A mistake: those whose label is the second best class, only."""
    counts = count_in_batch(scores, labels)
    return counts | {"top2": counts["top2"] - counts["accuracy"]}


_COUNT_CASES = [
    ([[0.1, 2.0, 0.5], [1.5, 0.2, 0.9], [0.3, 0.1, 0.2], [0.0, 1.0, 2.0]], [1, 2, 1, 2]),
    ([[3.0, -1.0, 0.5, 1.0], [0.2, 0.4, 0.1, 0.3]], [3, 2]),
]
_COUNT_TRAPS = {
    "Return sums over the batch, not means: `report` divides once, over all ranks.": _means,
    "A right answer is also among the two best.": _second_alone,
    "`samples` must be among them: it divides the others.": (
        lambda scores, labels: {
            name: n for name, n in count_in_batch(scores, labels).items() if name != "samples"
        }
    ),
}

# ---- a plain script made DDP

PLAIN_SCRIPT = ROOT / "notebooks" / "signals.py"
RANKS = (1, 2, 3)  # of the runs of a script; the others are compared with the first
_EPOCHS, _TRAIN_SAMPLES = 2, 960
_MOST = 3  # mistakes that are shown at once
_UNSEEN = "not covered: GPUs; a start without a launcher (step 2); a batch that the ranks cannot "
_UNSEEN += "share (6); each rank's own seed for dropout (7); the barrier at the end (10)"


def my_ddp_script(path_of_script: Answer) -> list[str]:
    """List what is still wrong with signals.py, made DDP, a line each."""
    script = Path(path_of_script()).resolve()  # type: ignore[arg-type]  # whatever a learner returns
    if not script.is_file():
        return [f"there is no file {script}: return the path of your script"]
    if script.read_text() == PLAIN_SCRIPT.read_text():
        return ["the script is still the plain one"]
    flags = "--epochs", _EPOCHS
    runs = {ranks: LearnerRun(script, *flags, ranks=ranks, watched=True) for ranks in RANKS}
    wait_for_runs(*runs.values())
    mistakes: dict[str, dict[str, list[int]]] = {}  # the ranks by difference, by hint
    for ranks, run in runs.items():
        if complaint := run.complaint():
            waited = "gloo/" in complaint or None in run.exit_statuses
            return [*[SAME_CALLS] * waited, f"{_on([ranks])}: {complaint}"]
        for hint, comparison in _compared(run, runs[RANKS[0]]):
            if told := difference(comparison):
                mistakes.setdefault(hint, {}).setdefault(told, []).append(ranks)
    lines = []
    for hint, differences in list(mistakes.items())[:_MOST]:
        lines += [hint, *(f"{_on(sizes)}: {told}" for told, sizes in differences.items())]
    return lines


def _on(sizes: list[int]) -> str:
    """Name runs by their ranks, as in on 2 and 3 ranks."""
    *first, last = map(str, sizes)
    numbers = f"{', '.join(first)} and {last}" if first else last
    return f"on {numbers} rank{'s' * (sizes != [1])}"


def _compared(run: LearnerRun, reference: LearnerRun) -> Iterator[tuple[str, Comparison]]:
    """Compare the ranks' notes with the run on one rank; yield a hint with each comparison."""
    notes = run.notes()
    orders = [[order for size, order in rank.passes if size == _TRAIN_SAMPLES] for rank in notes]
    first = sorted(chain(*(order[0] for order in orders if order)))
    samples = Comparison("the samples of epoch 1, of all ranks", first, [*range(_TRAIN_SAMPLES)])
    yield "Shard the training set: give its loader a DistributedSampler.", samples
    if not difference(samples):
        repeats = all(order[:1] == order[1:2] for order in orders)
        what = "whether epoch 2 has the order of epoch 1"
        yield "Tell the sampler which epoch it is.", Comparison(what, repeats, False)
    saved = [rank.saved[-1] for rank in notes if rank.saved]
    right = [rank.saved[-1] for rank in reference.notes() if rank.saved]
    hint = "One file, so one rank: let rank 0 save." if saved else "Let rank 0 save at the end."
    yield hint, Comparison("ranks that save", len(saved), 1)
    wrapped = [name for name in chain(*saved) if name.startswith("module.")][:1]
    yield "Save the model inside the wrapper.", Comparison("the wrapper's names", wrapped, [])
    if saved and right and not wrapped:
        equal = weight_distance(saved[0], right[0]) <= WEIGHT_TOLERANCE
        what = "whether the weights are those of one rank"
        yield _WHY, Comparison(what, equal, True)
    lines, right_lines = _epoch_lines(run), _epoch_lines(reference)
    hint = "Let one rank print." if lines else "Let rank 0 print a line for each epoch."
    yield hint, Comparison("lines about epochs", len(lines), _EPOCHS)
    if len(lines) == len(right_lines):
        epochs = Comparison("the epochs' lines", lines, right_lines)
        yield "Count each test point once, then sum.", epochs


_WHY = "Do the ranks share --batch-size? Does forward use the wrapper?"


def _epoch_lines(run: LearnerRun) -> list[str]:
    """Collect the lines about epochs that any rank printed."""
    lines = chain.from_iterable(run.lines_of_rank(rank) for rank in range(len(run.exit_statuses)))
    return [line for line in lines if line.startswith("epoch ")]


EXERCISES = [
    Exercise(epoch_line, _LINE_CASES, _LINE_TRAPS),
    Exercise(same_training, _SAME_CASES, _SAME_TRAPS),
    JudgedExercise("my_ddp_script", my_ddp_script, _UNSEEN),
    Exercise(count_in_batch, _COUNT_CASES, _COUNT_TRAPS),
]
