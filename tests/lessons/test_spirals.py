"""The plain scripts, spirals.py and spirals_ddp.py: the same model from each launcher, and on any number of ranks."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from difflib import unified_diff

import pytest
import torch
import torch.distributed as dist
from environments import HAND, RECORDED
from real import LIMIT, THOROUGH, need_launcher, python
from refusals import ended, one_line

from ddp_helpers import ROOT, RUNS, jobs
from ddp_helpers.cli import main
from ddp_helpers.launch.launchers import LINE_PATTERNS, launch_commands, launch_environment
from ddp_helpers.lessons.run_script import weight_distance

NAMES = ("spirals.py", "spirals_ddp.py", "spirals_resumable.py")
ONE, MANY, MORE = (ROOT / "notebooks" / name for name in NAMES)
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
# After 40 steps in float32 the ranks' sums of gradients, in another order than one device's, have moved a weight by
# 1e-6 at most; a batch of 48 on each rank, the control below, by more than 1e-2.
CLOSE = 1e-4
# Run the script of the second word, and keep this rank's weights in the folder of the first when it leaves the group.
KEEPING = """import runpy, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

folder, *sys.argv = sys.argv[1:]
wrap, leave, models = DDP.__init__, dist.destroy_process_group, []

def wrapped(wrapper, module, *things, **options):
    models.append(module)
    wrap(wrapper, module, *things, **options)

def left():
    torch.save(models[0].state_dict(), f"{folder}/rank{dist.get_rank()}.pt")
    leave()

DDP.__init__, dist.destroy_process_group = wrapped, left
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(launcher, ranks, program, folder):
    """Run a program under a launcher to its end: exit status, the ranks' lines, and all that was said."""
    [command] = launch_commands(launcher, [str(word) for word in program], [ranks], str(folder / "logs"))
    command = [word for word in command if word != "--kill-on-bad-exit=1"]  # let every rank end by itself
    env = launch_environment([ranks], ON_CPU)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env, "cwd": folder}
    done = subprocess.run(command, timeout=LIMIT, check=False, **options)
    lines = [
        match[2].strip() for match in map(re.compile(LINE_PATTERNS[launcher]).match, done.stdout.splitlines()) if match
    ]
    return done.returncode, [line for line in lines if line], done.stdout


def train(launcher, ranks, script, folder):
    """Train for two epochs: the lines of the epochs, the weights that were saved, and those of each rank."""
    (folder / "keeping.py").write_text(KEEPING)
    words = [folder / "keeping.py", folder, script, "--epochs", "2", "--save", folder / "spirals.pt"]
    status, lines, said = start(launcher, ranks, words, folder)
    assert status == 0, said
    each = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    saved = torch.load(folder / "spirals.pt", weights_only=True)
    return [line for line in lines if line.startswith("epoch")], saved, each


def changed(folder, right, wrong):
    """A copy of spirals_ddp.py with a mistake in it."""
    text = MANY.read_text()
    assert text.count(right) == 1
    (folder / "it.py").write_text(text.replace(right, wrong))
    return folder / "it.py"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """What spirals.py reaches in two epochs, on one device: the lines of the epochs, and the weights."""
    folder = tmp_path_factory.mktemp("single")
    done = python(ONE, "--epochs", "2", "--save", "it.pt", cwd=folder, env=os.environ | ON_CPU)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), torch.load(folder / "it.pt", weights_only=True)


LAUNCHERS = ("torchrun", "mpirun", "srun")
STARTS = [(launcher, ranks) for launcher in LAUNCHERS for ranks in (1, 2, 4)]
# One of each launcher, and of each number of ranks; srun has four in the job of two nodes below.
USUAL_STARTS = [("torchrun", 4), ("mpirun", 2), ("srun", 1)]


@pytest.fixture
def launcher(request):
    """A launcher, where it is on this machine."""
    need_launcher(request, request.param)
    return request.param


