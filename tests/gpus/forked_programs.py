"""Run a program, and fork all Python that it starts from this process, which has torch: forked_programs.py PROGRAM ….

A new Python would import torch for seconds. What is forked has its own environment, folder, output, session and
status, but not its own command line in the list of processes.
"""

import atexit
import inspect
import os
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.run
import torch.fx.experimental.symbolic_shapes
import torchvision.datasets  # noqa: F401  what the programs import

start_program = subprocess.Popen._execute_child
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def fork(popen, *given):
    """In the place of Popen's own start: where a Python is asked for, a fork of this process becomes it."""
    asked = inspect.signature(start_program).bind(popen, *given).arguments
    command = list(map(os.fsdecode, asked["args"]))
    if command[0] != sys.executable:
        start_program(popen, *given)
        return
    popen.pid, popen._child_created = os.fork(), True
    if popen.pid:
        popen._close_pipe_fds(*(asked[name] for name in PIPES))
        return
    status = 1
    try:
        become(asked)
        status = run(command[1:])
    finally:
        os._exit(status)


def become(asked):
    """Be the process that was asked for."""
    if asked["start_new_session"]:
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if asked[name] != -1:
            os.dup2(asked[name], number)
    for number in {asked[name] for name in PIPES}:
        if number > 2:
            os.close(number)
    close_files()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if asked["env"] is not None:
        os.environ.clear()
        os.environ.update({os.fsdecode(name): os.fsdecode(text) for name, text in asked["env"].items()})
    os.chdir(asked["cwd"] or ".")
    atexit._clear()
    torch.set_num_threads(1)  # a step compares weights, and forks ranks then, which have none of its threads


def close_files():
    """Close all files but 0 to 2, as a new program has none; and but pipes of which this process has both ends.

    libuv, which torchrun's store uses, closes its own pipe again in each fork, by its numbers: they must stay its own.
    """
    leads = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder that is listed
            leads[int(path.name)] = str(path.readlink())
    ends = Counter(leads.values())
    for number, where in leads.items():
        if number > 2 and not (where.startswith("pipe:") and ends[where] > 1):
            os.close(number)


def run(words):
    """Run a program by the words behind `python`; returns its exit status."""
    status, rest = 0, iter(words)
    try:
        for word in rest:
            if word == "-W":
                warnings.simplefilter(next(rest))
            elif word == "-m":
                sys.argv = [next(rest), *rest]
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            elif word != "-u":
                sys.argv, sys.path[0] = [word, *rest], str(Path(word).resolve().parent)
                runpy.run_path(word, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's, which says the rank
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    return status


if __name__ == "__main__":
    subprocess.Popen._execute_child = fork
    sys.exit(run(sys.argv[1:]))
