"""Staging: real MNIST where it is named, digits where there is no network, damage refused, two at once unharmed."""

import gzip
import hashlib
import runpy
import socket
from contextlib import closing
from functools import partial
from multiprocessing import get_context

import pytest
from real import LIMIT, served
from refusals import refused
from torchvision.datasets import MNIST

from ddp_helpers.data import mnist_files, staging
from ddp_helpers.data.digits import write_digits
from ddp_helpers.data.download import download
from ddp_helpers.data.mnist_files import check_data
from ddp_helpers.data.staging import stage
from ddp_helpers.rank.scripts import write_script

REFUSING = ["http://127.0.0.1:9/"]  # nobody listens there


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network, and a set of digits that is made in a second."""
    monkeypatch.setattr(MNIST, "mirrors", REFUSING)
    monkeypatch.setattr(staging, "write_digits", partial(write_digits, train=600, test=100))


def test_without_a_network_digits_are_made_and_that_is_said(tmp_path, capsys):
    root = stage(tmp_path / "data")
    assert root == tmp_path / "data"  # the folder that was asked for, whatever is laid down in it
    assert "No network" in capsys.readouterr().out
    assert check_data(root) == "digits"
    assert len(MNIST(root, train=True)) == 600
    assert stage(tmp_path / "data") == root  # found again, not made again
    assert "staged" in capsys.readouterr().out


def test_a_mirror_that_never_answers_is_given_up_and_followed_by_digits(tmp_path, monkeypatch):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        monkeypatch.setattr(staging, "download", partial(download, seconds=1))
        assert stage(tmp_path) == tmp_path
    assert socket.getdefaulttimeout() is None
    assert check_data(tmp_path) == "digits" and [path.name for path in tmp_path.iterdir()] == ["MNIST"]


def test_a_download_from_a_mirror_is_whole(tmp_path, monkeypatch):
    """The mirror is pretended, and what it has is a small set, whose digests take the place of MNIST's."""
    raw, site = write_digits(tmp_path / "made", 50, 10) / "MNIST" / "raw", tmp_path / "site"
    site.mkdir()
    for name, _ in MNIST.resources:
        (site / name).write_bytes(gzip.compress((raw / name.removesuffix(".gz")).read_bytes()))
    digests = {name: hashlib.md5((raw / name).read_bytes()).hexdigest() for name in mnist_files.MNIST_MD5}
    resources = [(name, hashlib.md5((site / name).read_bytes()).hexdigest()) for name, _ in MNIST.resources]
    monkeypatch.setattr(MNIST, "resources", resources)
    monkeypatch.setattr(mnist_files, "MNIST_MD5", digests)
    with served(site) as address:
        monkeypatch.setattr(MNIST, "mirrors", [address])
        (tmp_path / "data").mkdir()
        download(tmp_path / "data")
        assert check_data(tmp_path / "data") == "MNIST" and [path.name for path in (tmp_path / "data").iterdir()] == [
            "MNIST"
        ]
        resources[0] = (resources[0][0], "0" * 32)
        (tmp_path / "other").mkdir()
        with pytest.raises(ConnectionError, match="corrupted"):
            download(tmp_path / "other")
        assert list((tmp_path / "other").iterdir()) == []


def test_the_script_refuses_without_a_network_in_a_line_and_finds_what_is_there(tmp_path, digits, monkeypatch, capsys):
    script = write_script("download_data", tmp_path / "download_data.py")
    monkeypatch.setattr("sys.argv", ["download_data.py", "--data", str(tmp_path / "data")])
    refused(runpy.run_path, str(script), run_name="__main__", named=["no download", "copy MNIST/raw there"])
    monkeypatch.setattr("sys.argv", ["download_data.py", "--data", str(digits)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == f"digits is complete; use it with: --data {digits}\n"


def test_ddp_mnist_root_wins(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_MNIST_ROOT", str(digits))
    assert stage(tmp_path) == digits
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("DDP_MNIST_ROOT", str(tmp_path / "new"))  # a trainer exports the name first, and then fills it
    assert stage(tmp_path / "new") == tmp_path / "new" and check_data(tmp_path / "new") == "digits"


def test_a_damaged_set_is_refused_not_replaced(tmp_path):
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


def test_a_file_that_the_list_of_digests_leaves_out_is_not_complete(tmp_path, capsys):
    sums = write_digits(tmp_path, 50, 10) / "MNIST" / "raw" / "MD5SUMS"
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[1:]))
    refused(check_data, tmp_path, named=["damaged"])
