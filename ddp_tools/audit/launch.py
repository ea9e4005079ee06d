"""Start the instrumented ranks of an audit on this machine, and end all processes that they start.

The driver process calls it. Needs no torch. Ranks get the environment variables of torchrun.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO

from ddp_tools.audit.notes import Notes, read_notes
from ddp_tools.one_machine import HIDES_GPUS, LOOPBACK_ONLY, free_port

WITNESS = Path(__file__).with_name("instrument.py")
_START = 90.0  # seconds for the imports, in addition to the limit
_GRACE = 4.0  # seconds that the other ranks have once one has failed
# Variables that a launcher, or a job, around the audit has set for its own ranks.
_OF_LAUNCHERS = re.compile(
    r"(SLURMD?|PMIX?|PMI2|OMPI|PALS|TORCHELASTIC|MASTER|GROUP|ROLE)_"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)$|MPI_LOCALRANKID$"
)


def launch(
    ranks: int,
    command: Sequence[str],
    cwd: Path,
    notes: Path,
    limit: float,
    env: Mapping[str, str],
) -> list[Notes]:
    """Run the ranks until they exit or are killed; return their notes.

    Args:
        ranks: how many.
        command: the script and its arguments.
        cwd: the folder in which it runs.
        notes: the folder for the notes and for output.log.
        limit: seconds after which a rank ends itself.
        env: more environment variables.
    """
    words = [sys.executable, str(WITNESS), str(notes), str(limit), *command]
    until = time.monotonic() + limit + _START
    started: list[subprocess.Popen[bytes]] = []
    copying = []
    with (notes / "output.log").open("wb", buffering=0) as log:
        try:
            for rank, variables in enumerate(_environments(ranks, env)):
                process = subprocess.Popen(
                    words,
                    cwd=cwd,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                started.append(process)
                copying.append(Thread(target=_copy, args=[process.stdout, rank, log], daemon=True))
                copying[-1].start()
            while None in [process.poll() for process in started] and time.monotonic() < until:
                if any(process.returncode for process in started):
                    until = min(until, time.monotonic() + _GRACE)
                time.sleep(0.05)
        finally:
            for process in started:  # each leads the session of its own child processes
                with suppress(ProcessLookupError, PermissionError):  # the latter on macOS
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for thread in copying:
            thread.join(_GRACE)  # a process that has left the session may keep a pipe open
    return read_notes(notes, ranks)


def _copy(lines: IO[bytes], rank: int, log: IO[bytes]) -> None:
    """Copy a rank's output to the log, with its number before each line, as torchrun does."""
    for line in lines:
        with suppress(ValueError):  # the log is closed
            log.write(b"[rank%d]:%s\n" % (rank, line.rstrip(b"\n")))


def _environments(ranks: int, env: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank: torchrun's variables, the loopback only, GPUs if they suffice.

    env: more variables, which override all others.
    """
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    shared = {name: text for name, text in os.environ.items() if not _OF_LAUNCHERS.match(name)}
    shared |= LOOPBACK_ONLY | {
        "PYTHONUNBUFFERED": "1",
        "PYTHON_COLORS": "0",  # a notebook's FORCE_COLOR would colour tracebacks
        "OMP_NUM_THREADS": str(max(1, cpus // ranks)),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks))
    if int(os.environ.get("SIMULATED_GPUS", "0")) < ranks:  # set by `ddp-course gpus`
        shared |= dict.fromkeys(HIDES_GPUS, "")
    names = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    return [shared | dict.fromkeys(names, str(rank)) | dict(env) for rank in range(ranks)]
