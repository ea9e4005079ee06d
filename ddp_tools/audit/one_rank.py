"""The check "1-rank parity" of the audit: one rank and several take the same steps.

The audit's command calls it in the driver process, with the notes of both runs. Needs no torch.
"""

from collections.abc import Sequence
from itertools import chain
from math import hypot, isclose
from typing import NamedTuple

from ddp_tools.audit.distances import euclid, is_double, numbers_of
from ddp_tools.audit.notes import (
    FAIL,
    OK,
    UNKNOWN,
    End,
    Notes,
    Pass,
    RandomUse,
    Row,
    Step,
    TimeUp,
    Weights,
    Wrap,
    differ,
    digests_by_sample,
    select,
    training_passes,
)

NAME = "1-rank parity"
# Distances of two models, as fractions of the distance that training moved the weights.
SAME_MODEL, OTHER_MODEL = 1e-3, 0.1
# float64 rounds by 1e-16: to reach this, rounding would have to grow 1e10 times, and in float32
# that would make any two models differ. The .f64 files hold float64, so reading rounds nothing.
SAME_DOUBLE = 1e-6
_SAME_RATE = 1e-6  # relative
_SAME_START = 1e-6
_SAME_GRADIENTS = 1e-3  # tolerance for sums over the first step's gradients, relative to sizes
_CURE = "is the loss a mean over the rank's batch (a mean over tokens or positives: over the ones "
_CURE += "of all ranks, times the number of ranks), the learning rate the same, "
_CURE += "and no gradient summed by hand?"
_STEPS_CURE = "let the schedule count optimizer steps: one scheduler.step() after each, in all "
_STEPS_CURE += "epochs * len(train_batches), of this rank's loader; scale a rate by the global "
_STEPS_CURE += "batch, not by world_size, or give one rank the same rate in --one-rank-with=…"
_WORDS = "give one rank the arguments for the same global batch in --one-rank-with=…"


class Models(NamedTuple):
    """All wrapped models of a rank together: names and sizes, digests, and the notes themselves."""

    names: list[tuple[Sequence[str], Sequence[int]]]
    bits: list[Sequence[str]]
    weights: list[Weights]


def one_rank_words(flag: str, ranks: list[Notes]) -> list[str]:
    """The extra argument that gives one rank the global batch of these ranks.

    The flag may count the samples of all ranks or of each: the batch that each took is measured,
    and on one rank both are equal. Raises ValueError with the reason if there is none.
    """
    passes = training_passes(ranks[0])
    if not passes or not passes[0].batch_size:
        reason = f"so the global batch is unknown: {_WORDS} instead of --batch-size-flag"
        raise ValueError(f"no loader with a batch size was trained on, {reason}")
    return [f"{flag}={passes[0].batch_size * len(ranks)}"]


def models_at(notes: Notes, when: str) -> Models:
    """All wrapped models of a rank; when: "begin" or "end". Raises ValueError if there is none."""
    weights = [note for note in select(notes, Weights) if note.when == when]
    first_notes = {note.model: note for note in reversed(weights)}
    if not first_notes:
        raise ValueError("no model was wrapped in DistributedDataParallel")
    models = [first_notes[number] for number in sorted(first_notes)]
    names = [(note.names, note.sizes) for note in models]
    return Models(names, [note.bits for note in models], models)


def distance(models: Models, others: Models) -> float:
    """The Euclidean distance of two models, over all their weights."""
    pairs = zip(models.weights, others.weights, strict=True)
    return hypot(*(euclid(numbers_of(note), numbers_of(other)) for note, other in pairs))


