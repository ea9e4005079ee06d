"""Start the ranks of an audit under torchrun, and print its table."""

import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from ddp_helpers import ROOT, PlainError
from ddp_helpers.launch.launchers import HERE, commands, environment
from ddp_helpers.launch.processes import lines_of
from ddp_helpers.tools.audit import again
from ddp_helpers.tools.audit.judge import judge
from ddp_helpers.tools.audit.notes import OK, RED, UNSEEN, Notes, Row, of, read
from ddp_helpers.tools.audit.one import NAME, alone, compare

WITNESS = Path(__file__).with_name("witness.py")
RANKS, START = 2, 90.0  # seconds more, for torchrun and the imports


class AuditError(PlainError, ValueError):
    """An audit that cannot begin: what is wrong, and what to do."""


def audit(
    script: Path,
    words: Sequence[str] = (),
    folder: Path | None = None,
    cwd: Path | None = None,
    limit: float = 120,
    on_cpu: bool = False,
    batch_size_flag: str = "",
    resume_with: str | None = None,
) -> list[Row]:
    """Run an unchanged script on two CPU ranks under witnesses, and judge it; the learner's process calls it.

    folder: for all that the audit leaves, build/audit/NAME if none; cwd: where the script runs, if not in an empty one.
    limit: seconds until a script that has not ended is ended; on_cpu: what the script asks of CUDA is done on the CPU.
    batch_size_flag: the script's flag with which one rank can be given the same global batch, whether it counts all
    ranks or each. resume_with: have the script ended and started again, with these words besides, maybe none.
    Raises AuditError.
    """
    script = Path(script).resolve()
    folder = Path(folder or ROOT / "build" / "audit" / script.stem).resolve()
    check(script, folder, cwd, limit, resume_with or "")
    env = {"DDP_AUDIT_ON_CPU": "1" if on_cpu else "", "CUDA_VISIBLE_DEVICES": ""}

    def run(count: int, words: Sequence[str], name: str, stop: str = "", work: str = "") -> list[Notes]:
        for part in [f"notes{name}"] + [f"work{name}"] * (not work):
            shutil.rmtree(folder / part, ignore_errors=True)
            (folder / part).mkdir(parents=True)
        place = Path(cwd or folder / (work or f"work{name}")).resolve()
        given = env | {"DDP_AUDIT_STOP": stop}
        return launch(count, [script, *words], place, folder / f"notes{name}", limit, given)

    ranks = run(RANKS, words, "")
    begun(ranks, folder / "notes" / "output.log")
    rows = judge(ranks)
    try:
        given = alone(words, batch_size_flag, ranks)
        rows.append(compare(*run(1, given, "_one"), ranks) if rows[0].verdict == OK else Row(NAME, UNSEEN, "see 'end'"))
    except ValueError as why:
        rows.append(Row(NAME, UNSEEN, str(why)))
    if resume_with is not None and rows[0].verdict == OK:
        stopped = run(RANKS, words, "_stopped", stop="0")
        ends = of(stopped[0], "stopped")
        more = run(RANKS, [*words, *shlex.split(resume_with)], "_again", work="work_stopped") if ends else ranks
        rows.append(again.resumed(ranks[0], stopped[0], more))
    device = Row("device", UNSEEN, "the CPU stood in for CUDA, and gloo for NCCL: what only they do was not seen")
    return rows + [device] * on_cpu


def begun(ranks: list[Notes], log: Path) -> None:
    """Stop if the ranks did not begin, or if the script asks for another number of them. Raises AuditError."""
    if not all(ranks):
        last = [line for line in log.read_text().splitlines() if line][-1:]
        raise AuditError(f"the ranks did not begin: {''.join(last)[:200]} ({log})")
    for note in of(ranks[0], "ends"):
        if note["why"].startswith("mp.spawn is asked for"):
            raise AuditError(f"{note['why']}: have it ask for as many, maybe by torch.cuda.device_count()")


def check(script: Path, folder: Path, cwd: Path | None, limit: float, resume_with: str) -> None:
    """Stop before anything is written, if this cannot be audited. Raises AuditError."""
    try:
        compile(script.read_bytes(), str(script), "exec")
    except OSError as error:
        raise AuditError(f"{script} cannot be read ({error.strerror}): give the path of a Python script") from None
    except (SyntaxError, ValueError) as error:
        raise AuditError(f"{script.name} is no Python: {str(error).partition(chr(10))[0]}") from None
    if not 1 <= limit < 10**6:
        raise AuditError(f"--limit {limit:g} is out of range: give the seconds that the script may take")
    try:
        shlex.split(resume_with)
    except ValueError as error:
        raise AuditError(f"--resume-with={resume_with} cannot be split into words: {error}") from None
    if cwd and not Path(cwd).is_dir():
        raise AuditError(f"--cwd {cwd} is no folder: give the one in which the script is to run")
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    ours = {f"{part}{name}" for part in ("work", "notes") for name in ("", "_one", "_stopped", "_again")}  # these go
    if there and (there - ours or not (folder / "notes" / "output.log").exists()):
        raise AuditError(f"{folder} holds something else: choose another folder")


def launch(count: int, given: list, cwd: Path, notes: Path, limit: float, env: dict[str, str]) -> list[Notes]:
    """Run the ranks to their end, or until they are ended, with their output in output.log; returns their notes."""
    enter = [sys.executable, "-c", "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"]
    with tempfile.TemporaryDirectory() as logs, (notes / "output.log").open("w") as log:
        [start] = commands("torchrun", [str(WITNESS), str(notes), str(limit), *map(str, given)], [count], logs)
        command = [*enter, str(cwd), *start]
        with (
            closing(lines_of([command], environment([count], HERE | env), limit + START)) as lines,
            suppress(TimeoutError),
        ):
            for line in lines:
                if isinstance(line, str):
                    log.write(line + "\n")
    return read(notes, count)


def show(rows: Sequence[Row]) -> str:
    """The table, with a cure below each red row."""
    lines = [f"{'check':<12} {'':<8} what was seen"]
    for row in rows:
        lines.append(f"{row.name:<12} {row.verdict:<8} {row.seen}")
        lines += [f"{'':<21} cure: {row.cure}"] if row.cure else []
    count = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (OK, RED, UNSEEN)}
    lines.append(f"{count[RED]} of {len(rows)} checks RED, {count[OK]} ok, {count[UNSEEN]} not seen")
    if count[UNSEEN] >= len(rows) - 1:
        lines.append("So this says nothing about the script's training: did it train, on a CPU, in these processes?")
    return "\n".join("".join(letter if letter.isprintable() else " " for letter in line) for line in lines)


def main(path: Path | None, *given: object) -> int:
    """Audit a script, print the table, and write it to a file of JSON; 1 if a row is red, else 0. Raises AuditError."""
    rows = audit(*given)
    print(show(rows), flush=True)
    if path:
        path.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    return int(any(row.verdict == RED for row in rows))
