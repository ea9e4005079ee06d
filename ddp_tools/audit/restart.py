"""The check "resume" of the audit: a restarted run reaches the weights of an uninterrupted one.

The audit's command calls it in the driver process, with the notes of three runs. Needs no torch.
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
_ROUNDING = 1e-3  # of the distance that training moved the weights: below, it is rounding
CURE = "save and restore model, optimizer, scheduler, epoch, step and random numbers: notebook 11"


def compare_restarted(complete: Notes, stopped: Notes, restarted: list[Notes]) -> Row:
    """Judge the restarted ranks.

    complete, stopped: rank 0's notes of an uninterrupted run, and of the one that was killed.
    """
    try:
        check_first_step(complete, stopped)
        if not select(stopped, Stopped):
            reason = "no torch.save came more than two steps before the end"
            raise ValueError(f"the run was not killed: {reason}")
    except ValueError as reason:
        return Row(NAME, UNKNOWN, str(reason))
    return judge_restarted(complete, restarted, len(select(stopped, Save)))


def judge_restarted(complete: Notes, restarted: list[Notes], saves: int) -> Row:
    """Judge the ranks of a restart that runs to the end.

    complete: rank 0's notes of the uninterrupted run; saves: how many of its torch.save calls the
    killed run made; 0 if unknown.
    """
    try:
        finding = end(restarted)
        if finding.verdict == FAIL:
            seen = f"after the restart it failed: {finding.seen}"
            cure = "read its messages (--folder keeps them, in that run's notes folder)"
            calls = collectives(restarted)
            if calls.verdict == FAIL:
                seen += f"; {calls.seen}"
                cure = f"let all ranks load the checkpoint and start at the same step; {cure}"
            return Row(NAME, FAIL, seen, cure)
        apart = replicas(restarted)
        if apart.verdict == FAIL:
            seen = f"after the restart the ranks differ: {apart.seen}"
            cure = "let all ranks load the complete checkpoint, including the optimizer's state"
            return Row(NAME, FAIL, seen, f"{cure}; {apart.cure}")
        share = _share_of_way(complete, restarted[0])
    except ValueError as reason:
        return Row(NAME, UNKNOWN, str(reason))
    if share is None:
        return Row(NAME, OK, "killed and restarted, it reached the same weights, to the bit")
    seen = f"killed and restarted, its weights differ by {share:.2g} of the distance trained"
    if share < _ROUNDING:
        return Row(NAME, OK, f"{seen}: close, not equal")
    return _reason_apart(seen, complete, restarted[0], saves)


def check_first_step(complete: Notes, stopped: Notes) -> None:
    """Raise ValueError if the first steps of the two runs differ, or have no gradients."""
    first = _first_gradients(complete)
    if not any(size for _, size in first):
        raise ValueError("the first step had no gradients to recognise it by")
    if differ(first, _first_gradients(stopped)):
        seen = "the first step of the run to be killed differs from the uninterrupted run's"
        question = "is the seed set? Or did it find that run's checkpoint, by an absolute path?"
        raise ValueError(f"{seen}: {question}")


def _share_of_way(complete: Notes, restarted: Notes) -> float | None:
    """The distance of two runs' last weights, relative to the distance that training moved them.

    None if they are equal to the bit. Raises ValueError if they cannot be compared.
    """
    begin, last = models_at(complete, "begin"), models_at(complete, "end")
    other_last = models_at(restarted, "end")
    if last.names != other_last.names:
        raise ValueError("after the restart it wrapped a different model")
    if not differ(_first_gradients(complete), _first_gradients(restarted)):
        cure = "give the arguments with which it resumes in --resume-with=…"
        raise ValueError(f"after the restart it started from the beginning: {cure}")
    if last.bits == other_last.bits:
        return None
    return distance(last, other_last) / max(distance(begin, last), 1e-12)


def _reason_apart(seen: str, complete: Notes, restarted: Notes, saves: int) -> Row:
    """Explain why two runs differ: different samples, different random numbers, or the state."""
    trained = bool(training_passes(complete))
    if trained and _goes_further(complete, restarted):
        reason = "but trained past the end of the uninterrupted run: give both the same last step"
        return Row(NAME, UNKNOWN, f"it resumed with the right samples, {reason}")
    if trained and not _goes_on(complete, restarted):
        return Row(NAME, FAIL, f"{seen}, and it trained on different samples", CURE)
    if _other_random_numbers(complete, restarted, saves):
        if _noted_at_restart(complete, restarted, saves):
            reason = ", with different random numbers: restore torch.get_rng_state(), and rerun"
        else:
            reason = "; the random numbers were not noted there, so they cannot be compared"
        return Row(NAME, UNKNOWN, seen + reason)
    samples = ", with the same samples" if trained else ""
    return Row(NAME, FAIL, seen + samples, CURE)


def _first_gradients(notes: Notes) -> TensorSums:
    """The sums over the gradients of the first step."""
    return next((note.sums for note in select(notes, Step)), [])


def _random_states(notes: Notes) -> list[str]:
    """The states of torch's generator before each noted use by the model or the dataset."""
    in_model = [note.state for note in select(notes, RandomUse)]
    in_dataset = [state for note in training_passes(notes) for state in note.augmented]
    return in_model + in_dataset


def _other_random_numbers(complete: Notes, restarted: Notes, saves: int) -> bool:
    """Whether the first step after the restart had different random numbers from the same step.

    If the notes lack that step in either run: whether its state never occurred in the complete run.
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
    """The state of the generator before the first step's last use of it; or ""."""
    state = ""
    for note in notes:
        if isinstance(note, RandomUse):
            state = note.state
        elif isinstance(note, Step) and state:
            return state
    return ""


def _noted_at_restart(complete: Notes, restarted: Notes, saves: int) -> bool:
    """Whether the complete run noted random numbers at the step of the restart."""
    if select(restarted, RandomUse):  # after the last save
        indices = [index for index, note in enumerate(complete) if isinstance(note, Save)]
        if not indices[:saves]:
            return False
        last_save = indices[:saves][-1]
        return bool(select(complete[last_save:], RandomUse))
    # Uses by a dataset are noted at the first batches of an epoch.
    parts = training_passes(restarted)
    same_epochs = training_passes(complete)[-len(parts) :]
    first_sizes = [[len(note.samples) for note in passes[:1]] for passes in (same_epochs, parts)]
    return first_sizes[0] == first_sizes[1]


def _goes_on(complete: Notes, restarted: Notes) -> bool:
    """Whether the passes after the restart are the complete run's last, or parts of them."""
    passes, parts = training_passes(complete), training_passes(restarted)
    steps, steps_left = (sum(note.steps for note in each) for each in (passes, parts))
    if not 0 < steps_left < steps:
        return False
    pairs = zip(reversed(passes), reversed(parts), strict=False)
    return all(note.samples[-len(part.samples) :] == part.samples for note, part in pairs)


def _goes_further(complete: Notes, restarted: Notes) -> bool:
    """Whether the passes after the restart start inside the complete run, follow it and exceed it.

    A correct script may do so: one that trains N more epochs at each start.
    """
    passes = [note.samples for note in training_passes(complete)]
    parts = [note.samples for note in training_passes(restarted)]
    for begin in range(1, len(passes)) if parts else ():
        first, *rest = passes[begin:]
        follows = parts[0] == first[-len(parts[0]) :] and parts[1 : len(rest) + 1] == rest
        if follows and len(parts) > len(rest) + 1:
            return True
    return False
