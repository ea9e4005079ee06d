"""Ten thousand odd inputs for what every rank parses: a sound answer, or an end; and damaged checkpoints."""

import os
import zipfile
from argparse import Namespace
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from environments import BATCH, MPI, MPICH, SALLOC, SETS, STEP, TORCHRUN
from faults.matrix import bits
from fuzzing import INPUTS, fuzz, put
from refusals import outcome, refused
from torch import nn

from ddp_helpers.data.digits import FILES, write_digits
from ddp_helpers.data.mnist_files import check_data
from ddp_helpers.rank.launchers import LAUNCHERS, who_am_i
from ddp_helpers.rank.scripts import mnist_ddp_resumable as resumable

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")

# ---- the launcher's environment

NAMES = sorted({name for names in LAUNCHERS.values() for name in names})
STARTS = [{}, BATCH, MPICH, SALLOC, *SETS.values(), STEP | TORCHRUN, STEP | MPI]
NUMBERS = [*map(str, range(-1, 6)), "65535", "65536", "1,2,3", ",,,", "4(x2)", "9" * 18, "\udcff"]


def environment(choices):
    """A launcher's environment with some variables set to something else, or missing."""
    env = dict(choices.one(STARTS))
    for name in choices.some(NAMES, 4):
        way = choices.below(4)
        if way == 3:
            env.pop(name, None)
        else:
            env[name] = choices.text() if way == 2 else choices.one(NUMBERS)
    return env


def test_an_environment_gives_a_sound_rank_or_ends():
    sound, unsound = [], []

    def check(env):
        try:
            with patch.object(os, "environ", env):
                launcher, *numbers = who_am_i()
        except (SystemExit, ValueError) as end:  # Python names what is no number
            unsound.append(str(end))
        else:
            sound.append(env)
            words = LAUNCHERS.get(launcher, ())[-3:]
            assert numbers == [int(env[name]) for name in words] or (launcher, numbers) == ("single", [0, 0, 1])

    fuzz(environment, check)
    assert min(len(sound), len(unsound)) > INPUTS / 10, "both ends are reached"


# ---- the data


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A whole digits folder, its files, and how to write them."""
    root = write_digits(tmp_path_factory.mktemp("tiny"), train=3, test=2)
    raw = root / "MNIST" / "raw"
    return root, {name: (raw / name).read_bytes() for name in [*FILES, "MD5SUMS"]}


def test_only_a_whole_dataset_has_a_name(tiny):
    root, whole = tiny
    raw, named = root / "MNIST" / "raw", []
    words = [*FILES, *whole["MD5SUMS"].decode().split(), "\x1c", "\n", "x"]

    def build(choices):
        name = choices.one(sorted(whole))
        ways = [lambda: None, lambda: choices.damaged(whole[name]), lambda: " ".join(choices.some(words, 9)).encode()]
        return {name: choices.one(ways)()}

    def check(files):
        for name, content in files.items():
            put(raw / name, content)
        try:
            name, _ = outcome(check_data, root)
        finally:
            for file in files:
                put(raw / file, whole[file])
        same = all(files.get(file, whole[file]) == whole[file] for file in FILES)
        assert name in (None, "digits") and (name is None or same)
        named.append(name)

    fuzz(build, check)
    assert check_data(root) == "digits" and {None, "digits"} == set(named), "an MD5SUMS with one line more is no damage"


def test_a_data_folder_that_cannot_be_is_named_in_one_line(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("x" * 300, "loop/a", "a\0b", "\udcff", "a\nb"):
        refused(check_data, tmp_path / name, named=["--data"])


# ---- checkpoints


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder with a real checkpoint of step 5, and what this process, as the only rank, finds there."""
    monkeypatch.setattr(dist, "broadcast_object_list", lambda _: None)
    flags = {"seed": 1, "lr": 1.0, "gamma": 0.7, "batch_size": 64, "bf16": False, "dry_run": False}
    args = Namespace(run_dir=tmp_path, **flags)
    (tmp_path / "checkpoints").mkdir()
    resumable.save(args, {"model": nn.Linear(2, 1)}, {"step": 5})

    def find():
        with redirect_stdout(StringIO()) as said:
            return resumable.find_checkpoint(args), said.getvalue().splitlines()

    return tmp_path / "checkpoints", find


def test_the_newest_whole_checkpoint_wins_whatever_lies_beside_it(run):
    folder, find = run
    real, written = (folder / "step-00000005.pt").read_bytes(), bits(find()[0])

    def check(content):
        damage = folder / "step-00000007.pt"
        damage.write_bytes(content)
        newest, lines = find()
        assert bits(newest) == written, "also of a file in which nothing that counts is damaged"
        assert damage.exists() or (damage.with_suffix(".damaged").exists() and damage.name in lines[0])
        for path in folder.glob("step-00000007.*"):
            path.unlink()

    fuzz(lambda choices: choices.damaged(real), check, least=1000)


def test_a_tensor_that_is_marked_as_a_folder_is_no_weight(run):
    """One bit of the archive's list, of which no checksum knows: torch.load would leave the memory as it is."""
    folder, find = run
    content, written = bytearray((folder / "step-00000005.pt").read_bytes()), bits(find()[0])
    name = content.rindex(b"archive/data/0")  # in the list, 46 bytes behind the beginning of its entry
    content[name - 46 + 38] ^= 0x10
    (damage := folder / "step-00000007.pt").write_bytes(content)
    assert zipfile.ZipFile(damage).testzip() is None
    assert bits(find()[0]) == written and not damage.exists()


class Runs:
    """An object whose pickle runs a command where it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_a_checkpoint_that_would_run_a_command_is_set_aside_and_does_not_run_it(run, tmp_path):
    folder, find = run
    torch.save({"model": Runs(tmp_path / "marker")}, folder / "step-00000009.pt")
    newest, lines = find()
    assert newest["progress"] == {"step": 5} and "step-00000009.pt is damaged" in lines[0]
    assert not (tmp_path / "marker").exists()
    torch.load(folder / "step-00000009.damaged", weights_only=False)
    assert (tmp_path / "marker").exists(), "the control: it would have run"
