"""Wrong-device faults, planted into the course's scripts and cells: silent on the CPU, seen on simulated GPUs.

Or silent there too, as on a real GPU: the second table says why, and has the planted script show it.
"""

import json
import re
import shlex
import sys

import pytest
import yaml
from changed_text import replaced
from notebook_texts import cells
from real import python
from simulated import FORKED, IS_SHARED, run

from ddp_helpers import ROOT

PAGE = (ROOT / "docs" / "gpus.md").read_text()
OTHER = "simple_ddp with the page's diff"
DRIVER = FORKED.with_name("planted_programs.py")
# Each program: the file, or the number of a notebook and texts of its cells; its ranks; and its flags.
PROGRAMS = {
    "spirals": ("notebooks/spirals.py", 1, ["--epochs=1"]),
    "spirals_ddp": ("notebooks/spirals_ddp.py", 2, ["--epochs=1"]),
    "spirals_ddp saved": ("notebooks/spirals_ddp.py", 2, ["--epochs=1", "--save=weights.pt"]),
    "spirals_resumable": ("notebooks/spirals_resumable.py", 1, ["--epochs=1", "--run-dir=run"]),
    "simple_ddp": ("ddp_helpers/rank/scripts/simple_ddp.py", 2, []),
    "mnist_ddp": ("ddp_helpers/rank/scripts/mnist_ddp.py", 1, ["--dry-run", "--epochs=1", "--num-workers=0"]),
    "mnist_fast": ("ddp_helpers/rank/scripts/mnist_fast.py", 1, ["--dry-run", "--epochs=1"]),
    "02": (("02", "dist.reduce_scatter(part, "), 4, []),
    "04": (("04", "def averaged_gradient(loss):"), 2, []),
    "05": (("05", "from contextlib import nullcontext", "def same(tensor):", "def with_batch_norm():"), 2, []),
    "06": (("06", "mse_loss(ddp_model(inputs), wanted)"), 2, []),
    "11": (("11", "def save(path, parts, epoch, step):", "def exists(path):"), 2, []),
    "12": (("12", "def train(model, optimizer", "class Held"), 1, []),
    "14": (("14", "(loss / 4).backward()"), 2, []),
}
# What a program of cells begins with. The numbers are smaller than those of the cells tagged `parameters`.
GROUP = """import os, sys
import torch
import torch.distributed as dist
from ddp_helpers.rank.device import pick_device
device = pick_device(int(os.environ["LOCAL_RANK"]))
options = {"device_id": device} if device.type == "cuda" else {}
dist.init_process_group("nccl" if options else "gloo", **options)
seed = 1
"""
ONE = """import torch
import torch.nn.functional as F
from torch.optim import Adadelta
from torch.utils.data import TensorDataset
from ddp_helpers.rank.scripts.mnist_ddp import Net
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_set = TensorDataset(torch.zeros(1, 1), torch.zeros(1))
train_set.data, train_set.targets = torch.zeros(32, 28, 28, dtype=torch.uint8), torch.arange(32) % 10
some = range(32)
climb = lambda rung, model, batches: train(model, Adadelta(model.parameters()), batches)
"""
LOADS = 'print("begins", load("run.pt", {}), flush=True)\n'
BOTH = ('"nccl" if options', '"cpu:gloo,cuda:nccl" if options')  # of which notebook 11 says that its loop needs it
LEAVE = "dist.barrier()\ndist.destroy_process_group()\n"

