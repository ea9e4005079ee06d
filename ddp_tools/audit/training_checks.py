"""Checks of the audit on training: weights, gradients, learning rate, finite numbers.

`judge` calls each with the notes of all ranks, in the driver process. Needs no torch.
"""

from itertools import pairwise

from ddp_tools.audit.distances import names_apart
from ddp_tools.audit.notes import (
    CLOSE,
    FAIL,
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    Communication,
    Finding,
    Inputs,
    Loss,
    Notes,
    NotFinite,
    Schedule,
    Step,
    TensorSums,
    Weights,
    Wrap,
    differ,
    is_finite,
    select,
    short_line,
    training_passes,
)
from ddp_tools.audit.rank_checks import end, has_unused_weights
from ddp_tools.audit.state_checks import at_once, buffers, buffers_apart, copies

_FEW_MORE = 1.5  # a GradScaler that finds infinities skips steps of the optimizer
_LAST_PART = 0.1
_SEE_END = "see 'exit': until then not all gradients were averaged"


# ---- weights


def replicas(ranks: list[Notes]) -> Finding:
    """After each epoch and at the end, all ranks hold the same weights."""
    weights = [select(notes, Weights) for notes in ranks]
    if not all(weights):
        return Finding(UNKNOWN, "no model was wrapped in DistributedDataParallel")
    if has_unused_weights(ranks):
        return Finding(UNKNOWN, _SEE_END)
    wrapped_at = short_line(select(ranks[0], Wrap)[0].at)
    compared = 0
    for notes_at_once in at_once(ranks, Weights, "begin", "epoch", "end"):
        first = notes_at_once[0]
        when = "at the end" if first.when == "end" else "after an epoch"
        compared += 1
        for rank, note in enumerate(notes_at_once):
            if names := names_apart(note, first):
                seen = f"{when} rank {rank} has a different {names[0]} from rank 0"
                cure = _cure_of_replicas(ranks) or "see 'gradients'"
                return Finding(FAIL, seen, f"{cure}; the model is wrapped in {wrapped_at}")
    apart = [*buffers_apart(ranks)]
    of_copies, alone = copies(ranks, {name for _, _, name in apart})
    findings = [finding for finding in (buffers(ranks, apart), of_copies) if finding]
    if findings:
        return min(findings, key=lambda finding: finding.verdict != FAIL)
    if not _moved(ranks):
        return Finding(UNKNOWN, "no weight of the wrapped model changed")
    seen = f"weights equal on all ranks, compared after epochs and at the end: {compared}"
    return Finding(OK, seen + alone)


def _cure_of_replicas(ranks: list[Notes]) -> str:
    """Why weights differ although gradients are equal, with the fix; "" if gradients differ."""
    if gradients(ranks).verdict == FAIL:
        return ""
    steps = zip(*(select(notes, Step) for notes in ranks), strict=False)
    for number, (first, *others) in enumerate(steps, 1):
        for rank, other in enumerate(others, 1):
            if [*first.rates] != [*other.rates]:
                rates = f"{_rates(first)} on rank 0 and {_rates(other)} on rank {rank}"
                return f"the learning rate is {rates} at step {number}: give all ranks the same"
        if any(differ(first.weights, other.weights) for other in others):
            if number == 1:
                cause = "they differ before step 1: they were changed after DDP() had made "
                return f"{cause}them equal; load and initialise before the model is wrapped"
            cause = f"between steps {number - 1} and {number} a rank changed its own weights"
            return f"{cause} (clamp, average, another optimizer's state): do it on all ranks"
    return ""


def _rates(step: Step) -> str:
    """The learning rates of a step."""
    return ", ".join(f"{rate:g}" for rate in step.rates)


def _moved(ranks: list[Notes]) -> bool:
    """Whether training changed the weights of rank 0's wrapped models."""
    weights = select(ranks[0], Weights)
    first = {note.model: note.bits for note in weights if note.when == "begin"}
    return any(first.get(note.model) != note.bits for note in weights)


