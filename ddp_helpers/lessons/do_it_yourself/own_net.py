"""Project 1 of notebook 17: judge a run of a network of one's own by its record.

`exercises.py` calls `judge`, in the learner's process. The learner's function submits the job;
without a Slurm its ranks run on this machine.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ddp_helpers import RUNS
from ddp_helpers.jobs.job import JobError
from ddp_helpers.jobs.queue import ACTIVE
from ddp_helpers.jobs.run import read_job_record
from ddp_helpers.launch.scripts import script_text
from ddp_helpers.records import runs

BAR = 0.8  # share of the test images that must be right


class _JobSize(NamedTuple):
    """What a run must have; the values here, where the notebook's parameters do not say it."""

    nodes: int = 2
    gpus_per_node: int = 2


def judge(my_run: Callable[..., object]) -> list[str]:
    """Have the learner's function make a run in a new folder, and list what the record lacks.

    Prints what the record of a right run shows.
    """
    folder = runs.new_run_folder(RUNS, "17_my_net")
    my_run(folder)
    size = _size_in_notebook(my_run)
    lines = list_missing(folder, size.nodes, size.gpus_per_node)
    if not lines:
        _print_result(folder, size)
    return lines


def _size_in_notebook(my_run: Callable[..., object]) -> _JobSize:
    """Read the parameters of the notebook that defines the learner's function."""
    variables = my_run.__globals__
    default = _JobSize()
    nodes = variables.get("nodes", default.nodes)
    return _JobSize(nodes, variables.get("gpus_per_node", default.gpus_per_node))


def _print_result(folder: Path, size: _JobSize) -> None:
    """Print how many ranks a run had, and how well its network does."""
    run = runs.read_run(folder)
    last = run.epochs[-1]
    ranks = f"world size {run.env['world_size']} on {size.nodes} nodes"
    print(f"found: {run.state}, {ranks}, your Net in the script")
    accuracy, images = last["test_accuracy"], last["test_samples"]
    print(f"found: {accuracy:.1%} right of {images} test images")


def list_missing(folder: Path, nodes: int, gpus: int) -> list[str]:
    """List what a run folder lacks, a line each; of a job that has not ended, only that."""
    try:
        job_record = read_job_record(folder)
    except JobError:
        cure = "describe one with jobs.Job, and jobs.write_job(job, site, folder)"
        return [f"the folder holds no job: {cure}"]
    if job_record["state"] == "WRITTEN":
        return ["the job was written but not submitted: jobs.submit(folder)"]
    if job_record["state"] in ACTIVE:
        cure = "jobs.watch(folder), then jobs.collect(folder)"
        return [f"the job was submitted but not collected: {cure}"]
    run = runs.read_run(folder)
    if run.state in ("unknown", "done, no record"):
        cure = "give the script --run-dir {run_dir}"
        return [f"the job ended without a record in its folder: {cure}"]
    if run.state != "done" or not run.epochs:
        reason = run.status.get("why") or "read the log in its folder"
        return [f"the run ended as {run.state!r}: {reason}"]
    program = job_record["job"]["program"][0]
    lines = [
        _judge_size(run, nodes, gpus),
        _judge_net(folder, program),
        _judge_test_set(run),
        _judge_accuracy(run),
    ]
    return [line for line in lines if line]


def _judge_size(run: runs.RunRecord, nodes: int, gpus: int) -> str:
    """Say what is wrong with the number of ranks and nodes; empty, if nothing is."""
    ranks = run.env.get("world_size")
    if ranks == nodes * gpus and run.nodes == nodes:
        return ""
    expected = f"{nodes} nodes with {gpus} GPUs each make world size {nodes * gpus}"
    actual = f"the world size is {ranks} on {run.nodes} nodes"
    return f"{actual}, but {expected}: look at the Job's three numbers"


def _judge_net(folder: Path, program: str) -> str:
    """Say what is wrong with the script's Net; empty, if it has one that is not the course's."""
    net = _net_in((folder / program).read_text())
    if net not in ("", _net_in(script_text("mnist_ddp"))):
        return ""
    cure = "hand yours to scripts.write_script, as replace=[Net]"
    return f"{program} holds no Net but the course's: {cure}"


def _net_in(text: str) -> str:
    """Return the class Net of a script, without its layout; empty, if there is none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == "Net":
            return ast.dump(node)
    return ""


def _judge_test_set(run: runs.RunRecord) -> str:
    """Say what is wrong with the number of test images; empty, if each was counted once."""
    path = run.folder / run.spec["data"] / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    images = int.from_bytes(path.read_bytes()[4:8], "big")  # where the format has their number
    counted = run.epochs[-1].get("test_samples")
    if counted == images:
        return ""
    cure = "add up sums, and pad nothing"
    return f"{counted} test images were counted, and there are {images}: {cure}"


def _judge_accuracy(run: runs.RunRecord) -> str:
    """Say what is wrong with the accuracy; empty, if enough of the test images are right."""
    accuracy = run.epochs[-1].get("test_accuracy") or 0
    if accuracy >= BAR:
        return ""
    right = f"{accuracy:.1%} of the test images are right"
    return f"{right}, and {BAR:.0%} are asked: more epochs, or another network?"
