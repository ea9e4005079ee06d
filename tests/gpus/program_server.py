"""Start programs of Python as they are asked for: one in each line of stdin, as JSON.

`forked_programs.py program_server.py` forks each of them, and all Python that it starts, from this process: it alone
imports torch. Each one's exit status goes into a file beside its log.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    available = torch.accelerator.is_available
    # Else torchrun, to place its ranks on CPUs, counts the GPUs, after which torch lets no fork use them.
    torch.accelerator.is_available = lambda: not sys.argv[0].endswith("distributed/run.py") and available()
    running, is_open = [], True
    while is_open or running:
        if is_open and select.select([sys.stdin.buffer], [], [], 0.02)[0]:
            is_open = bool(line := sys.stdin.buffer.raw.readline())
            if not line:  # who tests has ended, or was ended: torchrun ends its ranks
                for process, _ in running:
                    process.terminate()
            else:
                asked = json.loads(line)
                log = Path(asked["log"])
                with log.open("wb") as file:
                    options = {"cwd": asked["cwd"], "env": os.environ | asked["env"], "stdin": subprocess.DEVNULL}
                    options |= {"stdout": file, "stderr": file, "start_new_session": True}
                    process = subprocess.Popen([sys.executable, *asked["words"]], **options)
                running.append((process, log))
                print(process.pid, flush=True)
        for process, log in [*running]:
            if process.poll() is not None:
                running.remove((process, log))
                (part := log.with_suffix(".part")).write_text(str(process.returncode))
                part.replace(log.with_suffix(".status"))
