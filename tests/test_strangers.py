"""Two jobs at one address and port: no rank joins a stranger's group; one-machine clusters number their jobs apart."""

import os
import subprocess
import sys

import pytest
from real import LIMIT, THOROUGH
from test_cluster import make_cluster, need_slurm, remove

from ddp_helpers import ROOT
from ddp_helpers.notebook.launchers import free_port

JOIN = """
import os, sys
from argparse import Namespace
import torch.distributed as dist
from ddp_helpers.rank.group import join
rank, owner, timeout = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
args = Namespace(no_cuda=True, timeout=timeout, global_batch_size=None, batch_size=1)
join(args, "slurm", rank, 0, 2)
owners = [None] * 2
dist.all_gather_object(owners, owner)
print("together:", *owners, flush=True)
dist.destroy_process_group()
"""


def start(port, rank, owner, timeout, **env):
    """A rank of somebody's job, which meets its peers at this port, and waits so many seconds for them."""
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)} | env
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", JOIN, str(rank), owner, str(timeout)], env=env, **pipes)


WHOSE = {
    "two users": ({"USER": "ann"}, {"USER": "bob"}),
    "two jobs": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}),
    "two attempts": ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}),
}


@pytest.mark.parametrize("case", WHOSE if THOROUGH else ["two jobs"])
def test_a_rank_of_a_stranger_does_not_join(case):
    mine, theirs = WHOSE[case]
    port = free_port()
    ranks = [start(port, 0, "mine", 8, **mine), start(port, 1, "theirs", 8, **theirs)]
    said = [rank.communicate(timeout=LIMIT) for rank in ranks]
    assert all(rank.returncode == 2 for rank in ranks), said
    assert not any("together" in out for out, _ in said), said
    for rank, (out, err) in enumerate(said):
        assert out.startswith(f"rank {rank} of 2 on ") and "do all run?" in err


def test_whoever_bears_the_name_of_the_same_start_does_join():
    """The control: without that name, the ranks above would train together."""
    port = free_port()
    job = {"timeout": LIMIT, "USER": "ann", "SLURM_JOB_ID": "7"}
    ranks = [start(port, rank, owner, **job) for rank, owner in enumerate(("mine", "theirs"))]
    said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    assert all("together: mine theirs" in out for out in said), said


def test_two_clusters_number_their_jobs_apart():
    need_slurm()
    clusters = [make_cluster(), make_cluster()]
    try:
        first, second = (cluster.up().submit("--wrap=true") for cluster in clusters)
        assert first != second and first % 20_000 != second % 20_000
        clusters[0]("down")
        assert clusters[0].up().submit("--wrap=true") == first + 1, "they go on where they were"
    finally:
        for cluster in clusters:
            remove(cluster)