TWO_DEVICES = "Expected all tensors to be on the same device, but "
OF_THE_CPU = "No backend type associated with device type cpu"
OTHER_GENERATOR = " device type for generator but found "
LOSS = "            loss = F.cross_entropy("
SEEN = {  # the fault: the program, the change, what PyTorch says, and the line at which it says so
    "the batch stays on the CPU": (
        "spirals",
        [("F.cross_entropy(model(x.to(device))", "F.cross_entropy(model(x)")],
        TWO_DEVICES,
        LOSS,
    ),
    "the targets stay on the CPU": ("spirals", [("y.to(device))  # YOUR", "y)  # YOUR")], TWO_DEVICES, LOSS),
    "the model stays on the CPU": (
        "spirals",
        [("nn.Linear(64, 3)).to(device)", "nn.Linear(64, 3))")],
        TWO_DEVICES,
        LOSS,
    ),
    "class weights on the CPU": (
        "spirals",
        [("y.to(device))  # YOUR", "y.to(device), torch.ones(3))  # YOUR")],
        TWO_DEVICES,
        LOSS,
    ),
    "the batches of the evaluation stay on the CPU": (
        "spirals",
        [("(model(x.to(device)).argmax", "(model(x).argmax")],
        TWO_DEVICES,
        "right += ",
    ),
    "the evaluation's targets stay on the CPU": (
        "spirals",
        [("== y.to(device)).sum()", "== y).sum()")],
        TWO_DEVICES,
        "right += ",
    ),
    "a counter on the CPU": (
        "spirals",
        [("torch.tensor(0, device=device)", "torch.tensor(0)")],
        TWO_DEVICES,
        "right += ",
    ),
    "a mask of the CPU": (
        "spirals",
        [("y.to(device))  # YOUR", "torch.where(x[:, 0] > 9, 0, y.to(device)))  # YOUR")],
        TWO_DEVICES,
        LOSS,
    ),
    "`.numpy()` without `.cpu()`": (
        "spirals",
        [("{right}/", "{right.numpy()}/")],
        "can't convert cuda:0 device type tensor to numpy",
        "print(",
    ),
    "the sampler's generator on the GPU": (
        "spirals",
        [("generator=torch.Generator())", "generator=torch.Generator(device))")],
        OTHER_GENERATOR,
        "for x, y in train_batches:",
    ),
    "`pin_memory` of what is on the GPU": (
        "spirals",
        [
            (
                "for x, y in train_batches",
                "train_set.tensors = [t.to(device) for t in train_set.tensors]\n        for x, y in train_batches",
            ),
            ("args.batch_size, sampler=sampler", "args.batch_size, sampler=sampler, pin_memory=True"),
        ],
        "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
        "for x, y in train_batches:",
    ),
    "DDP of a model on the CPU, moved only then": (
        "spirals_ddp",
        [("nn.Linear(64, 3)).to(device)", "nn.Linear(64, 3))"), ("DDP(model)", "DDP(model).to(device)")],
        OF_THE_CPU,
        "ddp_model = DDP(model)",
    ),
    "an all-reduce of a CPU tensor": (
        "spirals_ddp",
        [("dist.all_reduce(right)", "dist.all_reduce(right.cpu())")],
        OF_THE_CPU,
        "dist.all_reduce(",
    ),
    "`cuda:0` on every rank": (
        "spirals_ddp",
        [("cuda:{local_rank if gpus > 1 else 0}", "cuda:0")],
        IS_SHARED,
        "dist.init_process_group(",
    ),
    "a counter on `cuda:0` on every rank": (
        "spirals_ddp",
        [("torch.tensor(0, device=device)", 'torch.tensor(0, device="cuda:0" if gpus else "cpu")')],
        TWO_DEVICES,
        "right += ",
    ),
    "`cuda` without `set_device`": (
        "spirals_ddp",
        [
            ("        torch.cuda.set_device(device)\n", "        pass\n"),
            ("ddp_model(x.to(device))", "ddp_model(x.to(device.type))"),
        ],
        TWO_DEVICES,
        LOSS,
    ),
    "`cuda` without `set_device` and `device_id`": (
        "simple_ddp",
        [
            ("            torch.cuda.set_device(device)\n", ""),
            ('device_id=device if device.type == "cuda" else None', "device_id=None"),
            ("nn.Linear(42, 3).to(device)", "nn.Linear(42, 3).to(device.type)"),
        ],
        IS_SHARED,
        "model = DDP(",
    ),
    "the votes on the CPU": (
        "spirals_resumable",
        [("is_lost], device=norm.device)", "is_lost])")],
        OF_THE_CPU,
        "dist.all_reduce(ballot",
    ),
    "the loader's generator on the GPU": (
        "spirals_resumable",
        [("generator = torch.Generator().manual_seed(epoch", "generator = torch.Generator(device).manual_seed(epoch")],
        OTHER_GENERATOR,
        "for batch in train_batches:",
    ),
    "a loss is summed up on the CPU": (
        "mnist_ddp",
        [("sums.get(name, 0) + value", "torch.zeros(1).add_(sums.get(name, 0)).add_(value)")],
        TWO_DEVICES,
        "sums[name] = ",
    ),
    "targets that the metric alone needs": (
        "mnist_ddp",
        [("scores.argmax(dim=1) == target", "scores.argmax(dim=1) == batch[1]")],
        TWO_DEVICES,
        "right = scores.argmax",
    ),
    "a constant of the model that is no buffer": (
        "mnist_ddp",
        [
            ("self.dropout1, self", "self.scale = torch.ones(10)\n        self.dropout1, self"),
            ("return self.fc2(self.dropout2(x))", "return self.fc2(self.dropout2(x)) * self.scale"),
        ],
        TWO_DEVICES,
        "* self.scale",
    ),
    "the order's generator on the CPU": (
        "mnist_fast",
        [("torch.Generator(device)", "torch.Generator()")],
        OTHER_GENERATOR,
        "batches = torch.randperm(",
    ),
    "labels on the CPU, indices on the GPU": (
        "mnist_fast",
        [("data.targets.to(device)", "data.targets")],
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
        "labels[indices]",
    ),
    "12: held labels on the CPU": (
        "12",
        [("train_set.targets[: len(some)].to(device)", "train_set.targets[: len(some)]")],
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
        "held_labels[index]",
    ),
    "02: what is received, on the CPU": (
        "02",
        [("part = torch.empty(1, device=device)", "part = torch.empty(1)")],
        OF_THE_CPU,
        "dist.reduce_scatter(part",
    ),
    "04: `torch.tensor` of a metric": (
        "04",
        [("len(own)], device=device)", "len(own)])")],
        OF_THE_CPU,
        "dist.all_reduce(sums)",
    ),
    "05: BatchNorm stays on the CPU": (
        "05",
        [
            (
                "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)",
                "nn.Sequential(nn.Linear(4, 4).to(device), nn.BatchNorm1d(4))",
            )
        ],
        "input module must be on the same type of devices",
        "ddp_model = DDP(",
    ),
    "05: BatchNorm's averages stay on the CPU": (
        "05",
        [
            (
                "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)",
                "nn.Sequential(nn.Linear(4, 4).to(device), nn.BatchNorm1d(4, affine=False))",
            )
        ],
        OF_THE_CPU,
        "ddp_model = DDP(",
    ),
    "06: samples stay on the CPU": (
        "06",
        [("torch.randn(121, 10).to(device), torch", "torch.randn(121, 10), torch")],
        TWO_DEVICES,
        "target = features[:, :1] + noise",
    ),
    "11: NCCL alone, where its loop asks CPU tensors": ("11", [BOTH[::-1]], OF_THE_CPU, "dist.broadcast("),
    "14: the batch is made on the CPU": (
        "14",
        [("tensor.to(device).chunk(4)", "tensor.chunk(4)")],
        TWO_DEVICES,
        "loss = nn.functional.cross_entropy(model(inputs), wanted)",
    ),
}
LEFT = "    dist.barrier()  # srun"
# Silent on GPUs as well: what is printed on the last rank there, with the planted line that prints it.
SILENT = {
    "`torch.load` without `map_location`: all ranks' weights are on GPU 0": (
        "spirals_ddp saved",
        [
            ("torch.save(model.cpu().state_dict()", "torch.save(model.state_dict()"),
            (LEFT, f"    dist.barrier()\n    print('loaded on', torch.load(args.save)['0.bias'].device)\n{LEFT}"),
        ],
        "loaded on cuda:0",
    ),
    "no `set_device`: what is only called `cuda` is on GPU 0": (
        "spirals_ddp",
        [
            ("        torch.cuda.set_device(device)\n", "        pass\n"),
            (LEFT, f"    if gpus:\n        print('made on', torch.ones(1, device='cuda').device)\n{LEFT}"),
        ],
        "made on cuda:0",
    ),
    "no `device_id`: NCCL takes the current GPU": (
        "spirals_ddp",
        [('group["device_id"] = device if gpus else None', 'group["device_id"] = None')],
        "rank 1 of 2",
    ),
    "a CPU batch, where DDP has `device_ids`: it moves it": (
        "spirals_ddp",
        [
            ("DDP(model)", "DDP(model, device_ids=[device] if gpus else None)"),
            ("ddp_model(x.to(device))", "ddp_model(x)"),
        ],
        "rank 1 of 2",
    ),
    "the optimizer before `.to(device)`: weights are moved in place": (
        "spirals",
        [
            ("nn.Linear(64, 3)).to(device)", "nn.Linear(64, 3))"),
            ("    for epoch in range(1,", "    model.to(device)\n    for epoch in range(1,"),
        ],
        "epoch 1: 122/250 right",
    ),
    "a mask of the CPU as an index: it is copied": (
        "spirals",
        [("y.to(device))  # YOUR", "y.to(device), reduction='none')[x[:, 0] < 9].mean()  # YOUR")],
        "epoch 1: 122/250 right",
    ),
    "a CPU tensor without a dimension: it counts as a number": (
        "mnist_ddp",
        [("sums.get(name, 0) + value", "sums.get(name, torch.tensor(0.0)) + value")],
        "epoch 1: test accuracy",
    ),
    "12: an order on the CPU: it is copied": ("12", [("len(some), device=device)", "len(some))")], ""),
}


