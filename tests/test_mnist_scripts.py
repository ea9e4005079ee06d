"""The MNIST scripts: bad input ends at once with one line that names it, and good runs leave a complete record."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace

import coloured
import pytest
import torch
from faults.ranks import run as forked
from real import LIMIT, without_helpers
from refusals import ended, one_line
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_helpers.launch import launch
from ddp_helpers.launch.scripts import write_script
from ddp_helpers.rank import training
from ddp_helpers.rank.launchers import cpus_of_rank
from ddp_helpers.rank.model import Net
from ddp_helpers.rank.scripts import mnist_ddp, mnist_single
from ddp_helpers.records import runs

TRAIN = "train-images-idx3-ubyte"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to be in, which is where a run would write; and torch's own number of threads afterwards."""
    threads = torch.get_num_threads()
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def single(here, monkeypatch, capfd, digits):
    """Run mnist_single in this process; give its exit status, stdout and stderr."""

    def run(*args, data=digits):
        monkeypatch.setattr(sys, "argv", ["mnist_single.py", f"--data={data}", "--precision=float32", *map(str, args)])
        try:
            mnist_single.main()
            status = 0
        except SystemExit as end:
            status = end.code
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def first_of_three(here, monkeypatch, capfd, digits):
    """Run mnist_ddp in this process as rank 0 of 3, whose others never come; give exit status, stdout and stderr."""

    def run(*args):
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["mnist_ddp.py", f"--data={digits}", "--no-cuda", *args])
        with pytest.raises(SystemExit) as stopped:
            mnist_ddp.main()
        return stopped.value.code, *capfd.readouterr()

    return run


# ---- bad input


def cut_short(raw):
    (raw / TRAIN).write_bytes((raw / TRAIN).read_bytes()[:-1000])


def empty(raw):
    (raw / TRAIN).write_bytes(b"")


def remove(raw):
    (raw / TRAIN).unlink()


def mix(raw):
    (raw / TRAIN).write_bytes((raw / "t10k-images-idx3-ubyte").read_bytes())


DAMAGE = [(cut_short, f"{TRAIN}: cut short"), (empty, f"{TRAIN}: empty"), (remove, f"{TRAIN}: No such file")]
DAMAGE += [(mix, "train: 200 images, but 512 labels")]


@pytest.mark.parametrize(("name", "value"), [("SLURM_CPUS_PER_TASK", "abc"), ("LOCAL_WORLD_SIZE", "0")])
def test_cpus_that_no_launcher_would_set_are_not_counted(name, value, monkeypatch):
    available = cpus_of_rank()
    monkeypatch.setenv(name, value)
    assert cpus_of_rank() == available
    monkeypatch.setenv(name, str(4 * available))
    assert cpus_of_rank() == (1 if name == "LOCAL_WORLD_SIZE" else available), "the control: a number counts"


@pytest.mark.parametrize(("damage", "named"), DAMAGE)
def test_damaged_data_is_named(damage, named, single, here, digits, tmp_path):
    shutil.copytree(digits, tmp_path / "copy")
    damage(tmp_path / "copy" / "MNIST" / "raw")
    status, out, err = single("--run-dir=run", data=tmp_path / "copy")
    ended(status, out, err, f"--data {tmp_path / 'copy'} ", f"({named}")
    assert not list(here.iterdir())


@pytest.mark.parametrize("folder", ["nowhere", "two\nlines", "a b"])
def test_missing_data_is_named(folder, single, here):
    status, out, err = single("--run-dir=run", data=folder)
    ended(status, out, err, f"--data {' '.join(folder.split())} ")
    assert not list(here.iterdir())


BAD = [  # arguments, and what the line names
    ("--batch-size=0", "--batch-size 0"),
    ("--batch-size=-1", "--batch-size -1"),
    ("--batch-size=1.5", "--batch-size: invalid int value: '1.5'"),
    ("--batch-size=x", "--batch-size: invalid int value: 'x'"),
    ("--batch-size=", "--batch-size: invalid int value: ''"),
    (f"--batch-size={10**30}", f"--batch-size {10**30}"),
    ("--batch-size", "--batch-size: expected one argument"),
    ("--test-batch-size=0", "--test-batch-size 0"),
    ("--epochs=0", "--epochs 0"),
    ("--lr=0", "--lr 0"),
    ("--lr=-1", "--lr -1"),
    ("--lr=nan", "--lr nan"),
    ("--lr=inf", "--lr inf"),
    ("--gamma=nan", "--gamma nan"),
    ("--gamma=0", "--gamma 0"),
    ("--log-interval=0", "--log-interval 0"),
    ("--num-workers=-1", "--num-workers -1"),
    ("--num-workers=2000000000", "--num-workers 2000000000 is out of range: at most "),
    (f"--seed={2**63}", f"--seed {2**63}"),
    ("--epoch=1", "--epoch=1"),  # no abbreviations: what is added later must not change what this means
    ("--no-such-flag", "--no-such-flag"),
    ("word", "word"),
]


