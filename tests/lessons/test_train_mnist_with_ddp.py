"""The long exercise of 06: of a script made DDP each plausible mistake is named, also beside others."""

import pytest
from changed_text import replaced

from ddp_helpers import ROOT
from ddp_helpers.lessons import check, exercise_called
from ddp_helpers.lessons.exercise import RIGHT
from ddp_helpers.lessons.train_mnist_with_ddp import exercises as train_mnist_with_ddp

EXERCISE = exercise_called("my_ddp_script")
SET_EPOCH = ("        sampler.set_epoch(epoch)\n", "")
MISTAKES = {  # what is changed in the solution, and what is told
    "one batch for each rank": ([("args.batch_size // world_size", "args.batch_size")], "Do the ranks share --batch"),
    "past the wrapper": ([("cross_entropy(ddp_model(", "cross_entropy(model(")], "Do the ranks share --batch-size?"),
    "no set_epoch": ([SET_EPOCH], "Tell the sampler which epoch it is"),
    "no sampler": (
        [("    sampler = DistributedSampler(train_set)\n", ""), ("sampler=sampler", "shuffle=True"), SET_EPOCH],
        "give its loader a DistributedSampler",
    ),
    "all save": ([("    if rank == 0:\n        torch.save", "    if True:\n        torch.save")], "let rank 0 save"),
    "all print": (
        [("        if rank == 0:\n            print", "        if True:\n            print")],
        "Let one rank print",
    ),
    "module.": ([("torch.save(model.state", "torch.save(ddp_model.state")], "Save the model inside"),
    "all test all": ([("DataLoader(Subset(test_set, my_tests)", "DataLoader(test_set")], "Count each test point once"),
    "nobody adds up": ([("        dist.all_reduce(right)\n", "")], "Count each test point once"),
    "nothing is saved": ([("torch.save(model.state_dict(), ", "print(")], "ranks that save: got 0"),
    "rank 0 alone adds up": (
        [
            ("        dist.all_reduce(right)\n        if rank == 0:\n", "        if rank == 0:\n"),
            ("            print(f", "            dist.all_reduce(right)\n            print(f"),
        ],
        "Do all ranks call the same collectives",
    ),
    "no Python": ([("def main()", "def main(")], "on 1 rank: rank 0 exit status 1:"),
}
AT_ONCE = [  # a run on one rank and on two for each
    ["one batch for each rank"],
    ["past the wrapper"],
    ["no set_epoch", "all save", "all test all"],
    ["no sampler", "module.", "all print"],
    ["nothing is saved", "nobody adds up"],
    ["rank 0 alone adds up"],
    ["no Python"],
]


def changed(mistakes, folder):
    """The worked solution with these mistakes in it."""
    right = (ROOT / "notebooks" / "solutions" / "signals_ddp.py").read_text()
    script = folder / "mine.py"
    script.write_text(replaced(right, [change for mistake in mistakes for change in MISTAKES[mistake][0]]))
    return script


@pytest.mark.parametrize("mistakes", AT_ONCE, ids=", ".join)
def test_mistakes_are_named(mistakes, tmp_path, monkeypatch):
    monkeypatch.setattr(train_mnist_with_ddp, "RANKS", (1, 2))
    verdict = EXERCISE.verdict(lambda: changed(mistakes, tmp_path))
    assert verdict.startswith("not yet: ") and all(MISTAKES[mistake][1] in verdict for mistake in mistakes), verdict


def test_a_padded_test_is_seen_where_the_points_do_not_divide(tmp_path):
    """250 points: two ranks share them, three do not."""
    right = (ROOT / "notebooks" / "solutions" / "signals_ddp.py").read_text()
    padded = [
        ("DataLoader(Subset(test_set, my_tests), 100)", "DataLoader(test_set, 100, sampler=tests)"),
        ("    my_tests = range(", "    tests = DistributedSampler(test_set, shuffle=False)\n    my_tests = range("),
    ]
    (script := tmp_path / "mine.py").write_text(replaced(right, padded))
    verdict = EXERCISE.verdict(lambda: script)
    assert "on 3 ranks" in verdict and "Count each test point once" in verdict and "on 2 ranks" not in verdict, verdict


def test_each_difference_says_on_how_many_ranks_it_is(tmp_path):
    verdict = EXERCISE.verdict(lambda: changed(["all save", "past the wrapper"], tmp_path))
    for line in ("on 2 ranks: ranks that save: got 2", "on 3 ranks: ranks that save: got 3"):
        assert line in verdict, verdict
    assert "on 2 and 3 ranks: whether the weights are those of one rank" in verdict, verdict


def test_below_right_stands_what_was_not_looked_at(tmp_path, capsys):
    def my_ddp_script():
        return changed([], tmp_path)

    check(my_ddp_script)
    first, *below = capsys.readouterr().out.split("\n", 1)
    assert RIGHT in first
    for unseen in ("not covered", "launcher", "batch", "dropout", "barrier"):
        assert unseen in below[0], unseen


def test_no_script_and_the_plain_one_are_refused_at_once(tmp_path):
    verdicts = [
        EXERCISE.verdict(lambda path=path: path) for path in (tmp_path / "none.py", train_mnist_with_ddp.PLAIN_SCRIPT)
    ]
    assert all(verdict.startswith("not yet: ") for verdict in verdicts) and verdicts[0] != verdicts[1], verdicts
