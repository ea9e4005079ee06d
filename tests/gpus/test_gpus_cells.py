"""The tests of on_gpus.py, in a process of their own.

Ranks see what is put in the place of torch's classes only in modules that they import themselves: where another test of
the process has imported dial_ranks before, its DDP is the real one. And a first backward on tensors without memory
starts threads of autograd's, after which other tests could fork no ranks.
"""

import os
from pathlib import Path

from real import LIMIT, python


def test_cells_scripts_and_pages_on_pretended_gpus():
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # A path relative to its folder: pytest refuses one in which brackets stand, and a clone's folder may have some.
    quiet = ("-n0", "-o", "addopts=", "-q", "-p", "no:cacheprovider")
    done = python("-m", "pytest", *quiet, "on_gpus.py", cwd=Path(__file__).parent, env=env, limit=2 * LIMIT)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-10_000:]
