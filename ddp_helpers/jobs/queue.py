"""Slurm's own commands: submit, look, cancel; each as a list of words, none from inside another job."""

import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from ddp_helpers.jobs.job import JobError
from ddp_helpers.launch.launchers import clean

ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STAGE_OUT", "STOPPED"}
# Slurm's complaints, and what to do about each.
CURES = {
    "account": "change `account`; `sacctmgr show associations user=$USER` lists yours",
    "partition": "change `partition` (or leave it out); `sinfo` lists those there are",
    "time limit": "ask for less `time`; `sinfo -o '%P %l'` shows each partition's limit",
    "constraint": "change `constraint`; `sinfo -o '%N %f'` shows each node's features",
    "feature": "change `constraint`; `sinfo -o '%N %f'` shows each node's features",
    "node count": "ask for fewer nodes; `sinfo` shows how many each partition has",
    "gres": "change `gpus` in the site file; `sinfo -N -o '%N %G'` shows what GPUs are called",
    "node configuration": "ask for fewer nodes, GPUs, CPUs or less memory; `sinfo -N -o '%N %c %m %G'` shows them",
    "more processors": "ask for fewer nodes, GPUs or CPUs; `sinfo -N -o '%N %c %G'` shows what there is",
    "memory": "ask for less `memory`; `sinfo -N -o '%N %m'` shows what the nodes have",
}


@dataclass
class State:
    """The state of a job, or of one task of an array; times as Slurm writes them, seconds from start to end."""

    job_id: str
    state: str
    reason: str = ""
    exit_code: str = ""
    nodes: str = ""
    submitted: str = ""
    started: str = ""
    ended: str = ""
    task: str = ""  # its number in the array
    source: str = "scontrol"

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ACTIVE

    def record(self) -> dict:
        """The same for job.json, with the seconds in the queue and on the nodes."""
        times = [moment(text) for text in (self.submitted, self.started, self.ended)]
        queued, took = ((b - a).total_seconds() if a and b else None for a, b in pairwise(times))
        return asdict(self) | {"queue_seconds": queued, "seconds": took}


def moment(text: str) -> datetime | None:
    """A time of Slurm's; None where it is not known yet."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def ask(*command: str, cwd: Path | None = None, seconds: float = 60) -> subprocess.CompletedProcess:
    """Run one of Slurm's commands to its end. One that waits in the queue, as srun does, needs more seconds."""
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    try:
        return subprocess.run(command, env=clean(), cwd=cwd, timeout=seconds, check=False, **pipes)
    except subprocess.TimeoutExpired:
        raise JobError(f"{command[0]} gave no answer in {seconds:g} s: is Slurm's controller up? Try `sinfo`") from None
    except FileNotFoundError:
        raise JobError(f"{command[0]} is not on this machine: go to where Slurm is") from None


def available() -> bool:
    """Whether a Slurm answers here: the site's, or the one that slurm/cluster starts."""
    settings = clean().get("SLURM_CONF")
    if not shutil.which("sbatch") or (settings and not Path(settings).is_file()):  # sinfo would wait a minute for it
        return False
    return ask("sinfo", "--noheader").returncode == 0


def send(batch: Path) -> str:
    """Hand an sbatch file to Slurm, and give the job's id. Raises JobError with Slurm's words, and what to change."""
    done = ask("sbatch", "--parsable", str(batch.absolute()), cwd=batch.parent)
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    said = done.stderr.replace("sbatch: error: ", "").replace("Batch job submission failed: ", "")
    words = ". ".join(line.strip() for line in said.splitlines() if line.strip())
    cure = next((cure for sign, cure in CURES.items() if sign in words.lower()), "change the job or the site file")
    raise JobError(f"Slurm refused the job: {words}: {cure}")


def cancel(job_id: str) -> None:
    """End a job, or a whole array. One that has ended already stays as it is."""
    done = ask("scancel", job_id)
    if done.returncode:
        raise JobError(f"job {job_id} cannot be cancelled: {done.stderr.strip()}")


def start_now(job_id: str) -> None:
    """Have a requeued job start as soon as there is room: Slurm holds it back for two minutes."""
    done = ask("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    if done.returncode:
        raise JobError(f"job {job_id} cannot be started now: {(done.stderr or done.stdout).strip()}")


def look(job_id: str) -> list[State]:
    """The state of a job, or of each task of an array, from the first that knows it. Raises JobError if none does.

    A site's controller forgets a job some minutes after its end; then accounting has it.
    """
    for source in (controller, accounting):
        if found := [each for state in source(job_id) for each in tasks_of(state)]:
            return sorted(found, key=lambda state: state.task.zfill(6))
    raise JobError(f"job {job_id} is not known to Slurm: it ended long ago, or ran on another cluster")


def tasks_of(state: State) -> list[State]:
    """The tasks of an array, where Slurm speaks of many at once, as in 0-2,5%1: they wait, or were cancelled so."""
    spans = [span.partition("-") for span in state.task.strip("[]").partition("%")[0].split(",")]
    if not all(first.isdecimal() and (last or first).isdecimal() for first, _, last in spans):
        return [state]
    numbers = (number for first, _, last in spans for number in range(int(first), int(last or first) + 1))
    return [replace(state, task=str(number)) for number in numbers]


def controller(job_id: str) -> list[State]:
    """Read the states that `scontrol show job` reports."""
    names = ("JobId", "JobState", "Reason", "ExitCode", "NodeList", "SubmitTime", "StartTime", "EndTime", "ArrayTaskId")
    lines = ask("scontrol", "show", "job", job_id, "--oneliner").stdout.splitlines()
    # A folder of any name comes late in a line: of two fields of a name the first counts.
    found = [dict(reversed(re.findall(r"(?:^| )(\w+)=(\S*)", line))) for line in lines if line.startswith("JobId=")]
    return [State(*(fields.get(name, "") for name in names)) for fields in found]


def accounting(job_id: str) -> list[State]:
    """Read the states that `sacct` reports, where the cluster keeps accounts."""
    if not shutil.which("sacct"):
        return []
    columns = ["JobIDRaw", "State", "Reason", "ExitCode", "NodeList", "Submit", "Start", "End", "JobID"]
    done = ask("sacct", "-X", "-P", "-n", "-j", job_id, f"--format={','.join(columns)}")
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == len(columns) - 1]
    # CANCELLED by 1000; 11_2 is the third task of array 11.
    return [State(row[0], row[1].split()[0], *row[2:8], row[8].partition("_")[2], "sacct") for row in rows]
