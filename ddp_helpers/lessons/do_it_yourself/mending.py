"""Project 2 of notebook 17: a script with three faults that raise no error, and its checker.

The notebook shows the faulty script and `Net`; `lessons.check` calls `mend`, in the driver
process, which starts the ranks of the fixed script on this machine.
"""

import inspect
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ddp_helpers import ROOT
from ddp_helpers.data.digits import write_digits
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.lessons.run_script import (
    WEIGHT_TOLERANCE,
    LearnerRun,
    wait_for_runs,
    weight_distance,
)
from ddp_helpers.lessons.script_notes import RankNotes
from ddp_helpers.rank.scripts import script_text

_RANKS, _EPOCHS = 2, 2
_TRAIN, _TEST = 512, 201  # images; an odd number, so that a padded shard of the test set shows
_FLAGS = [
    f"--epochs={_EPOCHS}",
    "--batch-size=64",
    "--log-interval=1000",
    "--num-workers=0",
    "--save-model",
]
NOT_AS_ONE_PROCESS = (
    "no fault is left, but the weights are not those of one process: what else did mend change?"
)


class Net(nn.Module):
    """A small network without dropout: one process and many can end with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, 3)
        self.fc = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score the ten digits for each image."""
        return self.fc(F.relu(self.conv(x)).flatten(1))


# ---- the faults


class Fault(NamedTuple):
    """A fault of the script: the text `wrong` in place of `right`."""

    right: str
    wrong: str
    praise: str  # the finding if it is fixed
    hint: str  # the finding if not, with a question or a step to the fix


FAULTS = (
    Fault(
        right="        sampler.set_epoch(epoch)  # a new order\n        model.train()\n",
        wrong="        model.train()\n",
        praise="each epoch has its own order",
        hint="the second epoch repeats the order of the first, on every rank: "
        "which call passes the epoch to the sampler?",
    ),
    Fault(
        right="range(rank, len(test_set), world_size))  # each sample once",
        wrong="range(0, len(test_set), world_size))  # a share for each rank",
        praise="the ranks test each image once",
        hint="the ranks together do not test each image once: "
        "print which images each of them takes",
    ),
    Fault(
        right="one_pass(ddp_model, train_batches, args, optimizer",
        wrong="one_pass(model, train_batches, args, optimizer",
        praise="the ranks end with the same weights",
        hint="the ranks end with different weights, so nothing averages gradients: "
        "which object do the images go through?",
    ),
)


def _mended(ranks: list[RankNotes]) -> tuple[bool, ...]:
    """Return for each fault whether it is fixed, from the notes of all ranks."""
    trained, tested = (
        [[order for size, order in notes.passes if size == images] for notes in ranks]
        for images in (_TRAIN, _TEST)
    )
    of_epochs = [sorted(chain(*shares)) for shares in zip(*tested, strict=False)]
    distances = [weight_distance(notes.weights, ranks[0].weights) for notes in ranks]
    return (
        all(len({*map(tuple, orders)}) == _EPOCHS for orders in trained),
        of_epochs == [[*range(_TEST)]] * _EPOCHS,
        max(distances) < WEIGHT_TOLERANCE,
    )


def faulty_script() -> str:
    """Return the faulty script."""
    text = script_text("mnist_ddp")
    for fault in FAULTS:
        text = text.replace(fault.right, fault.wrong)
    return text


# ---- the checker


def mend(changed: Answer) -> list[str]:
    """List each fault that is still in the script, and what the changes broke, one line each.

    Prints what is fixed.
    """
    text = changed(faulty_script())
    if not isinstance(text, str):
        return [f"mend gives {type(text).__name__}: return the full text of the script"]
    if text == faulty_script():
        return ["mend changes nothing: is each piece that it replaces in the text, to the space?"]
    with TemporaryDirectory() as folder:
        alone = _start(script_text("mnist_ddp"), Path(folder, "alone.py"), ranks=1)
        mended = _start(text, Path(folder, "mended.py"), ranks=_RANKS)
        wait_for_runs(alone, mended)
        if complaint := alone.complaint() or mended.complaint():
            return [f"the script no longer runs: {complaint}"]
        ranks = mended.notes()
        weights_alone = alone.notes()[0].saved[0]
    left = []
    for fault, is_mended in zip(FAULTS, _mended(ranks), strict=True):
        if is_mended:
            print(f"found: {fault.praise}")
        else:
            left.append(f"still there: {fault.hint}")
    if left:
        return left
    if weight_distance(ranks[0].weights, weights_alone) < WEIGHT_TOLERANCE:
        print("found: the weights are those of one process with the same global batch")
        return []
    return [NOT_AS_ONE_PROCESS]


def _start(text: str, path: Path, ranks: int) -> LearnerRun:
    """Write a script, with the small net in front of its last lines, and start its ranks."""
    end = "\n\nif __name__ =="
    path.write_text(text.replace(end, f"\n\n{inspect.getsource(Net)}\n{end}"))
    folder = ROOT / "build" / f"digits_{_TRAIN}_{_TEST}"
    data = write_digits(folder, train=_TRAIN, test=_TEST)
    return LearnerRun(path, "--data", data, *_FLAGS, ranks=ranks, watched=True)
