"""Project 1 of notebook 17: check a run of the learner's own network by its record.

`lessons.check` calls `my_run`, in the driver process. The learner's function submits the job;
without a Slurm its ranks run on this machine.
"""

import ast
from pathlib import Path

from ddp_helpers import RUNS
from ddp_helpers.jobs.job import JobError
from ddp_helpers.jobs.queue import ACTIVE
from ddp_helpers.jobs.run import read_job_record
from ddp_helpers.lessons.exercise import Answer
from ddp_helpers.rank.scripts import script_text
from ddp_helpers.records import runs

BAR = 0.8  # share of the test images that must be right


def my_run(train_in: Answer) -> list[str]:
    """Have the learner's function make a run in a new folder, and list what its record lacks.

    Prints the findings in a correct record.
    """
    folder = runs.new_run_folder(RUNS, "17_my_net")
    train_in(folder)
    notebook = train_in.__globals__  # type: ignore[attr-defined]
    nodes, gpus = (notebook.get(name, 2) for name in ("nodes", "gpus_per_node"))
    if lines := list_missing(folder, nodes, gpus):
        return lines
    run = runs.read_run(folder)
    last = run.epochs[-1]
    ranks = f"world size {run.env['world_size']} on {_nodes_text(run)}"
    print(f"found: {run.state}, {ranks}, your Net in the script")
    accuracy, images = last["test_accuracy"], last["test_samples"]
    print(f"found: {accuracy:.1%} right of {images:.0f} test images")
    return []


def _nodes_text(run: runs.RunRecord) -> str:
    """Return the number of nodes of a run, and whether one machine simulated them all."""
    text = "1 node" if run.nodes == 1 else f"{run.nodes} nodes"
    hosts = {rank.get("host") for rank in run.env.get("ranks", [])}
    return f"{text}, simulated by one machine" if run.nodes != 1 and len(hosts) == 1 else text


def list_missing(folder: Path, nodes: int, gpus: int) -> list[str]:
    """List what a run folder lacks, one line each; for an unfinished job, only that."""
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
    return _mistakes(run, job_record["job"]["program"][0], nodes, gpus)


def _mistakes(run: runs.RunRecord, program: str, nodes: int, gpus: int) -> list[str]:
    """List what is wrong with a run that is done: its size, its net, its test, its accuracy."""
    lines = []
    ranks, last = run.env.get("world_size"), run.epochs[-1]
    if (ranks, run.nodes) != (nodes * gpus, nodes):
        expected = f"{nodes} nodes with {gpus} GPUs each make world size {nodes * gpus}"
        actual = f"the world size is {ranks} on {run.nodes} nodes"
        lines.append(f"{actual}, but {expected}: look at the Job's three numbers")
    if _net_in((run.folder / program).read_text()) in ("", _net_in(script_text("mnist_ddp"))):
        cure = "pass the file with yours to scripts.write_script, as parts="
        lines.append(f"{program} has no Net but the course's: {cure}")
    path = run.folder / run.spec["data"] / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    images = int.from_bytes(path.read_bytes()[4:8], "big")  # the format's field for their number
    if (counted := last.get("test_samples")) != images:
        cure = "add up sums, and pad nothing"
        number = "no" if counted is None else f"{counted:.0f}"
        lines.append(f"{number} test images were counted, and there are {images}: {cure}")
    if (accuracy := last.get("test_accuracy") or 0) < BAR:
        right = f"{accuracy:.1%} of the test images are right"
        lines.append(f"{right}, and {BAR:.0%} are required: more epochs, or a different network?")
    return lines


def _net_in(text: str) -> str:
    """Return the class Net of a script, without its layout; empty if there is none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == "Net":
            return ast.dump(node)
    return ""
