"""The command `audit`: run a script on instrumented ranks, check their notes, print the table.

The driver process calls it, and needs no torch itself.
"""

import shlex
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_tools import PlainError, printable
from ddp_tools.audit import one_rank, preempt, restart
from ddp_tools.audit.judge import EARLY, judge
from ddp_tools.audit.launch import launch
from ddp_tools.audit.mirror import MIRRORED, mirror
from ddp_tools.audit.notes import (
    FAIL,
    NOT_APPLICABLE,
    OK,
    SKIPPED,
    UNKNOWN,
    End,
    Notes,
    Row,
    Stopped,
    select,
)
from ddp_tools.audit.rank_checks import NEEDS_STAND_IN, SEE_LOG

RANKS = 2
_RUNS = ("", "_one", "_stopped", "_again", *preempt.RUNS)  # suffixes of their folders
_STATES = (FAIL, OK, UNKNOWN, NOT_APPLICABLE, SKIPPED)  # in the table's order
_WIDTH = 200  # characters of a rank's last line
_DEVICE = "the CPU stood in for CUDA, gloo for NCCL, BatchNorm for SyncBatchNorm, and torch.load "
_DEVICE += "got a map_location: what only CUDA and NCCL do was not checked"
# If all of these are unknown, the table is no result about the training.
_ON_TRAINING = {"sharding", "replicas", "gradients"}


@dataclass(frozen=True)
class _Runs:
    """Instrumented runs of one script, each with its own folders below one folder."""

    script: Path
    folder: Path
    cwd: Path | None  # each run finds its files, unchanged, in the run's own folder
    limit: float
    on_cpu: bool
    two_nodes: bool

    def run(
        self,
        ranks: int,
        arguments: Sequence[str],
        suffix: str,
        interrupt: str = "",
        work: str = "",
    ) -> list[Notes]:
        """Run the script and return the notes of its ranks.

        Args:
            suffix: of the run's folders.
            interrupt: what ends the run early, in the form that interrupt.py reads.
            work: the folder of an earlier run, in which this one runs.
        """
        notes = self.folder / f"notes{suffix}"
        _make_empty(notes)
        if not work:
            work = f"work{suffix}"
            _make_empty(self.folder / work)
            if self.cwd:
                mirror(self.cwd, self.folder / work, without=self.folder)
        env = {
            MIRRORED: str(self.cwd or ""),
            "DDP_AUDIT_ON_CPU": "1" if self.on_cpu else "",
            "DDP_AUDIT_TWO_NODES": "1" if self.two_nodes else "",
            "DDP_AUDIT_INTERRUPT": interrupt,
            "PYTHONDONTWRITEBYTECODE": "1",  # no __pycache__ next to the user's files
        }
        # Each rank has its own simulated GPU, unless with two_nodes both would use the first.
        if self.on_cpu or self.two_nodes:
            env["CUDA_VISIBLE_DEVICES"] = ""
        command = [str(self.script), *arguments]
        return launch(ranks, command, self.folder / work, notes, self.limit, env)


def audit(
    script: Path,
    arguments: Sequence[str] = (),
    folder: Path | None = None,
    cwd: Path | None = None,
    limit: float = 120,
    on_cpu: bool = False,
    batch_size_flag: str = "",
    one_rank_with: str | None = None,
    resume_with: str | None = None,
    preempts: bool = False,
    two_nodes: bool = False,
) -> list[Row]:
    """Run an unchanged script on two instrumented ranks and check it.

    The ranks use CPUs, or simulated GPUs under `ddp-course gpus`.

    Args:
        script: the file of the script.
        arguments: the script's arguments.
        folder: keeps all files of the audit; without it, they are removed at the end.
        cwd: the script finds copies of this folder's files in its working directory; the folder
            stays unchanged.
        limit: seconds after which the audit ends the script.
        on_cpu: run the script's CUDA calls on the CPU.
        batch_size_flag: the script's flag that gives one rank the same global batch; it may count
            the samples of all ranks or of each.
        one_rank_with: instead of that flag, the extra arguments, maybe none, that give one rank
            the same global batch.
        resume_with: kill the script and start it again with these extra arguments, maybe none.
        preempts: send one rank a signal twice, and kill all ranks within a torch.save; restarts
            also get the arguments of resume_with.
        two_nodes: each rank is the only one of its node, so local_rank is 0 on both and cannot
            be mistaken for the rank.

    Returns:
        the rows of the table.

    Raises:
        PlainError: the script cannot be audited with these arguments.
    """
    script = Path(script).resolve()
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="audit-")))
        folder = folder.resolve()
        if batch_size_flag and one_rank_with is not None:
            why = "both set what one rank is given: leave one out"
            raise PlainError(f"--batch-size-flag and --one-rank-with: {why}")
        words_of_flags = {"--one-rank-with": one_rank_with, "--resume-with": resume_with}
        _check(script, folder, cwd, limit, words_of_flags)
        cwd = Path(cwd).resolve() if cwd else None
        runs = _Runs(script, folder, cwd, limit, on_cpu, two_nodes)
        resume_with = "" if preempts and resume_with is None else resume_with
        return _audit_rows(runs, arguments, batch_size_flag, one_rank_with, resume_with, preempts)


