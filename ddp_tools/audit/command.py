"""The command `audit`: start ranks under witnesses, judge their notes, print the table.

The learner's process calls it. Needs no torch in this process.
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
_STATES = (FAIL, OK, UNKNOWN, NOT_APPLICABLE, SKIPPED)  # as the table has them
_WIDTH = 200  # letters of a rank's last line
_DEVICE = "the CPU stood in for CUDA, gloo for NCCL, BatchNorm for SyncBatchNorm, map_location was"
_DEVICE += " given to torch.load: what only they do was not seen"
# Checks without any of which a table says nothing about the training.
_ON_TRAINING = {"sharding", "replicas", "gradients"}


@dataclass(frozen=True)
class _Runs:
    """Runs of one script under witnesses, each in folders of its own below one folder."""

    script: Path
    folder: Path
    cwd: Path | None  # whose files each run finds in its folder, as before the audit
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
        """Run the script, and return the notes of its ranks.

        suffix: of the run's folders; interrupt: what ends it early, as `interrupt` reads it; work:
        the folder of an earlier run, in which this one runs.
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
            "PYTHONDONTWRITEBYTECODE": "1",  # no __pycache__ beside somebody's files
        }
        # Of simulated GPUs each rank has one of its own, unless both are told to be the first.
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
    """Run an unchanged script on two ranks under witnesses, and judge it.

    They have CPUs, or under `ddp-course gpus` simulated GPUs.

    Args:
        script: the file of the script.
        arguments: the script's.
        folder: for all that the audit leaves; without it, one that is removed at the end.
        cwd: the folder whose files the script finds where it runs; it changes none of them.
        limit: seconds until a script that has not ended is ended.
        on_cpu: what the script asks of CUDA is done on the CPU.
        batch_size_flag: the script's flag with which one rank can be given the same global batch,
            whether it counts all ranks or each.
        one_rank_with: in its place, the arguments besides, maybe none, that give one rank the same
            global batch.
        resume_with: have the script ended and started again, with these arguments besides, maybe
            none.
        preempts: have one rank get a signal twice, and all killed within a torch.save; started
            again it gets the arguments of resume_with, too.
        two_nodes: each rank is told that it is the only one of its node, so that local_rank, which
            is 0 on both, cannot pass for rank.

    Raises PlainError.
    """
    script = Path(script).resolve()
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="audit-")))
        folder = folder.resolve()
        if batch_size_flag and one_rank_with is not None:
            why = "both tell what one rank is given: leave one out"
            raise PlainError(f"--batch-size-flag and --one-rank-with: {why}")
        words_of_flags = {"--one-rank-with": one_rank_with, "--resume-with": resume_with}
        _check(script, folder, cwd, limit, words_of_flags)
        cwd = Path(cwd).resolve() if cwd else None
        runs = _Runs(script, folder, cwd, limit, on_cpu, two_nodes)
        resume_with = "" if preempts and resume_with is None else resume_with
        rows = _audit_rows(runs, arguments, batch_size_flag, one_rank_with, resume_with, preempts)
        return rows


def _audit_rows(
    runs: _Runs,
    arguments: Sequence[str],
    batch_size_flag: str,
    one_rank_with: str | None,
    resume_with: str | None,
    preempts: bool,
) -> list[Row]:
    """Run the script as often as it takes, and make all rows. Raises PlainError."""
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
        rows.append(Row(restart.NAME, SKIPPED, "whether it can go on: --resume-with=…"))
    elif came_to_end:
        rows.append(_resume_row(runs, arguments, resume_with, ranks))
    else:
        rows.append(Row(restart.NAME, UNKNOWN, "see 'exit'"))
    if not preempts:
        rows.append(Row(preempt.NAME, SKIPPED, "what a signal does, and half a file: --preempt"))
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
    """Run the script on one rank, and compare its steps and its model with those of these ranks.

    flag: by which it gets the global batch of these ranks; or "", and words do.
    """
    try:
        besides = one_rank.one_rank_words(flag, ranks) if flag else shlex.split(words)
    except ValueError as reason:
        return Row(one_rank.NAME, UNKNOWN, str(reason))
    [single] = runs.run(1, [*arguments, *besides], "_one")
    return one_rank.compare_with_one_rank(single, ranks)