@pytest.mark.parametrize(("argument", "named"), BAD, ids=[argument for argument, _ in BAD])
def test_a_bad_argument_is_named(argument, named, single, here):
    status, out, err = single("--run-dir=run", argument)
    ended(status, out, err, named)
    assert not list(here.iterdir())


BAD_IN_A_GROUP = [
    ("--batch-size=0", "--batch-size 0"),
    ("--batch-size=64", "--batch-size 64 cannot be shared evenly by 3 ranks"),
    ("--batch-size=2", "--batch-size 2 cannot be shared evenly by 3 ranks"),
    ("--timeout=0", "--timeout 0"),
]


@pytest.mark.parametrize(("argument", "named"), BAD_IN_A_GROUP, ids=[argument for argument, _ in BAD_IN_A_GROUP])
def test_a_bad_argument_is_named_before_any_rank_waits(argument, named, first_of_three, here):
    status, out, err = first_of_three(argument)
    ended(status, out, err, named)
    assert not list(here.iterdir())


@pytest.mark.parametrize("address", ["no-such-host.invalid", "a" * 70 + ".invalid"])
def test_an_address_that_nobody_knows_is_named_in_one_line(address, first_of_three, here, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "29500")
    status, out, err = first_of_three("--timeout=1", "--batch-size=63")
    assert (status, out.count("\n")) == (2, 1), err
    one_line(err, f"MASTER_ADDR={address} ")
    assert not list(here.iterdir())


def test_an_address_that_nobody_needs_is_not_looked_up(single, monkeypatch):
    """The control: one rank alone meets nobody."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "no.invalid"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mnist_single, "main", mnist_ddp.main)
    status, out, err = single(*SMALL, "--dry-run", "--num-workers=0")
    assert status == 0 and "epoch 1: " in out, err


GIVEN = {  # what stands in the environment of a process that was given GPUs, and of one that was not
    "by hand": ({"CUDA_VISIBLE_DEVICES": "0,1"}, "CUDA_VISIBLE_DEVICES=0,1"),
    "by its number": ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, "CUDA_VISIBLE_DEVICES=GPU-8932f937"),
    "a job's": ({"SLURM_JOB_GPUS": "3", "SLURM_GPUS_ON_NODE": "1"}, "SLURM_GPUS_ON_NODE=1"),
    "so many": ({"SLURM_GPUS_ON_NODE": "10"}, "SLURM_GPUS_ON_NODE=10"),
    "hidden": ({"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "2"}, ""),
    "hidden, too": ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
    "no device of a node": ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
    "none": ({"SLURM_GPUS_ON_NODE": "0"}, ""),
}


@pytest.mark.parametrize("case", GIVEN)
def test_gpus_that_were_given_and_are_not_seen_stop_a_run(case, single, here, monkeypatch):
    env, named = GIVEN[case]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # also where there are some
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    flags = ("--dry-run", "--epochs=1", "--num-workers=0", "--run-dir=run")
    status, out, err = single(*flags)
    if named:
        ended(status, out, err, f"{named}, ", f"torch {torch.__version__} ", "--no-cuda")
        assert not list(here.iterdir())
        status, out, err = single(*flags, "--no-cuda")  # as the local site says
    assert status == 0 and "epoch 1: " in out, err


def test_a_run_folder_that_cannot_be_made_is_named(single, here):
    (here / "file").write_text("mine")
    for folder in ("file", "file/run"):
        status, out, err = single("--run-dir", folder)
        ended(status, out, err, "--run-dir", "'file")
    assert [path.name for path in here.iterdir()] == ["file"] and (here / "file").read_text() == "mine"


def test_a_run_folder_that_holds_a_run_is_kept_as_it_is(single, here):
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text('{"epoch": 1}\n')
    status, out, err = single("--run-dir=run")
    ended(status, out, err, "--run-dir run ", "new folder")
    assert [path.name for path in (here / "run").iterdir()] == ["metrics.jsonl"]
    assert (here / "run" / "metrics.jsonl").read_text() == '{"epoch": 1}\n'


# ---- good runs

SMALL = ("--epochs=1", "--batch-size=64", "--no-cuda")


def check_record(folder, launcher, world_size, epochs=1):
    """The record of a run that went well."""
    run = runs.read_run(folder)
    assert (run.state, run.problems, len(run.epochs)) == ("done", [], epochs)
    files = ["env.json", "metrics.jsonl", "mnist_cnn.pt", "spec.json", "status.json"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert run.spec["batch_size"] == 64 and run.spec["epochs"] == epochs and run.spec["lr"] == 1.0
    row = run.row()
    assert (row["launcher"], row["world_size"], row["dataset"], row["nodes"]) == (launcher, world_size, "digits", 1)
    for number, rank in enumerate(run.env.get("ranks", [])):
        assert rank == {"rank": number, "local_rank": number, "host": os.uname().nodename, "device": "cpu"}
    assert (run.env["torch"], run.env["device"]) == (torch.__version__, "cpu") and run.env["cpus"] >= 1
    for number, epoch in enumerate(run.epochs, 1):
        assert epoch["epoch"] == number and epoch["test_samples"] == 200
        assert 0 < epoch["test_accuracy"] <= 1 and 0 < epoch["train_loss"] < 10
        assert epoch["images_per_second"] == pytest.approx(512 / epoch["seconds"])
        assert 0 <= epoch["data_seconds"] <= epoch["seconds"] and epoch["test_seconds"] > 0
    return run


def check_model(path):
    """The weights are those of a plain Net, without DDP's `module.` before their names."""
    Net().load_state_dict(torch.load(path / "mnist_cnn.pt", weights_only=True))


