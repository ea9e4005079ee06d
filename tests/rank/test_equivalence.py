"""The parallel run is the serial run: the same weights from one process and from ranks; controls must differ."""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from real import LIMIT, THOROUGH
from torch import nn

from ddp_helpers.launch import launch
from ddp_helpers.launch.scripts import write_script

SIZES = (2, 4) if THOROUGH else (2,)  # notebook 06 compares 1, 2 and 4 ranks each time


class Net(nn.Module):
    """The course's Net, smaller and without dropout, which draws other numbers on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, 2)
        self.fc = nn.Linear(8 * 13 * 13, 10)

    def forward(self, x):
        """Scores of the ten digits for each image."""
        return self.fc(F.relu(self.conv(x)).flatten(1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, digits):
    """Train the written-out scripts on the digits; the weights of each run, by its name."""
    folder = tmp_path_factory.mktemp("trained")
    runs = {"one process": (1, []), "another seed": (1, ["--seed=2"])}
    runs |= {f"{ranks} ranks": (ranks, []) for ranks in SIZES}  # name: ranks, its own arguments
    path = write_script("mnist_ddp", folder / "mnist_ddp.py", replace=[Net])
    weights = {}
    for name, (ranks, own) in runs.items():
        to = folder / name
        args = ["--data", digits, "--epochs=1", "--batch-size=64", "--no-cuda", "--save-model"]
        args += ["--run-dir", to]
        if ranks > 1:
            launch.run(path, *args, ranks=ranks, timeout=LIMIT)
        else:  # here, where torch is imported
            with patch.object(sys, "argv", [str(path), *map(str, args), *own]):
                runpy.run_path(str(path), run_name="__main__")
        state = torch.load(to / "mnist_cnn.pt", weights_only=True)
        weights[name] = torch.cat([state[key].flatten() for key in sorted(state)])
    return weights


@pytest.mark.parametrize("ranks", SIZES)
def test_mnist_on_several_ranks_ends_with_the_weights_of_one_process(ranks, trained):
    assert (trained[f"{ranks} ranks"] - trained["one process"]).abs().max() <= 1e-6


def test_another_seed_ends_elsewhere(trained):
    assert (trained["another seed"] - trained["one process"]).abs().max() > 1e-4


@pytest.mark.skipif(not THOROUGH, reason="notebooks 04, 05 and 12 prove it on two ranks: make test-all, on four")
def test_what_must_be_equal_and_what_must_differ_on_four_ranks():
    done = launch.run(Path(__file__).with_name("ranks_equivalence.py"), ranks=4, timeout=LIMIT)
    by_rank = [json.loads(line) for rank in range(4) for line in done.of(rank)]
    assert len(by_rank) == 4
    for rank in by_rank:
        for what in ("ddp - one process", "by hand - ddp", "no_sync - one big batch"):
            assert rank[what] < 1e-12, what  # in double precision
        for what in ("same shard everywhere - one process", "by hand, not averaged - ddp"):
            assert rank[what] > 1e-4, what
        assert rank["no_sync, not divided - one big batch"] > 1e-4
        assert rank["replicas"] == [True] * 4
        assert rank["perturbed replicas"] == [True, True, True, False]
