"""Checks of the audit that compare the ranks: exits, collectives, files, random numbers.

`judge` calls each with the notes of all ranks, in the driver process. Needs no torch.
"""

import linecache
import re
from collections.abc import Mapping
from itertools import zip_longest

from ddp_tools.audit.notes import (
    FAIL,
    NO_SUCH_DEVICE,
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    Collective,
    Communication,
    End,
    FileWritten,
    Finding,
    GroupCollective,
    Join,
    Notes,
    Pass,
    RandomUse,
    Save,
    TimeUp,
    select,
    short_line,
)

_GLOO_SOURCE = re.compile(r"\[/\S+:\d+\] ")  # a path on the machine that built gloo
_WIDTH = 200  # characters of an error
SEE_LOG = "read that rank's messages (--folder keeps them, in notes/output.log); "
SEE_LOG += "the row 'collectives' shows whether one rank left another waiting"
# torch's errors without a GPU, and the line of a script that asserts one.
_NO_GPU = re.compile(
    "only supported with GPUs|no NVIDIA driver|No CUDA GPUs|not compiled with CUDA|no CUDA-capable"
    "|have NCCL built in|on a CUDA device but|assert.*cuda.is_available"
)
NEEDS_STAND_IN = "run the audit on simulated GPUs, as in: ddp-course gpus 2 -- ddp-course audit …; "
NEEDS_STAND_IN += "if they are not available, give --on-cpu: a CPU stands in for each GPU"
_UNUSED = "Expected to have finished reduction"
# Parts of the most common errors, and their fixes.
_KNOWN = {
    _UNUSED: "the loss did not use all weights: DDP(model, find_unused_parameters=True), or "
    "remove the unused ones from the model",
    "marked as ready twice": "torch.utils.checkpoint with use_reentrant=False, or DDP(model, "
    "static_graph=True); one forward and one backward pass per step",
    "marked a variable ready only once": "torch.utils.checkpoint with use_reentrant=False, or "
    "DDP(model, static_graph=True)",
    **dict.fromkeys(
        ("Connection closed by peer", "Connection reset by peer"),
        "another rank failed first: read its lines in notes/output.log (--folder keeps them), and "
        "the row 'collectives' for the place",
    ),
    NO_SUCH_DEVICE: "use LOCAL_RANK as the number of the device, not the rank, which is "
    "larger on every node but the first",
    "address already in use": "a different MASTER_PORT, or torchrun --standalone",
}


# In these all ranks have the same role; in others one sends or waits, maybe at a different line.
_ALIKE = re.compile("all_|reduce_scatter")


def launch(ranks: list[Notes]) -> Finding:
    """Each rank gives init_process_group the launch's rank and world size."""
    joins = [(note, rank) for rank, notes in enumerate(ranks) for note in select(notes, Join)]
    for note, rank in joins:
        if (note.rank, note.world_size) != (rank, len(ranks)):
            given = f"rank={note.rank}, world_size={note.world_size}"
            seen = f"{short_line(note.at)}: init_process_group takes {given} on rank {rank} of "
            cure = "pass neither, or RANK and WORLD_SIZE: LOCAL_RANK, device_count() and the first "
            cure += "argument of an mp.spawn function count per node"
            return Finding(FAIL, f"{seen}{len(ranks)}, so the group would never form", cure)
    if not joins:
        return Finding(NOT_APPLICABLE, "no process group was made")
    return Finding(OK, "init_process_group takes the rank and world size of the launch")


def end(ranks: list[Notes]) -> Finding:
    """All ranks exited with status 0."""
    if launch(ranks).verdict == FAIL:
        return Finding(UNKNOWN, "see 'launch'")
    if any(select(notes, TimeUp) for notes in ranks):
        cure = "see 'collectives'; if nothing hangs, give a longer --limit"
        return Finding(FAIL, where_ranks_hang(ranks), cure)
    lost, failed = [], []
    for rank, notes in enumerate(ranks):
        ends = select(notes, End)
        failed += [(note, rank) for note in ends if note.status]
        if not ends:
            lost.append(f"rank {rank} was killed by a signal")
    if failed:
        # The first error may have caused the others.
        note, rank = min(failed, key=lambda pair: pair[0].time)
        message = f"rank {rank} at {short_line(note.at)}: {error_of(note)}"
        if note.by_stand_in:
            reason = "the audit's stand-in for CUDA lacks this: the script may be correct"
            return Finding(UNKNOWN, f"{message}; {reason}")
        cures = [cure for text, cure in _KNOWN.items() if text.lower() in note.why.lower()]
        if _NO_GPU.search(message):
            cures = [NEEDS_STAND_IN]
        return Finding(FAIL, "; ".join([message, *lost]), cures[0] if cures else SEE_LOG)
    if lost:
        return Finding(FAIL, "; ".join(lost), SEE_LOG)
    return Finding(OK, f"{len(ranks)} ranks ended with status 0")


