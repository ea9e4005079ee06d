"""Run a script on each rank so that it can be asked where it stands. The file needs nothing but torch: take it along.

torchrun --standalone --nproc-per-node 3 watched.py my_script.py --its-flags
pgrep -P PID_OF_TORCHRUN | xargs kill -USR2    # in a hang: each rank's flight recorder, to recorder_rank*.json
pgrep -P PID_OF_TORCHRUN | xargs kill -USR1    # the stacks of its threads, to stacks_rank*.txt: read "Current thread"

Torchrun itself would die of these signals. Under srun, with a task for each rank: scancel --signal=USR2 JOB.
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


def recorded() -> dict:
    """This rank's calls, of every recorder that has some: gloo's, and of both classes behind "nccl"."""
    from torch._C import _distributed_c10d as c10d

    # By what is put behind a group's name: a group can have gloo and NCCL, and each counts for itself.
    recorders = {
        "": lambda: c10d._dump_fr_trace_json(True, False),
        " of nccl": lambda: c10d._dump_nccl_trace_json(True, False),  # of ProcessGroupNCCL
        " of nccl2": lambda: c10d._dump_fr_trace_json(True, False, "nccl2"),  # of ProcessGroupNCCL2
    }
    every = {"entries": [], "pg_status": {}}
    for library, dump in recorders.items():
        with suppress(AttributeError, TypeError):  # a torch without NCCL, or before 2.14
            its = json.loads(dump())
            for entry in its.get("entries", []):
                entry["process_group"][0] += library
                if status := its["pg_status"].get(str(entry["pg_id"])):
                    every["pg_status"][entry["process_group"][0]] = status
                every["entries"].append(entry)
    return every


def watched(script: str) -> None:
    """Run a script, and write the recorder at SIGUSR2 and at the script's end; every rank calls it."""
    rank, size = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    dump = Path(f"recorder_rank{rank}.json")
    dump.unlink(missing_ok=True)
    stacks = os.open(f"stacks_rank{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC, 0o644)
    faulthandler.enable(stacks)  # for a rank that C++ aborts
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # a handler would wait until the collective ends

    def write(**more: object) -> None:
        dump.write_text(json.dumps({**recorded(), "world_size": size, **more}))

    def wait() -> None:
        while signal.sigwait({signal.SIGUSR2}):
            write()

    threading.Thread(target=wait, daemon=True).start()
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
        write(pg_status={})  # or the last call of a script that ended well may seem to go on
    finally:
        # What a hang wrote says more.
        if not dump.exists() or not json.loads(dump.read_text())["entries"]:
            write()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("no script is given: torchrun --standalone --nproc-per-node 3 watched.py my_script.py")
    sys.argv.pop(0)
    watched(sys.argv[0])
