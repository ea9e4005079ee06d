"""Real processes and servers for the tests, each with a time limit, each ended at the end."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ddp_helpers import ROOT

THOROUGH = bool(os.environ.get("TEST_ALL"))  # set by `make test-all`: every row, ten thousand inputs, fresh seeds
weekly = pytest.mark.skipif(not THOROUGH, reason="weekly: make test-all has it")
LIMIT = 300  # seconds until a test gives up a wait, whatever it waits for: far more than a busy machine needs


def fail_in_ci(reason):
    """What a test needs is missing: an error in CI, and a skipped test elsewhere."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def need_launcher(request, launcher):
    """Fail in CI, or skip the test, where the launcher is not on this machine; torchrun always is."""
    if fixture := {"mpirun": "mpirun", "srun": "cluster"}.get(launcher):
        request.getfixturevalue(fixture)


def python(*args, limit=LIMIT, **options):
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
    """What `make lab` has Python do, for who runs the tests; nothing is installed or started."""
    done = [word for target in (".venv/installed", "system", "staged") for word in ("-o", target)]
    said = subprocess.run(["make", "-n", *done, "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return re.search(r"python (-m [\w.]+lab (?:.*\\\n)*.*)$", said, re.M)[1].replace("\\\n", " ").split()


def until(condition, what):
    """Wait until it is so, LIMIT seconds at most, and give what the condition returned."""
    end = time.monotonic() + LIMIT
    while not (result := condition()):
        assert time.monotonic() < end, f"not within {LIMIT} s: {what}"
        time.sleep(0.1)
    return result


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that reports no request."""

    def log_message(self, *_):
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder's files, for this machine only."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
