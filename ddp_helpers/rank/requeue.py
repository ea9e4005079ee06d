"""The record of a run that takes several attempts, and the way back into Slurm's queue between them."""

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ddp_helpers.rank.attempt import Attempt
from ddp_helpers.rank.lost import brief
from ddp_helpers.rank.record import Record
from ddp_helpers.rank.topology import whole
from ddp_helpers.rank.votes import Preempted

RESTARTS = 10  # times that a job puts itself back into the queue: more would hide that something is wrong


def requeue(number: int) -> str:
    """Put this job back into Slurm's queue, if its time is nearly up; one rank calls it. Says what came of it."""
    job, restarts = os.environ.get("SLURM_JOB_ID"), whole(os.environ, "SLURM_RESTART_COUNT", 0)
    if number != signal.SIGUSR2 or not job:
        return "the same command goes on from here"
    if restarts >= RESTARTS:
        return f"job {job} was requeued {restarts} times, which is the limit: find out why, then submit it again"
    try:
        # One task of an array has the array's own number, which would stand for all its tasks.
        name = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if (task := os.environ.get("SLURM_ARRAY_TASK_ID")) else job
        done = subprocess.run(["scontrol", "requeue", name], capture_output=True, text=True, timeout=20, check=False)
        said = done.returncode and (done.stderr.strip() or f"exit status {done.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    return f"job {job} cannot be requeued ({said}): submit it again to go on" if said else f"job {job} is requeued"


def epoch_of(line: str) -> float:
    """The epoch of a line of metrics.jsonl; of one that is half-written, one that never comes."""
    try:
        return json.loads(line)["epoch"]
    except (ValueError, KeyError, TypeError):
        return math.inf


class AttemptRecord(Record):
    """The record of a run in several attempts: one goes on where the last one left it."""

    def __init__(self, attempt: Attempt, *args: Any) -> None:
        self.attempt = attempt
        super().__init__(*args)

    def claim(self) -> None:
        """Take the folder; of an earlier attempt's epochs, keep those that are not done again. Raises OSError."""
        metrics = self.folder / "metrics.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.attempt.goes_on and metrics.exists():
            return super().claim()  # which refuses it
        self.lock()  # before anything else is there: a run that dies here can be started again
        if not self.attempt.goes_on:
            return super().claim()
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        kept = [line for line in lines if epoch_of(line) < self.attempt.progress.epoch]
        part = self.folder / "metrics.part"
        part.write_text("".join(f"{line}\n" for line in kept))
        part.replace(metrics)

    def lock(self) -> None:
        """Hold the folder until this process ends. Raises OSError while another attempt does."""
        self.held = (self.folder / "attempts.jsonl").open("a")
        try:
            fcntl.flock(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another attempt runs there") from None
        except OSError:
            pass  # a file system without locks

    def __enter__(self) -> "AttemptRecord":
        env = {name.lower(): os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")}
        self.attempt.note("started", world_size=self.attempt.me.world_size, how=self.attempt.line, **env)
        if self.prints:
            print(self.attempt.line, flush=True)
        return super().__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        state = "preempted" if kind is Preempted else "failed" if kind else "done"
        why = {"why": brief(error) or kind.__name__} if error else {}
        with suppress(OSError):  # on a full disk the error that led here is the one to be seen
            self.write("status", {"state": state, **why})
            self.attempt.note(state, **why)
        if isinstance(error, Preempted):
            if self.prints:
                print(f"{error.why}; {requeue(error.number)}", flush=True)
            dist.barrier()  # nobody leaves before: srun ends all ranks when one has left with an error