def has_unused_weights(ranks: list[Notes]) -> bool:
    """Whether a rank ended because the loss did not use all weights."""
    return any(_UNUSED in note.why for notes in ranks for note in select(notes, End))


def where_ranks_hang(ranks: list[Notes]) -> str:
    """Describe the line of each rank at the time limit."""
    hanging, left = [], []
    for rank, notes in enumerate(ranks):
        if time_up := select(notes, TimeUp):
            note = time_up[0]
            hanging.append(f"rank {rank} at {short_line(note.at)} in {note.function}")
        else:
            left.append(f"rank {rank} had exited")
    return f"stopped at the time limit: {', '.join([*hanging, *left])}"


def error_of(note: End) -> str:
    """The error of a rank that failed, in one line."""
    error = _GLOO_SOURCE.sub("", note.why)[:_WIDTH] or f"exit status {note.status}"
    path, _, line = note.at.rpartition(":")
    if error.endswith(": "):  # as of an assert without a message
        error += linecache.getline(path, int(line)).strip()
    return error


def collectives(ranks: list[Notes]) -> Finding:
    """All ranks call the same collectives, in the same order."""
    calls = [select(notes, Collective) for notes in ranks]
    other_lines = _at_other_lines(calls)
    for number, calls_at_once in enumerate(zip_longest(*calls), 1):
        called = {rank: call for rank, call in enumerate(calls_at_once) if call}
        absent = [rank for rank in range(len(ranks)) if rank not in called]
        alike = len({(call.name, *(call.size or ())) for call in called.values()}) == 1
        if not alike or (absent and all(_is_known(ranks[rank]) for rank in absent)):
            each = [f"rank {rank} calls {_call_text(call)}" for rank, call in called.items()]
            each += [f"rank {rank} makes no such call" for rank in absent]
            seen = f"call {number}: {', '.join(each)}"
            if other_lines:
                seen = f"{other_lines}; {seen}"
            return Finding(FAIL, seen, _cure_of_calls(ranks, called))
        if absent:
            return Finding(UNKNOWN, f"the same {number - 1} calls; then a rank failed")
    if not calls[0]:
        return Finding(NOT_APPLICABLE, "none was called")
    if other_lines:
        return Finding(UNKNOWN, f"{other_lines}: are these the same values?")
    in_groups = len(select(ranks[0], GroupCollective))
    rest = f"; {in_groups} in other groups were not compared" if in_groups else ""
    return Finding(OK, f"the same {len(calls[0])} calls on all ranks{rest}")


def _at_other_lines(calls: list[list[Collective]]) -> str:
    """Describe the first call, if any, that pairs values from different lines of the script."""
    for number, calls_at_once in enumerate(zip(*calls, strict=False), 1):
        first, *others = calls_at_once
        same = {call.name for call in others} == {first.name}
        lines = {(call.at, *call.callers) for call in calls_at_once}
        if same and len(lines) > 1 and _ALIKE.match(first.name):
            each = [f"rank {rank}: {_call_text(call)}" for rank, call in enumerate(calls_at_once)]
            return f"call {number} pairs values from different lines, {', '.join(each)}"
    return ""


def _cure_of_calls(ranks: list[Notes], called: Mapping[int, Communication]) -> str:
    """The fix if ranks do not make the same call: unequal batches, a test on one rank."""
    if any("to test" in call.name for call in called.values()):
        return "test ddp_model.module, not the wrapper, or let all ranks test"
    trained = [[note for note in select(notes, Pass) if note.steps] for notes in ranks]
    for passes in zip(*trained, strict=False):
        shortest = min(passes, key=lambda note: note.batches)
        counts = [note.batches for note in passes]
        if len({*counts}) == 1:
            continue
        each = ", ".join(f"rank {rank} had {count}" for rank, count in enumerate(counts))
        if shortest.complete:
            cure = "equal shards, as DistributedSampler makes them, drop_last, or ddp_model.join()"
            return f"{each} batches: {cure}"
        return f"{each} batches when it ended: no rank may leave the loop early, or miss a call"
    cure = "look for a condition before it that differs between ranks"
    return f"let all ranks make this call, or none: {cure}"


