"""However a launch ends, and whichever engine has started its ranks: no process of theirs is left."""

import signal
import subprocess
import sys

import psutil
import pytest
from real import LIMIT, THOROUGH, need_launcher, until

from ddp_helpers.launch.shared import VARIABLE

# What each rank does: start three processes, which nobody ends, and note their numbers.
WORK = """
import os, pathlib, subprocess, time
silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # mpirun waits for who has a rank's output
sleeps = [subprocess.Popen(["sleep", "4747"], start_new_session=alone, **silent).pid for alone in (False, True)]
forked = os.fork()
if not forked:
    os.closerange(1, 3)
    time.sleep(4747)
note = pathlib.Path(FOLDER, f"part{os.getpid()}")
note.write_text(" ".join(map(str, [os.getpid(), forked, *sleeps])))
note.rename(note.with_name(f"pids{os.getpid()}"))
time.sleep(SECONDS)
"""
# A notebook starts ranks that end by themselves, then some that do not. A kernel hears SIGINT in any case; this process
# would not, where the tests run in the background of a shell script, which has SIGINT ignored in all that it starts.
NOTEBOOK = f"""
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
for folder, seconds in ((sys.argv[1], 0), (sys.argv[2], 4747)):
    text = {WORK!r}.replace("FOLDER", repr(folder)).replace("SECONDS", str(seconds))
    script = Path(folder, "script.py")
    script.write_text(text)
    START
"""
ENGINES = {
    "torchrun": f"""
    from ddp_helpers.launch.launch import run
    run(script, ranks=2, timeout={LIMIT})""",
    "mpirun": f"""
    from ddp_helpers.launch.launch import run
    run(script, ranks=2, launcher="mpirun", timeout={LIMIT})""",
    "ranks that stay": f"""
    from ddp_helpers.launch import ranks
    ranks.ranks_of_size(2).run(text, {LIMIT})
    ranks.end()""",
    "a forked script": f"""
    from ddp_helpers.launch.forked_script import ForkedScript, wait_for_runs
    run = ForkedScript(script, ranks=2, limit={LIMIT})
    wait_for_runs(run)
    any(run.exit_statuses) and sys.exit(1)""",
    "a kernel that has forked": f"""
    import os, time
    from ddp_helpers.launch.forked_script import ForkedScript, wait_for_runs
    run = ForkedScript(script, ranks=2, limit={LIMIT})
    if not os.fork():
        os.closerange(0, 3)
        time.sleep({LIMIT})  # longer than this process
        os._exit(0)
    wait_for_runs(run)
    any(run.exit_statuses) and sys.exit(1)""",
    "a forked call": f"""
    from ddp_helpers.launch.forked_call import on_ranks
    on_ranks(2, lambda: exec(text, {{}}), patience={LIMIT})""",
}
ENDS = [(engine, number) for engine in ENGINES for number in (signal.SIGINT, signal.SIGKILL)]
# Each engine once, and each signal for one whose ranks are forked and one whose ranks are not; make test-all has all.
USUAL = [(engine, signal.SIGKILL) for engine in ENGINES if engine != "a forked script"]  # a kernel that has forked does
USUAL += [(engine, signal.SIGINT) for engine in ("torchrun", "a forked call")]


def processes(folder):
    """What the ranks have noted: their numbers, and those of what they started."""
    return [int(pid) for note in folder.glob("pids*") for pid in note.read_text().split()]


def gone(pid):
    """Whether this process is no more, or dead and only not yet asked for its status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def server_of(notebook):
    """The warm server of a process."""
    [server] = [child for child in psutil.Process(notebook.pid).children() if "launch.server" in str(child.cmdline())]
    return server


@pytest.mark.parametrize("engine", ENGINES if THOROUGH else ["torchrun", "ranks that stay"])
def test_no_process_is_left_where_the_server_is_killed(engine, tmp_path, request, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # or it is forked from the server of all tests, and nobody's child
    test_no_process_is_left(engine, signal.SIGKILL, tmp_path, request, whom=lambda notebook: server_of(notebook))


@pytest.mark.parametrize(("engine", "number"), ENDS if THOROUGH else USUAL)
def test_no_process_is_left(engine, number, tmp_path, request, whom=lambda notebook: notebook):
    need_launcher(request, engine)
    folders = tmp_path / "end", tmp_path / "wait"
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", NOTEBOOK.replace("START", ENGINES[engine].strip()), *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as notebook:
        try:
            until(lambda: len([*folders[1].glob("pids*")]) == 2 or notebook.poll(), "both ranks have started theirs")
            assert notebook.poll() is None, notebook.stderr.read()
            ended, waiting = map(processes, folders)
            assert len(ended) == len({*ended}) == len(waiting) == 8
            assert all(map(gone, ended)), "of the ranks that ended by themselves"
            assert not any(map(gone, waiting)), "the control"
            whom(notebook).send_signal(number)
            until(lambda: all(map(gone, waiting)), "ranks, and what they started, are gone")
            assert notebook.wait(timeout=LIMIT)
        finally:
            notebook.kill()
