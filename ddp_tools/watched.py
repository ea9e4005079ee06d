"""Run a script on each rank so that signals make it dump its state; the launcher starts it.

This file needs only torch: copy it to your cluster.

torchrun --standalone --nproc-per-node 3 -- watched.py my_script.py --its-flags
# In a hang: each rank's flight recorder, to recorder_rank*.json.
pgrep -P PID_OF_TORCHRUN | xargs kill -USR2
# The stacks of its threads, to stacks_rank*.txt: read "Current thread".
pgrep -P PID_OF_TORCHRUN | xargs kill -USR1

The signals would kill torchrun itself. Under srun, with one task per rank:
scancel --signal=USR2 JOB.
"""

import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


def recorded() -> dict[str, Any]:
    """This rank's calls from all flight recorders: gloo's and those for both classes of "nccl"."""
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d  # the type stubs of some releases lack these functions
    # A group can have gloo and NCCL, with separate counters: the suffix of the group's name is the
    # backend's.
    recorders = {
        "": lambda: c10d._dump_fr_trace_json(True, False),
        # Of ProcessGroupNCCL: a torch without NCCL lacks it.
        " of nccl": lambda: c10d._dump_nccl_trace_json(True, False),
        " of nccl2": lambda: c10d._dump_fr_trace_json(True, False, "nccl2"),  # ProcessGroupNCCL2
    }
    entries: list[dict] = []
    statuses: dict[str, dict] = {}
    for library, dump in recorders.items():
        with suppress(AttributeError, TypeError):  # a torch without NCCL, or before 2.14
            recording = json.loads(dump())
            for entry in recording.get("entries", []):
                entry["process_group"][0] += library
                if status := recording["pg_status"].get(str(entry["pg_id"])):
                    statuses[entry["process_group"][0]] = status
                entries.append(entry)
    return {"entries": entries, "pg_status": statuses}


def watched(script: str) -> None:
    """Run a script; write the flight recorder at SIGUSR2 and at exit, the stacks at SIGUSR1.

    Every rank calls it.
    """
    # torchrun's names, Open MPI's, srun's, MPICH's: in a job mpirun's ranks also have srun's.
    ranks = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
    sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE")
    rank = next((os.environ[name] for name in ranks if name in os.environ), "0")
    size = int(next((os.environ[name] for name in sizes if name in os.environ), "1"))
    dump = Path(f"recorder_rank{rank}.json")
    dump.unlink(missing_ok=True)
    _write_stacks_at_usr1(f"stacks_rank{rank}.txt")

    def write(ended_well: bool = False) -> None:
        record = recorded() | {"world_size": size}
        if ended_well:  # otherwise its last call may seem to be running
            record["pg_status"] = {}
        dump.write_text(json.dumps(record))

    def write_at_usr2() -> None:
        while signal.sigwait({signal.SIGUSR2}):
            write()

    # A Python handler would wait until the collective ends, so a thread takes the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    threading.Thread(target=write_at_usr2, daemon=True).start()
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
        write(ended_well=True)
    finally:
        # A dump from a hang has more, so keep it.
        if not dump.exists() or not json.loads(dump.read_text())["entries"]:
            write()


def _write_stacks_at_usr1(name: str) -> None:
    """Make SIGUSR1, and an abort in C++, write the stacks of all threads to a file."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC
    stacks = os.open(name, flags, 0o644)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        example = "torchrun --standalone --nproc-per-node 3 -- watched.py my_script.py"
        sys.exit(f"no script is given: {example}")
    sys.argv.pop(0)
    watched(sys.argv[0])
