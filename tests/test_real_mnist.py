"""The promise of the course, on real MNIST where DDP_MNIST_ROOT names it: one epoch on two ranks reaches 98 %."""

import os
import subprocess
import sys

import pytest
from real import THOROUGH

from ddp_helpers.notebook import launch, launchers, runs, scripts

MNIST_ROOT = os.environ.get("DDP_MNIST_ROOT")
pytestmark = pytest.mark.skipif(not MNIST_ROOT, reason="DDP_MNIST_ROOT names no real MNIST")
POISON = 'raise ImportError("a written-out script must not need ddp_helpers")\n'


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "srun"][: 3 if THOROUGH else 1])  # 2 minutes each
def test_two_ranks_reach_98_per_cent_where_the_helpers_cannot_be_imported(launcher, tmp_path, request):
    if launcher == "mpirun":
        request.getfixturevalue("mpirun")
    if launcher == "srun":
        request.getfixturevalue("cluster")
    script = scripts.write("mnist_ddp", tmp_path / "mnist_ddp.py")
    (tmp_path / "ddp_helpers.py").write_text(POISON)
    env = {"PYTHONPATH": str(tmp_path)}
    poisoned = subprocess.run(
        [sys.executable, "-c", "import ddp_helpers"], env=launchers.environment([1], env), cwd="/"
    )
    assert poisoned.returncode != 0, "the helpers can be imported, so this test shows nothing"

    flags = ["--data", MNIST_ROOT, "--epochs", 1, "--no-cuda", "--run-dir", tmp_path / "run"]
    result = launch.run(script, *flags, ranks=2, launcher=launcher, env=env)

    run = runs.read(tmp_path / "run")
    assert (run.state, run.problems, run.env["dataset"]) == ("done", [], "MNIST")
    assert run.epochs[0]["test_samples"] == 10_000
    assert run.epochs[0]["test_accuracy"] >= 0.98
    assert {rank for rank, line in result.lines if line.startswith("epoch")} == {"0"}
