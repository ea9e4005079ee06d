"""The checks "preempt" and "torn save" of the audit: a signal to one rank, and half a checkpoint.

One rank gets a signal twice within an epoch: do all ranks leave after the same step, with a
checkpoint, and does the third attempt reach the weights of an uninterrupted run? Then all ranks
are killed when torch.save has written half of its bytes: does the next attempt find a complete
checkpoint? The audit's command calls it in the driver process. Needs no torch.
"""

from collections.abc import Callable

from ddp_tools.audit import restart
from ddp_tools.audit.notes import (
    FAIL,
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    End,
    FileWritten,
    Notes,
    Pass,
    Row,
    Save,
    Stopped,
    TimeUp,
    Told,
    select,
    short_line,
)
from ddp_tools.audit.rank_checks import collectives, error_of, where_ranks_hang

NAME, TORN = "preempt", "torn save"
RUNS = ("_told", "_told_again", "_told_end", "_torn", "_torn_again")  # suffixes of their folders
_TOLD_RANK = 1  # not 0: a flag that only rank 0 checks would pass
_LEAST = 4  # steps of an epoch in which there is room for two stops
_VOTE = "after each step let all ranks take the maximum of their flags (dist.all_reduce, MAX); if "
_VOTE += "it is set, all save and leave: notebook 11"
_WORKERS = "the loader's workers also get the signal: let worker_init_fn ignore it: notebook 11"
_SAVE = "save a checkpoint before the ranks leave: notebook 11"
_ASIDE = "write the checkpoint under a temporary name, then os.replace() it: notebook 11"

# Runs the script. Arguments: the interruption, the suffix of the run's folders, and the suffix of
# the earlier run whose files it finds.
Run = Callable[[str, str, str], list[Notes]]


def preempt(run: Run, ranks: list[Notes]) -> Row:
    """Signal one rank in two attempts within an epoch, and compare the end with `ranks`.

    ranks: the notes of the uninterrupted run.
    """
    try:
        first, second = _choose_steps(ranks[0])
        begun, attempts = 0, []
        for number, step in enumerate((first, second)):
            interrupt = f"signal {_TOLD_RANK} {max(1, step - begun)}"
            attempts.append(run(interrupt, RUNS[number], RUNS[0] if number else ""))
            restart.check_first_step(ranks[0], attempts[0][0])
            finding = _stopped_together(attempts[-1], "after the restart, " if number else "")
            if finding:
                return finding
            begun += _steps(attempts[-1][0])
        attempts.append(run("", RUNS[2], RUNS[0]))
    except ValueError as reason:
        return Row(NAME, UNKNOWN, str(reason))
    told = select(attempts[0][_TOLD_RANK], Told)[0]
    stops = [_steps(attempts[0][0]), begun]
    seen = f"{told.signal} to rank {_TOLD_RANK} only: all saved and left after step {stops[0]}, "
    seen += f"and again after step {stops[1]}; "
    row = restart.judge_restarted(ranks[0], attempts[-1], saves=0)
    taken, whole = begun + _steps(attempts[-1][0]), _steps(ranks[0])
    if row.verdict == OK and taken > whole:
        row = row._replace(seen=f"{row.seen} ({taken - whole} steps were repeated)")
    if row.verdict != OK and taken < whole and _came_to_end(attempts[-1]):
        cure = "count a batch as done after its step, and check the vote between two batches"
        lost = f"the three attempts took {taken} steps, the uninterrupted run {whole}"
        row = Row(NAME, FAIL, f"{lost}: batches were lost at a stop", f"{cure}: notebook 11")
    return Row(NAME, row.verdict, seen + row.seen, row.cure)


def torn_save(run: Run, ranks: list[Notes]) -> Row:
    """Kill all ranks with half a checkpoint on the disk, and compare the next attempt."""
    try:
        rank, number = _choose_save(ranks)
        stopped = run(f"tear {rank} {number}", RUNS[3], "")
        stops = select(stopped[rank], Stopped)
        if not stops:
            raise ValueError(f"rank {rank} did not reach its torch.save number {number}")
        restart.check_first_step(ranks[0], stopped[0])
    except ValueError as reason:
        return Row(TORN, UNKNOWN, str(reason))
    row = restart.judge_restarted(ranks[0], run("", RUNS[4], RUNS[3]), saves=0)
    seen = f"killed at {short_line(stops[0].at)} with half of {stops[0].file} written; {row.seen}"
    return Row(TORN, row.verdict, seen, _ASIDE if row.verdict == FAIL else "")


