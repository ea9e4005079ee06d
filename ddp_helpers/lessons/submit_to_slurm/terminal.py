"""The `%%slurm` magic: a cell of Slurm's commands, as one types them in a terminal."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from IPython.core.error import UsageError

from ddp_helpers.jobs import available, look
from ddp_helpers.launch.launchers import clean
from ddp_helpers.launch.screen import Screen

WORDS = re.compile(r"[\w ./:=,@%+-]*")  # what a value may hold: a path, a number, flags
QUOTED = re.compile(r"[^\"$`\\!\n]*")  # and between double quotes, where bash takes all else as it is


class Terminal:
    """Runs cells in bash, in the notebook's folder; {name} is a variable of the notebook.

    It leaves two variables there: `said`, what the last cell printed, and `JOB`, the number of the last job, which
    cells have as $JOB.
    """

    def __init__(self, shell) -> None:
        self.variables = shell.user_ns

    def run(self, line: str, cell: str) -> None:
        """Run a cell: `%%slurm`; `%%slurm fails` where it is meant to fail; `%%slurm until` to stop when $JOB ends."""
        if line.strip() not in ("", "fails", "until"):
            raise UsageError(f"%%slurm {line}: give nothing, fails, or until")
        self.variables["said"] = ""
        if not available():
            print("left out: no Slurm answers here")
            return
        status = self.shown(self.filled(cell), line.strip() == "until")
        if numbers := re.findall(r"Submitted batch job (\d+)", self.variables["said"]):
            self.variables["JOB"] = numbers[-1]
        if line.strip() == "fails":
            print(f"exit status {status}")
        if line.strip() != "until" and (status != 0) != (line.strip() == "fails"):
            raise UsageError(f"the commands ended with exit status {status}")

    def filled(self, cell: str) -> str:
        """Fill in the notebook's variables; what has braces and is none, ${…} too, stays as it is.

        Raises UsageError for a value that bash would take for more than words.
        """

        def value(hole: re.Match) -> str:
            name, quote = hole["name"], hole["quote"]
            text = str(self.variables.get(name, f"{{{name}}}"))
            if name in self.variables and not (QUOTED if quote else WORDS).fullmatch(text):
                raise UsageError(f"%%slurm: {name} is {text!r}: bash would take it for more than words")
            return f"{quote}{text}{quote}"

        return re.sub(r'(?<!\$)(?P<quote>"?)\{(?P<name>\w+)\}(?P=quote)', value, cell)

    def shown(self, commands: str, until: bool) -> int:
        """Run commands, print their lines as they come, and return the exit status; ends all of them if interrupted."""
        env = environment() | {"JOB": self.variables.get("JOB", ""), "PYTHONUNBUFFERED": "1"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        pipes |= {"text": True, "errors": "replace", "start_new_session": True}
        with subprocess.Popen(["bash", "-ec", commands], env=env, **pipes) as process:
            if until:
                threading.Thread(target=stop_with_job, args=[process, env["JOB"]], daemon=True).start()
            screen = Screen()
            try:
                for row in process.stdout:
                    self.variables["said"] += row
                    screen.add("", row.rstrip("\n"))
            except KeyboardInterrupt:
                os.killpg(process.pid, signal.SIGINT)
                raise
            finally:
                screen.draw()
        return process.returncode


def environment() -> dict[str, str]:
    """Make the environment of a terminal: no job's variables, and as `python` the one of this notebook."""
    return clean() | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}


def stop_with_job(process: subprocess.Popen, job: str) -> None:
    """Press Ctrl-C, as it were, when a job has left the queue and its last lines have been shown."""
    while look(job)[0].active:
        time.sleep(0.25)
    time.sleep(1.2)  # tail looks for a log that was not there once a second
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


def load_ipython_extension(shell) -> None:
    """Make `%%slurm` known: `%load_ext ddp_helpers.lessons.submit_to_slurm.terminal`."""
    shell.register_magic_function(Terminal(shell).run, "cell", "slurm")
