"""Project 1 of notebook 14: judge a run of one's own net by its record."""

import ast
from collections.abc import Callable
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.jobs.job import JobError
from ddp_helpers.jobs.queue import ACTIVE
from ddp_helpers.jobs.run import known
from ddp_helpers.launch.scripts import Script
from ddp_helpers.records import runs

SHAPE = {"nodes": 2, "gpus_per_node": 2}  # where the notebook's parameters do not say otherwise
BAR = 0.8  # share of the test images that must be right


def judge(my_run: Callable[[Path], None]) -> list[str]:
    """Have the learner's function make a run in a new folder, and say what the record lacks. Prints what it shows."""
    folder = runs.fresh(ROOT / "runs", "14_my_net")
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
        return ["the folder holds no job: describe one with jobs.Job, and jobs.write(job, place, folder)"]
    if said["state"] == "WRITTEN":
        return ["the job was written but not submitted: jobs.submit(folder)"]
    if said["state"] in ACTIVE:
        return ["the job was submitted but not collected: jobs.watch(folder), then jobs.collect(folder)"]
    run = runs.read(folder)
    if run.state in ("unknown", "done, no record"):
        return ["the job ended without a record in its folder: give the script --run-dir {run_dir}"]
    if run.state != "done" or not run.epochs:
        return [f"the run ended as {run.state!r}: {run.status.get('why') or 'read the log in its folder'}"]
    lines = [shape(run, nodes, gpus), net(folder, said["job"]["program"][0]), tested(run), accurate(run)]
    return [line for line in lines if line]


def shape(run: runs.Run, nodes: int, gpus: int) -> str:
    """What to say of the number of ranks and nodes; nothing, if they are as asked."""
    found = (run.env.get("world_size"), run.nodes)
    if found == (nodes * gpus, nodes):
        return ""
    asked = f"{nodes} nodes with {gpus} GPUs each make world size {nodes * gpus}"
    return f"the world size is {found[0]} on {found[1]} nodes, but {asked}: look at the Job's three numbers"


def net(folder: Path, program: str) -> str:
    """What to say of the script in the folder; nothing, if it holds a Net that is not the course's."""
    if net_in((folder / program).read_text()) not in ("", net_in(Script("mnist_ddp").text())):
        return ""
    return f"{program} holds no Net but the course's: hand yours to scripts.write, as replace=[Net]"


def net_in(text: str) -> str:
    """The class Net in a script, without its layout; nothing if there is none."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Net"]
    return ast.dump(found[0]) if found else ""


def tested(run: runs.Run) -> str:
    """What to say of the number of test images; nothing, if the run counted as many as the dataset has."""
    header = (run.folder / run.spec["data"] / "MNIST" / "raw" / "t10k-images-idx3-ubyte").read_bytes()[4:8]
    counted, images = run.epochs[-1].get("test_samples"), int.from_bytes(header, "big")
    told = f"{counted} test images were counted, and there are {images}: add up sums, and pad nothing"
    return "" if counted == images else told


def accurate(run: runs.Run) -> str:
    """What to say of the accuracy; nothing, if enough of the test images are right."""
    right = run.epochs[-1].get("test_accuracy") or 0
    asked = f"{right:.1%} of the test images are right, and {BAR:.0%} are asked: more epochs, or another network?"
    return "" if right >= BAR else asked
