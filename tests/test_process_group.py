"""Ranks meet and leave, or end with one line that says who or what is missing."""

import socket
import threading
from contextlib import closing, suppress

import pytest
import torch
import torch.distributed as dist
from real import IMPORT, gated

from ddp_helpers.notebook import launch
from ddp_helpers.rank.topology import Topology, process_group

RANK = """
import sys
import torch
import torch.distributed as dist
from ddp_helpers.rank.topology import process_group
from ddp_helpers.rank.topology import Topology

me = Topology.from_env()
try:
    with process_group(me, torch.device("cpu"), float(sys.argv[1])):
        total = torch.tensor([me.rank + 1.0])
        dist.all_reduce(total)
        print(f"{me.launcher} {me.rank} of {me.world_size}, {me.local_rank} on node {me.node}: sum {total.item():g}")
        if sys.argv[2:] == ["fails"]:
            raise ValueError("meant to fail")
except ValueError as error:
    print(f"caught {error}")
print("in the group" if dist.is_initialized() else "left the group")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


@pytest.fixture
def port():
    return launch.free_port()


def by_hand(script, ranks, size, port, seconds=3, limit=20, **env):
    """Start these ranks of a group of `size` by hand, as mp.spawn would, and wait for their ends."""
    with gated() as processes:
        for rank in ranks:
            ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            processes.start(script, seconds, **(ids | env))
        return processes.go(limit)


def test_three_ranks_meet_under_torchrun_on_uneven_nodes(script):
    # Node 1 has one rank: its local rank is 0 where its rank is 2.
    done = launch.run(script, 60, ranks=(2, 1), timeout=IMPORT)
    places = [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    for rank, local_rank, node in places:
        said = f"torchrun {rank} of 3, {local_rank} on node {node}: sum 6"
        assert done.of(rank) == [said, "left the group"]


def test_two_ranks_meet_under_mpirun(script, mpirun):
    # With no port given: all ranks of the job take the same one from the job's number.
    done = launch.run(script, 60, ranks=2, launcher="mpirun", timeout=IMPORT)
    for rank in range(2):
        assert done.of(rank) == [f"openmpi {rank} of 2, {rank} on node 0: sum 3", "left the group"]


def test_the_group_is_gone_after_a_failing_block(script, port):
    with gated() as processes:
        processes.start(script, 20, "fails", RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_PORT=port)
        processes.start(script, 20, "fails")  # alone, without any launcher
        for done, launcher in zip(processes.go(30), ("env", "single"), strict=True):
            first, *rest = done.out.splitlines()
            assert first.startswith(launcher) and rest == ["caught meant to fail", "left the group"]
            assert (done.status, done.err) == (0, "")


def test_the_missing_rank_is_named(script, port):
    for done in by_hand(script, [0, 1], 3, port):
        assert done.status == 2 and done.seconds < 15 and not done.out
        assert f"MASTER_PORT={port}: rank 2 of 3 missing" in done.line


def test_a_missing_rank_0_is_named(script, port):
    for done in by_hand(script, [1, 2], 3, port):
        assert done.status == 2 and done.seconds < 15 and not done.out
        assert f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: rank 0 is not there" in done.line


def test_a_busy_port_is_named_at_once_by_rank_0(script):
    with closing(socket.create_server(("", 0))) as stranger:
        port = stranger.getsockname()[1]
        first, second = by_hand(script, [0, 1], 2, port, seconds=5)
    # The stranger takes rank 1's connection and never answers it: rank 1 waits out its time, and not much longer.
    assert first.status == 2 and first.seconds < 10 and not first.out
    assert f"MASTER_PORT={port}: rank 0 cannot listen" in first.line
    assert second.status == 2 and second.seconds < 10 and not second.out
    assert f"MASTER_PORT={port}: held by a stranger" in second.line


def hang_up(server):
    """Take connections and close them at once, until the server is closed."""
    with suppress(OSError):
        while True:
            server.accept()[0].close()


def test_a_stranger_that_hangs_up_is_named(script):
    with closing(socket.create_server(("127.0.0.1", 0))) as stranger:
        port = stranger.getsockname()[1]
        threading.Thread(target=hang_up, args=[stranger], daemon=True).start()
        (done,) = by_hand(script, [1], 2, port, seconds=5)
        stranger.shutdown(socket.SHUT_RDWR)  # wakes the thread
    assert done.status == 2 and done.seconds < 10 and not done.out
    assert f"MASTER_PORT={port}" in done.err  # among torch's own warnings, which go on


def test_a_host_that_swallows_everything_does_not_hold_a_rank_longer_than_its_time(script):
    # A full queue drops new connections without a word, as a firewall does.
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as deaf:
        port = deaf.getsockname()[1]
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        (done,) = by_hand(script, [1], 2, port, seconds=3)
        for filler in fillers:
            filler.close()
    assert done.status == 2 and done.seconds < 8
    assert f"MASTER_PORT={port}: rank 0 is not there" in done.line


@pytest.mark.parametrize("address", ["::1", "localhost", "127.0.0.1"])
def test_ranks_meet_at_an_address_of_either_family(script, port, address):
    for rank, done in enumerate(by_hand(script, [0, 1], 2, port, seconds=20, limit=60, MASTER_ADDR=address)):
        said = f"env {rank} of 2, {rank} on node 0: sum 3"
        assert (done.status, done.err, done.out.splitlines()[0]) == (0, "", said)


@pytest.mark.parametrize("address", ["a..b", "x" * 70, "no.such.host.invalid"])
def test_an_address_that_is_none_is_one_line(script, port, address):
    (done,) = by_hand(script, [1], 2, port, MASTER_ADDR=address)
    assert done.status == 2 and f"MASTER_ADDR={address} MASTER_PORT={port}: rank 1 cannot get there" in done.line


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_a_gpu_is_given_to_the_group(device, backend, monkeypatch):
    # Here no GPU is needed: what torch is asked for is all that is looked at.
    asked = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **named: asked.append((args, named)))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    device = torch.device(device)
    with process_group(Topology(), device, 5) as store:
        [(args, named)] = asked
    assert args == (backend,) and named["device_id"] == (device if device.type == "cuda" else None)
    assert (named["store"], named["rank"], named["world_size"], named["timeout"].seconds) == (store, 0, 1, 5)