@pytest.mark.parametrize(("launcher", "ranks"), STARTS if THOROUGH else USUAL_STARTS, indirect=["launcher"])
def test_any_launcher_and_number_of_ranks_reach_the_model_of_one_device(ranks, launcher, single, tmp_path):
    lines, saved, each = train(launcher, ranks, MANY, tmp_path)
    assert lines == single[0], "printed once, and every test sample counted once"
    assert all(weight_distance(saved, weights) == 0 for weights in each)
    assert weight_distance(saved, single[1]) < CLOSE


def test_started_alone_it_reaches_that_model_too(single, tmp_path):
    done = python(MANY, "--epochs", "2", "--save", "it.pt", cwd=tmp_path, env=os.environ | ON_CPU)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.startswith("rank 0 of 1 on ") and lines == single[0]
    assert weight_distance(torch.load(tmp_path / "it.pt", weights_only=True), single[1]) < CLOSE


def test_weights_that_differ_are_seen(single, tmp_path):
    """The control: past the wrapper the ranks drift apart; a batch for each rank is another training."""
    script = changed(tmp_path, "F.cross_entropy(ddp_model(", "F.cross_entropy(model(")
    _, _, each = train("torchrun", 2, script, tmp_path)
    assert weight_distance(*each) > 100 * CLOSE
    (tmp_path / "spirals.pt").unlink()
    script = changed(tmp_path, "args.batch_size // world_size", "args.batch_size")
    lines, saved, each = train("torchrun", 2, script, tmp_path)
    assert weight_distance(*each) == 0 and weight_distance(saved, single[1]) > 100 * CLOSE and lines != single[0]


@pytest.mark.parametrize("launcher", LAUNCHERS if THOROUGH else ["mpirun"], indirect=True)
def test_a_batch_that_the_ranks_do_not_divide_is_one_line(launcher, tmp_path):
    status, lines, said = start(launcher, 4, [MANY, "--batch-size", "50"], tmp_path)
    [line] = {line for line in lines if "--batch-size" in line}
    assert all(part in line for part in ("--batch-size 50", "4 ranks", "multiple of 4")) and "rank 0 of 4" not in said
    if launcher == "torchrun":  # it reports the ranks' status, and has its own
        assert re.search(r"exitcode *: 2 ", said) and status == 1
    else:
        assert status == 2 and "Traceback" not in said


THREADS = """import runpy, sys
from pathlib import Path

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
print(sum(name.startswith("pt_gloo") for name in names))
"""
BEFORE = re.compile("^import torch.distributed.nn\\b.*\n", re.MULTILINE)  # there is a group


