"""Judge a script that a learner made DDP: run it on 1, 2 and 3 ranks, and compare what the ranks did."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.notebook import launch

PLAIN = ROOT / "notebooks" / "signals.py"
WITNESS = Path(__file__).with_name("witness.py")
RANKS, EPOCHS, TRAIN, TEST = (1, 2, 3), 2, 960, 250
CLOSE = 1e-4  # weights that differ by less are equal, to the rounding of some steps in float32


@dataclass(frozen=True)
class Seen:
    """What a script did on so many ranks: the epochs' lines, each rank's notes, and the weights that were saved."""

    lines: list[str]
    notes: list[dict]
    weights: dict

    def orders(self, epoch: int) -> list[list[int]]:
        """Each rank's order of the training set in an epoch, counted from 0; empty without a DistributedSampler."""
        found = [[order for size, order in note["orders"] if size == TRAIN] for note in self.notes]
        return [orders[epoch] for orders in found if len(orders) > epoch]


def seen(script: Path, ranks: int) -> Seen:
    """Run a script on so many ranks under witness. Raises LaunchError if it fails, OSError if it saves nothing."""
    import torch  # here: other exercises do without

    folder = ROOT / "build" / "own_script" / f"{ranks}_ranks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    done = launch.run(WITNESS, script.resolve(), folder, "--epochs", EPOCHS, ranks=ranks, timeout=90)
    notes = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
    weights = torch.load(folder / "signals.pt", map_location="cpu", weights_only=True)
    return Seen([line for _, line in done.lines if line.startswith("epoch ")], notes, weights)


def judge(answer: Callable[[], Path]) -> list[str]:
    """A line for each thing that is still wrong with the script whose path `answer` returns."""
    script = Path(answer())
    if not script.is_file():
        return [f"there is no file {script}: return the path of your script"]
    if script.read_text() == PLAIN.read_text():
        return ["the script is still the plain one"]
    found: dict[int, Seen] = {}
    for ranks in RANKS:
        try:
            found[ranks] = seen(script, ranks)
        except (launch.LaunchError, OSError) as error:
            return [f"on {ranks} rank{'s' * (ranks > 1)}: {error}"]
    wrong = [line for ranks in RANKS for line in faults(found[ranks], found[RANKS[0]])]
    return list(dict.fromkeys(wrong))[:3]


def faults(many: Seen, one: Seen) -> list[str]:
    """A line for each mistake that shows in the run on many ranks, held against the run on one."""
    wrong = []
    first, second = many.orders(0), many.orders(1)
    if len(first) < len(many.notes) or {index for order in first for index in order} != {*range(TRAIN)}:
        wrong.append("the ranks do not share the training set out: give its loader a DistributedSampler")
    elif first == second:
        wrong.append("epoch 2 has the order of epoch 1: tell the sampler which epoch it is")
    if any(name.startswith("module.") for name in many.weights):
        wrong.append("the saved names begin with module.: save the model inside the wrapper")
    elif far(many.weights, one.weights) > CLOSE:
        wrong.append(
            "the weights are not those of one rank: is --batch-size shared by the ranks? who calls the wrapper?"
        )
    if sum(note["saves"] for note in many.notes) != 1:
        wrong.append("more than one rank saves, into one file: let rank 0 do it")
    if len(many.lines) != EPOCHS:
        wrong.append(f"{len(many.lines)} lines for {EPOCHS} epochs: let one rank print")
    elif many.lines != one.lines:
        wrong.append(
            f"the ranks count {many.lines[0]!r}, one counts {one.lines[0]!r}: each test point once, then a sum"
        )
    return wrong


def far(weights: dict, others: dict) -> float:
    """The largest difference of two networks' weights; infinite where their names differ."""
    if weights.keys() != others.keys():
        return float("inf")
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)
