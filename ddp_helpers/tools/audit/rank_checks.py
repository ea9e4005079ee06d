"""Checks of the audit that compare what each rank did: its end, weights, collectives, files.

`judge` calls each with the notes of all ranks, in the learner's process. Needs no torch.
"""

import linecache
import re
from itertools import zip_longest

from ddp_helpers.tools.audit.notes import (
    OK,
    RED,
    UNSEEN,
    Collective,
    Communication,
    End,
    FileWritten,
    Finding,
    GroupCollective,
    Notes,
    Pass,
    RandomUse,
    Save,
    Step,
    TimeUp,
    Weights,
    Wrap,
    differ,
    select,
    short_line,
)

_GLOO_SOURCE = re.compile(r"\[/\S+:\d+\] ")  # where gloo was built
_WIDTH = 110  # letters of an error
_COMPARED = 8  # forward passes whose random numbers are compared
_SEE_LOG = "notes/output.log has all messages; "
_SEE_LOG += "'collectives' says whether one rank left another waiting"


def end(ranks: list[Notes]) -> Finding:
    """All ranks ended by themselves, with status 0."""
    if any(select(notes, TimeUp) for notes in ranks):
        return _ended_at_limit(ranks)
    lost, failed = [], []
    for rank, notes in enumerate(ranks):
        ends = select(notes, End)
        failed += [(note, rank) for note in ends if note.status]
        if not ends:
            lost.append(f"rank {rank} was ended by a signal")
    if failed:
        # The errors of the others may follow from the first one.
        note, rank = min(failed, key=lambda pair: pair[0].time)
        message = f"rank {rank} at {short_line(note.at)}: {_error_of(note)}"
        return Finding(RED, "; ".join([message, *lost]), _SEE_LOG)
    if lost:
        return Finding(RED, "; ".join(lost), _SEE_LOG)
    return Finding(OK, f"{len(ranks)} ranks ended with status 0")


def _ended_at_limit(ranks: list[Notes]) -> Finding:
    """Say where each rank was when the time was up."""
    hanging, left = [], []
    for rank, notes in enumerate(ranks):
        if time_up := select(notes, TimeUp):
            note = time_up[0]
            hanging.append(f"rank {rank} at {short_line(note.at)} in {note.function}")
        else:
            left.append(f"rank {rank} had ended")
    seen = f"ended at the limit: {', '.join([*hanging, *left])}"
    return Finding(RED, seen, "see 'collectives'; where nothing hangs, a longer --limit")


def _error_of(note: End) -> str:
    """The error of a rank that failed, in a line."""
    error = _GLOO_SOURCE.sub("", note.why)[:_WIDTH] or f"exit status {note.status}"
    path, _, line = note.at.rpartition(":")
    if error.endswith(": "):  # as of an assert without a message
        error += linecache.getline(path, int(line)).strip()
    return error


def replicas(ranks: list[Notes]) -> Finding:
    """After each epoch and at the end, all ranks hold the same weights."""
    weights = [select(notes, Weights) for notes in ranks]
    for notes_at_once in zip(*weights, strict=False):
        first = notes_at_once[0]
        for rank, note in enumerate(notes_at_once):
            if note.names == first.names and differ(note.sums, first.sums):
                when = "at the end" if note.when == "end" else "after an epoch"
                name = _first_that_differs(note, first)
                wrapped_at = short_line(select(ranks[0], Wrap)[0].at)
                return Finding(
                    RED,
                    f"{when} rank {rank} holds another {name} than rank 0",
                    f"see 'gradients'; the model is wrapped in {wrapped_at}",
                )
    if not all(weights):
        return Finding(UNSEEN, "no model was wrapped in DistributedDataParallel")
    compared = len(weights[0])
    return Finding(OK, f"equal on all ranks, compared after epochs and at the end: {compared}")


def _first_that_differs(weights: Weights, others: Weights) -> str:
    """The name of the first tensor in which two ranks' weights differ."""
    tensors = zip(weights.names, weights.sums, others.sums, strict=True)
    return next(name for name, sums, other in tensors if differ([sums], [other]))


def gradients(ranks: list[Notes]) -> Finding:
    """At each step of an optimizer, all ranks hold the same gradients."""
    steps = [select(notes, Step) for notes in ranks]
    wraps = select(ranks[0], Wrap)
    if not wraps or not any(step.wrapped_parameters for step in steps[0]):
        return Finding(UNSEEN, "no optimizer stepped the weights of a wrapped model")
    for number, notes_at_once in enumerate(zip(*steps, strict=False), 1):
        first = notes_at_once[0]
        if any(differ(step.sums, first.sums) for step in notes_at_once):
            called = "the wrapper was not called before it"
            if first.forwards:
                called = f"the wrapper was called {first.forwards} times"
            at, wrapped_at = short_line(first.at), short_line(wraps[0].at)
            seen = f"{at}: step {number} had other gradients on each rank; {called}"
            cure = f"call what DDP() returned in {wrapped_at}, not the model inside"
            return Finding(RED, seen, f"{cure}; no no_sync() at the last")
    count = len(steps[0])
    if not any(size for step in steps[0] for _, size in step.sums):
        question = "does the loss depend on the weights?"
        return Finding(UNSEEN, f"all are zero at the first {count} steps: {question}")
    return Finding(OK, f"equal on all ranks at the first {count} steps")