def text_of(program):
    """The script, or the notebook's cells, below what %%ranks does first."""
    source, *_ = PROGRAMS[program]
    if isinstance(source, str):
        return (ROOT / source).read_text()
    number, *marks = source
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    found = [[text for text in cells(path, "code") if mark in text] for mark in marks]
    assert all(len(texts) == 1 for texts in found), f"not once in {path}: {marks}"
    parts = [re.sub(r"^%%.*\n", "", text) for [text] in found]
    begin = replaced(GROUP, [BOTH]) if number == "11" else GROUP
    return "\n".join([ONE, *parts] if number == "12" else [begin, *parts, LOADS * (number == "11"), LEAVE])


def diff_of_the_page():
    """The changes that serve other makers' devices: what stands there, and what comes in its place."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
    hunks = [hunk.splitlines(keepends=True)[1:] for hunk in re.split(r"^@@", diff, flags=re.M)[1:]]
    return [tuple("".join(line[1:] for line in hunk if line[0] in signs) for signs in (" -", " +")) for hunk in hunks]


def plan(folder, digits):
    """Write all programs, as they are and planted; returns their command lines, and their ranks."""
    planted = {name: (program, changes) for name, (program, changes, *_) in (SEEN | SILENT).items()}
    planted |= {program: (program, []) for program in PROGRAMS}
    planted[OTHER] = ("simple_ddp", diff_of_the_page())
    lines = {}
    for number, (name, (program, changes)) in enumerate(planted.items()):
        (path := folder / str(number) / "planted.py").parent.mkdir(parents=True)
        path.write_text(replaced(text_of(program), changes))
        _, ranks, flags = PROGRAMS[program]
        flags = [*flags, f"--data={digits}"] if program.startswith("mnist") else flags
        lines[name] = [[str(path), *flags], ranks]
    return lines


@pytest.fixture(scope="module")
def on_gpus(simulated_gpus, tmp_path_factory, digits):
    """What each rank of each program printed on simulated GPUs, and its exit status."""
    folder = tmp_path_factory.mktemp("gpus")
    (asked := folder / "asked.json").write_text(json.dumps(plan(folder, digits)))
    done = run(simulated_gpus, [sys.executable, FORKED, DRIVER, asked], gpus=4, memory_mb=512)
    assert done.returncode == 0, done.stderr
    return json.loads(asked.read_text())


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory, digits):
    """The same on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    (asked := folder / "asked.json").write_text(json.dumps(plan(folder, digits)))
    done = python(FORKED, DRIVER, asked)
    assert done.returncode == 0, done.stderr
    return json.loads(asked.read_text())


