"""Slurm's own commands: submit a job, ask for its state, cancel it.

One process calls it, on a machine with Slurm's commands; none runs as part of another job.
"""

import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from ddp_helpers.jobs.job import JobError
from ddp_helpers.launch.launchers import clean_environment

ACTIVE = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "STAGE_OUT",
    "STOPPED",
    "RESIZING",
    "SIGNALING",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
}
_NODES = "`sinfo -N -o '%N %c %m %G'` shows them"
_PROCESSORS = "`sinfo -N -o '%N %c %G'` shows what there is"
# By a part of Slurm's error message, what to do about it.
_CURES = {
    "qos policy": "wait until jobs have ended, or ask for less; `sacctmgr show qos` has the limits",
    "account": "change `--account`; `sacctmgr show associations user=$USER` lists yours",
    "partition": "change `--partition` (or leave it out); `sinfo` lists those there are",
    "time limit": "ask for less `time`; `sinfo -o '%P %l'` shows each partition's limit",
    "constraint": "change `--constraint`; `sinfo -o '%N %f'` shows each node's features",
    "feature": "change `--constraint`; `sinfo -o '%N %f'` shows each node's features",
    "node count": "ask for fewer nodes; `sinfo` shows how many each partition has",
    "gres": "change `gpus` in the site file; `sinfo -N -o '%N %G'` shows what GPUs are called",
    "node configuration": f"ask for fewer nodes, GPUs, CPUs or less memory; {_NODES}",
    "more processors": f"ask for fewer nodes, GPUs or CPUs; {_PROCESSORS}",
    "memory": "ask for less with `--mem`; `sinfo -N -o '%N %m'` shows what the nodes have",
}


Finished = subprocess.CompletedProcess[str]


@dataclass
class State:
    """The state of a job, or of one task of an array; times are in Slurm's format."""

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
        """Whether the job waits or runs."""
        return self.state in ACTIVE

    def record(self) -> dict[str, str | float | None]:
        """Return the state for job.json, with the seconds in the queue and on the nodes."""
        queue_seconds = _seconds_between(self.submitted, self.started)
        seconds = _seconds_between(self.started, self.ended)
        return asdict(self) | {"queue_seconds": queue_seconds, "seconds": seconds}


def moment(text: str) -> datetime | None:
    """Parse a time of Slurm; None if it is not known yet."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _seconds_between(begin: str, end: str) -> float | None:
    """Return the seconds between two times of Slurm; None if one is not known yet."""
    first, last = moment(begin), moment(end)
    return (last - first).total_seconds() if first and last else None


def run_slurm(*command: str, cwd: Path | None = None, seconds: float = 60) -> Finished:
    """Run one of Slurm's commands to its end.

    seconds: the time limit; a command that waits in the queue, such as srun, needs more. Raises
    JobError after this limit, or if the command is not installed.
    """
    try:
        return subprocess.run(
            command,
            env=clean_environment(),
            cwd=cwd,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        cure = "is Slurm's controller up? Try `sinfo`"
        raise JobError(f"{command[0]} gave no answer in {seconds:g} s: {cure}") from None
    except FileNotFoundError:
        raise JobError(f"{command[0]} is not on this machine: go to where Slurm is") from None


def available() -> bool:
    """Whether a Slurm answers here: the site's, or the one that slurm/cluster starts."""
    if not shutil.which("sbatch"):
        return False
    settings = clean_environment().get("SLURM_CONF")
    if settings and not Path(settings).is_file():  # sinfo would wait a minute
        return False
    return run_slurm("sinfo", "--noheader").returncode == 0