def _is_known(notes: Notes) -> bool:
    """Whether a rank certainly makes no more calls: it hangs elsewhere, or exited with status 0."""
    ended_well = any(note.status == 0 for note in select(notes, End))
    return bool(select(notes, TimeUp)) or ended_well


def _call_text(call: Communication) -> str:
    """The name, the size and the line of a call."""
    size = f" {call.size}" if call.size else ""
    callers = ", from ".join(map(short_line, call.callers[:2]))
    return f"{call.name}{size} at {short_line(call.at)}{callers and f' (from {callers})'}"


def files(ranks: list[Notes]) -> Finding:
    """No two ranks write the same file."""
    written = [{note.path: note for note in select(notes, FileWritten)} for notes in ranks]
    logs = []
    for path, note in written[0].items():
        if sum(path in paths for paths in written) > 1:
            seen = f"{short_line(note.at)}: several ranks write {path.rpartition('/')[2]}"
            if note.tool:
                logs.append(f"{seen} by {note.tool}: intended?")
                continue
            others = "(the others wait in a barrier, if they need the file)"
            return Finding(FAIL, seen, f"let one rank do it: if rank == 0 {others}")
    if logs:
        return Finding(UNKNOWN, logs[0])
    if not any(written):
        return Finding(NOT_APPLICABLE, "none was written")
    return Finding(OK, "none was written by more than one rank")


def saved_names(ranks: list[Notes]) -> Finding:
    """The keys of a saved state_dict are the model's, without the wrapper's prefix."""
    saves = [note for notes in ranks for note in select(notes, Save)]
    for note in saves:
        wrapped = [name for name in note.names if name.startswith("module.")]
        if wrapped or note.wrapper:
            saved = wrapped[0] if wrapped else "the wrapper itself"
            seen, cure = f"{short_line(note.at)}: {saved} is saved", "ddp_model.module.state_dict()"
            path = note.at.rpartition(":")[0]
            if any("load_state_dict" in line for line in linecache.getlines(path)):
                only = "only a wrapped model can load it, as in this script: intended?"
                return Finding(UNKNOWN, f"{seen}; {only} Else save {cure}")
            return Finding(FAIL, seen, f"save {cure}")
    if not any(note.names for note in saves):
        return Finding(NOT_APPLICABLE, "no state_dict was saved by torch.save")
    return Finding(OK, f"no name begins with module., {len(saves)} saved")


def random_numbers(ranks: list[Notes]) -> Finding:
    """Dropout and augmentation use different random numbers on each rank."""
    uses = [select(notes, RandomUse) for notes in ranks]
    in_model = [[note for note in notes if not note.in_loop] for notes in uses]
    in_loop = [[note for note in notes if note.in_loop] for notes in uses]
    in_dataset = [_augmented_passes(notes) for notes in ranks]
    calls = zip(*in_model, strict=False)
    equal = [uses for uses in calls if len({note.state for note in uses}) == 1]
    if equal:  # equal states do not occur by chance
        at = short_line(equal[0][0].at)
        return Finding(
            FAIL,
            f"{at}: equal random numbers in the model on all ranks (dropout?)",
            "torch.manual_seed(seed + rank) after the model is made",
        )
    for passes in zip(*in_dataset, strict=False):
        if len({tuple(note.augmented) for note in passes}) == 1:
            at = short_line(in_dataset[0][0].begun)
            return Finding(
                FAIL,
                f"{at}: equal random numbers in the dataset on all ranks",
                "torch.manual_seed(seed + rank)",
            )
    for notes_at_once in zip(*in_loop, strict=False):
        if len({note.state for note in notes_at_once}) == 1:
            seen = f"{short_line(notes_at_once[0].at)}: equal random numbers on all ranks, drawn"
            question = "is it a common choice, or noise, which should differ (seed + rank)?"
            return Finding(UNKNOWN, f"{seen} between two batches: {question}")
    if all(in_model) or all(in_dataset) or all(in_loop):
        user = "model" if all(in_model) else "dataset" if all(in_dataset) else "training loop"
        return Finding(OK, f"torch's random numbers differ in the {user}")
    rest = "numpy, random and loader workers are not tracked"
    return Finding(
        NOT_APPLICABLE, f"torch's generator was not used in model, dataset or loop; {rest}"
    )


def _augmented_passes(notes: Notes) -> list[Pass]:
    """The training passes in which the dataset used random numbers."""
    return [note for note in select(notes, Pass) if note.steps and note.augmented]
