"""The row "resume" of the audit: a run that is started again reaches the whole run's weights.

The audit's command calls it in the learner's process, with the notes of three runs. Needs no torch.
"""

from ddp_tools.audit.notes import (
    FAIL,
    OK,
    UNKNOWN,
    Notes,
    RandomUse,
    Row,
    Save,
    Step,
    Stopped,
    TensorSums,
    differ,
    select,
    training_passes,
)
from ddp_tools.audit.one_rank import distance, models_at
from ddp_tools.audit.rank_checks import collectives, end
from ddp_tools.audit.training_checks import replicas

NAME = "resume"
_ROUNDING = 1e-3  # of the way that the weights went: nearer, they differ by rounding
CURE = "save and restore model, optimizer, scheduler, epoch, step and random numbers: notebook 11"


def compare_restarted(complete: Notes, stopped: Notes, restarted: list[Notes]) -> Row:
    """Judge the ranks that were started again.

    complete, stopped: rank 0's notes of a run to its end, and of one that was ended early.
    """
    try:
        check_first_step(complete, stopped)
        if not select(stopped, Stopped):
            reason = "torch.save wrote nothing more than two steps before the end"
            raise ValueError(f"not ended early: {reason}")
    except ValueError as reason:
        return Row(NAME, UNKNOWN, str(reason))
    return judge_restarted(complete, restarted, len(select(stopped, Save)))


def judge_restarted(complete: Notes, restarted: list[Notes], saves: int) -> Row:
    """Judge the ranks of an attempt that goes on to the end.

    complete: rank 0's notes of a run that nobody stopped; saves: how many of its torch.save came
    before this attempt; 0 where nobody knows.
    """
    try:
        finding = end(restarted)
        if finding.verdict == FAIL:
            seen = f"started again, it failed: {finding.seen}"
            cure = "read its messages (--folder keeps them, in the folder notes of that run)"
            calls = collectives(restarted)
            if calls.verdict == FAIL:
                seen += f"; {calls.seen}"
                cure = f"let all ranks load the checkpoint, and begin at the same step; {cure}"
            return Row(NAME, FAIL, seen, cure)
        apart = replicas(restarted)
        if apart.verdict == FAIL:
            seen = f"started again, the ranks part: {apart.seen}"
            cure = "let all ranks load all of the checkpoint, the optimizer's state too"
            return Row(NAME, FAIL, seen, f"{cure}; {apart.cure}")
        share = _share_of_way(complete, restarted[0])
    except ValueError as reason:
        return Row(NAME, UNKNOWN, str(reason))
    if share is None:
        return Row(NAME, OK, "ended and started again, it reached the same weights, to the bit")
    seen = f"ended and started again, it ended {share:.2g} of the weights' way apart"
    if share < _ROUNDING:
        return Row(NAME, OK, f"{seen}: close, not equal")
    return _reason_apart(seen, complete, restarted[0], saves)


def check_first_step(complete: Notes, stopped: Notes) -> None:
    """Raise ValueError if the first step of a run cannot be recognised in one to be ended early."""
    first = _first_gradients(complete)
    if not any(size for _, size in first):
        raise ValueError("the first step had no gradients by which to know it again")
    if differ(first, _first_gradients(stopped)):
        seen = "the run that was to be ended took another first step than the whole one"
        question = "is the seed set? Or did it find a checkpoint of that run, under a whole path?"
        raise ValueError(f"{seen}: {question}")


def _share_of_way(complete: Notes, restarted: Notes) -> float | None:
    """How far apart two runs ended, as a share of the weights' way; None if equal to the bit.

    Raises ValueError where they cannot be compared.
    """
    begin, last = models_at(complete, "begin"), models_at(complete, "end")
    other_last = models_at(restarted, "end")
    if last.names != other_last.names:
        raise ValueError("started again, it wrapped another model")
    if not differ(_first_gradients(complete), _first_gradients(restarted)):
        cure = "name what it needs in --resume-with=…"
        raise ValueError(f"started again, it began from the beginning: {cure}")
    if last.bits == other_last.bits:
        return None
    return distance(last, other_last) / max(distance(begin, last), 1e-12)


