"""Ask when a job would start, and make a queue where there is none.

Notebook 08 calls it, in its own process, on a login node or a laptop.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from ddp_helpers import ROOT, jobs
from ddp_helpers.records import runs

_FILES = ROOT / "build" / "jobs"
_HELD_SECONDS = 60


@contextmanager
def node_held(site: str) -> Iterator[None]:
    """Hold one node of the local cluster meanwhile, by a job that only sleeps; elsewhere nothing.

    So there is a queue. The job asks for ten minutes, as all of the course's do.
    """
    if site != "local" or not jobs.available():
        yield
        return
    sleep = ("-c", f"import time; time.sleep({_HELD_SECONDS})")
    job = jobs.Job("hold", sleep, tasks_per_node=2, gpus_per_node=2)
    folder = runs.new_run_folder(_FILES, "hold")
    jobs.write_job(job, jobs.Site.load(site), folder)
    held_by = jobs.submit(folder)
    try:
        while jobs.states_of_job(held_by)[0].state == "PENDING":
            time.sleep(0.2)
        yield
    finally:
        jobs.cancel(held_by)


def job_file(site: str, nodes: int, gpus: int) -> Path:
    """Write the sbatch file of a job of this size, and return its path."""
    job = jobs.Job("ask", ("mnist_ddp.py",), nodes, tasks_per_node=gpus, gpus_per_node=gpus)
    return jobs.write_job(job, jobs.Site.load(site), runs.new_run_folder(_FILES, "ask"))


def seconds_until(answer: str) -> float:
    """Return the seconds until the start that an answer of `sbatch --test-only` names; or 0."""
    if not answer:
        return 0.0
    start = datetime.fromisoformat(answer.split()[6])
    return max(0.0, (start - datetime.now()).total_seconds())
