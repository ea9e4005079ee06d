"""Notebook 07: its exercises. Two of them are job files, which the course submits to see what their ranks do."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddp_helpers import ROOT
from ddp_helpers.jobs import JobError, available, look
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT, Exercise
from ddp_helpers.lessons.submit_to_slurm.terminal import environment
from ddp_helpers.records import runs

WHO = """import json, os, sys
env = os.environ.get
me = {"rank": int(env("RANK", env("SLURM_PROCID", 0))), "local_rank": int(env("SLURM_LOCALID", 0))}
me |= {"address": env("MASTER_ADDR"), "port": env("MASTER_PORT"), "value": sys.argv[1:]}
with open(f"who-{env('SLURM_JOB_ID')}-{env('SLURMD_NODENAME')}-{os.getpid()}.json", "w") as file:
    json.dump(me, file)
"""


@dataclass(frozen=True)
class JobFile(Exercise):
    """An exercise whose answer is a job file that runs who.py. It is submitted, and judged by what the ranks did.

    judge: reduces what the ranks wrote to what is compared; expected: gives that for a case; traps: how a plausible
    mistake shows in it, under what the learner is told.
    """

    judge: Callable[[list[dict]], dict]
    expected: Callable[..., dict]

    def verdict(self, answer: Callable) -> str:
        """One line about a learner's job file: right, not attempted, or what its ranks did and why that is not it."""
        for case in self.cases:
            call = f"{self.oracle.__name__}({', '.join(map(repr, case))})"
            try:
                text = answer(*case)
                if not available():
                    return "not checked: no Slurm answers here; make cluster starts one on this machine"
                found = self.judge(submitted(text))
            except NotImplementedError:
                return NOT_ATTEMPTED
            except Exception as error:
                return f"not yet: {call} ends with {type(error).__name__}: {error}"
            if found != (expected := self.expected(*case)):
                told = [told for told, shows in self.traps.items() if shows(found)][:1]
                return " ".join([f"not yet: the job of {call} gives {found}, and should give {expected}.", *told])
        return RIGHT


def submitted(text: str) -> list[dict]:
    """Submit a job file in a folder of its own, wait for its end, and read what each task wrote, in order of rank."""
    folder = runs.fresh(ROOT / "build" / "jobs", "exercise")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "who.py").write_text(WHO)
    (folder / "job.sbatch").write_text(text)
    pipes = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(["sbatch", "--parsable", "job.sbatch"], cwd=folder, env=environment(), **pipes)
    if done.returncode:
        raise JobError(f"Slurm refused the job: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    while any(state.active for state in look(number)):
        time.sleep(0.2)
    found = [json.loads(path.read_text()) for path in folder.glob("who-*.json")]
    return sorted(found, key=lambda one: (one["rank"], one["local_rank"], one["value"]))


def job_file(nodes: int, gpus: int) -> str:
    """The text of a job file: so many nodes, so many GPUs on each, one rank for each GPU."""
    return f"""#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gres=gpu:{gpus}
#SBATCH --time=5
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
srun python who.py
"""


def seats(ranks: list[dict]) -> dict:
    """Reduce what the ranks wrote to their seats, and whether all have one address that other nodes know."""
    addresses = {one["address"] for one in ranks}
    met = len(addresses) == 1 and not addresses & {"", "localhost", None}
    return {"ranks": [one["rank"] for one in ranks], "local ranks": [one["local_rank"] for one in ranks], "meet": met}


def in_order(nodes: int, gpus: int) -> dict:
    """The seats of the ranks of a job that is right."""
    return {"ranks": [*range(nodes * gpus)], "local ranks": [*range(gpus)] * nodes, "meet": True}


SEAT_TRAPS = {
    "Without srun the program runs once, on the first node.": lambda found: len(found["ranks"]) < 2,
    "The batch script's SLURM_PROCID is 0, and all tasks inherit what it exports: leave RANK out.": (
        lambda found: len({*found["ranks"]}) < len(found["ranks"])
    ),
    "--ntasks says nothing about nodes, so one of them gets more tasks than GPUs: say --ntasks-per-node.": (
        lambda found: found["local ranks"].count(0) > 1 and max(found["local ranks"]) > 1
    ),
    "localhost is another machine on each node: give the first node of the job.": lambda found: not found["meet"],
}


def array_job(values: list[str]) -> str:
    """The text of a job file with an array task for each value, each with a port of its own."""
    return f"""#!/bin/bash
#SBATCH --array=0-{len(values) - 1}
#SBATCH --ntasks=1
#SBATCH --time=5
values=({" ".join(values)})
export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
srun python who.py ${{values[SLURM_ARRAY_TASK_ID]}}
"""


def values_and_ports(tasks: list[dict]) -> dict:
    """Reduce what the array tasks wrote to their values, and the number of different ports."""
    values = sorted(word for one in tasks for word in one["value"])
    return {"values": values, "ports": len({one["port"] for one in tasks})}


ARRAY_TRAPS = {
    "Places in a bash list begin with 0, and so must the array.": (
        lambda found: found["ports"] == len(found["values"]) + 1
    ),
    "SLURM_ARRAY_JOB_ID is the same in all tasks of the array: make the port from SLURM_JOB_ID.": (
        lambda found: found["ports"] < len(found["values"])
    ),
}


def first_to_fail(log: list[str]) -> tuple[int, int] | None:
    """(task, exit code) of the first task that the log reports as exited; None if there is none."""
    return next(iter(exits(log)), None)


def exits(log: list[str]) -> list[tuple[int, int]]:
    """(task, exit code) of every task that the log reports as exited."""
    found = re.findall(r"task (\d+): Exited with exit code (\d+)", "\n".join(log))
    return [(int(task), int(code)) for task, code in found]


OTHERS = ["srun: error: node1: task 0: Terminated", "srun: error: node2: tasks 2-3: Terminated"]
SEVEN = ["1: nothing to train on", "srun: error: node1: task 1: Exited with exit code 7"]
LOGS = [
    (SEVEN + OTHERS,),
    (OTHERS,),
    ([OTHERS[0], *SEVEN, "srun: error: node2: task 3: Exited with exit code 9"],),
    ([*SEVEN, "srun: error: node2: task 12: Exited with exit code 1"],),
    (["srun: error: node4: task 12: Exited with exit code 137", *OTHERS],),
]
LOG_TRAPS = {
    "The last one that complains may only have lost its peers: take the first.": (
        lambda log: next(reversed(exits(log)), None)
    ),
    "A task and an exit code can have several digits.": (
        lambda log: next((tuple(int(str(number)[0]) for number in found) for found in exits(log)), None)
    ),
    "The largest code is Slurm's choice for the job: take the first task that exited.": (
        lambda log: max(exits(log), key=lambda found: found[1], default=None)
    ),
}

EXERCISES = [
    JobFile(job_file, [(2, 2), (1, 2)], SEAT_TRAPS, seats, in_order),
    JobFile(
        array_job,
        [(["0.1", "0.01", "0.001"],), (["7", "8"],)],
        ARRAY_TRAPS,
        values_and_ports,
        lambda values: {"values": sorted(values), "ports": len(values)},
    ),
    Exercise(first_to_fail, LOGS, LOG_TRAPS),
]
