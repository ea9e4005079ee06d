"""What the rows of the fault matrix have in common: the run that is harmed, the golden run, and how they compare."""

import hashlib
import json
import shutil
import zipfile
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest
import torch
from changed_text import replaced
from real import LIMIT
from torch import nn

from ddp_helpers.data.digits import write_digits
from ddp_helpers.rank import scripts
from ddp_helpers.rank.scripts.mnist_ddp import Net
from faults.ranks import run

GIVES_UP = ["--timeout", 10]  # seconds that a rank waits for another that never comes: only where a row waits for it
NAME = "mnist_ddp_resumable"
# Of 16 optimizer steps each: 512 images, 32 for each step.
TWO_EPOCHS = ["--batch-size", "32", "--test-batch-size", "50", "--epochs", "2", "--checkpoint-every", "5"]
TWO_EPOCHS += ["--log-interval", "1000", "--no-cuda"]


@dataclass
class Matrix:
    """A folder to work in, the data and the script; golden runs are made when they are first asked for."""

    folder: Path
    goldens: dict = field(default_factory=dict)

    @cached_property
    def data(self) -> Path:
        return write_digits(self.folder / "digits", train=512, test=200)

    @cached_property
    def script(self) -> Path:
        return scripts.write_script(NAME, self.folder / f"{NAME}.py")

    def changed(self, *changes: tuple[str, str]) -> Path:
        """The script with something in it changed, such as a part left out for a negative control."""
        path = self.folder / f"changed_{zlib.crc32(repr(changes).encode()):x}.py"
        path.write_text(replaced(self.script.read_text(), changes))
        return path

    def fresh(self, name: str) -> Path:
        """A folder for one case, emptied."""
        folder = self.folder / name.replace(":", "").replace(" ", "_")
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def train(self, folder, *more, size=2, script=None, **options):
        """Two epochs in folder/run, or what is left of them."""
        return run(script or self.script, *self.flags(folder), *more, size=size, folder=folder, **options)

    def flags(self, folder):
        """The command line of a run of two epochs, recorded in folder/run."""
        return ["--data", self.data, "--run-dir", folder / "run", "--timeout", LIMIT, *TWO_EPOCHS]

    def golden(self, *more, size=2, script=None) -> str:
        """The weights of the run that nobody harmed."""
        key = (*more, size, script)
        if key not in self.goldens:
            folder = self.fresh(f"golden_{len(self.goldens)}")
            ended = self.train(folder, *more, size=size, script=script)
            assert ended.statuses == [0] * size, ended.said
            self.goldens[key] = weights(folder), metrics(folder)
        return self.goldens[key][0]

    def resumes(self, folder, *more, **options) -> str:
        """Start it again with the same command: its weights at the end."""
        ended = self.train(folder, *more, **options)
        assert set(ended.statuses) == {0}, "\n".join(ended.said)
        return weights(folder)

    def must_resume_equal(self, folder, *more, **options) -> None:
        """The resumed run's weights are the golden run's, bit for bit, and its metrics have each epoch once."""
        assert self.resumes(folder, *more, **options) == self.golden(*more, **options), "the resumed run differs"
        seen, (_, expected) = metrics(folder), self.goldens[*more, options.get("size", 2), options.get("script")]
        assert [(line["epoch"], line["train_samples"]) for line in seen] == [(1, 512), (2, 512)], seen
        assert seen == [pytest.approx(line, rel=1e-9) for line in expected], f"{seen}, not {expected}"


def events(folder: Path) -> list[dict]:
    """What the run's attempts.jsonl says."""
    path = folder / "run" / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(folder: Path) -> list[dict]:
    """What the run's metrics.jsonl says, but for the time that it took."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def checkpoints(folder: Path) -> list[Path]:
    """The run's checkpoints, the newest first."""
    return sorted((folder / "run" / "checkpoints").glob("step-*.pt"), reverse=True)


def steps(folder: Path) -> list[int]:
    """The steps after which the run's checkpoints were saved, the newest first."""
    return [int(path.stem[5:]) for path in checkpoints(folder)]


def weights(folder: Path) -> str:
    """A digest of what the newest checkpoint holds to the bit: model, optimizer, schedule."""
    state = torch.load(checkpoints(folder)[0], map_location="cpu", weights_only=True)
    held = bits([state["model"], state["optimizer"], state["schedule"], state["progress"]["step"]])
    return hashlib.sha256(repr(held).encode()).hexdigest()


def bits(value: object) -> object:
    """A state, however deep, in which tensors are bytes."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items()}
    return [*map(bits, value)] if isinstance(value, list | tuple) else value


def saved_model(folder: Path) -> nn.Module:
    """The model in the newest checkpoint, which is whole, as are all others in the folder."""
    for path in checkpoints(folder):
        assert zipfile.ZipFile(path).testzip() is None, f"{path} is damaged"
    model = Net()
    model.load_state_dict(torch.load(checkpoints(folder)[0], weights_only=True)["model"])
    return model