def compare_with_one_rank(single: Notes, ranks: list[Notes]) -> Row:
    """Judge whether one rank and these ranks took the same steps, to the same weights."""
    try:
        if seen := _steps_apart(single, ranks):
            return Row(NAME, FAIL, seen, _STEPS_CURE)
        _check_alike(single, ranks[0])
        seen = _common_steps(single, ranks)
        length = _way_of_weights(single, ranks[0])
    except ValueError as reason:
        return Row(NAME, UNKNOWN, str(reason))
    ends = models_at(single, "end")
    share = distance(ends, models_at(ranks[0], "end")) / length
    seen += f"one rank and {len(ranks)} differ by {share:.2g} of the distance trained"
    exact = all(is_double(note) for note in ends.weights)
    if share < (SAME_DOUBLE if exact else SAME_MODEL):
        return Row(NAME, OK, seen)
    alike = _begin_alike(single, ranks[0])
    if not alike:
        seen += ", and the gradients of the first step differ"
    if not _know_samples(single, ranks):
        return Row(NAME, UNKNOWN, f"{seen}: did one rank take the samples of both? If so: {_CURE}")
    if alike and not exact and share <= OTHER_MODEL:
        return Row(NAME, UNKNOWN, f"{seen}: is it accumulated rounding?")
    return Row(NAME, FAIL, seen, _CURE)


def _steps_apart(single: Notes, ranks: list[Notes]) -> str:
    """Describe the step at which learning rates differ, or unequal numbers of steps; or "".

    Raises ValueError if that may be correct, because the global batch is or may be different.
    """
    alone, together = _samples_in_step([single]), _samples_in_step(ranks)
    known = bool(alone and together)
    if known and alone != together:
        seen = f"in a step one rank took {alone} samples, and {len(ranks)} ranks {together}"
        raise ValueError(f"{seen} together: {_WORDS}")
    ends = [note for notes in (single, ranks[0]) for note in select(notes, End) if not note.status]
    counts = [note.steps for note in ends]
    numbers = ""
    if len(counts) == 2 and counts[0] != counts[1] and not known:
        numbers = f"one rank made {counts[0]} steps, and {len(ranks)} ranks {counts[1]}"
    if len(counts) == 2 and counts[0] == 0 < counts[1]:
        cure = "give checkpoints a relative path: each run has its own working directory"
        seen = "one rank made no step: did it resume from the ranks' last checkpoint?"
        raise ValueError(f"{seen} If so, {cure}")
    # No loader shows the global batch, but equal numbers of steps, or the first gradients, do.
    if not (known or _begin_alike(single, ranks[0])):
        if numbers:
            raise ValueError(f"{numbers}: did one rank take the global batch? If not, {_WORDS}")
        if len(counts) < 2:
            return ""
    steps = zip(select(single, Step), select(ranks[0], Step), strict=False)
    for number, (step, step_of_rank) in enumerate(steps, 1):
        for rate, other in zip(step.rates, step_of_rank.rates, strict=False):
            if not isclose(rate, other, rel_tol=_SAME_RATE):
                seen = f"at step {number} the learning rate is {rate:.7g} on one rank and "
                seen += f"{other:.7g} on {len(ranks)}, with one global batch: does "
                before = {*chain(*(each.rates for each in select(single, Step)[: number - 1]))}
                if len(before) == 1 and _is_random(single):  # it may have dropped at a plateau
                    raise ValueError(f"{seen}it follow the loss, which differs under dropout?")
                return f"{seen}its schedule count samples, or anything that depends on world_size?"
    return numbers and f"{numbers}, though their first gradients, and so the batch, are the same"


def _samples_in_step(ranks: list[Notes]) -> int:
    """How many samples these ranks together take per step; 0 if the notes do not show it."""
    count = 0
    for notes in ranks:
        passes, steps = training_passes(notes)[:1], select(notes, Step)[:2]
        # Between two epochs a test may also call the model.
        if not passes or passes[0].steps < 2 or len(steps) < 2:
            return 0
        count += passes[0].batch_size * (steps[1].forwards - steps[0].forwards)
    return count


def _begin_alike(single: Notes, several: Notes) -> bool:
    """Whether the first step's gradients are equal, as from the same batch and the same loss."""
    firsts = [select(notes, Step)[:1] for notes in (single, several)]
    sums = [[*step.sums, *step.other_sums] for steps in firsts for step in steps]
    return len(sums) == 2 and bool(sums[0]) and not differ(sums[0], sums[1], _SAME_GRADIENTS)


