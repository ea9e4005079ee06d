"""A job of the course that fails explains itself: the verdict is in its log, and its exit status stays what it was."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import program
from explained import answer, explain
from real import LIMIT

from ddp_helpers.jobs import Job, Site, render, submit, watch, write_job
from ddp_helpers.jobs.files import log_of

VERDICT = "explain says of this log:"
SAYS = "1: Traceback (most recent call last):\n1: KeyError: 7\nsrun: error: n1: task 1: Exited with exit code 41"
FAILS = """import os, sys, time, traceback
if os.environ["SLURM_PROCID"] == "1":
    try:
        open("shard1.csv")
    except OSError:
        traceback.print_exc()
        time.sleep(2)  # srun ends the step at once, and may lose what was said just before
        sys.exit(1)
time.sleep(100)
"""


def run_file(tmp_path: Path, site: Site, says: str, status: int, before: str = "", **job: object) -> tuple[int, str]:
    """Run a job file under a stand-in for srun, which says this and ends so; the status, and the log."""
    folder = tmp_path / "a run"
    folder.mkdir(exist_ok=True)
    program(tmp_path / "bin" / "srun", f"printf '%s\\n' {shlex.quote(says)}; exit {status}")
    program(tmp_path / "bin" / "scontrol", "echo JobState=RUNNING PreemptTime=None")
    (folder / "job.sbatch").write_text(render(Job("try", ("x.py",), **job), site, folder))
    (folder / "log").write_text(before)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}
    env |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "n1"}
    with (folder / "log").open("a") as log:
        command = ["bash", str(folder / "job.sbatch")]
        done = subprocess.run(command, env=env, stdout=log, stderr=log, timeout=LIMIT, check=False)
    return done.returncode, (folder / "log").read_text()


@pytest.mark.parametrize("kind", [{}, {"launcher": "torchrun"}, {"requeue": True, "grace": 60}], ids=str)
def test_the_verdict_stands_below_and_the_status_stays(kind: dict, tmp_path: Path) -> None:
    status, log = run_file(tmp_path, Site("here"), SAYS, 41, "2: MemoryError\n", **kind)
    verdict = log.partition(f"\n{VERDICT}\n")[2]
    assert status == 41 and "KeyError: 7" in verdict and "MemoryError" not in verdict and "only follows" not in verdict


def test_a_module_that_a_job_of_ours_lacks_is_explained_as_such(tmp_path: Path) -> None:
    says = (
        "1: Traceback (most recent call last):\n1: ModuleNotFoundError: No module named 'model'\nE1 its agent: failed"
    )
    _, log = run_file(tmp_path, Site("here"), says, 1, launcher="torchrun")
    verdict = log.partition(VERDICT)[2]
    assert "is not next to the script" in verdict and "Failed first: rank 1" in verdict
    assert answer(explain(tmp_path, says)) == "no-module", "the control: no job of ours"


def test_nothing_is_said_of_a_job_that_ends_well_and_nothing_breaks_without_explain(tmp_path: Path) -> None:
    status, log = run_file(tmp_path, Site("here"), "1: KeyError: 7", 0)
    assert status == 0 and VERDICT not in log
    for python in ("/nowhere/python", f"{sys.executable} -I -S", "false"):
        status, log = run_file(tmp_path, Site("here", python=python), SAYS, 3)
        assert status == 3 and log.endswith(f"{SAYS}\n")
    status, log = run_file(tmp_path, Site("here"), "loss 0.3", 3)  # it sees no failure, which helps nobody here
    assert status == 3 and VERDICT not in log


def test_under_slurm_the_last_lines_of_a_failed_job_say_why(cluster: object, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_job(Job("try", ("x.py",), nodes=2, ranks_per_node=1, time="00:05:00"), Site.load("local"), folder)
    (folder / "x.py").write_text(FAILS)
    number = submit(folder)
    watch(folder)
    said = "\n".join(log_of(folder, number)).partition(VERDICT)[2]
    assert "Failed first: rank 1" in said and "No such file or directory: 'shard1.csv'" in said and "fix:" in said
