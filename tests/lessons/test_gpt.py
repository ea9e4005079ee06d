"""gpt.py and gpt_ddp.py: one model on any number of ranks; stopped twice, the run that nobody stopped."""

from pathlib import Path

import pytest
import torch
from changed_text import replaced

from ddp_helpers import ROOT
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_helpers.rank.scripts import write_script

NOTEBOOKS = ROOT / "notebooks"
FLAGS = ("--steps", 12, "--validate-every", 4, "--batch-size", 4)
# On the last rank alone, at two steps, of which the second lies in the attempt after the first.
STOPS = [
    (
        "        step += 1\n",
        "        step += 1\n        heard.extend([10] * (step in (5, 7) and rank == world_size - 1))\n",
    )
]
FORGETS = [('        draws.set_state(saved[0]["draws"])\n', "")]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the script needs beside it."""
    folder = tmp_path_factory.mktemp("gpt")
    write_script("simple_ddp", folder / "ranks.py")
    (folder / "gpt.py").write_bytes((NOTEBOOKS / "gpt.py").read_bytes())
    return folder


def run(desk: Path, name: str, changes: list, ranks: int, out: str, *flags: object, ends: int = 0) -> Path:
    """Run a changed script on ranks, and return the folder of its weights."""
    script = desk / f"{out}_{name}"
    script.write_text(replaced((NOTEBOOKS / name).read_text(), changes))
    done = LearnerRun(script, *FLAGS, *flags, "--out", out, ranks=ranks, folder=desk)
    wait_for_runs(done)
    assert done.exit_statuses == [ends] * ranks, done.complaint()
    return desk / out


def apart(one: Path, two: Path, name: str = "best.pt") -> float:
    """The largest difference of two weights."""
    first, second = (torch.load(folder / name, weights_only=True) for folder in (one, two))
    return max((first[key] - second[key]).abs().max().item() for key in first)


def test_one_device_and_two_ranks_reach_one_model(desk: Path) -> None:
    """With unequal numbers of letters on the ranks, accumulated gradients, clipping, and a schedule by step."""
    plain = ("--dropout", 0, "--float64")
    alone = run(desk, "gpt.py", [], 1, "alone", *plain)
    for ranks in (1, 2):
        assert apart(alone, run(desk, "gpt_ddp.py", [], ranks, f"on_{ranks}", *plain)) < 1e-9
    mean_of_means = [
        (" * world_size / letters", " / letters_here"),
        (
            "        dist.all_reduce(letters)",
            "        letters_here = letters.clone()\n        dist.all_reduce(letters)",
        ),
    ]
    assert apart(alone, run(desk, "gpt_ddp.py", mean_of_means, 2, "means", *plain)) > 1e-6  # the control


def test_stopped_twice_it_ends_as_the_run_that_nobody_stopped(desk: Path) -> None:
    """To the bit, with dropout; one rank alone hears the signals."""
    unbroken = run(desk, "gpt_ddp.py", [], 2, "unbroken")
    for forgets, out in ((False, "stopped"), (True, "forgets")):
        changes = STOPS + FORGETS * forgets
        for _ in range(2):
            folder = run(desk, "gpt_ddp.py", changes, 2, out, ends=75)
        run(desk, "gpt_ddp.py", FORGETS * forgets, 2, out)
        assert (apart(folder, unbroken) == 0.0) is not forgets, "the control: without the place in the draws"
    last = torch.load(unbroken / "last.pt", weights_only=True)
    assert last["step"] == 12 and not [*unbroken.glob("*.part")]
