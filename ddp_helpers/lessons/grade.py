"""Grade a folder of many people's notebooks: `ddp-course grade FOLDER` calls `grade`.

Each exercise runs in its own process, in a fresh copy of the course, without a network, and with a
time limit. The process runs its cell, and the statements of earlier cells that it needs:
`submissions` has the rule.

The checker writes the verdict to a file; nothing that a cell prints is read. The answer runs in
the checker's process, though, so a learner who wants to deceive the checker can.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple
from uuid import uuid4

from ddp_helpers import ROOT, lessons
from ddp_helpers.launch.processes import end_found, exit_text, marked_processes
from ddp_helpers.lessons.exercise import NOT_YET, RIGHT
from ddp_helpers.lessons.submissions import code_cells, exercises_in, program, recognise
from ddp_tools import PlainError

MARK = "DDP_COURSE_GRADE"  # the environment variable by which an exercise's processes are found
PATIENCE = 30.0  # seconds that live ranks have, as in the notebook's own cells
LONGEST = 800  # characters of a result
NOT_GRADED = "not graded: "
VERDICT = "verdict"  # the file with it, in the copy of the course
_HELD = "Each answer has its own network, with only loopback."
_FREE = "This system gives no process its own network, so answers can reach other machines: "
_FREE += "grade in a container without a network."
# Verdicts on answers that need a Slurm, or a script that was not handed in.
_UNSEEN = ("not checked", f"{NOT_YET}: there is no file")


class Row(NamedTuple):
    """A row of the table; a result that starts with NOT_GRADED is no verdict."""

    person: str
    notebook: str  # as it was handed in
    exercise: str
    result: str


def grade(folder: Path, limit: float) -> Iterator[Row]:
    """Yield the result of each exercise in the notebooks below a folder; limit: seconds for each.

    Prints first how answers are kept from the network. Raises PlainError if there is no notebook.
    """
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*.ipynb"))]
    files = [file for file in files if not any(part[0] == "." for part in file.parts)]
    if not files:
        raise PlainError(f"{folder} holds no notebook: give one of NAME/02_….ipynb, and so on")
    probe = _child("leave_the_network()")
    tried = subprocess.run(probe, cwd=ROOT, env=_here(ROOT), capture_output=True, check=False)
    alone = tried.returncode == 0
    print(f"# {_HELD if alone else _FREE}", flush=True)
    originals = {
        path.stem: exercises_in(path) for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")
    }
    for file in files:
        person, *below = file.with_suffix("").parts
        beside = (folder / file).parent if below else None  # else: other people's files
        if not below:  # the name stands before the number of the notebook
            below = [person]
            person = re.split(r"(?:^|[ ._-]+)\d", person)[0] or folder.resolve().name
        try:
            cells = code_cells(folder / file)
            exercises = originals[recognise("\n".join(cells), originals)]
            texts = {name: program(cells, name, exercises[name] > 0) for name in exercises}
        except Exception as error:  # one person's file must not stop the grading
            texts = {"-": f"{NOT_GRADED}{type(error).__name__}: {error}"}
        for name, text in texts.items():
            result = text or "no cell defines it"
            if text and name != "-":
                result = _run(name, exercises[name], text, beside, limit, alone)
            yield Row(*map(_one_line, (person, "/".join(below), name, result)))


def _one_line(text: str) -> str:
    """Return a learner's text as one printable line."""
    shown = " ".join(text.split())[:LONGEST]
    return "".join(character if character.isprintable() else "?" for character in shown)


# ---- a process for an exercise


def _child(call: str) -> list[str]:
    code = f"from ddp_helpers.lessons import grade; grade.{call}"
    return [sys.executable, "-P", "-c", code]


def _here(course: Path) -> dict[str, str]:
    """Return the environment of a process that imports from this copy of the course."""
    inherited = os.environ.get("PYTHONPATH")  # it has the simulated GPUs
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(course), inherited]))}


