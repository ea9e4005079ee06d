"""Grade a folder of many people's notebooks: `ddp-course grade FOLDER` calls `grade`.

Each exercise runs in a process of its own, in a fresh copy of the course, without a network, and
with a time limit. What runs there is its cell, and what that needs of the cells above: `handed_in`
has the rule.

The verdict is what the judge returns, over a pipe of its own; nothing that a cell prints is read.
The answer runs in the judge's process, though: who sets out to deceive the judge can.
"""

import ctypes
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple
from uuid import uuid4

from ddp_helpers import ROOT, PlainError, lessons
from ddp_helpers.launch.processes import SURE, end_found, exit_text, marked_processes
from ddp_helpers.lessons.exercise import NOT_YET, RIGHT
from ddp_helpers.lessons.handed_in import code_cells, exercises_in, number_of, program, recognise

MARK = "DDP_COURSE_GRADE"  # the environment variable by which an exercise's processes are found
START = 120.0  # seconds until the learner's time begins: imports, on a busy machine
PATIENCE = 30.0  # seconds that live ranks have, as in the notebook's own cells
LONGEST = 800  # characters of a result
NOT_GRADED = "not graded: "
_HELD = {
    True: "Each answer has a network of its own, with loopback alone.",
    False: "This system lets no process have a network of its own, so a guard inside Python refuses"
    " connections: other programs that an answer starts are not held.",
}
# Verdicts on what is not here: a Slurm, and a script that was not handed in.
_UNSEEN = ("not checked", f"{NOT_YET}: there is no file")
_GUARD = """import sys
from ddp_helpers.lessons.grade import guard
sys.addaudithook(guard)
"""


class Row(NamedTuple):
    """A line of the table; a result that begins with NOT_GRADED is none."""

    person: str
    notebook: str  # as it was handed in
    exercise: str
    result: str


def grade(folder: Path, limit: float) -> Iterator[Row]:
    """Yield the result of each exercise in the notebooks below a folder; limit: seconds for each.

    Prints first what keeps the answers from the network. Raises PlainError where no notebook is.
    """
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*.ipynb"))]
    files = [file for file in files if not any(part[0] == "." for part in file.parts)]
    if not files:
        raise PlainError(f"{folder} holds no notebook: give one of NAME/02_….ipynb, and so on")
    probe = _child("leave_the_network()")
    tried = subprocess.run(probe, cwd=ROOT, env=_here(ROOT), capture_output=True, check=False)
    print(f"# {_HELD[alone := tried.returncode == 0]}", flush=True)
    originals = {
        path.stem: exercises_in(path) for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")
    }
    for file in files:
        person, *below = file.with_suffix("").parts
        beside = (folder / file).parent if below else None  # else: other people's files
        try:
            cells = code_cells(folder / file)
            notebook = recognise(file.stem, "\n".join(cells), originals)
            exercises = originals[notebook]
            texts = {name: program(cells, name, exercises[name] > 0) for name in exercises}
        except Exception as error:  # whatever one person's file is, the others' are graded
            result = f"{NOT_GRADED}{type(error).__name__}: {error}"
            yield Row(*map(_one_line, (person, "/".join(below) or person, "-", result)))
            continue
        if not below and (numbered := number_of(notebook).match(file.stem)):
            person, below = numbered[1] or folder.resolve().name, [file.stem]
        for name, text in texts.items():
            result = "no cell defines it"
            if text:
                result = _run(name, exercises[name], text, beside, limit, alone)
            yield Row(*map(_one_line, (person, "/".join(below) or person, name, result)))


def _one_line(text: str) -> str:
    """Return what a terminal shows as one line, whatever a learner has put into it."""
    shown = " ".join(text.split())[:LONGEST]
    return "".join(character if character.isprintable() else "?" for character in shown)


# ---- a process for an exercise


def _child(call: str) -> list[str]:
    code = f"from ddp_helpers.lessons import grade; grade.{call}"
    return [sys.executable, "-P", "-c", code]


def _here(course: Path) -> dict[str, str]:
    """Return the environment of a process that takes the packages from this copy of the course."""
    return os.environ | {"PYTHONPATH": str(course)}


