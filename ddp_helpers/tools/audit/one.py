"""One rank and several, with the same global batch, are to reach one model: the row that compares them."""

from collections.abc import Sequence
from itertools import chain, pairwise

from ddp_helpers.tools.audit.notes import OK, RED, UNSEEN, Notes, Row, of

NAME = "one rank"
EQUAL, OTHER = 0.02, 0.1  # of the way that the weights went: nearer is the same model, farther is another
CURE = "is the loss a mean over the rank's batch, the learning rate the same, and no gradient summed by hand?"


def trained(notes: Notes) -> Notes:
    """A rank's training passes over datasets with a length."""
    return [note for note in of(notes, "pass") if note["steps"] and not note["iterable"]]


def alone(words: Sequence[str], flag: str, ranks: list[Notes]) -> list[str]:
    """The words with which one rank takes the global batch of these ranks. Raises ValueError, which says why not.

    The flag may count the samples of all ranks or of each: what they took is measured, and on one rank both are one.
    """
    if not flag:
        raise ValueError("to have one rank compared with several, name the script's flag: --batch-size-flag=…")
    passes = trained(ranks[0])
    if not passes or not passes[0]["batch"]:
        raise ValueError("no loader with a batch size was trained on, so nobody knows the global batch")
    batch, whole = passes[0]["batch"], str(passes[0]["batch"] * len(ranks))
    pairs = [(n, *word.split("=", 1)) for n, word in enumerate(words) if word.startswith(f"{flag}=")]
    pairs += [(n + 1, "", value) for n, (word, value) in enumerate(pairwise(words)) if word == flag]
    if not pairs:  # the ranks took the script's own default
        return [*words, f"{flag}={whole}"]
    [(place, name, value), *more] = pairs
    if more or value not in (str(batch), whole):
        raise ValueError(f"{flag} {value}: give it once, with {batch} or {whole}, since that is what the ranks took")
    return [*words[:place], f"{name}={whole}" if name else whole, *words[place + 1 :]]


def steps(passes: Notes) -> list[list]:
    """The samples of each step, of full batches. Raises ValueError at one that is not full."""
    if any(len(note["samples"]) % note["batch"] for note in passes):
        raise ValueError("the last batch of an epoch is not full: choose a batch size that divides the dataset")
    sizes = [(note["samples"], note["batch"]) for note in passes]
    return [samples[first : first + size] for samples, size in sizes for first in range(0, len(samples), size)]


def models(notes: Notes, when: str) -> dict[str, list]:
    """Names, sums and digests of all wrapped models, at their begin or end. Raises ValueError if there is none."""
    each = {note["model"]: note for note in reversed(of(notes, "weights")) if note["when"] == when}
    if not each:
        raise ValueError("no model was wrapped in DistributedDataParallel")
    return {part: [*chain(*(each[n][part] for n in sorted(each)))] for part in ("names", "sums", "bits")}


def way(one: dict, other: dict) -> float:
    """How far apart two models are, by the sums over their weights."""
    pairs = zip(chain(*one["sums"]), chain(*other["sums"]), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


def compare(single: Notes, ranks: list[Notes]) -> Row:
    """Judge whether one rank and these ranks, which took the same global batches, ended with the same weights."""
    try:
        if any(note["status"] for note in of(single, "ends")) or not of(single, "ends"):
            raise ValueError("the run on one rank did not come to its end: see notes_one/output.log")
        first, last = ([models(notes, when) for notes in (single, ranks[0])] for when in ("begin", "end"))
        if first[0]["names"] != first[1]["names"]:
            raise ValueError("on one rank another model is wrapped in DistributedDataParallel")
        if of(single, "random") or any(note["norms"] for note in of(single, "wrapped")):
            raise ValueError("dropout or BatchNorm make one rank's training another: leave them out for the comparison")
        parts = [steps(trained(notes)) for notes in ranks]
        both = [sorted(chain(*several)) for several in zip(*parts, strict=False)]
        if both != [sorted(samples) for samples in steps(trained(single))] or not both:
            raise ValueError("the steps on one rank have other samples, so the models cannot be compared")
        went = way(first[0], last[0])
        if not went:
            raise ValueError("on one rank the weights did not move, so there is nothing to compare")
        if way(*first) > 1e-6 * went:
            raise ValueError("the first weights differ from run to run: set the seed before the model is made")
    except ValueError as why:
        return Row(NAME, UNSEEN, str(why))
    share = way(*last) / went
    seen = f"after {len(both)} steps with the same samples ({len(both[0])} in each, {len(parts[0][0])} on a rank), "
    seen += f"one rank and {len(ranks)} are {share:.2g} of their way apart"
    if share > OTHER:
        return Row(NAME, RED, seen, CURE)
    return Row(NAME, OK if share < EQUAL else UNSEEN, seen)
