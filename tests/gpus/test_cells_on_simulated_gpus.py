"""Cells for ranks on simulated GPUs, each rank on its own; and which of torch's classes for NCCL is used."""

import re
from pathlib import Path

import pytest
import torch
from changed_text import replaced
from notebook_texts import cells, files
from simulated import programs

from ddp_helpers import ROOT

PROGRAM = Path(__file__).with_name("cells_on_gpus.py")
REFUSED = "No backend type associated with device type cpu"


def leaves_the_gpus(path):
    """Whether a notebook has cells for ranks, and does not hide the GPUs from them."""
    sources = "\n".join(cells(path, "code"))
    return "%%ranks " in sources and 'os.environ["CUDA_VISIBLE_DEVICES"] = ""' not in sources


NOTEBOOKS = {path.stem[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")) if leaves_the_gpus(path)}
CHANGED = {
    # These ranks are forked themselves.
    "04": ['"num_workers": 2, "multiprocessing_context": "fork"', '"num_workers": 0'],
}


@pytest.fixture(scope="module")
def gpus(simulated_gpus):
    """Programs on four simulated GPUs."""
    with programs(simulated_gpus, 4) as started:
        yield started


def ranks_of(notebook):
    """How many ranks its cells have."""
    return max(int(number) for cell in cells(notebook, "code") for number in re.findall(r"^%%ranks (\d+)", cell))


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_the_ranks_of_a_notebook_send_tensors_of_their_gpus_alone(number, gpus, tmp_path):
    size = ranks_of(NOTEBOOKS[number])
    done = gpus.torchrun(size, tmp_path / "log", PROGRAM, NOTEBOOKS[number], *CHANGED.get(number, []))
    assert done.status() == 0, done.said()
    assert len(set(re.findall(r"[1-9]\d* cells on (cuda:\d)", done.said()))) == size


def test_control_a_tensor_of_the_cpu_is_refused(gpus, tmp_path):
    right = "torch.arange(1.0, 5.0, device=device)"
    words = [PROGRAM, NOTEBOOKS["02"], right, right.replace(", device=device", "")]
    done = gpus.torchrun(4, tmp_path / "log", *words)
    assert done.status() == 1 and REFUSED in done.said()


def test_the_loop_of_11_goes_on_with_the_state_of_the_gpus_own_generator(gpus, tmp_path):
    """From which its dropout draws there: stopped, it ends with the weights of the run that nobody stopped."""
    written = files(next((ROOT / "notebooks").glob("11_*.ipynb")))
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    done = gpus.torchrun(2, tmp_path / "golden.log", "resumable.py", "golden.pt")
    assert done.status() == 0, done.said()
    forgets = [("torch.set_rng_state, torch.cuda.set_rng_state", "[torch.set_rng_state]")]
    for name, changes in (("goes_on", []), ("forgets", forgets)):
        (tmp_path / "checkpoint.py").write_text(replaced(written["checkpoint.py"], changes))
        told = gpus.torchrun(2, tmp_path / "told.log", "harm.py", "SIGUSR2", 1, 24, "resumable.py", f"{name}.pt")
        assert told.status() == 1 and "saved in epoch 3 after step 4" in told.said(), told.said()
        assert gpus.torchrun(2, tmp_path / "again.log", "resumable.py", f"{name}.pt").status() == 0
    weights = {}
    for name in ("golden", "goes_on", "forgets"):
        state = torch.load(tmp_path / f"{name}.pt", map_location="cpu", weights_only=True)["model"]
        weights[name] = [value.tolist() for value in state.values()]
    assert weights["goes_on"] == weights["golden"] != weights["forgets"]


CLASS = """
import torch.distributed as dist
from ddp_helpers.rank.scripts.mnist_ddp import form_group, pick_device
device = pick_device(0)
form_group(0, 1, device, 300)
print("class", type(dist.group.WORLD._get_backend(device)).__name__)
dist.destroy_process_group()
"""


def test_ranks_take_the_older_class_of_nccl_unless_another_is_asked_for(gpus, tmp_path):
    (tmp_path / "asks.py").write_text(CLASS)
    asked = {"older": {}}
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        asked["newer"] = {"TORCH_DIST_USE_NCCL2": "1"}
    started = {name: gpus.start(tmp_path / f"{name}.log", ["asks.py"], **env) for name, env in asked.items()}
    seen = {name: (each.status(), re.findall(r"^class (\w+)$", each.said(), re.M)) for name, each in started.items()}
    assert seen == {name: (0, ["ProcessGroupNCCL2" if env else "ProcessGroupNCCL"]) for name, env in asked.items()}