def _run(name: str, ranks: int, text: str, beside: Path | None, limit: float, alone: bool) -> str:
    """Have an answer judged in a fresh copy of the course; all its processes are ended then.

    beside: a folder whose modules stand beside the notebook. alone: in a network of its own.
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
        if not alone:  # Python runs it wherever it starts
            (course / "sitecustomize.py").write_text(_GUARD)
        ours, theirs = os.pipe()
        process = subprocess.Popen(
            _child(f"judge({name!r}, {ranks}, {theirs}, {alone})"),
            cwd=course / "notebooks",
            env=_here(course) | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs],
            start_new_session=True,
        )
        os.close(theirs)
        begun = ""
        try:
            begun = _line(ours, START)
            return _line(ours, limit).replace(f"{course}/", "")
        except TimeoutError:
            late = f"{NOT_GRADED}its process did not begin within {START:g} s"
            return f"ended by the time limit of {limit:g} s" if begun else late
        except EOFError:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SURE)
            ended = f"its process ends without a verdict: {exit_text(process.poll())}"
            return ended if begun else f"{NOT_GRADED}{ended}"
        finally:
            find = partial(marked_processes, variables[MARK], MARK, [process.pid])
            end_found(find, signal.SIGKILL)
            process.wait()
            os.close(ours)


def _copy_course(course: Path, beside: Path | None) -> None:
    """Copy what an answer can need: the packages, and the modules beside the notebooks."""
    passing = shutil.ignore_patterns("*.pyc.*")  # which Python is writing just now
    for part in ("ddp_helpers", "ddp_tools", "slurm"):
        shutil.copytree(ROOT / part, course / part, ignore=passing)
    (course / "notebooks").mkdir()
    for source in filter(None, (ROOT / "notebooks", beside)):
        for path in filter(Path.is_file, source.glob("*.py")):
            shutil.copy(path, course / "notebooks")


def _line(pipe: int, seconds: float) -> str:
    """Read a line. Raises TimeoutError, and EOFError where the other end is closed before."""
    end, data = time.monotonic() + seconds, b""
    while not data.endswith(b"\n"):
        if not select.select([pipe], [], [], max(0, end - time.monotonic()))[0]:
            raise TimeoutError
        if not (more := os.read(pipe, 1)) or len(data) > 4 * LONGEST:
            raise EOFError
        data += more
    return data.decode(errors="replace").strip()


def judge(name: str, ranks: int, pipe: int, alone: bool) -> None:
    """Run what stands in ../answer.py, and send the verdict; the child of `_run` calls it."""
    if alone:
        leave_the_network()
    if ranks:  # only now: torch has threads, and a process with threads cannot leave its network
        from ddp_helpers.launch.forked_call import on_ranks
    os.set_inheritable(pipe, False)
    lessons.exercise_called(name)  # imports what judges, before anything of the learner's
    os.write(pipe, b"begun\n")
    try:
        ask = partial(_verdict, name)
        told = on_ranks(ranks, ask, PATIENCE) if ranks else [ask()]
    except Exception as error:
        told = [f"{NOT_YET}: {error}"]
    line = " ".join(next((one for one in told if one != RIGHT), RIGHT).split())
    os.write(pipe, f"{line[:LONGEST]}\n".encode(errors="replace"))


def _verdict(name: str) -> str:
    """Run the answer, and ask its judge."""
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
    except BaseException as error:  # SystemExit, too
        return f"{NOT_YET}: {name} ends with {type(error).__name__}: {error}"
    return f"{NOT_GRADED}{verdict}" if verdict.startswith(_UNSEEN) else verdict


# ---- no network


def leave_the_network() -> None:
    """Move this process into a network of its own, with loopback. Raises OSError if it may not."""
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


def guard(event: str, arguments: tuple) -> None:
    """Refuse what would reach another machine: an audit hook, which Python cannot take off."""
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        address = arguments
    else:
        return
    host = str(address[0] or "") if isinstance(address, tuple) else ""
    if host and host not in ("localhost", "::1", socket.gethostname()) and host[:4] != "127.":
        raise OSError(f"no network here: {host} is another machine")