def _resume_row(runs: _Runs, arguments: Sequence[str], resume_with: str, ranks: list[Notes]) -> Row:
    """End the script and start it again, and compare its model with that of these ranks."""
    stopped = runs.run(RANKS, arguments, "_stopped", "kill 0")
    restarted = ranks
    if select(stopped[0], Stopped):
        arguments = [*arguments, *shlex.split(resume_with)]
        restarted = runs.run(RANKS, arguments, "_again", work="work_stopped")
    return restart.compare_restarted(ranks[0], stopped[0], restarted)


def _preempt_rows(
    runs: _Runs, arguments: Sequence[str], resume_with: str, ranks: list[Notes]
) -> list[Row]:
    """Have one rank told to stop, then all killed within torch.save, and start it again each time.

    A rank that waits for one that has left is ended soon: by then the whole run had ended.
    """
    seconds = ranks[0][-1].time - ranks[0][0].time
    shorter = replace(runs, limit=min(runs.limit, 3 * seconds + 20))

    def run(interrupt: str, suffix: str, before: str) -> list[Notes]:
        words = [*arguments, *shlex.split(resume_with)] if before else arguments
        return shorter.run(RANKS, words, suffix, interrupt, f"work{before}" if before else "")

    return [preempt.preempt(run, ranks), preempt.torn_save(run, ranks)]


def check_started(ranks: list[Notes], log: Path) -> None:
    """Raise PlainError if the ranks did not start, or if the script asks for another number."""
    if not all(ranks):
        last = [line for line in log.read_text().splitlines() if line][-1:]
        raise PlainError(f"the ranks did not begin: {''.join(last)[:_WIDTH]} ({log})")
    for note in select(ranks[0], End):
        if note.why.startswith("mp.spawn is asked for"):
            cure = "have it ask for as many, maybe by torch.cuda.device_count()"
            raise PlainError(f"{note.why}: {cure}")


def _check(
    script: Path,
    folder: Path,
    cwd: Path | None,
    limit: float,
    words_of_flags: Mapping[str, str | None],
) -> None:
    """Stop before anything is written, if this cannot be audited. Raises PlainError."""
    try:
        compile(script.read_bytes(), str(script), "exec")
    except OSError as error:
        cure = "give the path of a Python script"
        raise PlainError(f"{script} cannot be read ({error.strerror}): {cure}") from None
    except (SyntaxError, ValueError) as error:
        message = str(error).partition("\n")[0]
        raise PlainError(f"{script.name} is no Python: {message}") from None
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
        cure = "give the one in which the script is to run"
        raise PlainError(f"--cwd {cwd} is no folder: {cure}")
    _check_folder(folder)


def _check_folder(folder: Path) -> None:
    """Stop if the folder holds anything but an earlier audit, which goes. Raises PlainError."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    ours = {f"{part}{suffix}" for part in ("work", "notes") for suffix in _RUNS}
    if names and (names - ours or not (folder / "notes" / "output.log").exists()):
        raise PlainError(f"{folder} holds something else: choose another folder")


def _make_empty(folder: Path) -> None:
    """Make a folder, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def show_table(rows: Sequence[Row]) -> str:
    """Format the table, with a cure below each red row."""
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
        lines.append(f"So this says nothing about the training; the rows {names} say why")
    return "\n".join(map(printable, lines))


def report(rows: Sequence[Row]) -> int:
    """Print the table, and return the status.

    0: no check failed, and none is unknown; 1: a check failed; 2: the script failed before it did
    anything; 3: no check failed, but one is unknown.
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
