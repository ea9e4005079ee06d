"""letters.py in the course's own script: the transformer learns to spell, on two ranks."""

import json
from collections import Counter

from changed_text import replaced

from ddp_helpers import ROOT
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_helpers.rank import scripts

SMALLER = {"width: int = 128, depth: int = 4": "width: int = 32, depth: int = 1"}
SMALLER |= {"(2048, seed=1), sentences(256,": "(256, seed=1), sentences(64,", "Adadelta(": "AdamW("}


def test_the_transformer_in_the_courses_script_learns(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    import letters

    script = scripts.write_script("mnist_ddp", tmp_path / "letters_ddp.py", parts=letters.__file__)
    script.write_text(replaced(script.read_text(), SMALLER.items()))
    flags = ["--epochs=2", "--lr=0.01", "--gamma=1", "--num-workers=0", "--batch-size=8", "--run-dir=record"]
    run = LearnerRun(script, *flags, ranks=2)
    wait_for_runs(run)
    assert not run.complaint(), run.complaint()
    last = json.loads((run.folder / "record" / "metrics.jsonl").read_text().splitlines()[-1])
    counts = Counter(letters.sentences(64, seed=2).tensors[1].flatten().tolist())
    frequent = counts.most_common(1)[0][1] / counts.total()  # the share of the space, which a constant gets right
    assert last["test_samples"] == 64 and last["test_accuracy"] > 2 * frequent
