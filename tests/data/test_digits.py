"""The digits set: MNIST's format, the same bytes from the same seed."""

from pathlib import Path

import pytest
import torch
from torchvision.datasets import MNIST

from ddp_helpers.data import digits
from ddp_helpers.data.mnist_files import check_data


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "MNIST" / "raw").iterdir()}


def test_torchvision_reads_it_unchanged(tmp_path):
    assert digits.write_digits(tmp_path, train=600, test=100) == tmp_path
    train, test = (MNIST(tmp_path, train=part, download=False) for part in (True, False))
    assert (len(train), len(test)) == (600, 100)
    assert train.data.shape == (600, 28, 28) and train.data.dtype == torch.uint8
    assert set(train.targets.tolist()) == set(range(10))
    assert train.data.flatten(1).amax(1).min() > 200, "an image without ink"
    assert 0.11 < train.data.float().mean() / 255 < 0.15
    assert check_data(tmp_path) == "digits", "by the digests that it brings"


def test_the_seed_and_nothing_else_decides_the_bytes(tmp_path):
    threads = torch.get_num_threads()
    torch.manual_seed(7)  # a state that no other test leaves behind
    before = torch.get_rng_state()
    one = contents(digits.write_digits(tmp_path / "one", 600, 100, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    torch.set_num_threads(threads + 1)
    same = contents(digits.write_digits(tmp_path / "same", 600, 100, seed=1))
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    other = contents(digits.write_digits(tmp_path / "other", 600, 100, seed=2))
    assert one == same
    assert all(one[name] != other[name] for name in one)


def test_a_complete_set_is_kept_and_a_foreign_folder_is_refused(tmp_path):
    first = contents(digits.write_digits(tmp_path / "a", 50, 10, seed=1))
    assert contents(digits.write_digits(tmp_path / "a", 50, 10, seed=2)) == first
    (tmp_path / "b" / "MNIST" / "raw").mkdir(parents=True)
    with pytest.raises(OSError):
        digits.write_digits(tmp_path / "b", 50, 10)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["MNIST"], "left its scratch folder behind"


def test_a_linear_model_learns_it(tmp_path):
    digits.write_digits(tmp_path, train=4000, test=1000)
    (x, y), (test_x, test_y) = (
        (part.data.flatten(1) / 255, part.targets)
        for part in (MNIST(tmp_path, train=True), MNIST(tmp_path, train=False))
    )
    weight = torch.zeros(784, 10, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(x @ weight, y).backward()
        optimizer.step()
    accuracy = ((test_x @ weight).argmax(1) == test_y).float().mean().item()
    assert 0.7 < accuracy < 0.97  # chance is 0.1; above 0.97 a network would have nothing to win
