"""Two jobs at one address and port: no rank trains with a stranger that a launcher or a flag tells apart."""

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from clusters import make_cluster, need_slurm, remove
from environments import SETS
from faults.ranks import Ranks
from real import LIMIT, THOROUGH

from ddp_helpers.launch.launchers import free_port
from ddp_helpers.rank.launchers import LAUNCHERS
from ddp_helpers.rank.scripts import write_script
from ddp_helpers.records import runs

FLAGS = ("--epochs=1", "--dry-run", "--no-cuda", "--timeout=30")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script that one takes home."""
    return write_script("mnist_ddp", tmp_path_factory.mktemp("script") / "mnist_ddp.py")


def environment(launcher, rank):
    """What this launcher sets for one of two ranks on this machine."""
    env = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE")) | SETS[launcher]
    # No agent of torchrun is here: rank 0 keeps the store.
    env |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return env | dict(zip(LAUNCHERS[launcher][-3:], (rank, rank, 2), strict=True))


def meet(script, folder, *ranks):
    """Start rank 0 of a job and rank 1 of a job at one port, each a pair of environment and flags, to their end.

    Returns their exit statuses, what they said, and the state of the record.
    """
    port = free_port()
    with ExitStack() as stack:
        started = []
        for rank, (env, flags) in enumerate(ranks):
            words = (*FLAGS, *flags, "--run-dir", folder / "run")
            here = Ranks(script, words, 1, folder / str(rank), env=env | {"MASTER_PORT": port})
            started.append(stack.enter_context(here))
        ended = [here.wait() for here in started]
    state = runs.read_run(folder / "run").state if (folder / "run").exists() else "no record"
    return [here.statuses[0] for here in ended], [here.said[0] for here in ended], state


def refused(statuses, said, state):
    """Nobody trained, each rank ended, and not with 0, and its last lines say why; there is no record."""
    assert all(statuses) and state == "no record", said
    assert all("epoch 1" not in text and "differs from rank 0 in its flags or its job" in text for text in said), said


# That two real starts of mpirun have two names is in test_launchers.
@pytest.mark.parametrize("launcher", [name for name, words in LAUNCHERS.items() if len(words) > 3])
def test_a_rank_of_another_start_does_not_train(launcher, script, digits, tmp_path):
    name, flags = LAUNCHERS[launcher][0], ("--data", digits)
    ours, theirs = ((environment(launcher, rank) | {name: f"{rank}7"}, flags) for rank in range(2))
    refused(*meet(script, tmp_path, ours, theirs))


@pytest.mark.parametrize("launcher", ["torchrun", "env"])
def test_ranks_that_were_given_other_flags_do_not_train(launcher, script, digits, tmp_path):
    flags = ["--data", digits, "--lr=0.1"], ["--data", digits, "--lr=7"]
    ours, theirs = ((environment(launcher, rank), flags[rank]) for rank in range(2))
    refused(*meet(script, tmp_path, ours, theirs))


def test_ranks_of_two_and_of_three_do_not_train(script, digits, tmp_path):
    flags = ("--data", digits, "--batch-size=66", "--timeout=5")  # which two ranks can share, and three
    three = environment("env", 1) | {"WORLD_SIZE": 3}
    statuses, said, state = meet(script, tmp_path, (environment("env", 0), flags), (three, flags))
    assert all(statuses) and state == "no record" and not any("epoch 1" in text for text in said), said


@pytest.mark.parametrize("launcher", LAUNCHERS if THOROUGH else ["openmpi", "slurm"])
def test_ranks_of_one_start_with_one_setting_train(launcher, script, digits, tmp_path):
    """The control. Workers and the data's folder may differ from node to node."""
    (tmp_path / "local").symlink_to(digits)
    flags = ["--timeout", LIMIT, "--data"]
    ours = environment(launcher, 0), (*flags, digits)
    theirs = environment(launcher, 1), (*flags, tmp_path / "local", "--num-workers=1")
    statuses, said, state = meet(script, tmp_path, ours, theirs)
    assert (statuses, state) == ([0, 0], "done"), said


def test_the_jobs_of_two_clusters_have_other_numbers(cluster):
    """And so other meeting ports, also where no launcher tells them apart."""
    need_slurm()
    other = make_cluster()
    try:
        settings = Path(os.environ["SLURM_CONF"]), other.up().state / "slurm.conf"
        first, second = (re.search(r"^FirstJobId=(\d+)$", path.read_text(), re.M)[1] for path in settings)
    finally:
        remove(other)
    assert first != second
