"""Judge a run of one's own net by its record: what is asked of it, and what is missing."""

import ast
from collections.abc import Callable
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.notebook import runs
from ddp_helpers.notebook.scripts import Script
from ddp_helpers.notebook.slurm.job import JobError
from ddp_helpers.notebook.slurm.queue import ACTIVE
from ddp_helpers.notebook.slurm.run import known

SHAPE = {"nodes": 2, "gpus_per_node": 2}  # where the notebook's parameters do not say otherwise
BAR = 0.8  # share of the test images that must be right


def judge(my_run: Callable[[Path], None]) -> list[str]:
    """Have the learner's function make a run in a new folder, and say what the record lacks. Prints what it shows."""
    folder = runs.fresh(ROOT / "runs", "13_my_net")
    my_run(folder)
    scope = my_run.__globals__  # of the notebook, where its parameters are
    nodes, gpus = (scope.get(name, number) for name, number in SHAPE.items())
    lines = missing(folder, nodes, gpus)
    if not lines:
        run = runs.read(folder)
        last = run.epochs[-1]
        print(f"found: {run.state}, world size {run.env['world_size']} on {nodes} nodes, your Net in the script")
        print(f"found: {last['test_accuracy']:.1%} right of {last['test_samples']} test images")
    return lines


def missing(folder: Path, nodes: int, gpus: int) -> list[str]:
    """List what a run folder lacks, a line each; only that it did not end, if the job never came to an end."""
    try:
        said = known(folder)
    except JobError:
        return ["the folder holds no job: describe one with slurm.Job, and slurm.write(job, place, folder)"]
    if said["state"] == "WRITTEN":
        return ["the job was written but not submitted: slurm.submit(folder)"]
    if said["state"] in ACTIVE:
        return ["the job was submitted but not collected: slurm.watch(folder), then slurm.collect(folder)"]
    run = runs.read(folder)
    if run.state in ("unknown", "done, no record"):
        return ["the job ended without a record in its folder: give the script --run-dir {run_dir}"]
    if run.state != "done" or not run.epochs:
        return [f"the run ended as {run.state!r}: {run.status.get('why') or 'read the log in its folder'}"]
    last = run.epochs[-1]
    return [*shape(run, nodes, gpus), *net(folder, said["job"]["program"][0]), *tested(run, last), *accurate(last)]


def shape(run: runs.Run, nodes: int, gpus: int) -> list[str]:
    """A line, unless the ranks are as many as asked, on as many nodes."""
    found = (run.env.get("world_size"), run.nodes)
    if found == (nodes * gpus, nodes):
        return []
    asked = f"{nodes} nodes with {gpus} GPUs each make world size {nodes * gpus}"
    return [f"the world size is {found[0]} on {found[1]} nodes, but {asked}: look at the Job's three numbers"]


def class_in(text: str) -> str:
    """The class Net in a script, without its layout; nothing if there is none."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Net"]
    return ast.dump(found[0]) if found else ""


def net(folder: Path, program: str) -> list[str]:
    """A line, unless the script in the folder holds a Net that is not the course's."""
    try:
        theirs = class_in((folder / program).read_text())
    except (OSError, SyntaxError):
        return [f"the folder holds no script that can be read as {program}: write it into the run's own folder"]
    if not theirs:
        return [f"{program} has no class Net: write it with scripts.write"]
    if theirs == class_in(Script("mnist_ddp").text()):
        return [f"{program} holds the course's Net: hand yours to scripts.write, as replace=[Net]"]
    return []


def tested(run: runs.Run, last: dict) -> list[str]:
    """A line, unless as many test images were counted as the dataset has."""
    try:
        header = (run.folder / run.spec["data"] / "MNIST" / "raw" / "t10k-images-idx3-ubyte").read_bytes()[4:8]
    except (OSError, KeyError, TypeError):
        return ["the dataset of the run is not where its record says: leave it there until the check is done"]
    images = int.from_bytes(header, "big")
    if (counted := last.get("test_samples")) == images:
        return []
    return [f"{counted} test images were counted, and there are {images}: add up sums, and pad nothing"]


def accurate(last: dict) -> list[str]:
    """A line, unless enough of the test images are right."""
    if (right := last.get("test_accuracy") or 0) >= BAR:
        return []
    return [f"{right:.1%} of the test images are right, and {BAR:.0%} are asked: more epochs, or another network?"]