def _run(name: str, ranks: int, text: str, beside: Path | None, limit: float, alone: bool) -> str:
    """Check an answer in a fresh copy of the course, and end all its processes afterwards.

    beside: a folder whose modules go next to the notebook. alone: give it its own network.
    """
    # Slurm would start a job on another machine.
    variables = {MARK: uuid4().hex, "DDP_RUNS": "", "SLURM_CONF": "/none"}
    with TemporaryDirectory(prefix="grade-", ignore_cleanup_errors=True) as folder:
        course = Path(folder).resolve()
        variables |= {"HOME": str(course), "TMPDIR": str(course)}
        try:
            _copy_course(course, beside)
        except (OSError, shutil.Error) as error:
            return f"{NOT_GRADED}{error}"
        (course / "answer.py").write_text(text, "utf-8", errors="replace")
        process = subprocess.Popen(
            _child(f"judge({name!r}, {ranks}, {alone})"),
            cwd=course / "notebooks",
            env=_here(course) | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit)
            status = process.poll()
        finally:
            find = partial(marked_processes, variables[MARK], MARK, [process.pid])
            end_found(find, signal.SIGKILL)
            process.wait()
        if (verdict := course / VERDICT).is_file():
            return verdict.read_text("utf-8").replace(f"{course}/", "")
        if status is None:
            return f"ended by the time limit of {limit:g} s"
        return f"its process ends without a verdict: {exit_text(status)}"


def _copy_course(course: Path, beside: Path | None) -> None:
    """Copy all that an answer can need: the packages, and the modules next to the notebooks."""
    passing = shutil.ignore_patterns("*.pyc.*")  # which Python is writing just now
    for part in ("ddp_helpers", "ddp_tools", "slurm"):
        shutil.copytree(ROOT / part, course / part, ignore=passing)
    (course / "notebooks").mkdir()
    for source in filter(None, (ROOT / "notebooks", beside)):
        for path in filter(Path.is_file, source.glob("*.py")):
            shutil.copy(path, course / "notebooks")


def judge(name: str, ranks: int, alone: bool) -> None:
    """Run ../answer.py and write the verdict; the child of `_run` calls it."""
    course = Path.cwd().parent
    if alone:
        leave_the_network()
    ask = partial(_verdict, name)
    if ranks:  # only now: torch has threads, and a process with threads cannot leave its network
        from ddp_helpers.launch.forked_call import on_ranks
    try:
        told = on_ranks(ranks, ask, PATIENCE) if ranks else [ask()]
    except Exception as error:
        told = [f"{NOT_YET}: {error}"]
    verdict = next((one for one in told if one != RIGHT), RIGHT)
    (course / VERDICT).write_text(verdict, "utf-8", errors="replace")
    os._exit(0)  # whatever the answer has left running


def _verdict(name: str) -> str:
    """Run the answer, and return its verdict."""
    exercise = lessons.exercise_called(name)
    assert exercise, name
    ask, path = exercise.verdict, Path("..", "answer.py").resolve()
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__file__=str(path), lessons=lessons)
    lessons.check = lambda answer: None  # the verdict is asked for below
    sys.path.insert(0, str(Path.cwd()))
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except BaseException as error:
        return f"the cell fails with {type(error).__name__}: {error}"
    try:
        verdict = ask(getattr(module, name))
    except BaseException as error:  # even SystemExit
        return f"{NOT_YET}: {name} ends with {type(error).__name__}: {error}"
    return f"{NOT_GRADED}{verdict}" if verdict.startswith(_UNSEEN) else verdict


# ---- no network


def leave_the_network() -> None:
    """Move this process into its own network, with loopback. Raises OSError if it may not."""
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_network = 0x10000000, 0x40000000
    if not hasattr(libc, "unshare") or libc.unshare(new_user | new_network):
        raise OSError(ctypes.get_errno(), "no network namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    import fcntl

    with socket.socket() as any_socket:  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))
