"""The long exercise of 06: a script made DDP passes on 1, 2 and 3 ranks, and each plausible mistake is named."""

import nbformat
import pytest
from asked import asked
from nbclient import NotebookClient
from real import THOROUGH

from ddp_helpers import ROOT
from ddp_helpers.lessons import exercises
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT
from ddp_helpers.lessons.train_mnist_with_ddp import own_script

pytestmark = pytest.mark.xdist_group("notebooks")  # as 06 does, it writes into build/own_script

EXERCISE = exercises("my_ddp_script")["my_ddp_script"]
SOLUTION = ROOT / "notebooks" / "solutions" / "signals_ddp.py"
SET_EPOCH = ("        sampler.set_epoch(epoch)\n", "")
MISTAKES = {  # what is changed in the solution, and what is told
    "one batch for each rank": ([("args.batch_size // world_size", "args.batch_size")], "weights are not those"),
    "past the wrapper": ([("cross_entropy(ddp_model(", "cross_entropy(model(")], "weights are not those"),
    "no set_epoch": ([SET_EPOCH], "which epoch it is"),
    "no sampler": (
        [
            ("    sampler = DistributedSampler(train_set)\n", ""),
            ("sampler=sampler", "shuffle=True"),
            SET_EPOCH,
        ],
        "give its loader a DistributedSampler",
    ),
    "all save": ([("    if rank == 0:\n        torch.save", "    if True:\n        torch.save")], "let rank 0 do it"),
    "all print": (
        [("        if rank == 0:\n            print", "        if True:\n            print")],
        "one rank print",
    ),
    "module.": ([("torch.save(model.state", "torch.save(ddp_model.state")], "save the model inside"),
    "all test all": (
        [("DataLoader(my_tests", "DataLoader(test_set")],
        "each test point once",
    ),
    "nobody adds up": ([("        dist.all_reduce(right)\n", "")], "each test point once"),
    "no Python": ([("def main()", "def main(")], "on 1 rank: "),
}
ASKED = list(MISTAKES) if THOROUGH else ["past the wrapper", "no set_epoch", "all test all"]


def test_the_solution_is_right_and_the_stub_not_attempted():
    def stub():
        raise NotImplementedError

    assert EXERCISE.verdict(EXERCISE.oracle) == RIGHT
    assert EXERCISE.verdict(stub) == NOT_ATTEMPTED


@pytest.mark.parametrize("mistake", ASKED)
def test_a_mistake_is_named(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr(own_script, "RANKS", (1, 2))
    changes, told = MISTAKES[mistake]
    text = SOLUTION.read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = tmp_path / "mine.py"
    script.write_text(text)
    verdict = EXERCISE.verdict(lambda: script)
    assert verdict.startswith("not yet: ") and told in verdict


def test_no_script_and_the_plain_one_are_refused_at_once(tmp_path):
    assert "there is no file" in EXERCISE.verdict(lambda: tmp_path / "none.py")
    assert "still the plain one" in EXERCISE.verdict(lambda: own_script.PLAIN)


def test_the_worked_solutions_of_the_notebook_are_right():
    path = SOLUTION.with_name("06_train_mnist_with_ddp.ipynb")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    printed = [out.text for cell in notebook.cells for out in cell.get("outputs", []) if out.output_type == "stream"]
    assert "".join(printed).splitlines().count(RIGHT) == 3
    assert asked(path) == asked(path.parents[1] / path.name) == ["epoch_line", "same_training", "my_ddp_script"]
