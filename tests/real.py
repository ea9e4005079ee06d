"""Real processes for the tests, each with a time limit, each ended at the end."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from ddp_helpers import ROOT

# Run a file as a script where ddp_helpers cannot be imported. It says "up" when torch is in, and then waits for a
# line: what is timed is the script, not the import, and several processes start at the same moment.
GATE = """
import runpy, sys, torch
if sys.argv.pop(1) == "standalone":
    import torch.nn.parallel, torch.optim, torch.utils.data, torchvision.datasets, torchvision.transforms
    sys.modules["ddp_helpers"] = None
print("up", flush=True)
sys.stdin.readline()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
THOROUGH = bool(os.environ.get("TEST_ALL"))  # set by `make test-all`: every row, ten thousand inputs, fresh seeds
IMPORT = 90  # seconds that a busy machine may need to import torch


@dataclass
class Ended:
    """How a process ended: exit status, what it printed, and seconds from the gate to the end."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def line(self) -> str:
        """The one line that it left on stderr; none, or two, are an error."""
        assert len(self.err.splitlines()) == 1, f"not one line on stderr:\n{self.err}"
        return self.err.strip()


@dataclass
class Gated:
    """Processes that wait at the gate, each with its own environment on top of ours."""

    children: list = field(default_factory=list)

    def start(self, script, *args, standalone=False, cwd=None, **env):
        """Bring one more process to the gate."""
        mode = "standalone" if standalone else "with helpers"
        command = [sys.executable, "-c", GATE, mode, str(script), *map(str, args)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | {k: str(v) for k, v in env.items()}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.children.append(subprocess.Popen(command, env=env, cwd=cwd, text=True, **pipes))

    def go(self, limit):
        """Open the gate for all at once; how each ended, within `limit` seconds."""
        for child in self.children:
            assert child.stdout.readline() == "up\n", child.stderr.read()
        begin, ended = time.monotonic(), []
        for child in self.children:
            child.stdin.write("go\n")
            child.stdin.close()
            child.stdin = None
        for child in self.children:
            out, err = child.communicate(timeout=max(0.1, begin + limit - time.monotonic()))
            ended.append(Ended(child.returncode, out, err, time.monotonic() - begin))
        return ended


@contextmanager
def gated():
    """Processes behind a gate; whatever happens, none is left."""
    processes = Gated()
    try:
        yield processes
    finally:
        for child in processes.children:
            child.kill()
            child.wait(timeout=10)


def python(*args, limit=IMPORT, **options):
    """Run Python with these arguments to its end."""
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, **options)


def without_helpers(folder):
    """The environment of ranks that cannot import ddp_helpers, whoever has installed it."""
    (folder / "ddp_helpers.py").write_text('raise ImportError("a written-out script must not need ddp_helpers")\n')
    tried = python("-c", "import ddp_helpers", env={**os.environ, "PYTHONPATH": str(folder)}, cwd="/")
    assert tried.returncode, "the helpers can be imported, so a script that runs shows nothing"
    return {"PYTHONPATH": str(folder)}


@cache
def make_lab():
    """The command of `make lab`, from `jupyter` on, for who runs the tests; nothing is installed or started."""
    done = [word for target in (".venv/installed", "system", "staged") for word in ("-o", target)]
    said = subprocess.run(["make", "-n", *done, "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return ["jupyter", *re.search(r"jupyter (lab .*)$", said, re.M)[1].split()]


def until(condition, what, seconds):
    """Wait until it is so, and give what the condition found."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return found
