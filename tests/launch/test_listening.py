"""The ranks of one machine listen on it alone: those that stay, of a launch, a script, an answer."""

import inspect
import json
import re

import psutil
import pytest
import torch.distributed as dist
from real import LIMIT, THOROUGH, need_launcher

from ddp_helpers.launch import launch
from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_tools.one_machine import LOOPBACK
from ddp_tools.rendezvous import TCPStore


def listeners(*processes):
    """The addresses and ports at which these processes listen."""
    ask = getattr(psutil.Process, "net_connections", None) or psutil.Process.connections  # psutil before 6
    links = [link for process in processes for link in ask(process, "inet")]
    return {(link.laddr.ip, link.laddr.port) for link in links if link.status == psutil.CONN_LISTEN}


def listening(*processes, inherited=(), port=None):
    """The addresses at which these processes listen, or at which they do so at this port."""
    places = listeners(*processes) - {*inherited}
    return sorted({address for address, at in places if port in (None, at)})


SCRIPT = f"""
import json
import sys

import psutil
import torch.distributed as dist

{inspect.getsource(listeners)}
{inspect.getsource(listening)}
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    parent = psutil.Process().parent()  # what listens is a rank, or what has started all of them
    with open(sys.argv[1], "w") as file:
        json.dump(listening(parent, *parent.children()), file)
dist.barrier()
"""
HERE = ["127.0.0.1"]


@pytest.fixture
def script(tmp_path):
    """A script that notes at which addresses its ranks and their launcher listen; the file of that note."""
    path = tmp_path / "meets.py"
    path.write_text(SCRIPT)
    return path, tmp_path / "note"


def test_torch_listens_at_all_addresses_and_this_store_at_its_own():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert {"::", "0.0.0.0"} & {*listening(psutil.Process(), port=store.port)}, "the control"
    del store
    store = TCPStore("127.0.0.1", 0, is_master=True)
    assert listening(psutil.Process(), port=store.port) == HERE  # other tests in this process may have left theirs
    dist.TCPStore("127.0.0.1", store.port).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        TCPStore("127.0.0.1", store.port, is_master=True)


@pytest.mark.parametrize("ranks", [(2, 1)] + [2] * THOROUGH)
def test_a_launch_listens_on_this_machine_alone(ranks, script):
    path, note = script
    launch.run(path, note, ranks=ranks, timeout=LIMIT)
    assert json.loads(note.read_text()) == HERE


@pytest.mark.parametrize("launcher", ["mpirun", "python"])
def test_ranks_of_other_launchers_are_told_to_listen_there(launcher, tmp_path, request):
    need_launcher(request, launcher)
    (path := tmp_path / "says.py").write_text("import os\nprint(os.environ['GLOO_SOCKET_IFNAME'])")
    [(_, interface)] = launch.run(path, ranks=1, launcher=launcher, timeout=LIMIT).lines
    assert interface == LOOPBACK


def test_a_script_that_an_exercise_runs_listens_on_this_machine_alone(script):
    path, note = script
    run = LearnerRun(path, note, ranks=2)
    wait_for_runs(run)
    assert not run.complaint() and json.loads(note.read_text()) == HERE


def test_an_answer_listens_on_this_machine_alone():
    ours = listeners(psutil.Process())  # what earlier tests left in this process, and its forks inherit
    assert on_ranks(2, lambda: listening(psutil.Process(), inherited=ours)) == [HERE, HERE]


def test_ranks_that_stay_listen_on_this_machine_alone(kernel):
    assert kernel.run("%%ranks 2\n1 + 1") == "[rank 0] 2\n[rank 1] 2"
    assert listening(*kernel.children()) == HERE


def test_ranks_that_stay_have_no_store_that_a_neighbour_can_write_to(kernel):
    """A store has no password, and where it listens any user of the machine can change what ranks tell each other."""
    [port] = re.findall(r"\d+", kernel.run("%%ranks 2\nimport os\nint(os.environ['MASTER_PORT'])").split("]")[1])[:1]
    assert listening(*kernel.children(), port=int(port)) == []
    own = "import torch.distributed as dist\nif dist.get_rank() == 0: own = dist.TCPStore('127.0.0.1', {port}, 1, True)"
    kernel.run(f"%%ranks 2\n{own.format(port=port)}")
    assert listening(*kernel.children(), port=int(port)) == HERE, "the control"
