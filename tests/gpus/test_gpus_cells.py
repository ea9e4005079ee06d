"""The tests of on_gpus.py, in a process of their own.

Their group and their tensors without memory leave threads of autograd's and patches of torch's behind; ranks that
other tests fork from the same process would fail.
"""

import os
from pathlib import Path

from real import LIMIT, python


def test_cells_scripts_and_pages_on_pretended_gpus():
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    file = Path(__file__).with_name("on_gpus.py")
    done = python(
        "-m", "pytest", "-n0", "-o", "addopts=", "-q", "-p", "no:cacheprovider", file, env=env, limit=2 * LIMIT
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-10_000:]