def collectives(ranks: list[Notes]) -> Finding:
    """All ranks call the same collectives, in the same order."""
    calls = [select(notes, Collective) for notes in ranks]
    for number, calls_at_once in enumerate(zip_longest(*calls), 1):
        called = {rank: call for rank, call in enumerate(calls_at_once) if call}
        absent = [rank for rank in range(len(ranks)) if rank not in called]
        alike = len({(call.name, *(call.size or ())) for call in called.values()}) == 1
        if not alike or (absent and all(_is_known(ranks[rank]) for rank in absent)):
            each = [f"rank {rank} calls {_call_text(call)}" for rank, call in called.items()]
            each += [f"rank {rank} does not come" for rank in absent]
            return Finding(
                RED,
                f"call {number}: {', '.join(each)}",
                "let all ranks make this call, or none: no `if rank == 0`",
            )
        if absent:
            return Finding(UNSEEN, f"alike for {number - 1} calls; then a rank failed")
    if not calls[0]:
        return Finding(UNSEEN, "none")
    in_groups = len(select(ranks[0], GroupCollective))
    rest = f"; {in_groups} in other groups were not compared" if in_groups else ""
    return Finding(OK, f"the same {len(calls[0])} calls on all ranks{rest}")


def _is_known(notes: Notes) -> bool:
    """Whether a rank's notes say that it makes no more calls: it hangs elsewhere, or ended well."""
    ended_well = any(note.status == 0 for note in select(notes, End))
    return bool(select(notes, TimeUp)) or ended_well


def _call_text(call: Communication) -> str:
    """The name and the size of a call, and where it is made."""
    size = f" {call.size}" if call.size else ""
    return f"{call.name}{size} at {short_line(call.at)}"


def files(ranks: list[Notes]) -> Finding:
    """No two ranks write the same file."""
    written = [{note.path: note.at for note in select(notes, FileWritten)} for notes in ranks]
    for path, at in written[0].items():
        if sum(path in paths for paths in written) > 1:
            seen = f"{short_line(at)}: several ranks write {path.rpartition('/')[2]}"
            others = "(the others wait in a barrier, if they need the file)"
            return Finding(RED, seen, f"let one rank do it: if rank == 0 {others}")
    if not any(written):
        return Finding(UNSEEN, "none was written")
    return Finding(OK, "none was written by more than one rank")


def saved_names(ranks: list[Notes]) -> Finding:
    """The names in what is saved are those of the model, not of its wrapper."""
    saves = [note for notes in ranks for note in select(notes, Save)]
    for note in saves:
        wrapped = [name for name in note.names if name.startswith("module.")]
        if wrapped or note.wrapper:
            saved = wrapped[0] if wrapped else "the wrapper itself"
            cure = "save ddp_model.module.state_dict()"
            return Finding(RED, f"{short_line(note.at)}: {saved} is saved", cure)
    if not any(note.names for note in saves):
        return Finding(UNSEEN, "no state_dict was saved by torch.save")
    return Finding(OK, f"no name begins with module., {len(saves)} saved")


def random_numbers(ranks: list[Notes]) -> Finding:
    """Dropout and augmentation use other random numbers on each rank."""
    in_model = [select(notes, RandomUse)[:_COMPARED] for notes in ranks]
    in_dataset = [_augmented_passes(notes) for notes in ranks]
    calls = zip(*in_model, strict=False)
    equal = [uses for uses in calls if len({note.state for note in uses}) == 1]
    if equal and len(equal) == min(map(len, in_model)):
        at = short_line(equal[0][0].at)
        return Finding(
            RED,
            f"{at}: the same random numbers in the model on all ranks (dropout?)",
            "torch.manual_seed(seed + rank) after the model is made",
        )
    for passes in zip(*in_dataset, strict=False):
        if len({tuple(note.augmented) for note in passes}) == 1:
            at = short_line(in_dataset[0][0].begun)
            return Finding(
                RED,
                f"{at}: the same random numbers in the dataset on all ranks",
                "torch.manual_seed(seed + rank)",
            )
    if all(in_model) or all(in_dataset):
        user = "model" if all(in_model) else "dataset"
        return Finding(OK, f"torch's random numbers differ in the {user}")
    rest = "numpy, random and workers are not followed"
    return Finding(UNSEEN, f"torch's generator was not used in model or dataset; {rest}")


def _augmented_passes(notes: Notes) -> list[Pass]:
    """The training passes in which the dataset used random numbers."""
    return [note for note in select(notes, Pass) if note.steps and note.augmented]
