"""The row "one rank" of the audit: one rank and several with one global batch reach one model.

The audit's command calls it in the learner's process, with the notes of both runs. Needs no torch.
"""

from collections.abc import Sequence
from itertools import chain
from math import hypot
from typing import NamedTuple

from ddp_tools.audit.apart import euclid, numbers_of
from ddp_tools.audit.notes import (
    OK,
    RED,
    UNSEEN,
    End,
    Notes,
    Pass,
    RandomUse,
    Row,
    Step,
    Weights,
    Wrap,
    differ,
    digests_by_sample,
    select,
    training_passes,
)

NAME = "one rank"
# Distances of two models, as shares of the way that the weights went in training.
SAME_MODEL, OTHER_MODEL = 1e-3, 0.1
_SAME_START = 1e-6
_SAME_GRADIENTS = 1e-3  # sums over those of the first step that differ by less, by their sizes
_CURE = "is the loss a mean over the rank's batch (where it is one over tokens or positives: over "
_CURE += "those of all ranks, times the number of ranks), the learning rate the same, "
_CURE += "and no gradient summed by hand?"


class Models(NamedTuple):
    """All wrapped models of a rank together: names and sizes, digests, and the notes themselves."""

    names: list[tuple[Sequence[str], Sequence[int]]]
    bits: list[Sequence[str]]
    weights: list[Weights]


def one_rank_arguments(arguments: Sequence[str], flag: str, ranks: list[Notes]) -> list[str]:
    """The script's arguments with which one rank takes the global batch of these ranks.

    The flag may count the samples of all ranks or of each: what they took is measured, and on one
    rank both are one. Raises ValueError, which says why not.
    """
    passes = training_passes(ranks[0])
    if not passes or not passes[0].batch_size:
        reason = "so nobody knows the global batch"
        raise ValueError(f"no loader with a batch size was trained on, {reason}")
    per_rank = passes[0].batch_size
    global_batch = str(per_rank * len(ranks))
    values = _values_of_flag(arguments, flag)
    if not values:  # the ranks took the script's own default
        return [*arguments, f"{flag}={global_batch}"]
    index, value = values[0]
    if len(values) > 1 or value not in (str(per_rank), global_batch):
        cure = f"give it once, with {per_rank} or {global_batch}"
        raise ValueError(f"{flag} {value}: {cure}, since that is what the ranks took")
    joined = arguments[index].startswith(f"{flag}=")
    changed = f"{flag}={global_batch}" if joined else global_batch
    return [*arguments[:index], changed, *arguments[index + 1 :]]


def _values_of_flag(arguments: Sequence[str], flag: str) -> list[tuple[int, str]]:
    """Where the flag has a value, as FLAG=VALUE or FLAG VALUE: the value's index, and the value."""
    joined, apart = [], []
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            joined.append((index, argument.partition("=")[2]))
        elif argument == flag and index + 1 < len(arguments):
            apart.append((index + 1, arguments[index + 1]))
    return joined + apart


def models_at(notes: Notes, when: str) -> Models:
    """All wrapped models of a rank, at their begin or end. Raises ValueError if there is none."""
    weights = [note for note in select(notes, Weights) if note.when == when]
    first_notes = {note.model: note for note in reversed(weights)}
    if not first_notes:
        raise ValueError("no model was wrapped in DistributedDataParallel")
    models = [first_notes[number] for number in sorted(first_notes)]
    names = [(note.names, note.sizes) for note in models]
    return Models(names, [note.bits for note in models], models)


def distance(models: Models, others: Models) -> float:
    """How far apart two models are, over all their weights."""
    pairs = zip(models.weights, others.weights, strict=True)
    return hypot(*(euclid(numbers_of(note), numbers_of(other)) for note, other in pairs))


def compare_with_one_rank(single: Notes, ranks: list[Notes]) -> Row:
    """Judge whether one rank and these ranks ended with the same weights."""
    try:
        _check_alike(single, ranks[0])
        steps = _common_steps(single, ranks)
        length = _way_of_weights(single, ranks[0])
    except ValueError as reason:
        return Row(NAME, UNSEEN, str(reason))
    share = distance(models_at(single, "end"), models_at(ranks[0], "end")) / length
    each = training_passes(ranks[0])[0].batch_size
    batches = f"{len(steps[0])} in each, {each} on a rank"
    seen = f"after {len(steps)} steps with the same samples ({batches}), "
    seen += f"one rank and {len(ranks)} are {share:.2g} of their way apart"
    if share < SAME_MODEL:
        return Row(NAME, OK, seen)
    first, other = (select(notes, Step)[0].sums for notes in (single, ranks[0]))
    if differ(first, other, _SAME_GRADIENTS):
        seen += ", and the gradients of the first step differ"
    elif share <= OTHER_MODEL:
        return Row(NAME, UNSEEN, f"{seen}: is it rounding that has grown?")
    return Row(NAME, RED, seen, _CURE)


def _check_alike(single: Notes, several: Notes) -> None:
    """Raise ValueError where one rank's models cannot be compared with those of one of several."""
    ends = select(single, End)
    if not ends or any(note.status for note in ends):
        raise ValueError("the run on one rank did not come to its end: see notes_one/output.log")
    if models_at(single, "begin").names != models_at(several, "begin").names:
        raise ValueError("on one rank another model is wrapped in DistributedDataParallel")
    models_at(single, "end"), models_at(several, "end")
    if select(single, RandomUse) or any(note.has_batch_norm for note in select(single, Wrap)):
        cure = "leave them out for the comparison"
        raise ValueError(f"dropout or BatchNorm make one rank's training another: {cure}")
    digests = digests_by_sample(single)
    for sample, given in digests_by_sample(several).items():
        if sample in digests and not {*given} & {*digests[sample]}:
            seen = f"on one rank the dataset gives other values for sample {sample[1]}"
            raise ValueError(f"{seen} (augmentation?): leave that out for the comparison")


def _way_of_weights(single: Notes, several: Notes) -> float:
    """How far the weights went on one rank. Raises ValueError if nowhere, or from another start."""
    first = models_at(single, "begin")
    length = distance(first, models_at(single, "end"))
    if not length:
        raise ValueError("on one rank the weights did not move, so there is nothing to compare")
    if distance(first, models_at(several, "begin")) > _SAME_START * length:
        cure = "set the seed before the model is made"
        raise ValueError(f"the first weights differ from run to run: {cure}")
    return length


def _common_steps(single: Notes, ranks: list[Notes]) -> list[list[int | str]]:
    """The samples of each step of all ranks. Raises ValueError where one rank took others."""
    steps = [_samples_of_steps(training_passes(notes)) for notes in ranks]
    together = [sorted(chain(*parts), key=str) for parts in zip(*steps, strict=False)]
    alone = [sorted(samples, key=str) for samples in _samples_of_steps(training_passes(single))]
    if together != alone or not together:
        reason = "so the models cannot be compared"
        raise ValueError(f"the steps on one rank have other samples, {reason}")
    return together


def _samples_of_steps(passes: list[Pass]) -> list[list[int | str]]:
    """The samples of each step, of full batches. Raises ValueError at one that is not full."""
    steps = []
    for note in passes:
        if len(note.samples) % note.batch_size:
            cure = "choose a batch size that divides the dataset"
            raise ValueError(f"the last batch of an epoch is not full: {cure}")
        for first in range(0, len(note.samples), note.batch_size):
            steps.append([*note.samples[first : first + note.batch_size]])
    return steps
