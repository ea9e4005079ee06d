"""spirals.py and spirals_ddp.py: one model, from each launcher and on any number of ranks; and what they refuse."""

import re
import runpy
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from changed_text import replaced
from environments import HAND, RECORDED
from real import LIMIT, need_launcher, python
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.launch import launch
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs, weight_distance

NAMES = ("spirals.py", "spirals_ddp.py", "spirals_resumable.py")
ONE, MANY, MORE = (ROOT / "notebooks" / name for name in NAMES)
FLAGS = ["--epochs", 2, "--save", "it.pt"]
# After 40 steps in float32 the ranks' sums of gradients, in another order than one device's, have moved a weight by
# 1e-6 at most; a batch of 48 on each rank, a control below, by more than 1e-2.
CLOSE = 1e-4


def changed(script, right, wrong, folder):
    """A copy of a script with a change in it."""
    (folder / "it.py").write_text(replaced(script.read_text(), [(right, wrong)]))
    return folder / "it.py"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """What spirals.py reaches in two epochs, on one device: the lines of the epochs, and the weights."""
    folder = tmp_path_factory.mktemp("single")
    done = python(ONE, *FLAGS, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), torch.load(folder / "it.pt", weights_only=True)


# ---- the same model


@pytest.mark.parametrize(("launcher", "ranks"), [("torchrun", 4), ("mpirun", 2), ("srun", (2, 2))])
def test_under_each_launcher_it_reaches_the_model_of_one_device(launcher, ranks, single, tmp_path, request):
    need_launcher(request, launcher)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_port())} if launcher == "srun" else {}
    saved = tmp_path / "it.pt"
    done = launch.run(MANY, *FLAGS[:-1], saved, ranks=ranks, launcher=launcher, timeout=LIMIT, env=meet)
    trained = [line for rank, line in done.lines if rank and line.startswith("epoch")]
    assert trained == single[0], "printed once, and every test sample counted once"
    assert weight_distance(torch.load(saved, weights_only=True), single[1]) < CLOSE


THREADS = """import runpy, sys
from pathlib import Path

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print(sum(name.startswith("pt_gloo") for name in names))
"""


