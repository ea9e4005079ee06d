"""Judge a mended script: run it on two ranks, the course's own on one, and compare what both have seen."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.lessons.do_it_yourself.faults import CLOSE, FAULTS, apart, planted
from ddp_helpers.notebook import launch
from ddp_helpers.notebook.scripts import Script

RANKS = 2
WITNESS = Path(__file__).with_name("witness.py")
# An odd number of test images, so that a padded shard is seen; no GPU and no bfloat16, so that results compare.
TRAIN, TEST = 512, 201
FLAGS = [
    "--epochs=2",
    "--no-cuda",
    "--precision=float32",
    "--log-interval=1000",
]
OTHER = "no fault is left, but the weights are not those of one process: what else did mend change?"


def seen(text: str, ranks: int, name: str) -> list[dict]:
    """Run a script under witness; what each rank was shown, and its weights. Raises LaunchError if it fails."""
    from ddp_helpers.rank.digits import write_digits  # here: it imports torch, which other exercises do without

    data = write_digits(ROOT / "build" / "projects" / f"digits_{TRAIN}_{TEST}", train=TRAIN, test=TEST)
    folder = ROOT / "build" / "projects" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script = folder / f"{name}.py"
    script.write_text(text)
    launcher = "torchrun" if ranks > 1 else "python"
    launch.run(
        WITNESS,
        script,
        folder,
        "--data",
        data,
        f"--batch-size={64 // ranks}",
        *FLAGS,
        ranks=ranks,
        launcher=launcher,
        timeout=180,
    )
    return [json.loads(Path(folder, f"rank_{rank}.json").read_text()) for rank in range(ranks)]


@cache
def alone() -> dict:
    """Run the course's script in one process under the witness: the reference for two ranks."""
    print("the course's own script, in one process:")
    return seen(Script("mnist_single").text(), 1, "alone")[0]


@cache
def together(text: str) -> list[dict]:
    """Run a mended script on two ranks under the witness; a text that was run before is taken from the cache."""
    print(f"your script, on {RANKS} ranks:")
    return seen(text, RANKS, "mended")


def judge(mend: Callable[[str], str]) -> list[str]:
    """A line for each fault that is still in the script, and for what the mending broke. Prints what is found."""
    text = mend(planted())
    if not isinstance(text, str):
        return [f"mend gives {type(text).__name__}: return the whole text of the script"]
    if text == planted():
        return ["mend changes nothing: is each piece that it replaces in the text, to the space?"]
    try:
        compile(text, "script", "exec")
        one, ranks = alone(), together(text)
    except SyntaxError as error:
        return [f"the script is no Python any more: line {error.lineno}, {error.msg}"]
    except launch.LaunchError as error:
        return [f"the script does not run any more: {error}"]
    mended = [fault for fault in FAULTS if fault.mended(ranks, one)]
    for fault in mended:
        print(f"found: {fault.found}")
    wrong = [f"still there: {fault.still}" for fault in FAULTS if fault not in mended]
    return wrong or broken(ranks[0]["weights"], one["weights"])


def broken(weights: list[float], expected: list[float]) -> list[str]:
    """A line, unless the weights are those of one process: the last word, when each fault seems mended."""
    if len(weights) == len(expected) and apart(weights, expected) < CLOSE:
        print("found: the weights are those of one process with the same global batch")
        return []
    return [OTHER]
