"""The long exercise of 06: of a script made DDP each plausible mistake is named, also beside others."""

import pytest
from changed_text import replaced

from ddp_helpers import ROOT
from ddp_helpers.lessons import exercise_called
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
    "no Python": ([("def main()", "def main(")], "on 1 rank: rank 0 exit status 1:"),
}
AT_ONCE = [  # a run on one rank and on two for each
    ["one batch for each rank"],
    ["past the wrapper"],
    ["no set_epoch", "all save", "all test all"],
    ["no sampler", "module.", "all print"],
    ["nothing is saved", "nobody adds up"],
    ["no Python"],
]


@pytest.mark.parametrize("mistakes", AT_ONCE, ids=", ".join)
def test_mistakes_are_named(mistakes, tmp_path, monkeypatch):
    monkeypatch.setattr(train_mnist_with_ddp, "RANKS", (1, 2))
    right = (ROOT / "notebooks" / "solutions" / "signals_ddp.py").read_text()
    script = tmp_path / "mine.py"
    script.write_text(replaced(right, [change for mistake in mistakes for change in MISTAKES[mistake][0]]))
    verdict = EXERCISE.verdict(lambda: script)
    assert verdict.startswith("not yet: ") and all(MISTAKES[mistake][1] in verdict for mistake in mistakes), verdict


def test_no_script_and_the_plain_one_are_refused_at_once(tmp_path):
    verdicts = [
        EXERCISE.verdict(lambda path=path: path) for path in (tmp_path / "none.py", train_mnist_with_ddp.PLAIN_SCRIPT)
    ]
    assert all(verdict.startswith("not yet: ") for verdict in verdicts) and verdicts[0] != verdicts[1], verdicts
