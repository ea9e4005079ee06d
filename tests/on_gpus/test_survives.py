"""The course's scripts on one, two and four simulated GPUs, under torchrun: trained, stopped, killed, full and late."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from changed_text import replaced
from faults.matrix import metrics, steps, weights
from real import until
from simulated import programs

from ddp_helpers import ROOT

NOTEBOOKS, SCRIPTS = ROOT / "notebooks", ROOT / "slurm" / "scripts"
HARMED = Path(__file__).with_name("harmed.py")


@pytest.fixture(scope="module")
def gpus(simulated_gpus):
    """Programs on four simulated GPUs."""
    with programs(simulated_gpus, 4) as started:
        yield started


# ---- as on the CPU

# A GPU's dropout draws other numbers than a CPU's.
NO_DROPOUT = [("nn.Dropout(0.25), nn.Dropout(0.5)", "nn.Dropout(0.0), nn.Dropout(0.0)")]
MNIST = ["--epochs", 1, "--num-workers", 0, "--save-model", "--run-dir", "run"]
SPIRALS = ["--epochs", 1, "--save", "weights.pt"]
TRAINED = {  # on how many GPUs; the flags, and the file with the weights
    "spirals": ([1], SPIRALS, "weights.pt"),
    "spirals_ddp": ([4], SPIRALS, "weights.pt"),  # test_simulated_gpus has one and two
    "spirals_resumable": ([1, 2, 4], SPIRALS, "weights.pt"),
    "mnist_ddp": ([1, 2, 4], MNIST, "run/mnist_cnn.pt"),
    "mnist_ddp_resumable": ([1, 4], MNIST, "run/mnist_cnn.pt"),
}


def train(gpus, script, ranks, folder, *flags, **env):
    """Train in a folder, with torchrun where there is a rank: all that was said."""
    folder.mkdir()
    words = (script, *flags)
    done = gpus.torchrun(ranks, folder / "log", *words, **env) if ranks else gpus.start(folder / "log", words, **env)
    assert done.status() == 0, done.said()
    return done.said()


@pytest.mark.parametrize("name", TRAINED)
def test_a_script_trains_on_gpus_as_on_the_cpu(name, gpus, digits, tmp_path):
    numbers, flags, file = TRAINED[name]
    script, changes = tmp_path / f"{name}.py", NO_DROPOUT if name.startswith("mnist") else []
    source = (SCRIPTS if changes else NOTEBOOKS) / script.name
    script.write_text(replaced(source.read_text(), changes))
    flags = [*flags, "--data", digits] if changes else flags
    alone = 0 if name == "spirals" else 1
    train(gpus, script, alone, tmp_path / "cpu", *flags, CUDA_VISIBLE_DEVICES="")
    train(gpus, script, alone, tmp_path / "control", *flags, "--lr", 0.05, CUDA_VISIBLE_DEVICES="")
    for number in numbers:
        said = train(gpus, script, number * alone, tmp_path / str(number), *flags)
        assert all(f", cuda:{rank}\n" in said for rank in range(number * alone)), said
    kept = {path.name: torch.load(path / file) for path in tmp_path.iterdir() if path.is_dir()}  # no GPU is here
    off = {
        name: max((each[part] - kept["cpu"][part]).abs().max().item() for part in each) for name, each in kept.items()
    }
    assert off.pop("control") > 1e-2 and max(off.values()) < 1e-4, off


def test_simple_ddp_has_the_same_model_on_four_gpus(gpus, tmp_path):
    said = train(gpus, SCRIPTS / "simple_ddp.py", 4, tmp_path / "four")
    assert "all 4 ranks hold the same model" in said
    assert len({line.split()[-1] for line in said.splitlines() if "sum is" in line}) == 1
    assert all(f"rank {rank} on cuda:{rank}: " in said for rank in range(4))


def test_mnist_fast_ends_with_the_same_bits_with_and_without_its_cuda_graph(gpus, digits, tmp_path):
    eager, flags = tmp_path / "eager.py", [*MNIST[:2], "--save-model", "--data", digits]
    graph = "as_graph(step, args.batch_size, device) if on_gpu else step"
    eager.write_text(replaced((SCRIPTS / "mnist_fast.py").read_text(), [(graph, "step")]))
    train(gpus, eager, 0, tmp_path / "without", *flags)
    train(gpus, SCRIPTS / "mnist_fast.py", 0, tmp_path / "with", *flags)
    train(gpus, SCRIPTS / "mnist_fast.py", 0, tmp_path / "control", *flags, "--lr", 0.05)
    without, recorded, control = (
        torch.load(tmp_path / name / "mnist_cnn.pt") for name in ("without", "with", "control")
    )
    assert all(torch.equal(without[name], recorded[name]) for name in without)
    assert not any(torch.equal(without[name], control[name]) for name in without)


# ---- harmed, and started again


class Run:
    """A resumable script in a folder, on two simulated GPUs; it votes after each step and saves after each second."""

    def __init__(self, gpus, name, folder, digits):
        self.gpus, self.folder, self.log = gpus, folder, folder / "log"
        folder.mkdir()
        self.script = folder / f"{name}.py"
        self.flags = ["--epochs", 1, "--run-dir", "run", "--vote-every", 1]
        if name == "spirals_resumable":
            shutil.copy(NOTEBOOKS / self.script.name, folder)
            self.flags += ["--save-every", 2]
        else:
            shutil.copy(SCRIPTS / self.script.name, folder)
            self.flags += ["--checkpoint-every", 2, "--data", digits, "--num-workers", 0]

    def start(self, *harm, restarts=0, **env):
        """Start an attempt, in which this rank is harmed at this moment: rank, harm, moment, number."""
        words = [f"--max-restarts={restarts}", *([HARMED, *harm] if harm else []), self.script, *self.flags]
        return self.gpus.torchrun(2, self.log, *words, **env)

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
def golden(request, gpus, digits, tmp_path_factory):
    """The script's name, and the ending of the run that nobody harmed."""
    run = Run(gpus, request.param, tmp_path_factory.mktemp("golden") / "run", digits)
    run.ends(0)
    return request.param, run.ending()