def _check_alike(single: Notes, several: Notes) -> None:
    """Raise ValueError if the models of the one-rank run and of rank 0 cannot be compared."""
    for note in select(single, TimeUp):
        cure = "give more seconds, or less data"
        raise ValueError(f"--limit {note.limit:g} ended the run on one rank: {cure}")
    ends = select(single, End)
    if not ends or any(note.status for note in ends):
        raise ValueError("the run on one rank failed: see notes_one/output.log")
    if models_at(single, "begin").names != models_at(several, "begin").names:
        raise ValueError("on one rank a different model is wrapped in DistributedDataParallel")
    models_at(single, "end"), models_at(several, "end")
    if _is_random(single):
        cure = "leave them out for the comparison"
        raise ValueError(f"with dropout or BatchNorm one rank trains differently: {cure}")
    digests = digests_by_sample(single)
    for sample, given in digests_by_sample(several).items():
        if sample in digests and not {*given} & {*digests[sample]}:
            seen = f"on one rank the dataset gives different values for sample {sample[1]}"
            raise ValueError(f"{seen} (augmentation?): leave that out for the comparison")


def _is_random(single: Notes) -> bool:
    """Whether a rank's model draws random numbers or has BatchNorm."""
    batch_norm = any(note.has_batch_norm for note in select(single, Wrap))
    return batch_norm or bool(select(single, RandomUse))


def _way_of_weights(single: Notes, several: Notes) -> float:
    """The distance that training moved the weights on one rank.

    Raises ValueError if it is 0, or if the first weights of the two runs differ.
    """
    first = models_at(single, "begin")
    length = distance(first, models_at(single, "end"))
    if not length:
        raise ValueError("on one rank the weights did not change, so there is nothing to compare")
    if distance(first, models_at(several, "begin")) > _SAME_START * length:
        cure = "set the seed before the model is made"
        raise ValueError(f"the first weights differ from run to run: {cure}")
    return length


def _know_samples(single: Notes, ranks: list[Notes]) -> bool:
    """Whether each step's samples are known: all runs trained from loaders with a batch size."""
    passes = [training_passes(notes) for notes in (single, *ranks)]
    return all(passes) and all(note.batch_size for each in passes for note in each)


def _common_steps(single: Notes, ranks: list[Notes]) -> str:
    """Describe the steps of all ranks. Raises ValueError if one rank took different samples."""
    if not _know_samples(single, ranks):
        return f"after {select(single, End)[0].steps} steps, on samples from no loader, "
    steps = [_samples_of_steps(training_passes(notes)) for notes in ranks]
    together = [sorted(chain(*parts), key=str) for parts in zip(*steps, strict=False)]
    alone = [sorted(samples, key=str) for samples in _samples_of_steps(training_passes(single))]
    if together != alone or not together:
        reason = "so the models cannot be compared"
        raise ValueError(f"the steps on one rank have different samples, {reason}")
    batches = f"{len(together[0])} per step, {training_passes(ranks[0])[0].batch_size} per rank"
    return f"after {len(together)} steps with the same samples ({batches}), "


def _samples_of_steps(passes: list[Pass]) -> list[list[int | str]]:
    """The samples of each step, which takes one full batch or several full micro-batches.

    Raises ValueError if a batch is not full, or if micro-batches are left over.
    """
    steps = []
    for note in passes:
        if len(note.samples) % note.batch_size:
            cure = "choose a batch size that divides the dataset"
            raise ValueError(f"the last batch of an epoch is not full: {cure}")
        batches = len(note.samples) // note.batch_size
        if batches % note.steps:
            cure = "choose a number of micro-batches per step that divides the batches"
            raise ValueError(f"{batches} batches made {note.steps} steps in an epoch: {cure}")
        size = note.batch_size * (batches // note.steps)
        for first in range(0, len(note.samples), size):
            steps.append([*note.samples[first : first + size]])
    return steps