def test_a_run_of_mnist_single_leaves_a_complete_record(single, here):
    status, out, err = single(*SMALL, "--run-dir=runs/one", "--save-model")
    assert (status, err) == (0, "")
    *_, score, saved = out.splitlines()
    assert re.fullmatch(r"epoch 1: \d+/200 right, [\d,]+ images/s", score) and saved == "saved runs/one/mnist_cnn.pt"
    run = check_record(here / "runs" / "one", "single", 1)
    assert run.env.keys() == {"device", "chip", "cpus", "torch", "made_from", "dataset", "train_set"}
    assert run.spec["save_model"] is True and run.env["made_from"] == "ddp_helpers, imported"
    check_model(here / "runs" / "one")
    assert [path.name for path in here.iterdir()] == ["runs"]


def test_mnist_ddp_needs_no_helpers_leaves_a_complete_record_and_says_where_each_rank_is(here, digits, tmp_path):
    script = write_script("mnist_ddp", tmp_path / "mnist_ddp.py")
    args = (*SMALL, "--data", digits, "--run-dir", "run", "--save-model", "--test-batch-size=30", "--log-interval=2")
    done = launch.run(script, *args, ranks=2, timeout=LIMIT, env=without_helpers(tmp_path))
    assert re.fullmatch(r"epoch 1: \d+/200 right, [\d,]+ images/s", done.of(0)[-2])
    steps = [line.partition(" loss")[0] for line in done.of(0) if " loss " in line]  # 512 images, 64 in a step
    assert steps == [f"epoch 1 [{'#' * (5 * n):.<20}] {2 * n}/8" for n in (1, 2, 3, 4)]
    assert done.of(0)[0] == f"rank 0 of 2 on {os.uname().nodename}, cpu"
    assert done.of(1) == [f"rank 1 of 2 on {os.uname().nodename}, cpu"]
    run = check_record(here / "run", "torchrun", 2)
    assert len(run.env["ranks"]) == 2
    assert run.env["made_from"].startswith("ddp_helpers ") and "imported" not in run.env["made_from"]
    check_model(here / "run")


def test_dry_run_takes_one_batch(single, here):
    status, out, _ = single(*SMALL, "--dry-run", "--save-model", "--log-interval=1")
    assert status == 0 and " 1/8 " in out and " 2/8 " not in out
    check_model(here)  # there is no run folder


def test_any_number_of_workers_trains_alike(single, here):
    for workers in (0, 2):
        status, *_ = single(*SMALL, f"--run-dir={workers}", f"--num-workers={workers}")
        assert status == 0
    none, two = (runs.read_run(here / name).epochs[0] for name in ("0", "2"))
    assert none["train_loss"] == pytest.approx(two["train_loss"], abs=1e-4)
    assert none["test_loss"] == pytest.approx(two["test_loss"], abs=1e-4)


