"""Exercises of notebook 07: two job files, which the course submits, and the log of a failed job.

`lessons.check` reads EXERCISES, in the learner's process. The job files need a Slurm, which runs
the ranks.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ddp_helpers import ROOT
from ddp_helpers.jobs import JobError, available, states_of_job
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, NOT_YET, RIGHT, SEPARATOR, Exercise
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


class _Task(TypedDict):
    """What a task of a job writes, by who.py."""

    rank: int
    local_rank: int
    address: str | None
    port: str | None
    value: list[str]  # its arguments


_Summary = Mapping[str, Any]  # what is compared, as the verdict shows it


@dataclass(frozen=True)
class JobFile(Exercise):
    """An exercise whose answer is the text of a job file that runs who.py on each rank.

    It is submitted, and judged by what its tasks wrote. traps: whether a mistake shows in a
    summary, under the hint to give then.
    """

    judge: Callable[[list[_Task]], _Summary]  # of what the tasks wrote
    expected: Callable[..., _Summary]  # for the arguments of a case

    def verdict(self, answer: Callable) -> str:
        """Judge a job file: right, not attempted, not checked, or a hint and what the ranks did."""
        for case in self.cases:
            call = f"{self.oracle.__name__}({', '.join(map(repr, case))})"
            try:
                text = answer(*case)
                if not available():
                    cure = "make cluster starts one on this machine"
                    return f"not checked: no Slurm answers here; {cure}"
                summary = self.judge(_run_job(text))
            except NotImplementedError:
                return NOT_ATTEMPTED
            except Exception as error:
                return f"{NOT_YET}: {call} ends with {type(error).__name__}: {error}"
            expected = self.expected(*case)
            if summary != expected:
                difference = f"the job of {call} gives {summary}, and should give {expected}."
                lines = filter(None, [self._hint_on(summary), difference])
                return f"{NOT_YET}: {SEPARATOR.join(lines)}"
        return RIGHT

    def _hint_on(self, summary: _Summary) -> str:
        """Return the hint of the first mistake that shows in a summary; empty, if none does."""
        return next((hint for hint, shows in self.traps.items() if shows(summary)), "")


def _run_job(text: str) -> list[_Task]:
    """Submit a job file in a new folder, wait for its end, and read what each task wrote.

    The tasks are in the order of their ranks. Raises JobError where Slurm refuses the job.
    """
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


def job_file(nodes: int, gpus: int) -> str:
    """Return a job file: so many nodes, so many GPUs on each, one rank for each GPU."""
    return f"""#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gres=gpu:{gpus}
#SBATCH --time=5
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
srun python who.py
"""


def _ranks_and_meeting(tasks: list[_Task]) -> _Summary:
    """Return the ranks, and whether all have one address that other nodes know."""
    addresses = {task["address"] for task in tasks}
    meet = len(addresses) == 1 and not addresses & {"", "localhost", None}
    ranks = [task["rank"] for task in tasks]
    return {"ranks": ranks, "local ranks": [task["local_rank"] for task in tasks], "meet": meet}


def _expected_ranks(nodes: int, gpus: int) -> _Summary:
    """Return the summary of a right job."""
    return {"ranks": [*range(nodes * gpus)], "local ranks": [*range(gpus)] * nodes, "meet": True}


def _runs_once(summary: _Summary) -> bool:
    """Whether there is one rank at most."""
    return len(summary["ranks"]) < 2


def _ranks_are_not_distinct(summary: _Summary) -> bool:
    """Whether two tasks have one rank."""
    return len({*summary["ranks"]}) < len(summary["ranks"])


def _nodes_differ(summary: _Summary) -> bool:
    """Whether there are several nodes, and more than two tasks on one of them."""
    local_ranks = summary["local ranks"]
    return local_ranks.count(0) > 1 and max(local_ranks) > 1


def _do_not_meet(summary: _Summary) -> bool:
    """Whether the ranks have no address to meet at."""
    return not summary["meet"]


_RANK_TRAPS = {
    "Without srun the program runs once, on the first node.": _runs_once,
    "The batch script's SLURM_PROCID is 0, and all tasks inherit what it exports: "
    "leave RANK out.": _ranks_are_not_distinct,
    "--ntasks says nothing about nodes, so one of them gets more tasks than GPUs: "
    "say --ntasks-per-node.": _nodes_differ,
    "localhost is another machine on each node: give the first node of the job.": _do_not_meet,
}


# ---- an array


def array_job(values: list[str]) -> str:
    """Return a job file with an array task for each value, each with a port of its own."""
    return f"""#!/bin/bash
