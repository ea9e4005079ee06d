"""The `%%slurm` magic of notebook 07: a cell of Slurm's commands, as in a terminal.

The notebook loads it by %load_ext; the exercises take its `environment` for their jobs.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from ddp_helpers.jobs.queue import available, states_of_job
from ddp_helpers.launch.launchers import clean_environment
from ddp_helpers.launch.screen import Screen

_VARIABLE = re.compile(r"(?<!\$)\{(\w+)\}")  # {name}, not ${name}


class Terminal:
    """Runs cells in bash, in the notebook's folder; {name} is a variable of the notebook.

    It sets two variables there: `said`, the last cell's output, and `JOB`, the number of the
    last job, which is $JOB in cells.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.variables = shell.user_ns

    def run(self, line: str, cell: str) -> None:
        """Run a cell and print its lines as they come.

        line: empty; `fails`, if the commands should fail; `until`, to stop when $JOB ends;
        `local`, to run only at the site `local`: elsewhere the jobs would hold nodes of others.
        Raises UsageError for another line, or if the commands end differently.
        """
        mode = line.strip()
        if mode not in ("", "fails", "until", "local"):
            raise UsageError(f"%%slurm {line}: give nothing, fails, until, or local")
        self.variables["said"] = ""
        if mode == "local" and self.variables["site"] != "local":
            print("left out: these jobs would only hold nodes that others wait for")
            return
        if not available():
            print("left out: no Slurm answers here")
            return
        status = self._run_in_bash(cell, until_job_ends=mode == "until")
        if numbers := re.findall(r"Submitted batch job (\d+)", self.variables["said"]):
            self.variables["JOB"] = numbers[-1]
        if mode == "fails":
            print(f"exit status {status}")
        if mode != "until" and bool(status) != (mode == "fails"):
            raise UsageError(f"the commands ended with exit status {status}")

    def _run_in_bash(self, cell: str, until_job_ends: bool) -> int:
        """Run commands, print and keep their lines, and return the exit status.

        Bash gets the notebook's variables as its own variables, so it runs no code in a value.
        An interrupt ends the commands, and all that they have started.
        """
        names = {name for name in _VARIABLE.findall(cell) if name in self.variables}
        job = self.variables.get("JOB", "")
        with subprocess.Popen(
            [
                "bash",
                "-ec",
                _VARIABLE.sub(lambda found: "$" * (found[1] in names) + found[0], cell),
            ],
            env=environment()
            | {name: str(self.variables[name]) for name in names}
            | {"JOB": job, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            if until_job_ends:
                arguments = (process, job)
                threading.Thread(target=_stop_with_job, args=arguments, daemon=True).start()
            screen = Screen()
            try:
                for line in process.stdout or ():
                    self.variables["said"] += line
                    screen.add("", line.rstrip("\n"))
            except KeyboardInterrupt:
                os.killpg(process.pid, signal.SIGINT)
                raise
            finally:
                screen.draw()
        return process.returncode


def environment() -> dict[str, str]:
    """Return the environment of a terminal: no variables of a job, and this notebook's `python`."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return clean_environment() | {"PATH": path}


def _stop_with_job(process: subprocess.Popen, job: str) -> None:
    """Wait until a job has left the queue and its last lines are shown, then end the process."""
    while states_of_job(job)[0].active:
        time.sleep(0.25)
    time.sleep(1.2)  # tail looks for a missing log once per second
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register `%%slurm`: `%load_ext ddp_helpers.lessons.submit_to_slurm.terminal`."""
    terminal = Terminal(shell)
    register = shell.register_magic_function
    register(terminal.run, "cell", "slurm")  # type: ignore[arg-type]  # IPython types it unbound