def _choose_steps(notes: Notes) -> tuple[int, int]:
    """Choose two steps within the second epoch, or within the first if the second is too short.

    Raises ValueError if both are.
    """
    passes = [note for note in select(notes, Pass) if note.steps]
    lengths = [note.steps for note in passes] or [_steps(notes)]
    number = 1 if len(lengths) > 1 and lengths[1] >= _LEAST else 0
    if lengths[number] < _LEAST:
        few = f"its epochs have {lengths[number]} steps, too few for two stops"
        raise ValueError(f"{few}: give it more data")
    before = sum(lengths[:number])
    return before + lengths[number] // 4 + 1, before + lengths[number] // 2 + 1


def _choose_save(ranks: list[Notes]) -> tuple[int, int]:
    """Choose a rank and the number of its torch.save: the first that overwrites a file.

    If none does: the second. Raises ValueError if there are fewer than two.
    """
    rank = max(range(len(ranks)), key=lambda rank: len(select(ranks[rank], Save)))
    files: list[str] = []  # the file of each save; "" if unknown
    for note in ranks[rank]:
        if isinstance(note, Save):
            files.append("")
        elif isinstance(note, FileWritten) and files and not files[-1]:
            files[-1] = note.path
    if len(files) < 2:
        count = len(files) or "no"
        raise ValueError(f"{count} torch.save in this run: two are needed, so train more epochs")
    again = [number for number, file in enumerate(files) if file and file in files[:number]]
    return rank, (again or [1])[0] + 1


def _stopped_together(ranks: list[Notes], when: str) -> Row | None:
    """A row if not all ranks left after the same step, with a checkpoint; else None.

    Raises ValueError if no rank got the signal.
    """
    tolds = select(ranks[_TOLD_RANK], Told)
    if not tolds:
        if not _came_to_end(ranks):
            return Row(NAME, FAIL, f"{when}it failed: {_first_error(ranks)}", restart.CURE)
        raise ValueError(f"{when}it ended before the signal could be sent")
    told = tolds[0]
    if not told.handled:
        seen = f"no handler of SIGTERM, SIGUSR1 or SIGUSR2: {told.signal} kills the script"
        return Row(NAME, NOT_APPLICABLE, f"{seen}, which 'resume' and '{TORN}' check")
    seen = f"{when}{told.signal} to rank {_TOLD_RANK} only, in step {told.steps}: "
    if not _came_to_end(ranks):
        error = _first_error(ranks)
        return Row(NAME, FAIL, seen + error, _WORKERS if "DataLoader worker" in error else _VOTE)
    steps = [_steps(notes) for notes in ranks]
    if len({*steps}) > 1:
        each = ", ".join(f"rank {rank} after {count}" for rank, count in enumerate(steps))
        return Row(NAME, FAIL, f"{seen}the ranks left after different steps, {each}", _VOTE)
    later = [note for notes in ranks for note in notes if note.time >= told.time]
    if not any(isinstance(note, Save | FileWritten) for note in later):
        return Row(NAME, FAIL, f"{seen}all left after step {steps[0]}, and none saved", _SAVE)
    return None


def _came_to_end(ranks: list[Notes]) -> bool:
    """Whether each rank exited without an exception or a signal; the status may be any."""
    ends = [select(notes, End) for notes in ranks]
    hang = any(select(notes, TimeUp) for notes in ranks)
    return all(ends) and not hang and not any(note.raised for notes in ends for note in notes)


def _first_error(ranks: list[Notes]) -> str:
    """Describe the error that ended the run."""
    if any(select(notes, TimeUp) for notes in ranks):
        return where_ranks_hang(ranks)
    failed = [(note, rank) for rank, notes in enumerate(ranks) for note in select(notes, End)]
    failed = [(note, rank) for note, rank in failed if note.raised]
    if failed:
        note, rank = min(failed, key=lambda pair: pair[0].time)
        calls = collectives(ranks)
        also = f"; {calls.seen}" if calls.verdict == FAIL else ""
        return f"rank {rank} at {short_line(note.at)}: {error_of(note)}{also}"
    lost = [str(rank) for rank, notes in enumerate(ranks) if not select(notes, End)]
    return f"rank {', '.join(lost)} was killed by a signal"


def _steps(notes: Notes) -> int:
    """How many steps this rank took."""
    return sum(note.steps for note in select(notes, End))
