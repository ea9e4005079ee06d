"""letters_fsdp.py: one model on any number of ranks, saved whole, and gone on from; what it trains is in shards."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from changed_text import replaced
from simulated import TORCHRUN
from simulated import run as run_on_gpus

from ddp_helpers import ROOT
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs

NOTEBOOKS = ROOT / "notebooks"
# A test set whose size no number of ranks divides, and float64: AdamW divides a gradient by its size, rounding and all.
SMALLER = {
    "width: int = 128, depth: int = 4": "width: int = 32, depth: int = 1",
    "(2048, seed=1), sentences(256,": "(64, seed=1), sentences(65,",
}
IN_FLOAT64 = {"    train_set, test_set = ": "    torch.set_default_dtype(torch.float64)\n    train_set, test_set = "}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small letters.py."""
    folder = tmp_path_factory.mktemp("fsdp")
    (folder / "letters.py").write_text(replaced((NOTEBOOKS / "letters.py").read_text(), SMALLER.items()))
    return folder


def run(desk: Path, out: str, ranks: int, *flags: object, **changes: str) -> tuple[dict, list[float]]:
    """Run the script, changed, on ranks; return the weights that it saves, and the losses that it prints."""
    script = desk / f"{out}.py"
    script.write_text(replaced((NOTEBOOKS / "letters_fsdp.py").read_text(), changes.items()))
    done = LearnerRun(script, "--lr", 0.01, *flags, "--save", f"{out}.pt", ranks=ranks, folder=desk)
    wait_for_runs(done)
    assert not done.complaint(), done.complaint()
    losses = re.findall(r"^epoch \d: loss (\S+) of 65 texts$", "\n".join(done.lines_of_rank(0)), re.M)
    return torch.load(desk / f"{out}.pt", weights_only=True), [float(loss) for loss in losses]


def apart(one: dict, two: dict) -> float:
    """The largest difference of two weights."""
    return max((one[name] - two[name]).abs().max().item() for name in one)


def test_one_rank_and_two_reach_one_model_and_a_share_for_all_is_another(desk: Path) -> None:
    alone, losses = run(desk, "alone", 1, **IN_FLOAT64)
    two, losses_of_two = run(desk, "two", 2, **IN_FLOAT64)
    assert apart(alone, two) < 1e-9 and losses == losses_of_two and losses[1] < losses[0]
    own = IN_FLOAT64 | {"DistributedSampler(train_set)": "DistributedSampler(train_set, 1, 0)"}
    other, _ = run(desk, "other", 2, **own)
    assert apart(alone, other) > 1e-3  # the control


def test_a_small_last_batch_of_fewer_pieces_is_a_step_like_any_other(desk: Path) -> None:
    """Of 64 texts a batch of 28 leaves 8: `chunk(7)` makes four pieces of them."""
    flags = "--epochs", 1, "--batch-size", 28, "--micro-batches"
    whole, _ = run(desk, "whole", 1, *flags, 1, **IN_FLOAT64)
    pieces, _ = run(desk, "pieces", 1, *flags, 7, **IN_FLOAT64)
    assert apart(whole, pieces) < 1e-9
    counts = IN_FLOAT64 | {"number == len(pieces)": "number == args.micro_batches"}
    other, _ = run(desk, "counts", 1, *flags, 7, **counts)
    assert apart(whole, other) > 1e-3  # the control: that batch takes no step


def test_its_file_is_a_plain_models_and_the_next_run_goes_on_from_it_in_bfloat16(desk: Path, monkeypatch) -> None:
    saved, losses = run(desk, "first", 2, "--epochs", 1)
    monkeypatch.syspath_prepend(desk)
    monkeypatch.delitem(sys.modules, "letters", raising=False)
    import letters

    letters.Net().load_state_dict(saved)  # strict
    assert all(type(weight) is torch.Tensor and weight.dtype == torch.float32 for weight in saved.values())
    more = "--epochs", 1, "--weights", "first.pt", "--bf16"
    weights, [loss] = run(desk, "more", 2, *more)
    assert loss < losses[0] and all(weight.dtype == torch.float32 for weight in weights.values())
    untrained = {"optimizer.step()": "pass", "AdamW(": "SGD("}
    kept, _ = run(desk, "kept", 2, *more, **untrained)
    assert apart(kept, saved) == 0 < apart(weights, saved)  # what came in by broadcast goes out whole


def test_on_two_gpus_it_trains_and_saves_for_a_cpu_and_a_mask_that_stays_on_the_cpu_is_seen(
    desk: Path, simulated_gpus: Path
) -> None:
    text = (NOTEBOOKS / "letters_fsdp.py").read_text()
    for name, changes, status in (("gpus", {}, 0), ("mask", {"(places <= last).to(device)": "(places <= last)"}, 1)):
        (desk / f"{name}.py").write_text(replaced(text, changes.items()))
        words = [
            sys.executable,
            *TORCHRUN,
            2,
            desk / f"{name}.py",
            "--epochs",
            1,
            "--bf16",
            "--save",
            desk / f"{name}.pt",
        ]
        done = run_on_gpus(simulated_gpus, words)
        assert done.returncode == status, done.stderr
    assert "Expected all tensors to be on the same device" in done.stderr
    saved = torch.load(desk / "gpus.pt", weights_only=True)
    assert {(weight.device.type, weight.dtype) for weight in saved.values()} == {("cpu", torch.float32)}


def called(text: str) -> list[str]:
    """What a source calls of FSDP2's, of the checkpoint's and of the optimizer's, line by line."""
    of_fsdp = r"fully_shard|to_empty|set_model_state_dict|AdamW|set_requires_gradient_sync|backward|clip_grad_norm_"
    return re.findall(rf"\b({of_fsdp}|optimizer\.step|zero_grad|get_model_state_dict|torch\.save)\(", text)


def test_the_lines_to_remember_of_15_are_the_scripts_in_its_order() -> None:
    parts = nbformat.read(NOTEBOOKS / "15_shard_the_model.ipynb", as_version=4).cells
    [heading] = [
        place
        for place, part in enumerate(parts)
        if "lines to remember" in part.source.lower() and "letters_fsdp.py" in part.source
    ]
    assert "letters_fsdp.py" in parts[heading].source
    lines, script = called(parts[heading + 1].source), called((NOTEBOOKS / "letters_fsdp.py").read_text())
    assert len(lines) == 12 and lines == script