# ---- gradients


def gradients(ranks: list[Notes]) -> Finding:
    """At each step of an optimizer, all ranks hold the same gradients."""
    steps = [select(notes, Step) for notes in ranks]
    wraps = select(ranks[0], Wrap)
    if not any(steps):
        return Finding(UNKNOWN, "no optimizer made a step")
    if any(step.sharded for step in steps[0]):
        return Finding(UNKNOWN, "the optimizer has sharded weights, as with FSDP: not checked")
    if has_unused_weights(ranks):
        return Finding(UNKNOWN, _SEE_END)
    if not any(step.wrapped_parameters for step in steps[0]):
        return _without_ddp(ranks, steps, wraps)
    for number, notes_at_once in enumerate(zip(*steps, strict=False), 1):
        first = notes_at_once[0]
        if any(differ(step.sums, first.sums) for step in notes_at_once):
            return _other_gradients(number, notes_at_once, wraps[0])
    return _equal_gradients(ranks, steps)


def _without_ddp(ranks: list[Notes], steps: list[list[Step]], wraps: list[Wrap]) -> Finding:
    """Judge optimizers that hold no weight of a wrapped model."""
    at = short_line(steps[0][0].at) if steps[0] else "an unknown line"
    if wraps and any(step.forwards for step in steps[0]):
        seen = "no optimizer has a weight of the wrapped model, which was called: it never learns"
        cure = "create the optimizer from the parameters of the model that is wrapped in "
        return Finding(FAIL, f"{at}: {seen}", f"{cure}{short_line(wraps[0].at)}")
    if not any(select(notes, Communication) for notes in ranks):
        seen = "no model is wrapped, and the ranks never communicate: each trains its own model"
        return Finding(FAIL, f"{at}: {seen}", "init_process_group, and DDP(model) on each rank")
    alike = all(len(step.other_sums) == len(steps[0][0].other_sums) for step in steps[0][:1])
    pairs = enumerate(zip(*steps, strict=False), 1)
    for number, (first, *others) in pairs:
        alike = alike and all(len(o.other_sums) == len(first.other_sums) for o in others)
        if alike and any(differ(first.other_sums, other.other_sums) for other in others):
            if _talk_at_each_step(ranks[0]):
                break  # another parallelism, or an average that comes after the step
            seen = f"step {number} had different gradients on each rank, and no model is wrapped"
            return Finding(FAIL, f"{at}: {seen}", "ddp_model = DDP(model), and call ddp_model")
    return Finding(UNKNOWN, "no optimizer stepped the weights of a wrapped model")


def _talk_at_each_step(notes: Notes) -> bool:
    """Whether a rank communicates between most steps, without DDP."""
    indices = [index for index, note in enumerate(notes) if isinstance(note, Step)]
    talks = []
    for first, last in pairwise(indices):
        calls = select(notes[first:last], Communication)
        talks.append(any(call.name != "barrier" for call in calls))
    return sum(talks) * 2 > len(talks)


def _other_gradients(number: int, steps: tuple[Step, ...], wrap: Wrap) -> Finding:
    """Judge a step at which the ranks' gradients differ."""
    first = steps[0]
    at = f"{short_line(first.at)}: step {number}"
    if all(_is_multiple(step.sums, first.sums) for step in steps[1:]):
        seen = f"{at} had gradients that are multiples of each other's: each rank scales them"
        cure = "clip or scale by the same number on all ranks, after backward averages them"
        return Finding(FAIL, seen, cure)
    called = "the wrapper was not called before it"
    if first.forwards:
        called = f"the wrapper was called {first.forwards} times"
    seen = f"{at} had different gradients on each rank; {called}"
    cure = f"call the wrapper that DDP() returned in {short_line(wrap.at)}, not the inner model"
    if first.forwards >= number:
        cure = f"no no_sync() around the last micro-batch before a step; {cure}"
    if first.sync_changed:
        seen += ", and require_backward_grad_sync was changed between forward and backward"
        cure = "set it before the forward pass, when DDP reads it; or put both under no_sync()"
        return Finding(FAIL, seen, cure)
    return Finding(FAIL, seen, cure)