def _reason_apart(seen: str, complete: Notes, restarted: Notes, saves: int) -> Row:
    """Say why two runs ended apart: other samples, other random numbers, or the state."""
    trained = bool(training_passes(complete))
    if trained and _goes_further(complete, restarted):
        reason = "but trained on where the whole run ends: give both the same last step"
        return Row(NAME, UNKNOWN, f"it went on with the whole run's samples, {reason}")
    if trained and not _goes_on(complete, restarted):
        return Row(NAME, FAIL, f"{seen}, and trained on other samples", CURE)
    if _other_random_numbers(complete, restarted, saves):
        if _noted_at_restart(complete, restarted, saves):
            reason = ", with other random numbers: restore torch.get_rng_state(), and look again"
        else:
            reason = "; the random numbers were not noted there, so they cannot be compared"
        return Row(NAME, UNKNOWN, seen + reason)
    samples = ", with the same samples" if trained else ""
    return Row(NAME, FAIL, seen + samples, CURE)


def _first_gradients(notes: Notes) -> TensorSums:
    """The sums over the gradients of the first step."""
    return next((note.sums for note in select(notes, Step)), [])


def _random_states(notes: Notes) -> list[str]:
    """The states of torch's random numbers with which model and dataset began."""
    in_model = [note.state for note in select(notes, RandomUse)]
    in_dataset = [state for note in training_passes(notes) for state in note.augmented]
    return in_model + in_dataset


def _other_random_numbers(complete: Notes, restarted: Notes, saves: int) -> bool:
    """Whether the model's first step after the restart had other random numbers than it had once.

    Where the notes do not have that step of the whole run, or no step: other ones than ever.
    """
    states = _random_states(complete)
    begins = _random_states(restarted)[:1]
    indices = [index for index, note in enumerate(complete) if isinstance(note, Save)]
    if 0 < saves <= len(indices):
        once = _state_of_first_step(complete[indices[saves - 1] :])
        again = _state_of_first_step(restarted)
        if once and again:
            return once != again
    return bool(states) and not {*begins} <= {*states}


def _state_of_first_step(notes: Notes) -> str:
    """The state of the random numbers with which the model was called for the first step; or ""."""
    state = ""
    for note in notes:
        if isinstance(note, RandomUse):
            state = note.state
        elif isinstance(note, Step) and state:
            return state
    return ""


def _noted_at_restart(complete: Notes, restarted: Notes, saves: int) -> bool:
    """Whether random numbers of the whole run were noted where the restarted one begins."""
    if select(restarted, RandomUse):  # after what was saved last
        indices = [index for index, note in enumerate(complete) if isinstance(note, Save)]
        if not indices[:saves]:
            return False
        last_save = indices[:saves][-1]
        return bool(select(complete[last_save:], RandomUse))
    # Those of a dataset are noted at the first batches of an epoch.
    parts = training_passes(restarted)
    same_epochs = training_passes(complete)[-len(parts) :]
    first_sizes = [[len(note.samples) for note in passes[:1]] for passes in (same_epochs, parts)]
    return first_sizes[0] == first_sizes[1]


def _goes_on(complete: Notes, restarted: Notes) -> bool:
    """Whether the passes after the restart are the last of the whole run, or parts of them."""
    passes, parts = training_passes(complete), training_passes(restarted)
    steps, steps_left = (sum(note.steps for note in each) for each in (passes, parts))
    if not 0 < steps_left < steps:
        return False
    pairs = zip(reversed(passes), reversed(parts), strict=False)
    return all(note.samples[-len(part.samples) :] == part.samples for note, part in pairs)


def _goes_further(complete: Notes, restarted: Notes) -> bool:
    """Whether the passes after the restart begin inside the whole run, follow it, and go beyond.

    So does a sound script that trains so many epochs more each time that it is started.
    """
    passes = [note.samples for note in training_passes(complete)]
    parts = [note.samples for note in training_passes(restarted)]
    for begin in range(1, len(passes)) if parts else ():
        first, *rest = passes[begin:]
        follows = parts[0] == first[-len(parts[0]) :] and parts[1 : len(rest) + 1] == rest
        if follows and len(parts) > len(rest) + 1:
            return True
    return False
