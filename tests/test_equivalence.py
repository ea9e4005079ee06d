"""The parallel run is the serial run: the same weights from 1, 2 and 4 ranks, and controls that must differ."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_helpers.notebook import launch
from ddp_helpers.notebook.scripts import write

SIZES = (2, 4)


class Net(nn.Module):
    """The course's Net, smaller and without dropout, which draws other numbers on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, 2)
        self.fc = nn.Linear(8 * 13 * 13, 10)

    def forward(self, x):
        """Scores of the ten digits for each image."""
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, digits):
    """Train the written-out scripts on the digits; the weights of each run, by its name."""
    folder = tmp_path_factory.mktemp("trained")
    runs = {  # name: script, ranks, its own arguments
        "one process": ("mnist_single", 1, []),
        "2 ranks": ("mnist_ddp", 2, []),
        "4 ranks": ("mnist_ddp", 4, []),
        "another seed": ("mnist_single", 1, ["--seed=2"]),
    }
    weights = {}
    for name, (script, ranks, own) in runs.items():
        path, to = write(script, folder / f"{script}.py", replace=[Net]), folder / name
        args = ["--data", digits, "--epochs=1", f"--batch-size={64 // ranks}", "--no-cuda", "--save-model"]
        args += ["--run-dir", to, "--precision", "float32"]  # bfloat16 rounds more than the order of a sum does
        launch.run(path, *args, *own, ranks=ranks, launcher="torchrun" if ranks > 1 else "python", timeout=150)
        state = torch.load(to / "mnist_cnn.pt", weights_only=True)
        weights[name] = torch.cat([state[key].flatten() for key in sorted(state)])
    return weights


@pytest.mark.parametrize("ranks", SIZES)
def test_mnist_on_several_ranks_ends_with_the_weights_of_one_process(ranks, trained):
    assert (trained[f"{ranks} ranks"] - trained["one process"]).abs().max() <= 1e-6


def test_another_seed_ends_elsewhere(trained):
    assert (trained["another seed"] - trained["one process"]).abs().max() > 1e-4


@pytest.fixture(scope="module", params=SIZES, ids=lambda ranks: f"{ranks} ranks")
def found(request):
    """What each rank of one launch of ranks_equivalence.py found."""
    script = Path(__file__).with_name("ranks_equivalence.py")
    done = launch.run(script, ranks=request.param, timeout=150)
    return [json.loads(line) for rank in range(request.param) for line in done.of(rank)]


def test_every_rank_reports(found, request):
    assert len(found) == request.node.callspec.params["found"]


@pytest.mark.parametrize("what", ["ddp - one process", "by hand - ddp", "no_sync - one big batch"])
def test_what_must_be_equal(what, found):
    assert all(rank[what] < 1e-12 for rank in found)  # in double precision


@pytest.mark.parametrize(
    "what",
    ["same shard everywhere - one process", "by hand, not averaged - ddp", "no_sync, not divided - one big batch"],
)
def test_what_must_differ(what, found):
    assert all(rank[what] > 1e-4 for rank in found)


def test_replicas_are_equal_to_the_bit(found):
    for rank in found:
        assert rank["replicas"] == [True] * len(found)
        assert rank["perturbed replicas"] == [True] * (len(found) - 1) + [False]


def split_well(shards, size):
    """Whether shards are of one length, complete, and disjoint but for the few that fill the last round."""
    dealt = [sample for shard in shards for sample in shard]
    repeats = -size % len(shards)
    return (
        len({len(shard) for shard in shards}) == 1
        and sorted(set(dealt)) == list(range(size))
        and len(dealt) == size + repeats
    )


def test_shards_are_disjoint_and_complete(found):
    for rank in found:
        assert rank["shards"] == found[0]["shards"]
        for size, shards in rank["shards"].items():
            assert len(shards) == len(found) and split_well(shards, int(size))


def test_shards_of_ranks_that_all_shuffle_on_their_own_are_not(found):
    # The control: had each rank another seed, the same count of samples would not be a partition.
    orders = [torch.randperm(24, generator=torch.Generator().manual_seed(rank)).tolist() for rank in range(len(found))]
    assert split_well([orders[0][rank :: len(found)] for rank in range(len(found))], 24)
    assert not split_well([order[rank :: len(found)] for rank, order in enumerate(orders)], 24)