def test_started_alone_it_reaches_that_model_too_and_gloos_threads_end_before_python_does(single, tmp_path):
    """A thread that still has to free a tensor while Python ends aborts the rank, before 3.14."""
    [import_line] = re.findall(r"^import torch.distributed.nn\b.*\n", MANY.read_text(), re.M)
    late = changed(MANY, import_line, "", tmp_path)  # the control: where DDP imports it, it keeps the group
    counts = []
    for words in ([MANY, *FLAGS], [late, "--epochs", 1], [ROOT / "ddp_helpers/rank/scripts/simple_ddp.py"]):
        done = python("-c", THREADS, *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        *lines, count = done.stdout.splitlines()
        counts.append(int(count))
        if words[0] == MANY:
            assert lines[0].startswith("rank 0 of 1 on ") and lines[1:] == single[0]
    assert counts[0] == counts[2] == 0 < counts[1]
    assert weight_distance(torch.load(tmp_path / "it.pt", weights_only=True), single[1]) < CLOSE


def test_any_number_of_ranks_reaches_it_with_equal_weights_and_what_is_no_such_training_is_seen(single, tmp_path):
    scripts = {  # the ranks; and the controls: past the wrapper they drift apart, a batch for each is another training
        "as it is": (3, "", ""),
        "past the wrapper": (2, "F.cross_entropy(ddp_model(", "F.cross_entropy(model("),
        "a batch for each": (2, "args.batch_size // world_size", "args.batch_size"),
    }
    runs = {}
    for name, (ranks, right, wrong) in scripts.items():
        (folder := tmp_path / name).mkdir()
        script = changed(MANY, right, wrong, folder) if right else MANY
        runs[name] = LearnerRun(script, *FLAGS, ranks=ranks, watched=True)
    wait_for_runs(*runs.values())
    lines, apart, off = {}, {}, {}
    for name, run in runs.items():
        assert not run.complaint(), run.complaint()
        lines[name] = [line for rank in range(len(run.exit_statuses)) for line in run.lines_of_rank(rank)]
        weights = [notes.weights for notes in run.notes()]
        apart[name] = max(weight_distance(weights[0], other) for other in weights[1:])
        off[name] = weight_distance(weights[0], single[1])
    assert [line for line in lines["as it is"] if line.startswith("epoch")] == single[0]
    assert apart["as it is"] == apart["a batch for each"] == 0 and apart["past the wrapper"] > 100 * CLOSE
    assert off["as it is"] < CLOSE and off["a batch for each"] > 100 * CLOSE


# ---- what is refused, in one line


def start(script, *words):
    """Run a script in this process, as a program."""
    with patch.object(sys, "argv", [str(script), *map(str, words)]):
        runpy.run_path(str(script), run_name="__main__")


def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path, monkeypatch):
    (old := tmp_path / "old.pt").write_text("weights of last week")
    for script in (ONE, MANY):
        for path in (old, tmp_path / "none" / "new.pt"):
            refused(start, script, "--save", path, named=[f"--save {path}"])
    assert old.read_text() == "weights of last week"
    batch_script = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    for forgotten, named in ((batch_script, "SLURM_NTASKS=4"), ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2")):
        with monkeypatch.context() as here:
            for name, text in forgotten.items():
                here.setenv(name, text)
            refused(start, MANY, named=[f"{named}, but no launcher", "srun", "torchrun"])  # and does not train alone
    for name, text in (HAND | {"WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, text)
    refused(start, MANY, "--batch-size", 50, named=["--batch-size 50", "4 ranks", "multiple of 4"])
    refused(start, MANY, named=["export", "MASTER_ADDR", "MASTER_PORT"])
    monkeypatch.delenv("MASTER_PORT")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    refused(start, MANY, named=["export", "MASTER_ADDR", "MASTER_PORT"])


# ---- what a launcher tells


def joining(monkeypatch, env, gpus=0):
    """What main() hands to init_process_group in this environment, and the device that it claims before."""

    class Joined(Exception):
        """The test has seen enough."""

    def join(backend, **group):
        raise Joined(backend, group)

    claimed = []
    with monkeypatch.context() as pretended:
        pretended.setattr(dist, "init_process_group", join)
        pretended.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        pretended.setattr(torch.cuda, "device_count", lambda: gpus)
        pretended.setattr(torch.cuda, "set_device", claimed.append)
        for name, value in (env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
            pretended.setenv(name, value)
        with pytest.raises(Joined) as seen:
            start(MANY, "--batch-size", 840)
    return *seen.value.args, claimed


# In a batch script they are those of its own process, 0 in every rank: exported there, they do not count.
EXPORTED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_environment_is_read(name, monkeypatch):
    env, (_, rank, _, world_size) = RECORDED[name]
    for more in [{}, EXPORTED] if name in ("step", "mpirun in an allocation") else [{}]:
        backend, group, _ = joining(monkeypatch, env | more)
        assert (backend, group["rank"], group["world_size"]) == ("gloo", rank, world_size)
        assert (group["store"] is None) == (world_size > 1) and group["timeout"].total_seconds() == 600


@pytest.mark.parametrize(("gpus", "index"), [(1, 0), (2, 1), (8, 1)])
def test_a_rank_claims_its_gpu_or_the_one_that_it_is_shown(gpus, index, monkeypatch):
    """A machine without a GPU can only be told that it has some."""
    backend, group, claimed = joining(monkeypatch, RECORDED["step"][0], gpus)  # its local rank is 1
    assert backend == "nccl" and [group["device_id"]] == claimed == [torch.device("cuda", index)]


def test_the_third_finds_its_rank_its_device_and_its_group_by_the_lines_of_the_second():
    """So what is tested of them above holds for it, too."""
    texts = [path.read_text() for path in (MANY, MORE)]
    for begin, end in (
        ("import torch.distributed.nn  #", "\n"),
        ("# Where launchers set", "\n]\n"),
        ("    rank, local_rank, world_size = 0", "minutes=10)}\n"),
        ('    group["device_id"]', "**group)\n"),
    ):
        first, second = (text[text.index(begin) :].partition(end)[0] for text in texts)
        assert first == second and len(first) > 50
