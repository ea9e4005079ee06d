"""Cells, scripts and pages on GPUs, as far as a machine without one can tell."""

import ast
import re
import tomllib
from argparse import Namespace
from contextlib import ExitStack

import nbformat
import pytest
import torch
import torch.distributed as dist
from gpu_rank import one_rank, run
from packaging.requirements import Requirement

from ddp_helpers import ROOT
from ddp_helpers.lessons.feed_the_ranks.pipeline import write_forms
from ddp_helpers.lessons.measure import trains_alike
from ddp_helpers.rank.scripts.mnist_ddp import Net, one_pass
from ddp_helpers.rank.scripts.mnist_ddp_resumable import vote

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
RANKS = re.compile(r"%%ranks (\d+).*\n")
REFUSED = "No backend type associated with device type cpu"
SCRIPTS = [*(ROOT / "notebooks").glob("*.py"), *(ROOT / "notebooks" / "solutions").glob("*.py")]
SCRIPTS += [*(ROOT / "slurm" / "scripts").glob("*.py"), *(ROOT / "ddp_helpers").rglob("*.py")]
SCRIPTS += (ROOT / "ddp_tools").rglob("*.py")
# The torch in NVIDIA's PyTorch images: 25.12's as in its release notes, the others as their users print it. What is
# called 2.10.0a0 was built before 2.10.
IMAGES = {"25.08": "2.8.0a0+34c6371d24", "25.12": "2.10.0a0+b4e4ee81d3", "26.02": "2.11.0a0+eb65b36914"}
# The cells that stop on tensors without memory: what stands in them, and the error. Nothing else may stop a cell.
STOPS = {
    "torch.save(ddp_model.module.state_dict()": AttributeError,  # saves weights
    'torch.save({"model": model_state': AttributeError,
    "checkpoint = torch.load(path, map_location=device": RuntimeError,  # which was not written
    'ddp_model.module.load_state_dict(checkpoint["model"])': TypeError,
    "trace.account(": ValueError,  # reads the profiler's traces
    "with Join([": AttributeError,  # Join asks DDP's constructor for its hooks
    "init_device_mesh(device.type, (2,)": Exception,  # a mesh looks for its rank in a tensor
    "early = adamw(": NameError,
    "cut, alone = net(device), net(device)": NameError,
    "init_device_mesh(device.type, (2, 2)": Exception,
    "dcp.async_save(": NameError,  # wants the model of the cell before
    "model, optimizer = loaded(device)": Exception,
}


def stops_with(source):
    """The error with which this cell stops, NoneType if it does not."""
    return next((error for text, error in STOPS.items() if text in source), type(None))


def code_cells(path):
    """The code cells of a notebook: place and source."""
    cells = enumerate(nbformat.read(path, as_version=4).cells)
    return [(place, cell.source) for place, cell in cells if cell.cell_type == "code"]


def ranks_on_gpus(path):
    """Whether a notebook has cells for ranks, and leaves them the GPUs."""
    sources = "\n".join(source for _, source in code_cells(path))
    return RANKS.search(sources) and 'os.environ["CUDA_VISIBLE_DEVICES"] = ""' not in sources


def given(path, folder):
    """What a notebook's kernel hands to its ranks: the numbers of the cell tagged `parameters`, and files."""
    variables = {"work": str(folder), "checkpoint": str(folder), "path": str(folder / "net.pt"), "losses": [1.0] * 4}
    for cell in nbformat.read(path, as_version=4).cells:
        if "parameters" in cell.metadata.get("tags", []):
            exec(cell.source, variables)
    layers = torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    tests = {"images": torch.zeros(200, 784), "labels": torch.zeros(200, dtype=torch.long)}
    torch.save(tests | {"weights": torch.nn.Sequential(*layers).state_dict()}, variables["path"])
    forms = write_forms(folder / "forms", 32, 8)
    return variables | {"files": [*map(str, forms["files"])], "tars": [*map(str, forms["shards"])]}


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Run a notebook's cells for ranks in order, as rank 0 on GPUs: yields place, and what each one raised."""
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    monkeypatch.setenv("LOCAL_RANK", "0")

    def cells(path):
        size, start = None, given(path, tmp_path)
        with ExitStack() as group:
            for place, source in code_cells(path):
                if not (ranks := RANKS.match(source)):
                    continue
                if ranks[1] != size:  # other ranks, without the variables of these
                    group.close()
                    size, variables = ranks[1], dict(start)
                    group.enter_context(one_rank(0, int(size)))
                try:
                    run(source[ranks.end() :], variables)
                    yield place, None
                except Exception as error:
                    yield place, error

    return cells


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if ranks_on_gpus(p)], ids=lambda path: path.stem)
def test_cells_for_ranks_send_tensors_of_the_gpu_alone(path, notebook):
    """A cell that stops for another reason than STOPS says is a failure, and so is a cell that need not stand there."""
    sources = dict(code_cells(path))
    for place, error in notebook(path):
        expected = stops_with(sources[place])
        assert isinstance(error, expected) and REFUSED not in str(error), f"{place}: {error!r}"


def test_a_cell_that_sends_a_tensor_of_the_cpu_is_refused():
    """The control: two cells of the course, right, and with `device=device` taken out."""
    controls = [
        ("02_form_a_process_group", "numbers = (rank + 1) * torch.arange(1.0, 5.0, device=device)"),
        ("04_shard_the_data", "sums = torch.tensor([sum(share), len(share)], device=device)"),
    ]
    for name, line in controls:
        [source] = [source for _, source in code_cells(ROOT / "notebooks" / f"{name}.ipynb") if line in source]
        cell = source.partition("\n")[2]
        before = "import torch\nimport torch.distributed as dist\n"
        assert ", device=device" in cell
        with one_rank(0, 4):
            run(before + cell, {})
            with pytest.raises(RuntimeError, match=REFUSED):
                run(before + cell.replace(", device=device", "", 1), {})