@pytest.mark.parametrize(
    "script", [MANY, ROOT / "slurm/scripts/simple_ddp.py", *[MORE] * THOROUGH], ids=lambda path: path.stem
)
def test_gloos_threads_end_before_python_does(script, tmp_path):
    """A thread that still has to free a tensor while Python ends aborts the rank, before 3.14."""
    (tmp_path / "late.py").write_text(late := BEFORE.sub("", script.read_text()))
    assert late != script.read_text()
    counts = []
    for path in (script, tmp_path / "late.py"):
        done = python("-c", THREADS, path, env=os.environ | ON_CPU, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        counts.append(int(done.stdout.splitlines()[-1]))
    assert counts[0] == 0
    assert counts[1] > 0, "the control: where DDP imports it, it keeps the group"


def refused(script, *words, env):
    """The one line with which a script ends before it trains."""
    done = python(script, *words, env={**os.environ, **ON_CPU, **env})
    return ended(done.returncode, done.stdout, done.stderr)


def test_ranks_without_a_place_to_meet_stop_with_one_line():
    for env in ({}, {"MASTER_ADDR": "127.0.0.1"}):
        line = refused(MANY, env={name: HAND[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} | env)
        one_line(line, "export", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("script", [ONE, MANY])
def test_weights_are_neither_written_over_nor_lost_for_want_of_a_folder(script, tmp_path):
    (old := tmp_path / "old.pt").write_text("weights of last week")
    for path in (old, tmp_path / "none" / "new.pt"):
        one_line(refused(script, "--save", path, env={}), f"--save {path}")
    assert old.read_text() == "weights of last week"


def joining(monkeypatch, env, gpus=0):
    """What main() hands to init_process_group in this environment, and the device that it claims before."""

    class Joined(Exception):
        """The test has seen enough."""

    def join(backend, **group):
        raise Joined(backend, group)

    claimed = []
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", claimed.append)
    monkeypatch.setattr(sys, "argv", [str(MANY), "--batch-size", "840"])
    for name, value in (env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Joined) as seen:
        runpy.run_path(str(MANY), run_name="__main__")
    return *seen.value.args, claimed


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_environment_is_read(name, monkeypatch):
    env, (_, rank, _, world_size) = RECORDED[name]
    backend, group, _ = joining(monkeypatch, env)
    assert (backend, group["rank"], group["world_size"]) == ("gloo", rank, world_size)
    assert (group["store"] is None) == (world_size > 1) and group["timeout"].total_seconds() == 600


def test_numbers_that_a_batch_script_exports_do_not_count(monkeypatch):
    """There they are those of its own process: 0, in every rank."""
    wrong = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name in ("step", "mpirun in an allocation"):
        env, (_, rank, _, world_size) = RECORDED[name]
        _, group, _ = joining(monkeypatch, env | wrong)
        assert (group["rank"], group["world_size"]) == (rank, world_size)


@pytest.mark.parametrize(("gpus", "index"), [(1, 0), (2, 1), (8, 1)])
def test_a_rank_claims_its_gpu_or_the_one_that_it_is_shown(gpus, index, monkeypatch):
    """A machine without a GPU can only be told that it has some."""
    backend, group, claimed = joining(monkeypatch, RECORDED["step"][0], gpus)  # its local rank is 1
    assert backend == "nccl" and [group["device_id"]] == claimed == [torch.device("cuda", index)]


@pytest.fixture
def name():
    """The name of a run folder that is gone after the test."""
    yield "test_spirals"
    for folder in RUNS.glob("test_spirals*"):
        shutil.rmtree(folder)


def test_a_job_of_two_nodes_trains_it_under_srun(cluster, name, single, capsys):
    words = ["--nodes", "2", "--gpus", "2", "--run", name, "--submit", "--", "--epochs", "2"]
    assert main(["job", "local", str(MANY), *words, "--save", "{run_dir}/spirals.pt"]) == 0
    assert "srun --label" in capsys.readouterr().out
    folder = RUNS / name
    jobs.watch(folder)
    [log] = folder.glob("slurm-*.log")
    lines = log.read_text().splitlines()
    assert sorted(set(re.findall(r"^\d: rank (\d) of 4 on ", log.read_text(), re.M))) == [*"0123"], log.read_text()
    assert [line.removeprefix("0: ") for line in lines if "epoch" in line] == single[0], log.read_text()
    assert weight_distance(torch.load(folder / "spirals.pt", weights_only=True), single[1]) < CLOSE


def test_the_three_have_the_same_places_for_ones_own_parts_and_each_is_a_diff_of_the_one_before():
    one, many, more = (path.read_text().splitlines() for path in (ONE, MANY, MORE))
    for mark in ("YOUR DATA", "YOUR NETWORK", "YOUR LOSS", "YOUR OPTIMIZER"):
        assert [sum(f"# {mark}" in line for line in lines) for lines in (one, many, more)] == [1, 1, 1]
    for mark in ("YOUR SAMPLER", "YOUR SCHEDULE", "YOUR EMA"):
        assert any(f"# {mark}" in line for line in more)
    for before, after in ((one, many), (many, more)):
        gone = [line for line in unified_diff(before, after, n=0) if line.startswith("-")]
        assert len(gone) <= 18, gone


def test_the_third_finds_its_rank_its_device_and_its_group_by_the_lines_of_the_second():
    """So what is tested of them above holds for it, too."""
    texts = [path.read_text() for path in (MANY, MORE)]
    for begin, end in (
        ("# Where launchers tell", "\n]\n"),
        ("    rank, local_rank, world_size = 0", 'gloo", **group)\n'),
    ):
        first, second = (text[text.index(begin) :].partition(end)[0] for text in texts)
        assert first == second and len(first) > 100
