"""What is harmed on GPUs: a run that is stopped, full or killed goes on as if nothing were; one that is late ends."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from changed_text import replaced
from faults.matrix import checkpoints, metrics, steps, weights
from real import until
from training import difference, read, source

from ddp_helpers.launch.launchers import free_port

HARMED = Path(__file__).with_name("harmed.py")
SOON = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": 100, "SIMULATED_GPUS_ABORT_SECONDS": 5}


class Run:
    """A script in a folder, on two GPUs; a resumable one votes after each step and saves after each second."""

    def __init__(self, gpus, name, folder, digits):
        self.gpus, self.folder, self.log = gpus, folder, folder / "log"
        folder.mkdir()
        self.script = folder / f"{name}.py"
        shutil.copy(source(name), folder)
        self.flags = ["--epochs", 1]
        if name.startswith("mnist"):
            self.flags += ["--data", digits, "--num-workers", 0]
        if name.endswith("resumable"):
            every = "--checkpoint-every" if name.startswith("mnist") else "--save-every"
            self.flags += ["--run-dir", "run", "--vote-every", 1, every, 2]

    def start(self, *harm, restarts=0, **env):
        """Start an attempt, in which this rank is harmed at this moment: rank, harm, moment, number."""
        words = [f"--max-restarts={restarts}", *([HARMED, *harm] if harm else []), self.script, *self.flags]
        return self.gpus.torchrun(2, self.log, *words, **env)

    def by_hand(self, *harm, **env):
        """Start its two ranks without a launcher, which would end the one when the other has ended."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2, **env}
        words = (HARMED, *harm, self.script, *self.flags)
        return [
            self.gpus.start(self.folder / f"log{rank}", words, RANK=rank, LOCAL_RANK=rank, **place) for rank in (0, 1)
        ]

    def ends(self, status, *harm, **env):
        """Run an attempt to its end: all that was said."""
        attempt = self.start(*harm, **env)
        assert attempt.status() == status, attempt.said()
        assert not list(self.folder.rglob("checkpoints/*.part")), "nothing is half-written"
        return attempt.said()

    def state(self):
        return json.loads((self.folder / "run" / "status.json").read_text())["state"]

    def ending(self):
        """What the run has come to, to the bit, and its metrics."""
        assert self.state() == "done"
        return weights(self.folder), metrics(self.folder)


RESUMABLE = ["spirals_resumable", "mnist_ddp_resumable"]


@pytest.fixture(scope="module", params=RESUMABLE)
def golden(request, ranks, gpus, digits, tmp_path_factory):
    """The script's name, and the folder and the ending of the run that nobody harmed."""
    run = Run(gpus, request.param, tmp_path_factory.mktemp("golden") / "run", digits)
    run.ends(0)
    return request.param, run.folder, run.ending()


def forget(folder):
    """Take the optimizer's state out of the newest checkpoint."""
    newest = checkpoints(folder)[0]
    state = read(newest)
    state["optimizer"]["state"] = {}
    torch.save(state, newest)


def test_resume(golden, gpus, digits, tmp_path, record):
    """Stopped, full and killed it ends as a run that nobody harmed: to the bit, or on real GPUs far nearer than one
    that has lost its optimizer's state."""
    name, folder, expected = golden
    run = Run(gpus, name, tmp_path / "run", digits)
    run.ends(1, 1, "SIGUSR2", "step", 4)  # torchrun's own status: the ranks' was 75
    assert run.state() == "preempted" and steps(run.folder)[0] == 3  # the first backward is thrown away
    control = Run(gpus, name, tmp_path / "control", digits)
    shutil.copytree(run.folder / "run", control.folder / "run")
    forget(control.folder)
    control.ends(0)
    run.ends(1, 1, "full", "step", 4)
    assert steps(run.folder)[0] == 4
    said = run.ends(0, 1, "SIGKILL", "step", 4, restarts=1)  # torchrun ends the other, and starts both again
    assert "after step 4\n" in said and "after step 6\n" in said
    ends = [read(checkpoints(each)[0])["model"] for each in (folder, run.folder, control.folder)]
    off = {"resumed": difference(ends[0], ends[1]), "control": difference(ends[0], ends[2])}
    record(off=off)
    assert off["resumed"] <= (0 if gpus.simulated else off["control"] / 10) < off["control"]
    assert run.ending() == expected or not gpus.simulated


# ---- ended: by memory, a time-out, a peer


def test_full(gpus, ranks, digits, tmp_path, record):
    """Out of memory on one rank is named on that rank, and all ranks end."""
    for rank in (0, 1):
        attempt = Run(gpus, "mnist_ddp", tmp_path / str(rank), digits).start(rank, "full", "step", 4)
        status, said = attempt.status(), attempt.said()
        named = [line for line in said.splitlines() if "CUDA out of memory" in line]
        record(**{f"rank {rank}": {"status": status, "named": named}})
        assert status == 1 and f"[rank{rank}]: torch.OutOfMemoryError: CUDA out of memory." in said, said
        assert f"GPU {min(rank, gpus.count - 1)} has a total capacity of" in said
        assert f"[rank{1 - rank}]: torch.OutOfMemoryError" not in said