def send(batch: Path, *options: str) -> str:
    """Hand an sbatch file to Slurm, and return the job's id.

    options: more options of sbatch; with --test-only, nothing is submitted, and the id is "".
    Raises JobError with Slurm's error message, and what to change.
    """
    done = run_slurm("sbatch", "--parsable", *options, str(batch.absolute()), cwd=batch.parent)
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    errors = done.stderr.replace("sbatch: error: ", "").replace("allocation failure: ", "")
    errors = errors.replace("Batch job submission failed: ", "")
    complaint = ". ".join(line.strip() for line in errors.splitlines() if line.strip())
    cures = [cure for piece, cure in _CURES.items() if piece in complaint.lower()]
    cure = cures[0] if cures else "change the job or the site file"
    raise JobError(f"Slurm refused the job: {complaint}: {cure}")


def cancel(job_id: str) -> None:
    """End a job, or an entire array. A job that has ended already stays unchanged."""
    done = run_slurm("scancel", job_id)
    if done.returncode:
        raise JobError(f"job {job_id} cannot be cancelled: {done.stderr.strip()}")


def start_now(job_id: str) -> None:
    """Let a requeued job start as soon as there is room: Slurm delays it by two minutes."""
    done = run_slurm("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip()
        raise JobError(f"job {job_id} cannot be started now: {complaint}")


def states_of_job(job_id: str) -> list[State]:
    """Return the state of a job, or of each task of an array, from the first source that has it.

    A site's controller forgets a job some minutes after its end; then accounting has it. Raises
    JobError if neither has the job.
    """
    for source in (controller, accounting):
        states = [task for state in source(job_id) for task in tasks_of(state)]
        if states:
            return sorted(states, key=lambda state: state.task.zfill(6))
    ends = "it ended long ago, or ran on another cluster, or its controller does not answer"
    raise JobError(f"job {job_id} is not known to Slurm: {ends}")


def tasks_of(state: State) -> list[State]:
    """Split the state of several array tasks, which Slurm gives as 0-2,5%1, into one per task.

    Slurm does so if tasks wait, or were cancelled before they started.
    """
    tasks = state.task.strip("[]").partition("%")[0]
    numbers: list[int] = []
    for span in tasks.split(","):
        first, _, last = span.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()):
            return [state]
        numbers += range(int(first), int(last) + 1)
    return [replace(state, task=str(number)) for number in numbers]


def controller(job_id: str) -> list[State]:
    """Read the states that `scontrol show job` reports."""
    states = []
    for line in run_slurm("scontrol", "show", "job", job_id, "--oneliner").stdout.splitlines():
        if not line.startswith("JobId="):
            continue
        # A folder of any name comes late in the line: of two fields with one name, the first
        # counts.
        pairs = re.findall(r"(?:^| )(\w+)=(\S*)", line)
        fields = dict(reversed(pairs))
        state = State(
            job_id=fields.get("JobId", ""),
            state=fields.get("JobState", ""),
            reason=fields.get("Reason", ""),
            exit_code=fields.get("ExitCode", ""),
            nodes=fields.get("NodeList", ""),
            submitted=fields.get("SubmitTime", ""),
            started=fields.get("StartTime", ""),
            ended=fields.get("EndTime", ""),
            task=fields.get("ArrayTaskId", ""),
        )
        states.append(state)
    return states


_ACCOUNTING_COLUMNS = "JobIDRaw,State,Reason,ExitCode,NodeList,Submit,Start,End,JobID"


def accounting(job_id: str) -> list[State]:
    """Read the states that `sacct` reports, if the cluster has accounting."""
    if not shutil.which("sacct"):
        return []
    options = ("-X", "-P", "-n", "-j", job_id, f"--format={_ACCOUNTING_COLUMNS}")
    states = []
    for line in run_slurm("sacct", *options).stdout.splitlines():
        if line.count("|") != _ACCOUNTING_COLUMNS.count(","):
            continue
        raw_id, state, reason, exit_code, nodes, submit, start, end, array_id = line.split("|")
        states.append(
            State(
                job_id=raw_id,
                state=state.split()[0],  # as in: CANCELLED by 1000
                reason=reason,
                exit_code=exit_code,
                nodes=nodes,
                submitted=submit,
                started=start,
                ended=end,
                task=array_id.partition("_")[2],  # 11_2 is the third task of array 11
                source="sacct",
            )
        )
    return states
