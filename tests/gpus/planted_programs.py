"""Run programs of one rank or several, one program after the other: planted_programs.py FILE.

FILE holds their command lines, as JSON, and gets what each rank printed, and its exit status. Under
`forked_programs.py` each rank is a fork of one process, which alone imports torch.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ddp_helpers.launch.launchers import free_port

LIMIT = 120  # seconds of one program; none is to hang


def run(words, ranks):
    """Run a program on so many ranks, and end the others once one has failed, as torchrun does."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    folder, processes = Path(words[0]).parent, []
    logs = [folder / f"log{rank}" for rank in range(ranks)]
    for rank, log in enumerate(logs):
        env = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            processes.append(subprocess.Popen([sys.executable, *words], env=env, cwd=folder, **streams))
    end = time.monotonic() + LIMIT
    while None in (statuses := [process.poll() for process in processes]) and time.monotonic() < end:
        if any(statuses):
            break
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.wait()
    return [(status, log.read_text()) for status, log in zip(statuses, logs, strict=True)]


if __name__ == "__main__":
    file = Path(sys.argv[1])
    programs = json.loads(file.read_text())
    file.write_text(json.dumps({name: run(*program) for name, program in programs.items()}))
