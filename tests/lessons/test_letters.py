"""letters.py in the course's own script: 1, 2 and 4 ranks end with the same weights, and it learns to spell."""

import json
from collections import Counter

import pytest
import torch

from ddp_helpers import ROOT
from ddp_helpers.launch import scripts
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs, weight_distance

SMALLER = {"width: int = 128, depth: int = 4": "width: int = 32, depth: int = 1"}
SMALLER |= {"(2048, seed=1), sentences(256,": "(256, seed=1), sentences(64,", "Adadelta(": "AdamW("}
SMALLER |= {"\n    main()": "\n    torch.set_default_dtype(torch.float64)\n    main()"}  # Adam makes steps of rounding


@pytest.fixture
def letters(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    import letters

    return letters


def test_the_transformer_in_the_courses_script_is_one_training_on_any_ranks_and_learns(letters, tmp_path):
    script = scripts.write_script("mnist_ddp", tmp_path / "letters_ddp.py", replace=letters.PARTS)
    text = script.read_text()
    for old, new in SMALLER.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    script.write_text(text)
    flags = ["--epochs=2", "--lr=0.01", "--gamma=1", "--num-workers=0", "--save-model"]
    asked = {"1 rank": (1, 8), "2 ranks": (2, 8), "4 ranks": (4, 8), "another batch": (2, 16)}
    flags += ["--run-dir=record", "--batch-size"]
    runs = {name: LearnerRun(script, *flags, n, ranks=ranks) for name, (ranks, n) in asked.items()}
    wait_for_runs(*runs.values())
    assert [run.complaint() for run in runs.values()] == [""] * 4
    weights = {name: torch.load(run.folder / "record" / "mnist_cnn.pt") for name, run in runs.items()}
    apart = {name: weight_distance(weights["1 rank"], one) for name, one in weights.items()}
    assert apart["2 ranks"] < 1e-9 and apart["4 ranks"] < 1e-9 and apart["another batch"] > 1e-3
    last = json.loads((runs["2 ranks"].folder / "record" / "metrics.jsonl").read_text().splitlines()[-1])
    counts = Counter(letters.sentences(64, seed=2).tensors[1].flatten().tolist())
    frequent = counts.most_common(1)[0][1] / counts.total()  # the share of the space
    print(apart, last["test_accuracy"], frequent)
    assert last["test_samples"] == 64 and last["test_accuracy"] > 2 * frequent
