"""Run a script as one rank of a first attempt, with a harm planted: harmed.py RANK HARM MOMENT NUMBER SCRIPT FLAGS."""

import os
import runpy
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.inject import HARMS, MOMENTS, on_call

RANK = int(os.environ.get("RANK", "0"))


def is_vote(_tensor, op=dist.ReduceOp.SUM):
    """Whether an all-reduce is a vote on stopping."""
    return op == dist.ReduceOp.MAX


def is_last_and_waited_for(seconds):
    """From now on ranks wait so long for each other; whether this is the last."""
    # Not from the start: one may come to the join long after the other.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    return int(os.environ["WORLD_SIZE"]) - 1 == RANK


def come_late():
    """The last rank does not come, for which the others wait four seconds."""
    if is_last_and_waited_for(4):
        print(f"late since {time.time()}", flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torchrun ends it
        time.sleep(3600)


def be_killed():
    """The last rank is killed, for which the others wait ten seconds."""
    if is_last_and_waited_for(10):
        os.kill(os.getpid(), signal.SIGKILL)


def wait_first():
    """Have the ranks of a second attempt live for a while before they train."""
    print("the second attempt", flush=True)
    time.sleep(float(os.environ.get("SECOND_ATTEMPT_WAITS", "0")))


def ask_for_too_much():
    """Ask this rank's GPU for more memory than there is."""
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


MOMENTS |= {
    "vote": lambda n, harm: on_call(dist, "all_reduce", n, harm, only=is_vote),
    "count": lambda n, harm: on_call(dist, "all_reduce", n, harm, only=lambda *given: not is_vote(*given)),
}
HARMS |= {"late": come_late, "killed": be_killed, "full": ask_for_too_much}

if __name__ == "__main__":
    rank, harm, moment, number, script, *flags = sys.argv[1:]
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        MOMENTS["step"](1, wait_first)
        time.sleep(0 if RANK else 3)  # so the others look first at what the attempt before left in torchrun's store
    elif rank in (str(RANK), "all"):
        MOMENTS[moment](int(number), HARMS[harm])
    sys.argv, sys.path[0] = [script, *flags], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
