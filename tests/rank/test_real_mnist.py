"""The promise of the course, on real MNIST where DDP_MNIST_ROOT names it: one epoch on two ranks reaches 98 %."""

import os

import pytest
from real import THOROUGH, without_helpers

from ddp_helpers.launch import launch, scripts
from ddp_helpers.records import runs

MNIST_ROOT = os.environ.get("DDP_MNIST_ROOT")
pytestmark = pytest.mark.skipif(not (THOROUGH and MNIST_ROOT), reason="minutes; or DDP_MNIST_ROOT names no real MNIST")


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "srun"])
def test_two_ranks_reach_98_per_cent_where_the_helpers_cannot_be_imported(launcher, tmp_path, request):
    if launcher == "mpirun":
        request.getfixturevalue("mpirun")
    if launcher == "srun":
        request.getfixturevalue("cluster")
    script = scripts.write_script("mnist_ddp", tmp_path / "mnist_ddp.py")
    env = without_helpers(tmp_path)
    flags = ["--data", MNIST_ROOT, "--epochs", 1, "--no-cuda", "--run-dir", tmp_path / "run"]
    result = launch.run(script, *flags, ranks=2, launcher=launcher, env=env)

    run = runs.read_run(tmp_path / "run")
    assert (run.state, run.problems, run.env["dataset"]) == ("done", [], "MNIST")
    assert run.epochs[0]["test_samples"] == 10_000
    assert run.epochs[0]["test_accuracy"] >= 0.98
    assert {rank for rank, line in result.lines if line.startswith("epoch")} == {"0"}