def test_stopped_full_and_killed_it_ends_with_the_bits_of_a_run_that_nobody_harmed(golden, gpus, digits, tmp_path):
    name, expected = golden
    run = Run(gpus, name, tmp_path / "run", digits)
    run.ends(1, 1, "SIGUSR2", "step", 4)  # torchrun's own status: the ranks' was 75
    assert run.state() == "preempted" and steps(run.folder)[0] == 3  # the first backward is thrown away
    said = run.ends(1, 1, "full", "step", 4)
    assert "[rank1]: torch.OutOfMemoryError: CUDA out of memory." in said and "GPU 1 has a total capacity of" in said
    assert steps(run.folder)[0] == 4
    said = run.ends(0, 1, "SIGKILL", "step", 4, restarts=1)  # torchrun ends the other, and starts both again
    assert "after step 4\n" in said and "after step 6\n" in said
    assert run.ending() == expected


# ---- late: under torchrun a rank goes on for a moment with what its peer has not given

SOON = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": 100, "SIMULATED_GPUS_ABORT_SECONDS": 5}
LONG = SOON | {"SIMULATED_GPUS_ABORT_SECONDS": 600}  # until the test ends it


def goes_on_until_it_has_saved(run, step, *late):
    """Run an attempt whose last rank is late, and in which the first goes on until it has saved after this step."""
    attempt = run.start("all", "late", *late, **LONG)
    until(lambda: step in steps(run.folder) or attempt.has_ended(), f"step {step} is saved")
    attempt.kill_ranks()
    assert attempt.status() == 1 and steps(run.folder)[0] == step, attempt.said()


def test_after_a_time_out_nothing_is_saved_that_a_peer_has_not_given(golden, gpus, digits, tmp_path):
    name, expected = golden
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
def test_control_without_a_vote_a_step_without_the_peers_gradients_is_saved(golden, gpus, digits, tmp_path):
    name, expected = golden
    run = Run(gpus, name, tmp_path / "run", digits)
    vote = "told = vote(loss, model)\n                if"
    run.script.write_text(replaced(run.script.read_text(), [(vote, vote.replace("vote(loss, model)", "0"))]))
    goes_on_until_it_has_saved(run, 6, "step", 7)
    run.ends(0)
    assert run.ending() != expected