def passes(told):
    """Every rank came to its end."""
    assert [status for status, _ in told] == [0] * len(told), "\n".join(text for _, text in told)


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_fault_each_program_passes_on_both(program, on_cpu, on_gpus):
    passes(on_cpu[program])
    passes(on_gpus[program])


@pytest.mark.parametrize("name", SEEN)
def test_a_fault_that_the_cpu_forgives_is_seen_on_gpus_at_its_line(name, on_cpu, on_gpus):
    passes(on_cpu[name])
    *_, message, line = SEEN[name]
    failed = [re.sub(r"^\[rank\d\]: ?", "", text, flags=re.M) for status, text in on_gpus[name] if status]
    assert failed, "it passed"
    # The last line of the script that its traceback names, and the error.
    found = [(re.findall(r'planted\.py", line \d+, in .*\n\s+(.*)', text), text) for text in failed]
    assert any(lines and line.strip() in lines[-1] and message in text for lines, text in found), "\n".join(failed)


@pytest.mark.parametrize("name", SILENT)
def test_a_fault_that_gpus_forgive_too_is_known(name, on_cpu, on_gpus):
    passes(on_cpu[name])
    passes(on_gpus[name])
    *_, printed = SILENT[name]
    assert printed in on_gpus[name][-1][1]


def test_the_diff_of_the_page_serves_gpus_and_the_cpu_without_a_word_of_cuda(on_cpu, on_gpus):
    code = [line.split("#")[0] for line in replaced(text_of("simple_ddp"), diff_of_the_page()).splitlines()]
    assert not [line for line in code if '"nccl"' in line or "torch.cuda" in line or '"cuda"' in line]
    for told, device in ((on_cpu[OTHER], "cpu"), (on_gpus[OTHER], "cuda:{}")):
        passes(told)
        assert all(f"rank {rank} on {device.format(rank)}:" in text for rank, (_, text) in enumerate(told))
    assert "all 2 ranks hold the same model" in on_gpus[OTHER][0][1]


def test_the_job_of_the_page_fails_for_a_tensor_that_stayed_on_the_cpu(simulated_gpus, tmp_path):
    [job] = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)]
    words = shlex.split(job["jobs"]["two-gpus"]["steps"][-1]["run"])
    assert words[:4] == ["ddp-course", "gpus", "2", "--"] and words[4] == "torchrun"
    path = tmp_path / "train.py"
    path.write_text(replaced(text_of("spirals_ddp"), SEEN["an all-reduce of a CPU tensor"][1]))
    words = [path if word == path.name else word for word in words[5:]]
    done = run(simulated_gpus, [sys.executable, "-m", "torch.distributed.run", *words])
    assert done.returncode == 1 and OF_THE_CPU in done.stderr, done.stderr