def _is_multiple(sums: TensorSums, others: TensorSums) -> bool:
    """Whether all tensors are the same multiple, other than 1, of the others."""
    if len(sums) != len(others) or not is_finite([*sums, *others]):
        return False
    ratios = [size / other for (_, size), (_, other) in zip(sums, others, strict=True) if other]
    few = len(ratios) < 2 or abs(ratios[0] - 1) < CLOSE
    return not few and max(ratios) - min(ratios) <= CLOSE * max(ratios)


def _equal_gradients(ranks: list[Notes], steps: list[list[Step]]) -> Finding:
    """Judge steps at which all ranks have the same gradients."""
    count = len(steps[0])
    if not any(size for step in steps[0] for _, size in step.sums):
        seen = f"all are zero or missing at the first {count} steps: nothing is learned"
        cure = "a loss that depends on the weights, and zero_grad() before backward(), not after"
        return Finding(FAIL, f"{short_line(steps[0][0].at)}: {seen}", cure)
    moves = count > 1 and any(rate for step in steps[0] for rate in step.rates)
    if moves and not _moved(ranks):
        seen = f"after {count} steps the weights of the wrapped model are unchanged"
        return Finding(FAIL, seen, "create the optimizer from the wrapped model's own parameters")
    made = [note.steps for notes in ranks for note in select(notes, Weights) if note.when == "end"]
    if end(ranks).verdict == OK and len({*made}) > 1:
        each = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(made))
        return _unequal_steps(ranks, f"the ranks made unequal numbers of steps: {each}")
    if finding := _unequal_means(ranks) or _sum_of_equals(ranks):
        return finding
    return Finding(OK, f"equal on all ranks at the first {count} steps")


def _unequal_means(ranks: list[Notes]) -> Finding | None:
    """Judge losses that each rank divides by its own number, as by its count of tokens.

    DDP averages the ranks' gradients, so a term weighs more on a rank with fewer terms.
    """
    losses = [*zip(*(select(notes, Loss) for notes in ranks), strict=False)]
    divisors = [[note.divisor for note in each] for each in losses]
    pairs = zip(losses, divisors, strict=True)
    apart = [each for each, numbers in pairs if max(numbers) > min(numbers) * (1 + CLOSE)]
    if not apart:
        return None
    numbers = ", ".join(f"{note.divisor:g} on rank {rank}" for rank, note in enumerate(apart[0]))
    line = short_line(apart[0][0].at)
    seen = f"{line}: the loss is divided by {numbers} at {len(apart)} of {len(losses)} backward"
    seen += " passes: a mean of unequal means"
    cure = "all_reduce the number of terms, and call backward on sum * world_size / all terms"
    # A smaller last batch on one rank is a small error, which people know and accept.
    return Finding(FAIL if 2 * len(apart) > len(losses) else UNKNOWN, seen, cure)


def _sum_of_equals(ranks: list[Notes]) -> Finding | None:
    """Ask about a sum, between backward and step, of numbers that are equal on all ranks.

    Numbers from gradients that DDP averaged, such as their norm, are equal. Integers are left out:
    they may be counts.
    """
    calls = zip(*(_sums_before_steps(notes) for notes in ranks), strict=False)
    equal = [
        first
        for first, *others in calls
        if not all(total.is_integer() for total, _ in first.added)
        and not any(differ(first.added, other.added) for other in others)
    ]
    if len({first.added[0][0] for first in equal}) < 2:  # else it may be a constant
        return None
    seen = f"{short_line(equal[0].at)}: between backward and step {equal[0].name} adds up numbers "
    seen += "that are the same on all ranks, as averaged gradients are"
    return Finding(UNKNOWN, f"{seen}: is the sum divided by world_size again?")