LEAVES = """
import atexit, hashlib, os, sys, threading, time
from pathlib import Path
from ddp_helpers.rank import group

def state():
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    return stat.read_text().rpartition(") ")[2][0] if stat.exists() else "ended"

group._REST = float(sys.argv[2])
os.register_at_fork(before=lambda: print(state()))  # the last one registered is called first, at the exit, too
atexit.register(lambda: print(state()))
group.wait_before_fork_and_exit()
pause = ("sha256", b"", b"", 2_000_000)  # without the GIL
thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=pause, daemon=True)  # or the exit itself waits for it
thread.start()
while state() != "R":
    time.sleep(0.001)
if sys.argv[1] == "fork":
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.parametrize(("way", "needless"), [("fork", (3, 12)), ("exit", (3, 14))])
def test_a_rank_forks_a_worker_and_ends_while_no_other_thread_runs(way, needless):
    if sys.version_info >= needless:
        pytest.skip("from this version on Python itself sees to it")

    def state(rest):
        return subprocess.check_output([sys.executable, "-c", LEAVES, way, str(rest)], text=True).strip()

    assert state(LIMIT) in ("S", "ended")
    assert state(-1) == "R", "the same, where it does not wait"


def test_a_run_that_raises_leaves_the_reason(here, digits, monkeypatch):
    def break_down(*_, **__):
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(mnist_single, "one_pass", break_down)
    monkeypatch.setattr(sys, "argv", ["mnist_single.py", "--data", str(digits), *SMALL, "--dry-run", "--run-dir=run"])
    with pytest.raises(FloatingPointError):
        mnist_single.main()
    run = runs.read_run(here / "run")
    assert run.status == {"state": "failed", "why": "FloatingPointError: the loss is nan"}
    assert run.epochs == [] and run.problems == []


# ---- a network, data and a loss of one's own

BUFFERS = "dist.broadcast(buffer, 0)"  # what makes the ranks test with the averages that are saved


def trained(script, folder, ranks, *flags, **options):
    """Run a script on ranks forked from one that has imported torch, recorded in folder/run; how it ended."""
    args = ["--run-dir", folder / "run", "--epochs", 1, "--precision", "float32", "--no-cuda", "--save-model", *flags]
    return forked(script, *args, size=ranks, folder=folder, **options)


def counted_and_recounted(folder):
    """How many test pictures were right and their loss: what the record says, and the saved model in one process."""
    model, (_, test_set) = coloured.Net().eval(), coloured.datasets(folder)
    model.load_state_dict(torch.load(folder / "run" / "mnist_cnn.pt", weights_only=True))
    with torch.no_grad():
        loss, metrics = coloured.loss_and_metrics(model(test_set.tensors[0]), test_set.tensors[1])
    [epoch] = runs.read_run(folder / "run").epochs
    assert epoch["test_samples"] == len(test_set) == 201 and epoch["train_samples"] == 512
    recorded = epoch["test_accuracy"] * 201, epoch["test_top2"] * 201, epoch["test_max_score"], epoch["test_loss"]
    return recorded, [*(metrics[name].item() for name in ("accuracy", "top2", "max_score")), loss.item()]


@pytest.mark.parametrize(("name", "ranks"), [("mnist_single", 1), ("mnist_ddp", 2)])
def test_what_was_counted_is_what_the_saved_model_counts(name, ranks, tmp_path):
    script = write_script(name, tmp_path / f"{name}.py", replace=coloured.PARTS)
    ran = trained(script, tmp_path, ranks, "--batch-size", 32)
    assert ran.statuses == [0] * ranks, ran.said
    recorded, expected = counted_and_recounted(tmp_path)  # right, right among the best two, largest score, loss
    assert recorded == pytest.approx(expected, rel=1e-5) and 30 < recorded[0] < recorded[1] < 201
    assert runs.read_run(tmp_path / "run").env["dataset"] == "TensorDataset"
    if ranks > 1:  # the control
        assert script.read_text().count(BUFFERS) == 1
        script.write_text(script.read_text().replace(BUFFERS, "pass"))
        assert trained(script, tmp_path / "own", ranks, "--batch-size", 32).statuses == [0] * ranks
        (*_, loss), (*_, expected) = counted_and_recounted(tmp_path / "own")
        assert loss != pytest.approx(expected, rel=1e-3), "each rank tests with its own averages, and nobody sees"


def test_a_second_run_into_the_same_folder_stops_all_ranks(digits, tmp_path):
    script = write_script("mnist_ddp", tmp_path / "mnist_ddp.py")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"epoch": 1}\n')
    ran = trained(script, tmp_path, 2, "--data", digits)
    assert ran.statuses == [2, 2] and all(f"--run-dir {tmp_path / 'run'} " in said for said in ran.said)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_picture_that_is_missing_is_not_taken_for_the_run_folder(digits, tmp_path):
    script = write_script("mnist_single", tmp_path / "mnist_single.py")
    line = "        wait_begin = time.perf_counter()\n"
    assert script.read_text().count(line) == 1
    script.write_text(script.read_text().replace(line, f'        open("7.png")\n{line}'))
    ran = trained(script, tmp_path, 1, "--data", digits)
    assert ran.statuses == [1] and "Traceback" in ran.said[0] and "--run-dir" not in ran.said[0], ran.said
    run = runs.read_run(tmp_path / "run")
    assert run.state == "failed" and "7.png" in run.status["why"]


@pytest.mark.parametrize(("name", "ranks"), [("mnist_single", 1), ("mnist_ddp", 2)])
def test_a_disk_without_room_for_the_model_is_named(name, ranks, digits, tmp_path):
    script = write_script(name, tmp_path / f"{name}.py")
    ran = trained(script, tmp_path, ranks, "--data", digits, fault=(0, "disk full", "step", 1))  # 1 MB for a file
    assert ran.statuses == [2, 1][:ranks], ran.said  # the other waits for it, and loses it
    own = re.compile(r"(harm|left|rank \d of \d|a step takes|epoch \d):? ")  # what is printed anyway
    lines = [line for line in ran.said[0].splitlines() if line and not own.match(line)]
    one_line("\n".join(lines), "--run-dir", "File too large")
    assert not ran.said[1:] or "Errno" not in ran.said[1]
    run = runs.read_run(tmp_path / "run")
    assert run.state == "failed" and "File too large" in run.status["why"] and len(run.epochs) == 1
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "env.json",
        "metrics.jsonl",
        "spec.json",
        "status.json",
    ]


def test_a_loss_in_bfloat16_does_not_round_what_is_counted(monkeypatch):
    def own(output, target):
        return output.mean().bfloat16(), {"accuracy": (target >= 0).sum()}

    monkeypatch.setattr(training, "loss_and_metrics", own)
    batches = DataLoader(TensorDataset(torch.zeros(301, 3), torch.zeros(301)), 301)
    sums = training.one_pass(nn.Linear(3, 1), batches, Namespace(precision="float32", dry_run=False))
    assert (sums["accuracy"], sums["samples"]) == (301, 301) and torch.tensor(
        301.0
    ).bfloat16().item() != 301  # the control


# ---- reading records


def test_a_half_written_line_is_skipped_and_named(single, here):
    status, *_ = single(*SMALL, "--epochs=2", "--run-dir=runs/killed", "--dry-run")
    assert status == 0
    metrics = here / "runs" / "killed" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + lines[1][: len(lines[1]) // 2])
    (here / "runs" / "killed" / "status.json").write_text(json.dumps({"state": "running"}))
    run = runs.read_run(here / "runs" / "killed")
    assert [epoch["epoch"] for epoch in run.epochs] == [1]
    [problem] = run.problems
    assert problem.startswith("metrics.jsonl line 2: ")
    assert run.state == "running"


@pytest.mark.parametrize(
    "line", ["{", '{"epo', '{"epoch": 1, "loss": 0.', "12", "null", '"epoch"', "[1]", "{}", '{"epoch": "1"}']
)
def test_a_line_that_is_no_epoch_is_skipped_and_named(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"epoch": 1}}\n{line}\n{{"epoch": 3}}\n')
    run = runs.read_run(tmp_path)
    assert [epoch["epoch"] for epoch in run.epochs] == [1, 3]
    assert any(problem.startswith("metrics.jsonl line 2: ") for problem in run.problems)


def test_what_is_missing_or_unreadable_is_named(tmp_path, capsys):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "spec.json").write_text('{"batch_size": 64}')
    (tmp_path / "runs" / "a" / "env.json").write_text('{"world_')
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_bytes(b'{"epoch": 1}\n\xff\xfe')
    run = runs.read_run(tmp_path / "runs" / "a")
    assert run.state == "unknown" and run.spec == {"batch_size": 64} and run.env == {}
    assert [problem.split(":")[0] for problem in run.problems] == ["env.json", "status.json", "metrics.jsonl line 2"]
    rows = runs.table(tmp_path / "runs")
    assert len(rows) == 1 and rows["state"][0] == "unknown"
    assert capsys.readouterr().err.count("a: ") == 3
