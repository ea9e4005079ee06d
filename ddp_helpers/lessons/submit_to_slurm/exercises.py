"""Exercises of notebook 07: two job files, which the course submits, and the log of a failed job.

`lessons.check` reads EXERCISES, in the driver process. The checker of a job file has its exercise's
name, and needs a Slurm, which runs the ranks.
"""

import json
import re
import subprocess
import time
from typing import Any

from ddp_helpers import ROOT
from ddp_helpers.jobs.job import JobError
from ddp_helpers.jobs.queue import available, states_of_job
from ddp_helpers.lessons.exercise import Answer, Exercise, JudgedExercise, NotCheckedError
from ddp_helpers.lessons.submit_to_slurm.terminal import environment
from ddp_helpers.records import runs

# ---- what a job file's ranks did

_WHO = """import json, os, sys
env = os.environ.get
task = {"rank": int(env("RANK", env("SLURM_PROCID", 0)))}
task |= {"local_rank": int(env("SLURM_LOCALID", 0))}
task |= {"address": env("MASTER_ADDR"), "port": env("MASTER_PORT"), "value": sys.argv[1:]}
with open(f"who-{env('SLURM_JOB_ID')}-{env('SLURMD_NODENAME')}-{os.getpid()}.json", "w") as file:
    json.dump(task, file)
"""


def _run_job(text: Any) -> list[dict[str, Any]]:
    """Submit a job file in a new folder, wait for its end, and read what each task wrote.

    The job file runs who.py on each rank; the tasks are in the order of their ranks. Raises
    JobError if Slurm refuses the job, and NotCheckedError if there is none.
    """
    if not available():
        raise NotCheckedError("no Slurm answers here: make cluster starts one on this machine")
    folder = runs.new_run_folder(ROOT / "build" / "jobs", "exercise")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "who.py").write_text(_WHO)
    (folder / "job.sbatch").write_text(text)
    sbatch = subprocess.run(
        ["sbatch", "--parsable", "job.sbatch"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if sbatch.returncode:
        raise JobError(f"Slurm refused the job: {sbatch.stderr.strip()}")
    job_id = sbatch.stdout.strip().partition(";")[0]
    while any(state.active for state in states_of_job(job_id)):
        time.sleep(0.2)
    tasks = [json.loads(path.read_text()) for path in folder.glob("who-*.json")]
    return sorted(tasks, key=lambda task: (task["rank"], task["local_rank"], task["value"]))


# ---- a job of several nodes


def job_file(text_for: Answer) -> list[str]:
    """Say what is wrong with the ranks of a job of several nodes, and show them."""
    for nodes, gpus in ((2, 2), (1, 2)):
        tasks = _run_job(text := text_for(nodes, gpus))
        ranks, local_ranks = ([task[name] for task in tasks] for name in ("rank", "local_rank"))
        addresses = {task["address"] for task in tasks}
        # The local nodes have this address, so it is right if Slurm gave it, and wrong if written.
        by_number = bool(re.search(r"""=['"]?127\.""", str(text)))
        meet = len(addresses) == 1 and not addresses & {"", "localhost", None} and not by_number
        seen = {"ranks": ranks, "local ranks": local_ranks, "meet": meet}
        local = [*range(gpus)] * nodes
        right = {"ranks": [*range(nodes * gpus)], "local ranks": local, "meet": True}
        hints = {
            "Without srun the program runs once, on the first node.": len(tasks) < 2,
            "The batch script's SLURM_PROCID is 0, and all tasks inherit what it exports: "
            "leave RANK out.": len({*ranks}) < len(ranks),
            "--ntasks does not fix tasks per node, so one of them gets more tasks than GPUs: "
            "give --ntasks-per-node.": max(local_ranks, default=0) >= gpus,
            "127.0.0.1, like localhost, is a different machine on each node: "
            "use the job's first node.": by_number,
            "localhost is a different machine on each node: use the job's first node.": not meet,
        }
        if seen != right:
            return _told(f"job_file({nodes}, {gpus})", seen, right, hints)
    return []


def _told(call: str, seen: dict, right: dict, hints: dict[str, bool]) -> list[str]:
    """Return the first hint that applies, and the values of a job's tasks."""
    applying = [hint for hint, applies in hints.items() if applies]
    return [*applying[:1], f"the job of {call} gives {seen}, expected {right}."]


# ---- an array


def array_job(text_for: Answer) -> list[str]:
    """Say what is wrong with the values and ports of an array's tasks, and show them."""
    for values in (["0.1", "0.01", "0.001"], ["7", "8"]):
        tasks = _run_job(text_for(values))
        taken = sorted(value for task in tasks for value in task["value"])
        ports = len({task["port"] for task in tasks})
        seen = {"values": taken, "ports": ports}
        right = {"values": sorted(values), "ports": len(values)}
        hints = {
            "Places in a bash list start at 0, and so must the array.": ports == len(taken) + 1,
            "SLURM_ARRAY_JOB_ID is the same in all tasks of the array: "
            "make the port from SLURM_JOB_ID.": ports < len(taken),
        }
        if seen != right:
            return _told(f"array_job({values})", seen, right, hints)
    return []


# ---- the log of a job that failed

_Exit = tuple[int, int]  # the number of a task, and its exit code


def first_to_fail(log: list[str]) -> tuple[int, int] | None:
    """Return (task, exit code) of the first task that the log reports as exited; None if none."""
    return next(iter(_exits(log)), None)


def _exits(log: list[str]) -> list[_Exit]:
    """List every task that the log reports as exited, in the log's order."""
    exits = re.findall(r"tasks? (\d+)[\d,-]*: Exited with exit code (\d+)", "\n".join(log))
    return [(int(task), int(code)) for task, code in exits]


def _first_digits(log: list[str]) -> _Exit | None:
    """A mistake: only the first digits of the task and of the exit code."""
    first = first_to_fail(log)
    return first and (int(str(first[0])[0]), int(str(first[1])[0]))


_TERMINATED = [
    "srun: error: node1: task 0: Terminated",
    "srun: error: node2: tasks 2-3: Terminated",
]
_EXITED = ["1: nothing to train on", "srun: error: node1: task 1: Exited with exit code 7"]
_LOGS = [
    (_EXITED + _TERMINATED,),
    (_TERMINATED,),
    (["srun: error: node1: tasks 0-3: Exited with exit code 1"],),
    ([_TERMINATED[0], *_EXITED, "srun: error: node2: task 3: Exited with exit code 9"],),
    ([*_EXITED, "srun: error: node2: task 12: Exited with exit code 1"],),
    (["srun: error: node4: task 12: Exited with exit code 137", *_TERMINATED],),
]
_LOG_TRAPS = {
    "The last one that complains may only have lost its peers: take the first.": (
        lambda log: next(reversed(_exits(log)), None)
    ),
    "A task and an exit code can have several digits.": _first_digits,
}


EXERCISES = [
    JudgedExercise("job_file", job_file),
    JudgedExercise("array_job", array_job),
    Exercise(first_to_fail, _LOGS, _LOG_TRAPS),
]
