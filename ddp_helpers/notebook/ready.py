"""Is a site ready? The doctor, as a job of any shape."""

from ddp_helpers import ROOT
from ddp_helpers.notebook import runs, slurm
from ddp_helpers.rank.staging import stage


def ready(site: str, nodes: int = 2, gpus_per_node: int = 2) -> bool:
    """Whether every row of the doctor is green on so many nodes and GPUs; a person on the login node calls it.

    The job is made from the site file, as a learner's jobs are. Prints what the ranks say, which is the doctor's table.
    Raises JobError where no Slurm answers, or where it refuses the job.
    """
    if not slurm.available():
        raise slurm.JobError("no Slurm answers here: go to the login node, or start one with slurm/cluster up")
    place, folder = slurm.Site.load(site), runs.fresh(ROOT / "runs", "ready")
    words = ("--data", stage(ROOT / "data").absolute(), "--run-dir", "{run_dir}")
    shape = {"nodes": nodes, "tasks_per_node": gpus_per_node, "gpus_per_node": gpus_per_node, "time": "00:05:00"}
    slurm.prepare("doctor", words, place, folder, **shape)
    number = slurm.submit(folder)
    slurm.watch(folder)
    return slurm.look(number)[0].state == "COMPLETED"
