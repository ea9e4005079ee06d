"""Staging: real MNIST where it is named, digits where there is no network, damage refused, two at once unharmed."""

from functools import partial
from multiprocessing import get_context

import pytest
from real import LIMIT, THOROUGH
from refusals import refused
from torchvision.datasets import MNIST

from ddp_helpers.rank import staging
from ddp_helpers.rank.digits import write_digits
from ddp_helpers.rank.staging import check_data, stage

REFUSING = ["http://127.0.0.1/"]  # nobody listens there on port 443
SIZE = {"train": 60_000, "test": 10_000} if THOROUGH else {"train": 3000, "test": 500}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network, and a set of digits that is made in a second."""
    monkeypatch.setattr(MNIST, "mirrors", REFUSING)
    monkeypatch.setattr(staging, "write_digits", partial(write_digits, **SIZE))


def test_without_a_network_digits_are_made_and_that_is_said(tmp_path, capsys):
    root = stage(tmp_path / "data")
    assert root == tmp_path / "data"  # the folder that was asked for, whatever is laid down in it
    assert "No network" in capsys.readouterr().out
    assert check_data(root) == "digits"
    assert len(MNIST(root, train=True)) == SIZE["train"]
    assert stage(tmp_path / "data") == root  # found again, not made again
    assert "staged" in capsys.readouterr().out


def test_a_download_that_fails_is_followed_by_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_reachable", lambda seconds: True)
    assert stage(tmp_path, seconds=1) == tmp_path  # the process that downloads is ended after a second
    assert check_data(tmp_path) == "digits" and [path.name for path in tmp_path.iterdir()] == ["MNIST"]


def test_ddp_mnist_root_wins(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_MNIST_ROOT", str(digits))
    assert stage(tmp_path) == digits
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_set_is_refused_not_replaced(tmp_path, capsys):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").write_bytes(b"half a file")
    refused(stage, tmp_path, named=["damaged"])


def test_two_that_ask_at_once_leave_one_whole_set(tmp_path):
    context = get_context("fork")
    gate = context.Barrier(2)

    def ask() -> None:
        gate.wait(LIMIT)
        stage(tmp_path)

    both = [context.Process(target=ask) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(2 * LIMIT)
    assert [process.exitcode for process in both] == [0, 0]
    assert check_data(tmp_path) == "digits"
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]