def _audit_rows(
    runs: _Runs,
    arguments: Sequence[str],
    batch_size_flag: str,
    one_rank_with: str | None,
    resume_with: str | None,
    preempts: bool,
) -> list[Row]:
    """Do all runs that the arguments ask for and make the rows. Raises PlainError."""
    folder, on_cpu = runs.folder, runs.on_cpu
    ranks = runs.run(RANKS, arguments, "")
    check_started(ranks, folder / "notes" / "output.log")
    rows = judge(ranks)
    came_to_end = rows[0].verdict == OK
    if not batch_size_flag and one_rank_with is None:
        seen = "whether one rank reaches the same model: --batch-size-flag=…"
        rows.append(Row(one_rank.NAME, SKIPPED, seen))
    elif came_to_end:
        rows.append(_one_rank_row(runs, arguments, batch_size_flag, one_rank_with or "", ranks))
    else:
        rows.append(Row(one_rank.NAME, UNKNOWN, "see 'exit'"))
    if resume_with is None:
        rows.append(Row(restart.NAME, SKIPPED, "whether it can resume: --resume-with=…"))
    elif came_to_end:
        rows.append(_resume_row(runs, arguments, resume_with, ranks))
    else:
        rows.append(Row(restart.NAME, UNKNOWN, "see 'exit'"))
    if not preempts:
        seen = "whether it stops at a signal, and survives half a checkpoint: --preempt"
        rows.append(Row(preempt.NAME, SKIPPED, seen))
    elif came_to_end:
        rows += _preempt_rows(runs, arguments, resume_with or "", ranks)
    else:
        rows += [Row(name, UNKNOWN, "see 'exit'") for name in (preempt.NAME, preempt.TORN)]
    if on_cpu:
        rows.append(Row("device", SKIPPED, _DEVICE))
    return rows


def _one_rank_row(
    runs: _Runs, arguments: Sequence[str], flag: str, words: str, ranks: list[Notes]
) -> Row:
    """Run the script on one rank and compare its steps and its model with the given ranks'.

    flag: the flag that gives it their global batch; if "", the arguments in `words` give it.
    """
    try:
        besides = one_rank.one_rank_words(flag, ranks) if flag else shlex.split(words)
    except ValueError as reason:
        return Row(one_rank.NAME, UNKNOWN, str(reason))
    [single] = runs.run(1, [*arguments, *besides], "_one")
    return one_rank.compare_with_one_rank(single, ranks)


def _resume_row(runs: _Runs, arguments: Sequence[str], resume_with: str, ranks: list[Notes]) -> Row:
    """Kill the script, start it again, and compare its model with the model of these ranks."""
    stopped = runs.run(RANKS, arguments, "_stopped", "kill 0")
    restarted = ranks
    if select(stopped[0], Stopped):
        arguments = [*arguments, *shlex.split(resume_with)]
        restarted = runs.run(RANKS, arguments, "_again", work="work_stopped")
    return restart.compare_restarted(ranks[0], stopped[0], restarted)


def _preempt_rows(
    runs: _Runs, arguments: Sequence[str], resume_with: str, ranks: list[Notes]
) -> list[Row]:
    """Signal one rank, then kill all ranks within torch.save, and restart after each.

    These runs get a limit from the first run's time, since a rank that waits for one that has left
    would wait until the end of a long one.
    """
    seconds = ranks[0][-1].time - ranks[0][0].time
    shorter = replace(runs, limit=min(runs.limit, 3 * seconds + 20))

    def run(interrupt: str, suffix: str, before: str) -> list[Notes]:
        words = [*arguments, *shlex.split(resume_with)] if before else arguments
        return shorter.run(RANKS, words, suffix, interrupt, f"work{before}" if before else "")

    return [preempt.preempt(run, ranks), preempt.torn_save(run, ranks)]