def _sums_before_steps(notes: Notes) -> list[Communication]:
    """A rank's sums of floats between a forward pass and the optimizer's step."""
    before_steps: list[Communication] = []
    since: list[Communication] = []
    for note in notes:
        if isinstance(note, Inputs):
            since = []
        elif isinstance(note, Communication) and note.added:
            since.append(note)
        elif isinstance(note, Step):
            before_steps += since
            since = []
    return before_steps


def _unequal_steps(ranks: list[Notes], seen: str) -> Finding:
    """Judge ranks that made unequal numbers of steps: correct only if their weights are equal."""
    last = [[note.sums for note in select(notes, Weights) if note.when == "end"] for notes in ranks]
    pairs = [zip(last[0], other, strict=False) for other in last[1:]]
    if any(differ(sums, others) for pair in pairs for sums, others in pair):
        return Finding(FAIL, seen, "let all ranks call optimizer.step() the same number of times")
    return Finding(UNKNOWN, f"{seen}; their weights are equal at the end (join?)")


# ---- the learning rate


def schedule(ranks: list[Notes]) -> Finding:
    """A scheduler steps once per optimizer step or per epoch; its rate lasts to the end."""
    counts = [note for notes in ranks for note in select(notes, Schedule)]
    if not counts:
        return Finding(NOT_APPLICABLE, "no scheduler of torch.optim was stepped")
    epochs = max(len(training_passes(notes)) for notes in ranks)
    for note in counts:
        seen = f"the scheduler made {note.calls} steps, and the optimizer {note.steps}"
        if note.calls > _FEW_MORE * note.steps + epochs + 1:
            cure = "scheduler.step() once after each optimizer.step(), not for each micro-batch"
            return Finding(FAIL, seen, cure)
        if note.idle > _LAST_PART * note.steps:
            seen = f"{note.idle} of {note.steps} steps had a learning rate of 0, after a higher one"
            cure = "give the schedule the number of optimizer steps of this rank's loader"
            return Finding(FAIL, f"{seen}: the schedule had ended", cure)
    return Finding(OK, seen)


# ---- numbers


def finite(ranks: list[Notes]) -> Finding:
    """Gradients and weights are finite, at each of the first steps and at the end."""
    for number, steps in enumerate(
        zip(*(select(notes, Step) for notes in ranks), strict=False),
        1,
    ):
        bad = [
            rank
            for rank, step in enumerate(steps)
            if not is_finite([*step.sums, *step.other_sums, *step.weights])
        ]
        if bad:
            at = short_line(steps[0].at)
            who = "all ranks" if len(bad) == len(ranks) else f"rank {', '.join(map(str, bad))}"
            seen = f"{at}: at step {number} gradients or weights are not finite on {who}"
            return _not_finite(ranks, seen)
    for notes in ranks:
        if any(not is_finite(note.sums) for note in select(notes, Weights)):
            return _not_finite(ranks, "weights are not finite after an epoch, or at the end")
    if not any(select(notes, Step) for notes in ranks):
        return Finding(UNKNOWN, "no optimizer made a step")
    seen = "gradients and weights finite at the first steps, after epochs, at the end"
    return Finding(OK, seen)


def _not_finite(ranks: list[Notes], seen: str) -> Finding:
    """Add the rank on which it started, if an output or a loss shows it."""
    first = {
        rank: select(notes, NotFinite)[0]
        for rank, notes in enumerate(ranks)
        if select(notes, NotFinite)
    }
    if first:
        earliest = min(note.steps for note in first.values())
        began = {rank: note for rank, note in first.items() if note.steps == earliest}
        which = " and ".join(f"rank {rank}" for rank in began)
        note = next(iter(began.values()))
        seen += f"; it started with the {note.what} of {which}, at {short_line(note.at)}"
    cure = "look at this rank's batch at that step: an empty one, log(0), 0/0, a wrong target;"
    return Finding(FAIL, seen, f"{cure} a lower learning rate, clip_grad_norm_ after backward")
