"""The shared server: each process has a fork of it as a server of its own, and a forked kernel is as a new one."""

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import psutil
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from real import until

from ddp_helpers.launch import engine, kernels
from ddp_helpers.launch.kernels import KernelOnFiles, WarmKernel
from ddp_helpers.launch.processes import is_alive
from ddp_helpers.launch.shared import VARIABLE, shared_server, socket_folder

# What a process may have from the one that forked it, where a new Python has it from its start.
STATE = """import json, os, resource, signal, sys
import ddp_helpers, matplotlib.pyplot, numpy, torch
numbers = [number for number in signal.Signals if number.name != "SIGCHLD"]
print(json.dumps({
    "argv": sys.argv[1:2], "path": sys.path, "executable": sys.executable, "folder": os.getcwd(),
    "runs": str(ddp_helpers.RUNS),
    "environment": {name: text for name, text in os.environ.items() if name not in LEFT_OUT},
    "threads": torch.get_num_threads(), "backend": matplotlib.get_backend(),
    "random": [torch.rand(1).item(), numpy.random.rand()],
    "signals": {number.name: str(signal.getsignal(number)).split(" at ")[0] for number in numbers},
    "limits": [resource.getrlimit(number) for number in range(16)], "leads a group": os.getpgid(0) == os.getpid(),
}))""".replace("LEFT_OUT", repr(["JPY_PARENT_PID", "DDP_COURSE_LAUNCH"]))

# Says who has forked its rank, and what that finds; then waits with a rank that waits.
PROGRAM = """import os, time
from ddp_helpers.launch.engine import Processes
from ddp_helpers.launch.shared import _inherited
print("listening:", *os.listdir(os.environ["DDP_SERVER"]), "asked for:", _inherited(), flush=True)
launch = Processes()
says = "echo $OWN; pwd; tr '\\\\0' ' ' </proc/$(ps -o ppid= $PPID | tr -d ' ')/cmdline; echo"
launch.call(os.system, says, environment=dict(os.environ))
launch.wait(600)
launch.call(time.sleep, 600, environment=dict(os.environ))
print(launch.process_ids[1], flush=True)
time.sleep(600)
"""


def executed(manager, folder):
    """What the cell says in a kernel that this manager starts."""
    notebook = new_notebook(cells=[new_code_cell(STATE)])
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, kernel_name="python3", kernel_manager_class=manager, resources=resources)
    asyncio.run(client.async_execute())
    return json.loads(notebook.cells[0].outputs[0].text)


def test_kernels_that_start_at_once_listen_in_one_folder_which_stays(monkeypatch):
    """functools.cache calls the function for each thread that comes before the first has its result."""

    def slow():
        time.sleep(0.2)
        return socket_folder()

    monkeypatch.setattr(kernels, "_folder", cache(slow))
    with ThreadPoolExecutor(2) as threads:
        files = [each.result()["connection_file"] for each in [threads.submit(kernels.file_transport) for _ in "12"]]
    assert {Path(file).parent for file in files} == {Path(kernels._folder().name)} and Path(files[0]).parent.is_dir()


def test_a_forked_kernel_is_as_a_new_one(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(engine, "_server", None)
    with shared_server():
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("DDP_RUNS", str(tmp_path / "mine"))
        forked, again, new = (executed(manager, tmp_path) for manager in (WarmKernel, WarmKernel, KernelOnFiles))
    assert forked.pop("random") != again.pop("random") != new.pop("random")
    assert forked == again == new


@pytest.mark.parametrize("is_like", [True, False])
def test_each_process_has_a_server_of_its_own_from_the_shared_one_if_it_is_like_that(tmp_path, monkeypatch, is_like):
    monkeypatch.delenv(VARIABLE, raising=False)
    with shared_server():
        env = {**os.environ, "OWN": "its own", **({} if is_like else {"PYTHONPATH": str(tmp_path)})}
        command = [sys.executable, "-c", PROGRAM]
        with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as started:
            names, own, folder, server, rank = (started.stdout.readline().rstrip("\n") for _ in range(5))
            rank_process = psutil.Process(int(rank))
            started.kill()
        assert (own, folder) == ("its own", str(tmp_path))
        assert ("ddp_helpers.launch.server /" in server) == is_like, f"{server}; {names}"  # else it cannot be told why
        until(lambda: not is_alive(rank_process), "the end of the rank of a process that was killed")
