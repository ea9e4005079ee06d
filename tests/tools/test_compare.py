"""`compare` says that weights agree only where nothing but rounding can be between them."""

import pytest
import torch

from ddp_helpers.cli import main


def status_of(folder, one, two):
    """The exit status of `compare` for two states."""
    for name, state in {"one.pt": one, "two.pt": two}.items():
        torch.save(state, folder / name)
    return main(["compare", str(folder / "one.pt"), str(folder / "two.pt")])


@pytest.mark.parametrize(
    ("kind", "change", "status", "said"),
    [
        (torch.float32, 0.0, 0, "2 tensors, 2 of them equal to the bit"),
        (torch.float64, 1e-15, 0, "they agree up to rounding"),
        (torch.float64, 1e-8, 1, "they DIFFER by more than rounding"),  # one SGD step with a small rate
        (torch.float32, 1e-6, 3, "not known"),
        (torch.float32, 0.1, 1, "they DIFFER, unless"),
        (torch.float32, float("nan"), 1, "inf of the largest number, in layer.weight (float32)"),
    ],
)
def test_a_status_of_0_needs_float64_or_equal_bits(tmp_path, capsys, kind, change, status, said):
    state = {"layer.weight": torch.linspace(-1, 1, 5, dtype=kind), "steps": torch.tensor(3)}
    other = {"model": {"module.layer.weight": state["layer.weight"] + change, "module.steps": torch.tensor(3)}}
    assert status_of(tmp_path, {"model": state}, other) == status
    assert said in capsys.readouterr().out.replace("model.", "")


@pytest.mark.parametrize("other", [{"a": torch.ones(2)}, {"b": torch.ones(3)}])
def test_other_names_and_shapes_differ(tmp_path, other):
    assert status_of(tmp_path, {"a": torch.ones(3)}, other) == 1
