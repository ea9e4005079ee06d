"""Project 2 of notebook 14: a script with three faults that no error tells of, and the judge of a mended one."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.nn.functional as F
from torch import Tensor, nn

from ddp_helpers import ROOT
from ddp_helpers.launch.scripts import Script
from ddp_helpers.lessons.run_script import CLOSE, Run, attend, far
from ddp_helpers.rank.digits import write_digits
from ddp_helpers.rank.watch import RankNotes

RANKS, EPOCHS, TRAIN, TEST = 2, 2, 512, 201  # an odd number of test images, so that a padded shard is seen
FLAGS = [f"--epochs={EPOCHS}", "--precision=float32", "--log-interval=1000", "--num-workers=0", "--save-model"]
OTHER = "no fault is left, but the weights are not those of one process: what else did mend change?"


class Net(nn.Module):
    """A small network without dropout: several ranks and one process can then end with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, 3)
        self.fc = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the ten digits for each image."""
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)


def passes(notes: RankNotes, size: int) -> list[list[int]]:
    """The images that a rank took from the dataset of this size, in each epoch."""
    return [indices for count, indices in notes.passes if count == size]


def ordered(ranks: list[RankNotes]) -> bool:
    """Whether each rank took the training images in a new order in every epoch."""
    return all(len(set(map(tuple, passes(notes, TRAIN)))) == EPOCHS for notes in ranks)


def tested(ranks: list[RankNotes]) -> bool:
    """Whether the ranks have tested each image once, in every epoch."""
    epochs = list(zip(*(passes(notes, TEST) for notes in ranks), strict=False))
    return len(epochs) == EPOCHS and all(sorted(chain(*shards)) == [*range(TEST)] for shards in epochs)


def equal(ranks: list[RankNotes]) -> bool:
    """Whether the ranks have ended with the same weights."""
    return all(far(notes.weights, ranks[0].weights) < CLOSE for notes in ranks)


@dataclass(frozen=True)
class Fault:
    """A fault: the right text and the wrong one, a predicate on what each rank did, and the hint to give then."""

    right: str
    wrong: str
    mended: Callable[[list[RankNotes]], bool]
    found: str
    still: str


FAULTS = (
    Fault(
        "        sampler.set_epoch(epoch)  # a new order each epoch\n        model.train()\n",
        "        model.train()\n",
        ordered,
        "each epoch has an order of its own",
        "the second epoch repeats the order of the first, on every rank: who tells the sampler which epoch it is?",
    ),
    Fault(
        "range(rank, len(test_set), world_size)  # each sample on one rank, once",
        "range(0, len(test_set), world_size)  # a share for each rank",
        tested,
        "the ranks test each image once",
        "the ranks together do not test each image once: print which images each of them takes",
    ),
    Fault(
        "one_pass(ddp_model, train_batches, args, optimizer",
        "one_pass(model, train_batches, args, optimizer",
        equal,
        "the ranks end with the same weights",
        "the ranks end with different weights, so nobody averages gradients: which object do the images go through?",
    ),
)


def planted() -> str:
    """The faulty script."""
    text = Script("mnist_ddp").text()
    for fault in FAULTS:
        text = text.replace(fault.right, fault.wrong)
    return text


def start(text: str, path: Path, ranks: int) -> Run:
    """Start a script on so many ranks with the small net, which stands in front of its last lines."""
    end = "\n\nif __name__ =="
    path.write_text(text.replace(end, f"\n\n{inspect.getsource(Net)}\n{end}"))
    data = write_digits(ROOT / "build" / f"digits_{TRAIN}_{TEST}", train=TRAIN, test=TEST)
    return Run(path, "--data", data, "--batch-size=64", *FLAGS, ranks=ranks, watched=True)


def judge(mend: Callable[[str], str]) -> list[str]:
    """A line for each fault that is still in the script, and for what the mending broke. Prints what is found."""
    text = mend(planted())
    if not isinstance(text, str):
        return [f"mend gives {type(text).__name__}: return the whole text of the script"]
    if text == planted():
        return ["mend changes nothing: is each piece that it replaces in the text, to the space?"]
    try:
        compile(text, "script", "exec")
    except SyntaxError as error:
        return [f"the script is no Python any more: line {error.lineno}, {error.msg}"]
    with TemporaryDirectory() as folder:
        alone = start(Script("mnist_single").text(), Path(folder, "alone.py"), 1)
        mended = start(text, Path(folder, "mended.py"), RANKS)
        attend(alone, mended)
        if why := alone.complaint() or mended.complaint():
            return [f"the script does not run any more: {why}"]
        ranks, one = mended.notes(), alone.notes()[0].saved
    right = [fault for fault in FAULTS if fault.mended(ranks)]
    for fault in right:
        print(f"found: {fault.found}")
    wrong = [f"still there: {fault.still}" for fault in FAULTS if fault not in right]
    if not wrong and far(ranks[0].weights, one[0]) < CLOSE:
        print("found: the weights are those of one process with the same global batch")
    elif not wrong:
        wrong = [OTHER]
    return wrong