def test_timeout(gpus, ranks, digits, tmp_path, record):
    """At the time-out of an all-reduce the watchdog writes the flight recorder, and ends the process by SIGABRT."""
    names = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"  # the second is its old one
    env = dict.fromkeys(names, tmp_path / "recorder_rank_") | {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": 3000}
    first, late = Run(gpus, "mnist_ddp", tmp_path / "run", digits).by_hand("all", "late", "step", 4, **env)
    status, files = first.status(), sorted(path.name for path in tmp_path.glob("recorder_rank_*"))
    late.kill()
    waited = first.ended() - float(re.search(r"late since (\S+)", late.said())[1])
    record(status=status, waited=waited, recorders=files)
    assert "Watchdog caught collective operation timeout" in first.said(), first.said()
    assert status == -signal.SIGABRT and files and waited > 3.5, first.said()


def test_killed(gpus, ranks, digits, tmp_path, record):
    """A killed peer is noticed no sooner than one that is late: at the time-out."""
    ranks = Run(gpus, "mnist_ddp", tmp_path / "run", digits).by_hand("all", "killed", "step", 4, **SOON)
    statuses = [rank.status() for rank in ranks]
    late = ranks[0].ended() - ranks[1].ended()
    record(statuses=statuses, late=late)
    assert statuses[1] == -signal.SIGKILL and statuses[0] not in (0, -signal.SIGKILL), ranks[0].said()
    assert late > 8, ranks[0].said()  # of ten seconds


def test_restart(gpus, ranks, digits, tmp_path, record):
    """A time-out leaves a key in torchrun's store that ends the next attempt; who deletes it goes on."""
    names, env = ["mnist_ddp", *RESUMABLE], SOON | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": 15, "SECOND_ATTEMPT_WAITS": 40}
    attempts = {
        name: Run(gpus, name, tmp_path / name, digits).start("all", "late", "step", 4, restarts=1, **env)
        for name in names
    }
    statuses = {name: attempt.status() for name, attempt in attempts.items()}
    record(statuses=statuses)
    for name, attempt in attempts.items():
        said = attempt.said()
        first, second = said.split("rank 0 of 2 on")[1:]
        assert "Watchdog caught collective operation timeout" in first, said
        if name == "mnist_ddp":
            assert statuses[name] == 1 and "Received a dump signal due to a collective timeout" in second, said
        else:
            assert statuses[name] == 0 and "the second attempt" in second, said


# ---- late: under torchrun a rank goes on for a moment with what its peer has not given

LONG = SOON | {"SIMULATED_GPUS_ABORT_SECONDS": 600}  # until the test ends it


def goes_on_until_it_has_saved(run, step, *late):
    """Run an attempt whose last rank is late, and in which the first goes on until it has saved after this step."""
    attempt = run.start("all", "late", *late, **LONG)
    until(lambda: step in steps(run.folder) or attempt.has_ended(), f"step {step} is saved")
    attempt.kill_ranks()
    assert attempt.status() == 1 and steps(run.folder)[0] == step, attempt.said()


@pytest.fixture
def lasting_abort(gpus):
    """Of simulated GPUs a test can say how long an abort lasts; a real one is over in a moment."""
    if not gpus.simulated:
        pytest.skip("simulated GPUs alone: there an abort lasts as long as the test wants")


def test_after_a_time_out_nothing_is_saved_that_a_peer_has_not_given(golden, lasting_abort, gpus, digits, tmp_path):
    name, _, expected = golden
    run = Run(gpus, name, tmp_path / "run", digits)
    said = run.ends(1, "all", "late", "step", 7, **SOON)  # in the gradients of step 6
    assert "Watchdog caught collective operation timeout" in said
    assert steps(run.folder)[0] == 4, "the vote before each save waits for the peer"
    if name == "spirals_resumable":
        goes_on_until_it_has_saved(run, 6, "vote", 2)  # whose gradients were whole
        run.ends(1, "all", "late", "count", 1, **SOON)  # after the test
        assert steps(run.folder)[0] == 18 and not (run.folder / "run" / "metrics.jsonl").exists()
    else:  # it adds up the sums of all ranks between the vote and the save
        run.ends(1, "all", "late", "vote", 2, **SOON)
        assert steps(run.folder)[0] == 4
    run.ends(0)
    assert run.ending() == expected


@pytest.mark.parametrize("golden", ["spirals_resumable"], indirect=True)
def test_control_without_a_vote_a_step_without_the_peers_gradients_is_saved(
    golden, lasting_abort, gpus, digits, tmp_path
):
    name, _, expected = golden
    run = Run(gpus, name, tmp_path / "run", digits)
    vote = "told = vote(loss, model)\n                if"
    run.script.write_text(replaced(run.script.read_text(), [(vote, vote.replace("vote(loss, model)", "0"))]))
    goes_on_until_it_has_saved(run, 6, "step", 7)
    run.ends(0)
    assert run.ending() != expected
