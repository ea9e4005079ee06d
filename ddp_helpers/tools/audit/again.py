"""A run that is ended and started again is to reach the weights of the whole run: the row that compares them."""

from ddp_helpers.tools.audit.judge import end
from ddp_helpers.tools.audit.notes import OK, RED, UNSEEN, Notes, Row, differ, of
from ddp_helpers.tools.audit.one import models, trained, way

NAME = "resume"
ROUNDING = 1e-3  # of the way that the weights went: nearer, they differ by rounding
CURE = "save and restore model, optimizer, scheduler, epoch, step and random numbers: notebook 11"


def dice(notes: Notes) -> list[str]:
    """The states of torch's random numbers with which model and dataset began."""
    augmented = [state for note in trained(notes) for state in note["augmented"]]
    return [note["state"] for note in of(notes, "random")] + augmented


def first_step(notes: Notes) -> list:
    """The sums over the gradients of the first step."""
    return next((note["sums"] for note in of(notes, "step")), [])


def noted_there(whole: Notes, stopped: Notes, later: Notes) -> bool:
    """Whether random numbers of the whole run were noted where the later one begins: after what was saved last."""
    if of(later, "random"):
        told, saves = of(whole, "saved", "random"), len(of(stopped, "saved"))
        places = [place for place, note in enumerate(told) if note["kind"] == "saved"][:saves]
        return bool(places and of(told[places[-1] :], "random"))
    parts = trained(later)  # of a dataset's they are noted at the first batches of an epoch
    sizes = [[len(note["samples"]) for note in notes[-len(parts) :][:1]] for notes in (trained(whole), parts)]
    return sizes[0] == sizes[1]


def goes_on(whole: Notes, later: Notes) -> bool:
    """Whether the passes after the restart are the last ones of the whole run, or the last parts of them."""
    told, parts = trained(whole), trained(later)
    if not 0 < sum(note["steps"] for note in parts) < sum(note["steps"] for note in told):
        return False
    pairs = zip(reversed(told), reversed(parts), strict=False)
    return all(one["samples"][-len(part["samples"]) :] == part["samples"] for one, part in pairs)


def resumed(whole: Notes, stopped: Notes, again: list[Notes]) -> Row:
    """Judge the ranks that were started again, by rank 0's notes of the whole run and of the one that was ended."""
    try:
        if not of(stopped, "stopped"):
            raise ValueError("not ended early: torch.save wrote nothing more than two steps before the end")
        if not any(size for _, size in first_step(whole)):
            raise ValueError("the first step had no gradients by which to know it again")
        if differ(first_step(whole), first_step(stopped)):
            why = "is the seed set, and does it write into the folder where it stands?"
            raise ValueError(f"the run that was to be ended took another first step than the whole one: {why}")
        verdict, seen, _ = end(again)
        if verdict == RED:
            return Row(NAME, RED, f"started again, it failed: {seen}", "notes_again/output.log has all messages")
        begin, last, other = models(whole, "begin"), models(whole, "end"), models(again[0], "end")
        if last["names"] != other["names"]:
            raise ValueError("started again, it wrapped another model")
        if not differ(first_step(whole), first_step(again[0])):
            raise ValueError("started again, it began from the beginning: name what it needs in --resume-with=…")
    except ValueError as why:
        return Row(NAME, UNSEEN, str(why))
    if last["bits"] == other["bits"]:
        return Row(NAME, OK, "ended and started again, it reached the same weights, to the bit")
    share = way(last, other) / max(way(begin, last), 1e-12)
    seen = f"ended and started again, it ended {share:.2g} of the weights' way apart"
    if share < ROUNDING:
        return Row(NAME, OK, f"{seen}: close, not equal")
    if trained(whole) and not goes_on(whole, again[0]):
        return Row(NAME, RED, f"{seen}, and trained on other samples", CURE)
    if dice(whole) and not {*dice(again[0])[:1]} <= {*dice(whole)}:
        changed = ", with other random numbers: restore torch.get_rng_state(), and look again"
        none = "; the random numbers were not noted there, so they cannot be compared"
        return Row(NAME, UNSEEN, seen + (changed if noted_there(whole, stopped, again[0]) else none))
    return Row(NAME, RED, seen + ", with the same samples" * bool(trained(whole)), CURE)