def check_started(ranks: list[Notes], log: Path) -> None:
    """Raise PlainError if the ranks did not start, or the script spawns a different number."""
    if not all(ranks):
        last = [line for line in log.read_text().splitlines() if line][-1:]
        raise PlainError(f"the ranks did not start: {''.join(last)[:_WIDTH]} ({log})")
    for note in select(ranks[0], End):
        if note.why.startswith("mp.spawn is asked for"):
            cure = "spawn that number, for example torch.cuda.device_count()"
            raise PlainError(f"{note.why}: {cure}")


def _check(
    script: Path,
    folder: Path,
    cwd: Path | None,
    limit: float,
    words_of_flags: Mapping[str, str | None],
) -> None:
    """Check the arguments before anything is written. Raises PlainError."""
    try:
        compile(script.read_bytes(), str(script), "exec")
    except OSError as error:
        cure = "give the path of a Python script"
        raise PlainError(f"{script} cannot be read ({error.strerror}): {cure}") from None
    except (SyntaxError, ValueError) as error:
        message = str(error).partition("\n")[0]
        raise PlainError(f"{script.name} is not valid Python: {message}") from None
    if not 1 <= limit < 10**6:
        cure = "give the seconds that the script may take"
        raise PlainError(f"--limit {limit:g} is out of range: {cure}")
    for flag, words in words_of_flags.items():
        try:
            shlex.split(words or "")
        except ValueError as error:
            why = f"cannot be split into words: {error}"
            raise PlainError(f"{flag}={words} {why}") from None
    if cwd and not Path(cwd).is_dir():
        cure = "give the folder in which the script is to run"
        raise PlainError(f"--cwd {cwd} is not a folder: {cure}")
    _check_folder(folder)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier audit. Raises PlainError."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    ours = {f"{part}{suffix}" for part in ("work", "notes") for suffix in _RUNS}
    if names and (names - ours or not (folder / "notes" / "output.log").exists()):
        raise PlainError(f"{folder} holds files that are not an audit's: choose a new folder")


def _make_empty(folder: Path) -> None:
    """Make an empty folder, after removing an old one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def show_table(rows: Sequence[Row]) -> str:
    """Format the table, with a fix below each failed check."""
    lines = [f"{'check':<15} {'':<7} finding"]
    for row in sorted(rows, key=lambda row: _STATES.index(row.verdict)):
        lines.append(f"{row.name:<15} {row.verdict:<7} {row.seen}")
        if row.cure:
            lines.append(f"{'':<23} fix: {row.cure}")
    counts = Counter(row.verdict for row in rows)
    more = [f", {counts[state]} {state}" for state in _STATES[1:] if counts[state]]
    lines.append(f"{len(rows)} checks: {counts[FAIL]} failed{''.join(more)}")
    if {row.name for row in rows if row.verdict == UNKNOWN} >= _ON_TRAINING:
        names = ", ".join(row.name for row in rows if row.name in _ON_TRAINING)
        lines.append(f"So the training itself was not checked; the rows {names} give the reasons")
    return "\n".join(map(printable, lines))


def report(rows: Sequence[Row]) -> int:
    """Print the table and return the exit status.

    0: no check failed, and none is unknown; 1: a check failed; 2: the script failed before it did
    anything; 3: no check failed, but at least one is unknown.
    """
    print(show_table(rows), flush=True)
    failed = [row.name for row in rows if row.verdict == FAIL]
    if failed:
        began = [row for row in rows if row.verdict == OK or row.seen.startswith(EARLY)]
        at_begin = {row.name for row in began} <= {"launch"}
        nothing_ran = at_begin and rows[0].cure in (SEE_LOG, NEEDS_STAND_IN)
        return 2 if failed == ["exit"] and nothing_ran else 1
    unknown = [row.name for row in rows if row.verdict == UNKNOWN]
    if unknown:
        print(f"No check failed, but these are unknown: {', '.join(unknown)}", flush=True)
    return 3 if unknown else 0
