"""Cells, scripts and sites on GPUs, as far as a machine without one can tell."""

import ast
import re
import tomllib

import torch.distributed as dist
from notebook_texts import cells
from packaging.requirements import Requirement

from ddp_helpers import ROOT
from ddp_helpers.lessons.measure import trains_alike

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
SCRIPTS = [*(ROOT / "notebooks").glob("*.py"), *(ROOT / "notebooks" / "solutions").glob("*.py")]
SCRIPTS += [*(ROOT / "ddp_helpers").rglob("*.py"), *(ROOT / "ddp_tools").rglob("*.py")]
# The torch in NVIDIA's PyTorch images: 25.12's as in its release notes, the others as their users print it. What is
# called 2.11.0a0 was built before 2.11.
IMAGES = {"25.12": "2.10.0a0+b4e4ee81d3", "26.02": "2.11.0a0+eb65b36914", "26.04": "2.12.0a0+0291f960b6.nv26.04"}


def test_weights_are_equal_to_the_bit_on_cpus_and_gradients_up_to_rounding_on_gpus(monkeypatch):
    rounded, half = {"weights off": 1e-4, "gradient off": 1e-7}, {"weights off": 1e-4, "gradient off": 2e-3}
    for backend, equal in (("gloo", [False, False]), ("nccl", [True, False])):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        assert [trains_alike(rounded), trains_alike(half)] == equal
    assert trains_alike({"weights off": 0, "gradient off": 0})


# ---- the text of every program


def programs():
    """Every program of the course, place and text: of a notebook what its kernel runs, what its ranks, each file."""
    for path in SCRIPTS:
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in NOTEBOOKS:
        texts = {}
        for place, cell in enumerate(cells(path, "code")):
            magic, _, rest = cell.partition("\n") if cell.startswith("%%") else ("", "", cell)
            kind, *words = magic.split() or [""]
            if kind not in ("", "%%ranks", "%%launch", "%%writefile") or (
                words and words[-1].endswith((".sbatch", ".sh"))
            ):
                continue
            name = {"": "kernel", "%%launch": f"cell {place}", "%%writefile": words and words[-1]}.get(kind, "ranks")
            texts[name] = texts.get(name, "") + re.sub(r"(?m)^[%!].*", "pass", rest) + "\n"
        yield from ((f"{path.stem}, {name}", text) for name, text in texts.items())


def calls(tree, name):
    """The calls of a function of this name, wherever it was imported from."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [node for node in nodes if getattr(node.func, "attr", getattr(node.func, "id", "")) == name]


def unbound(text):
    """The calls that form a group without a backend, or on GPUs without one that was claimed before."""
    tree = ast.parse(text)
    claimed = "device_id" in text and calls(tree, "set_device") + calls(tree, "pick_device")
    formed = [(call, ast.unparse(call.args[0]) if call.args else "") for call in calls(tree, "init_process_group")]
    return [call for call, backend in formed if backend not in ("'gloo'", "'fake'") and not (backend and claimed)]


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
    assert [where for where, text in programs() if unbound(text) or saved_late(text)] == []
    right = 'torch.cuda.set_device(d)\ndist.init_process_group("nccl", device_id=d)'
    assert not unbound(right) and unbound(right.replace(", device_id=d", "")), "the control"
    assert unbound(right.partition("\n")[2]) and unbound(right.replace('"nccl", ', "")), "the control"
    right = "torch.save(m, f)\ndist.barrier()\ndist.destroy_process_group()"
    assert not saved_late(right) and saved_late("\n".join(reversed(right.splitlines()))), "the control"


def test_torchrun_in_bash_hides_a_gpu_too_few():
    """%%bash starts it past launchers.environment(), which does so."""
    bash = [cell for path in NOTEBOOKS for cell in cells(path, "code") if cell.startswith("%%bash")]
    started = [cell for cell in bash if re.search(r"^[^#\n]*\btorchrun --", cell, re.M)]
    assert started and all("CUDA_VISIBLE_DEVICES=" in cell.partition("torchrun --")[0] for cell in started)


def test_an_image_that_a_site_names_has_a_torch_that_the_course_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = map(Requirement, project["optional-dependencies"]["torch"])
    [takes] = [need.specifier for need in needed if need.name == "torch"]
    texts = {path.name: path.read_text() for path in (ROOT / "slurm" / "sites").iterdir()}
    named = {(name, tag) for name, text in texts.items() for tag in re.findall(r"pytorch:([\d.]+)-py3", text)}
    assert named and not takes.contains(IMAGES["26.02"], prereleases=True)
    assert [pair for pair in named if not takes.contains(IMAGES.get(pair[1], "0"), prereleases=True)] == []