def test_scripts_train_and_vote_on_the_gpu():
    """Loss and metrics stay on the GPU until they are read, and so does the ballot."""
    args = Namespace(bf16=False, dry_run=False, log_interval=1)
    with one_rank(0, 2):
        device = torch.device("cuda", 0)
        model = torch.nn.parallel.DistributedDataParallel(Net().to(device))
        batches = [(torch.rand(4, 1, 28, 28), torch.zeros(4, dtype=torch.long))] * 2
        sums = one_pass(model, batches, args, torch.optim.Adadelta(model.parameters()))
        assert {"loss", "accuracy", "samples"} < sums.keys() and sums["loss"].is_cuda
        with pytest.raises(SystemExit, match="not finite"):  # the ballot comes back, and is read as ones
            vote(sums["loss"], model)
        with pytest.raises(RuntimeError, match=REFUSED):
            dist.all_reduce(torch.ones(4))


def test_weights_are_equal_to_the_bit_on_cpus_and_gradients_up_to_rounding_on_gpus(monkeypatch):
    rounded, half = {"weights off": 1e-4, "gradient off": 1e-7}, {"weights off": 1e-4, "gradient off": 2e-3}
    for backend, equal in (("gloo", [False, False]), ("nccl", [True, False])):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        assert [trains_alike(rounded), trains_alike(half)] == equal
    assert trains_alike({"weights off": 0, "gradient off": 0})


def sources():
    """Every program of the course, place and text: of a notebook what its kernel runs, what its ranks, each file."""
    for path in SCRIPTS:
        if ROOT / "ddp_helpers" / "rank" not in path.parents:  # slurm/scripts has what these make up
            yield str(path.relative_to(ROOT)), path.read_text()
    for path in NOTEBOOKS:
        programs = {}
        for place, cell in code_cells(path):
            magic, _, rest = cell.partition("\n") if cell.startswith("%%") else ("", "", cell)
            kind, *words = magic.split() or [""]
            if kind not in ("", "%%ranks", "%%launch", "%%writefile") or (
                words and words[-1].endswith((".sbatch", ".sh"))
            ):
                continue
            name = {"": "kernel", "%%launch": f"cell {place}", "%%writefile": words and words[-1]}.get(kind, "ranks")
            programs[name] = programs.get(name, "") + re.sub(r"(?m)^[%!].*", "pass", rest) + "\n"
        yield from ((f"{path.stem}, {name}", text) for name, text in programs.items())


def calls(tree, name):
    """The calls of a function of this name, wherever it was imported from."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [node for node in nodes if getattr(node.func, "attr", getattr(node.func, "id", "")) == name]


def unbound(text):
    """The calls that form a group without a backend, or on GPUs without one that was claimed before."""
    lines, claims = [], calls(ast.parse(text), "set_device") + calls(ast.parse(text), "pick_device")
    for call in calls(ast.parse(text), "init_process_group"):
        backend = ast.unparse(call.args[0]) if call.args else ""
        right = backend and "device_id" in text and claims
        if backend not in ("'gloo'", "'fake'") and not right:
            lines.append(ast.unparse(call))
    return lines


def saved_late(text):
    """What is saved behind the last barrier of a function that leaves the group: other ranks may be gone by then."""
    lines = []
    for body in (node.body for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.FunctionDef)):
        if any(isinstance(line, ast.Expr) and calls(line, "destroy_process_group") for line in body):
            last = max((place for place, line in enumerate(body) if calls(line, "barrier")), default=-1)
            saves = [call for line in body[last + 1 :] for name in ("save", "write") for call in calls(line, name)]
            lines += [line for line in map(ast.unparse, saves) if line.startswith(("torch.save", "write("))]
    return lines


def test_a_group_on_gpus_is_bound_to_a_claimed_one_and_left_when_all_is_saved():
    assert {where: lines for where, text in sources() if (lines := unbound(text) + saved_late(text))} == {}


def test_the_rules_find_what_they_are_for():
    assert unbound("dist.init_process_group()") and unbound('dist.init_process_group("nccl", device_id=d)')
    assert unbound("torch.cuda.set_device(0)\ndist.init_process_group(backend)")
    assert unbound("dist.init_process_group(backend, device_id=d)")
    assert not unbound('torch.cuda.set_device(d)\ndist.init_process_group("nccl", device_id=d)')
    assert saved_late("def main():\n  dist.barrier()\n  dist.destroy_process_group()\n  torch.save(m, f)")
    assert not saved_late("def main():\n  torch.save(m, f)\n  dist.barrier()\n  dist.destroy_process_group()")


def test_torchrun_in_bash_hides_a_gpu_too_few():
    """%%bash starts it past launchers.environment(), which does so."""
    cells = [cell for path in NOTEBOOKS for _, cell in code_cells(path) if cell.startswith("%%bash")]
    started = [cell for cell in cells if re.search(r"^[^#\n]*\btorchrun --", cell, re.M)]
    assert started and all("CUDA_VISIBLE_DEVICES=" in cell.partition("torchrun --")[0] for cell in started)


def test_an_image_that_a_site_names_has_a_torch_that_the_course_takes():
    needed = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    [takes] = [need.specifier for need in needed if need.name == "torch"]
    texts = {path.name: path.read_text() for path in (ROOT / "slurm" / "sites").iterdir()}
    named = {(name, tag) for name, text in texts.items() for tag in re.findall(r"pytorch:([\d.]+)-py3", text)}
    assert named and not takes.contains(IMAGES["25.08"], prereleases=True)
    assert [pair for pair in named if not takes.contains(IMAGES.get(pair[1], "0"), prereleases=True)] == []
