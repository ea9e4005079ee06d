"""The images of notebook 13: its three forms hold the same, and nothing of an old set. What it says of `Join`."""

import tarfile
from pathlib import Path

import torch
import torch.distributed as dist
from real import LIMIT
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons.feed_the_ranks.pipeline import write_forms


def contents(form: list[Path]) -> dict[str, bytes]:
    """The encoded images of a form, by their names."""
    if form[0].suffix == ".png":
        return {path.name: path.read_bytes() for path in form}
    contents = {}
    for path in form:
        with tarfile.open(path) as tar:
            contents |= {member.name: tar.extractfile(member).read() for member in tar}
    return contents


def test_the_three_forms_hold_the_same_images(tmp_path: Path) -> None:
    write_forms(tmp_path / "forms", 41, 5)
    forms = write_forms(tmp_path / "forms", 37, 4)  # 37 images do not fit 4 files evenly
    assert {form: len(paths) for form, paths in forms.items()} == {"files": 37, "archive": 1, "shards": 4}
    assert contents(forms["files"]) == contents(forms["archive"]) == contents(forms["shards"])
    assert len(set(contents(forms["files"]).values())) == 37, "one image for all would be equal, too"


def weights_after_join() -> list[list[float]]:
    """The weights when `Join` has ended, and one ordinary step later; every rank calls it."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> list[float]:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        return model.module.weight.flatten().tolist()

    with Join([model]):
        for _ in range(1 + dist.get_rank()):  # rank 0 has a batch less
            step()
    return [model.module.weight.flatten().tolist(), step()]


def test_what_13_says_of_join_it_sends_the_weights_and_not_the_state_of_adamw() -> None:
    (joined, later), (joined_1, later_1) = on_ranks(2, weights_after_join, patience=LIMIT)
    assert joined == joined_1
    assert max(abs(one - other) for one, other in zip(later, later_1, strict=True)) > 1e-4
