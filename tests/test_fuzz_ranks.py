"""Ten thousand odd inputs for what every rank parses: a sound answer, or exit status 2 and one line."""

import os
import pickle
from contextlib import redirect_stdout
from hashlib import sha256
from io import StringIO

import pytest
import torch
from environments import BATCH, MPI, MPICH, SALLOC, SETS, STEP, TORCHRUN
from fuzzing import INPUTS, fuzz, put
from refusals import outcome, refused

from ddp_helpers.rank.digits import FILES, write_digits
from ddp_helpers.rank.launchers import LAUNCHERS, who_am_i
from ddp_helpers.rank.resume import load_checkpoint, read_checkpoint, read_newest_checkpoint, save_checkpoint
from ddp_helpers.rank.staging import check_data

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


def test_an_environment_gives_a_sound_rank_or_one_line():
    sound, unsound = [], []

    def check(env):
        ranks, line = outcome(who_am_i, env)
        (unsound if line else sound).append(env)
        if not line:
            _, rank, local_rank, world_size = ranks
            assert 0 <= local_rank <= rank < world_size
            assert int(env.get("RANK", rank)) == rank and int(env.get("WORLD_SIZE", world_size)) == world_size

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


@pytest.mark.parametrize("name", ["x" * 300, "loop/a", "a\0b", "\udcff", "a\nb"])
def test_a_data_folder_that_cannot_be_is_named_in_one_line(name, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    line = refused(check_data, tmp_path / name)
    assert "--data" in line


# ---- checkpoints


def named(folder, content, step=1):
    """A file of this content under the name that says it is whole."""
    path = folder / f"step-{step:08}-{sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The bytes of a real checkpoint."""
    state = {"model": {"weight": torch.ones(2)}, "step": 3, "order": [1, 2]}
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), 3, state).read_bytes()


def test_bytes_under_a_wrong_digest_are_refused_by_name(real, tmp_path):
    path = named(tmp_path, real)

    def check(content):
        put(path, content)
        read, line = outcome(read_checkpoint, path, error=ValueError)
        assert (read == real) if content == real else (path.name in line)

    fuzz(lambda choices: choices.damaged(real), check)


class Runs:
    """An object whose pickle runs a command where it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("write", [torch.save, pickle.dump], ids=["torch", "pickle"])
@pytest.mark.parametrize("around", [lambda x: x, lambda x: {"model": x}], ids=["bare", "inside"])
def test_a_checkpoint_that_would_run_a_command_is_refused_and_does_not_run_it(write, around, tmp_path):
    marker, folder = tmp_path / "marker", tmp_path / "checkpoints"
    folder.mkdir()
    with (tmp_path / "evil").open("wb") as file:
        write(around(Runs(marker)), file)
    evil = (tmp_path / "evil").read_bytes()
    path = named(folder, evil)
    assert read_checkpoint(path) == read_newest_checkpoint(folder) == evil, (
        "its digest is right: only the load can tell"
    )
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(evil)
    assert not marker.exists()
    if write is pickle.dump:  # the control: it would have run
        pickle.loads(evil)
    else:
        torch.load(tmp_path / "evil", weights_only=False)
    assert marker.exists()


def test_the_newest_whole_checkpoint_wins_whatever_lies_beside_it(real, tmp_path):
    def check(case):
        step, content = case
        for path in tmp_path.iterdir():
            path.unlink()
        older = named(tmp_path, real, step=5)
        damage = tmp_path / f"step-{step:08}-{'0' * 16}.pt"
        damage.write_bytes(content)
        with redirect_stdout(StringIO()) as said:
            newest = read_newest_checkpoint(tmp_path)
        lines = said.getvalue().splitlines()
        assert newest == real and older.exists() and len(lines) == (step > 5) == (not damage.exists())
        assert all(damage.name in line and "set aside" in line for line in lines)

    fuzz(lambda choices: (choices.below(10), choices.damaged(real)), check, least=1000)
    assert read_checkpoint(named(tmp_path, real)) == real
    assert refused(read_checkpoint, named(tmp_path, real).rename(tmp_path / "mnist.pt"), error=ValueError)
