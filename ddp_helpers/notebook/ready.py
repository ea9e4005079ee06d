"""Is a site ready? The doctor, as a job on two nodes: `python -m ddp_helpers.notebook.ready SITE`."""

import sys
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.notebook import runs, scripts, slurm
from ddp_helpers.rank.topology import stop


def ready(site: str, data: Path) -> bool:
    """Whether every row of the doctor is green on two nodes with two ranks each; a person on the login node calls it.

    The job is made from the site file, as a learner's jobs are. Prints what the ranks say, which is the doctor's table.
    """
    place, folder = slurm.Site.load(site), runs.fresh(ROOT / "runs", "ready")
    flags = ("--data", str(data.absolute()), "--run-dir", str(folder), "--timeout", "120")  # a busy disk is slow
    program = ("doctor.py", *flags, *place.script_args)
    job = slurm.Job(folder.name, program, nodes=2, tasks_per_node=2, gpus_per_node=2, time="00:05:00")
    if not slurm.available():
        raise slurm.JobError("no Slurm answers here: go to the login node, or start one with slurm/cluster up")
    slurm.write(job, place, folder)
    scripts.write("doctor", folder / "doctor.py")
    number = slurm.submit(folder)
    slurm.watch(folder)
    return slurm.look(number)[0].state == "COMPLETED"


def main(words: list[str]) -> int:
    """The exit status: 0 if the site is ready for jobs, 1 if a row is red or the job did not run."""
    if len(words) != 1:
        stop("give one site: a name in slurm/sites, or the path of a .toml file")
    from ddp_helpers.rank.staging import stage  # it takes seconds to import

    try:
        return int(not ready(words[0], stage(ROOT / "data")))
    except slurm.JobError as error:
        stop(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