#SBATCH --array=0-{len(values) - 1}
#SBATCH --ntasks=1
#SBATCH --time=5
values=({" ".join(values)})
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun python who.py ${{values[SLURM_ARRAY_TASK_ID]}}
"""


def _values_and_ports(tasks: list[_Task]) -> _Summary:
    """Return the values of the array tasks, and the number of different ports."""
    values = sorted(argument for task in tasks for argument in task["value"])
    return {"values": values, "ports": len({task["port"] for task in tasks})}


def _expected_values(values: list[str]) -> _Summary:
    """Return the summary of a right array."""
    return {"values": sorted(values), "ports": len(values)}


def _lacks_a_value(summary: _Summary) -> bool:
    """Whether one task has a port, and no value."""
    return summary["ports"] == len(summary["values"]) + 1


def _ports_are_not_distinct(summary: _Summary) -> bool:
    """Whether two tasks have one port."""
    return summary["ports"] < len(summary["values"])


_ARRAY_TRAPS = {
    "Places in a bash list begin with 0, and so must the array.": _lacks_a_value,
    "SLURM_ARRAY_JOB_ID is the same in all tasks of the array: "
    "make the port from SLURM_JOB_ID.": _ports_are_not_distinct,
}


# ---- the log of a job that failed

_Exit = tuple[int, int]  # the number of a task, and its exit code


def first_to_fail(log: list[str]) -> tuple[int, int] | None:
    """Return (task, exit code) of the first task that the log reports as exited; None if none."""
    return next(iter(_exits(log)), None)


def _exits(log: list[str]) -> list[_Exit]:
    """List every task that the log reports as exited, in the log's order."""
    exits = re.findall(r"tasks? (\d+)[\d,-]*: Exited with exit code (\d+)", "\n".join(log))
    return [(int(task), int(code)) for task, code in exits]


def _last_to_fail(log: list[str]) -> _Exit | None:
    """A mistake: the last task that exited."""
    return next(reversed(_exits(log)), None)


def _first_digits(log: list[str]) -> _Exit | None:
    """A mistake: only the first digits of the task and of the exit code."""
    first = first_to_fail(log)
    return first and (int(str(first[0])[0]), int(str(first[1])[0]))


def _worst_exit(log: list[str]) -> _Exit | None:
    """A mistake: the task with the largest exit code."""
    return max(_exits(log), key=lambda task_and_code: task_and_code[1], default=None)


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
    "The last one that complains may only have lost its peers: take the first.": _last_to_fail,
    "A task and an exit code can have several digits.": _first_digits,
    "The largest code is Slurm's choice for the job: take the first task that exited.": _worst_exit,
}


EXERCISES = [
    JobFile(
        job_file,
        cases=[(2, 2), (1, 2)],
        traps=_RANK_TRAPS,
        judge=_ranks_and_meeting,
        expected=_expected_ranks,
    ),
    JobFile(
        array_job,
        cases=[(["0.1", "0.01", "0.001"],), (["7", "8"],)],
        traps=_ARRAY_TRAPS,
        judge=_values_and_ports,
        expected=_expected_values,
    ),
    Exercise(first_to_fail, _LOGS, _LOG_TRAPS),
]
