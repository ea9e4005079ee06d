"""mnist_ddp: one training on any number of ranks, what it leaves and counts, and how it ends where all is not well."""

import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import own_parts
import pytest
import torch
import torch.nn.functional as F
from changed_text import replaced
from faults.ranks import run as forked
from real import LIMIT, fail_in_ci, need_launcher, weekly, without_helpers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_helpers import ROOT
from ddp_helpers.data.mnist_files import check_data, has_files
from ddp_helpers.launch import launch
from ddp_helpers.lessons.run_script import weight_distance
from ddp_helpers.rank.scripts import mnist_ddp, write_script
from ddp_helpers.records import runs

SMALL = ("--epochs=1", "--batch-size=64", "--no-cuda", "--save-model")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script that one takes home."""
    return write_script("mnist_ddp", tmp_path_factory.mktemp("script") / "mnist_ddp.py")


def trained(script, folder, ranks, *flags, **options):
    """Run a script on ranks forked from one that has imported torch, recorded in folder/run; how it ended."""
    args = ["--run-dir", folder / "run", *SMALL, *flags]
    return forked(script, *args, size=ranks, folder=folder, **options)


def changed(folder, *changes, parts=None):
    """The script with some of its lines changed, in a folder."""
    path = write_script("mnist_ddp", folder / "changed.py", parts)
    path.write_text(replaced(path.read_text(), changes))
    return path


# ---- one training, and its record

# Without the dropout, which each rank draws by itself; in double precision, where a sum that is rounded otherwise moves
# no ReLU's zero.
SAME_EVERYWHERE = [
    ("nn.Dropout(0.25), nn.Dropout(0.5)", "nn.Identity(), nn.Identity()"),
    ("(0.3081,))])", "(0.3081,)), torch.Tensor.double])"),
    ("Net().to(device)", "Net().to(device).double()"),
]


def test_any_number_of_ranks_ends_with_the_weights_of_one(digits, tmp_path):
    script = changed(tmp_path, *SAME_EVERYWHERE)
    weights = {}
    for name, ranks, flags in [("1", 1, []), ("2", 2, []), ("4", 4, []), ("control", 2, ["--batch-size=128"])]:
        assert trained(script, tmp_path / name, ranks, "--data", digits, *flags).statuses == [0] * ranks
        weights[name] = torch.load(tmp_path / name / "run" / "mnist_cnn.pt", weights_only=True)
    apart = {name: weight_distance(weights["1"], each) for name, each in weights.items()}
    assert apart["2"] < 1e-9 and apart["4"] < 1e-9 and apart["control"] > 1e-3, apart


def test_gamma_is_the_factor_of_the_learning_rate_after_each_epoch(script, digits, tmp_path):
    weights = {}
    for name, flags in {"one": [], "factor 0": ["--epochs=2", "--gamma=0"], "control": ["--epochs=2"]}.items():
        assert trained(script, tmp_path / name, 1, "--data", digits, *flags).statuses == [0]
        weights[name] = torch.load(tmp_path / name / "run" / "mnist_cnn.pt", weights_only=True)
    assert weight_distance(weights["one"], weights["factor 0"]) == 0, "at a rate of 0 nothing moves"
    assert weight_distance(weights["one"], weights["control"]) > 1e-3


def test_the_wait_for_data_is_the_mean_over_the_ranks(digits, tmp_path):
    waits = changed(tmp_path, ('metrics["data_seconds"] = waited', 'metrics["data_seconds"] = 1.0 + dist.get_rank()'))
    assert trained(waits, tmp_path, 2, "--data", digits).statuses == [0, 0]
    assert runs.read_run(tmp_path / "run").epochs[0]["data_seconds"] == 8 * 1.5, "of 8 batches"


def test_ranks_leave_a_complete_record_and_each_says_where_it_is(script, digits, tmp_path):
    ran = trained(script, tmp_path, 2, "--data", digits, "--test-batch-size=30", "--log-interval=2")
    assert ran.statuses == [0, 0], ran.said
    here = f"on {os.uname().nodename}, cpu"
    first, *steps, last = ran.said[0].splitlines()
    assert first == f"rank 0 of 2 {here}" and ran.said[1].splitlines() == [f"rank 1 of 2 {here}"]
    assert [f" {step}/8 " in line for step, line in zip((2, 4, 6, 8), steps, strict=True)] == [True] * 4
    assert last.startswith("epoch 1: ") and "accuracy 0." in last
    run = runs.read_run(tmp_path / "run")
    files = ["env.json", "metrics.jsonl", "mnist_cnn.pt", "spec.json", "status.json"]
    assert (run.state, run.problems, sorted(path.name for path in run.folder.iterdir())) == ("done", [], files)
    row, [epoch] = run.row(), run.epochs
    assert (row["launcher"], row["world_size"], row["dataset"], row["nodes"]) == ("env", 2, "digits", 1)
    assert (row["global_batch"], row["batch_per_rank"], row["train_set"]) == (64, 32, 512)
    assert [rank["local_rank"] for rank in run.env["ranks"]] == [0, 1]
    assert all((rank["host"], rank["device"]) == (os.uname().nodename, "cpu") for rank in run.env["ranks"])
    assert (epoch["epoch"], epoch["train_samples"], epoch["test_samples"]) == (1, 512, 200)
    assert 0 < epoch["test_accuracy"] <= 1 and 0 < epoch["train_loss"] < 10
    assert epoch["images_per_second"] == pytest.approx(512 / epoch["seconds"])
    assert 0 <= epoch["data_seconds"] <= epoch["seconds"] and epoch["test_seconds"] > 0
    weights = torch.load(run.folder / "mnist_cnn.pt", weights_only=True)
    mnist_ddp.Net().load_state_dict(weights)  # without DDP's `module.` before their names


@pytest.fixture(scope="module")
def mnist():
    """The folder with real MNIST: the test fails in CI without one, and is skipped elsewhere."""
    folder = Path(os.environ.get("DDP_MNIST_ROOT") or ROOT / "data")
    if not has_files(folder) or check_data(folder) != "MNIST":
        fail_in_ci(f"no real MNIST in {folder}: `ddp-course data {folder}` gets it")
    return folder


@weekly
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "srun"])
def test_on_real_mnist_two_ranks_reach_98_per_cent_where_the_helpers_cannot_be_imported(
    launcher, script, mnist, tmp_path, request
):
    need_launcher(request, launcher)
    flags = ["--data", mnist, "--epochs", 1, "--no-cuda", "--run-dir", tmp_path / "run"]
    env, limit = without_helpers(tmp_path), 3 * LIMIT  # minutes for two ranks that share their CPUs with other tests
    result = launch.run(script, *flags, ranks=2, launcher=launcher, timeout=limit, env=env)
    run = runs.read_run(tmp_path / "run")
    assert (run.state, run.problems, run.env["dataset"]) == ("done", [], "MNIST")
    assert run.epochs[0]["test_samples"] == 10_000 and run.epochs[0]["test_accuracy"] >= 0.98
    assert {rank for rank, line in result.lines if line.startswith("epoch")} == {"0"}


@pytest.fixture
def alone(tmp_path, monkeypatch, capfd, digits):
    """Run mnist_ddp in this process, in an empty folder; give its exit status, stdout and stderr."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*args, data=digits):
        monkeypatch.setattr(sys, "argv", ["mnist_ddp.py", "--data", str(data), *map(str, args)])
        try:
            mnist_ddp.main()
            status = 0
        except SystemExit as end:
            status = 1 if isinstance(end.code, str) else end.code
            if status == 1:
                print(end.code, file=sys.stderr)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return status, *capfd.readouterr()

    return run


def test_dry_run_takes_one_batch_and_without_a_record_the_weights_lie_here(alone, tmp_path):
    status, out, _ = alone(*SMALL, "--dry-run", "--log-interval=1")
    assert status == 0 and " 1/8 " in out and " 2/8 " not in out
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["mnist_cnn.pt"]


def test_any_number_of_workers_trains_alike(alone, tmp_path):
    assert [alone(*SMALL, f"--run-dir={n}", f"--num-workers={n}")[0] for n in (0, 2)] == [0, 0]
    none, two = (torch.load(tmp_path / "here" / n / "mnist_cnn.pt", weights_only=True) for n in "02")
    assert all(torch.allclose(none[name], two[name], atol=1e-5) for name in none)


# ---- what is counted

BUFFERS = "dist.broadcast(buffer, 0)"  # what makes the ranks test with the averages that are saved


def counted_and_recounted(folder):
    """How many test pictures were right and their loss: what the record says, and the saved model in one process."""
    model, (_, test_set) = own_parts.Net().eval(), own_parts.datasets(folder)
    model.load_state_dict(torch.load(folder / "run" / "mnist_cnn.pt", weights_only=True))
    with torch.no_grad():
        loss, metrics = own_parts.loss_and_metrics(model, test_set.tensors, torch.device("cpu"))
    [epoch] = runs.read_run(folder / "run").epochs
    assert (epoch["test_samples"], epoch["train_samples"]) == (201, 512), "an uneven set: each sample once"
    recorded = [201 * epoch["test_accuracy"], 201 * epoch["test_top2"], epoch["test_loss"]]
    return recorded, [metrics["accuracy"].item(), metrics["top2"].item(), loss.item()]


def test_what_was_counted_is_what_the_saved_model_counts(tmp_path):
    own = write_script("mnist_ddp", tmp_path / "own.py", parts=own_parts.__file__)
    ran = trained(own, tmp_path, 2, "--batch-size=32")
    assert ran.statuses == [0, 0], ran.said
    recorded, expected = counted_and_recounted(tmp_path)
    assert recorded == pytest.approx(expected, rel=1e-5) and 30 < recorded[0] < recorded[1] < 201
    own = changed(tmp_path, (BUFFERS, "pass"), parts=own_parts.__file__)  # the control
    assert trained(own, tmp_path / "own", 2, "--batch-size=32").statuses == [0, 0]
    (*_, loss), (*_, expected) = counted_and_recounted(tmp_path / "own")
    assert loss != pytest.approx(expected, rel=1e-3), "each rank tests with its own averages, and nobody sees"


def test_more_ranks_than_test_samples_count_each_once(digits, tmp_path):
    line = "    return train_set, test_set\n"
    few = changed(tmp_path, (line, "    return train_set, Subset(test_set, range(2))\n"))
    ran = trained(few, tmp_path, 3, "--data", digits, "--batch-size=66")
    assert ran.statuses == [0] * 3, ran.said
    assert runs.read_run(tmp_path / "run").epochs[0]["test_samples"] == 2


def test_a_loss_in_bfloat16_does_not_round_what_is_counted(monkeypatch):
    def own(model, batch, device):
        return model(batch[0]).mean().bfloat16(), {"accuracy": (batch[1] >= 0).sum(), "samples": len(batch[1])}

    monkeypatch.setattr(mnist_ddp, "loss_and_metrics", own)
    batches = DataLoader(TensorDataset(torch.zeros(301, 3), torch.zeros(301)), 301)
    sums = mnist_ddp.one_pass(nn.Linear(3, 1), batches, Namespace(bf16=False, dry_run=False))
    assert (sums["accuracy"], sums["samples"], sums["loss"].dtype) == (301, 301, torch.float64)
    assert torch.tensor(301.0).bfloat16().item() != 301, "the control"


def test_scores_and_log_probabilities_learn_alike():
    """The seeds' network ends with log_softmax; under nll_loss plain scores would learn nothing, and silently."""
    torch.manual_seed(1)
    model, batch = mnist_ddp.Net().eval(), [torch.rand(8, 1, 28, 28), torch.arange(8)]
    scores, _ = mnist_ddp.loss_and_metrics(model, batch, torch.device("cpu"))
    logs, _ = mnist_ddp.loss_and_metrics(lambda x: F.log_softmax(model(x), dim=1), batch, torch.device("cpu"))
    assert scores.item() == pytest.approx(logs.item(), rel=1e-6)
    assert F.nll_loss(model(batch[0]), batch[1]).item() != pytest.approx(scores.item(), rel=0.1), "the control"


# ---- what is wrong: it ends, not with 0, says the cause in its last lines, and has written nothing wrong

TRAIN = "MNIST/raw/train-images-idx3-ubyte"


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1000])


def other_labels(path):
    shutil.copy(path.with_name("t10k-images-idx3-ubyte"), path)


DAMAGE = {
    "cut short": (cut_short, "invalid"),
    "missing": (lambda path: path.unlink(), "not found"),
    "of other labels": (other_labels, "not as many labels as images"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_data_that_are_not_whole_are_refused(case, alone, digits, tmp_path):
    damage, says = DAMAGE[case]
    shutil.copytree(digits, tmp_path / "copy")
    damage(tmp_path / "copy" / TRAIN)
    status, out, err = alone("--run-dir=run", data=tmp_path / "copy")
    assert (status, out) == (1, "") and f"--data {tmp_path / 'copy'} holds no complete MNIST" in err, err
    assert says in err, err
    assert not list((tmp_path / "here").iterdir())


ENDS = {  # flags, environment: status, what the last line names
    "no number": (["--batch-size=x"], {}, 2, "--batch-size: invalid int value: 'x'"),
    "an unknown flag": (["--lrr=1"], {}, 2, "--lrr=1"),
    "half a flag": (["--epoch=1"], {}, 2, "--epoch=1"),
    "a batch that ranks cannot share": (
        ["--batch-size=64"],
        {"WORLD_SIZE": "3"},
        2,
        "3 ranks cannot share --batch-size 64",
    ),
    "a used folder": (["--run-dir=used"], {}, 2, "--run-dir used holds a run: choose a new folder"),
    "another record": (["--run-dir=record"], {}, 2, "--run-dir record holds a run"),
    "nowhere to meet": (["--batch-size=66"], {"WORLD_SIZE": "3"}, 1, "export MASTER_ADDR and MASTER_PORT"),
    "a loss that is not finite": (["--lr=1e30"], {}, 1, "the loss is nan: check the data, or lower --lr"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_run_that_cannot_be_right_ends_with_the_cause(case, alone, tmp_path, monkeypatch):
    flags, env, status, says = ENDS[case]
    for name, value in ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | env).items():
        monkeypatch.setenv(name, value)
    for folder, name in (("used", "spec.json"), ("record", "metrics.jsonl")):
        (tmp_path / "here" / folder).mkdir()
        (tmp_path / "here" / folder / name).write_text("precious")
    ended, _, err = alone("--no-cuda", "--epochs=1", *flags)
    assert ended == status and says in err.splitlines()[-1], err
    left = {str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert left == {"used/spec.json", "record/metrics.jsonl"}
    assert (tmp_path / "here" / "used" / "spec.json").read_text() == "precious"


SCORES = "    scores = model(inputs)\n"


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_the_record_says_so(digits, tmp_path):
    spoilt = '    scores = scores * float("nan" if dist.get_rank() else 1)\n'
    path = changed(tmp_path, (SCORES, SCORES + spoilt))
    ran = trained(path, tmp_path, 2, "--data", digits)
    assert ran.statuses == [1, 1] and all("the loss is nan" in said for said in ran.said), ran.said
    run = runs.read_run(tmp_path / "run")
    assert run.state == "failed" and "nan" in run.status["why"] and run.epochs == []


def test_a_disk_without_room_for_the_weights_fails_and_keeps_what_was_measured(script, digits, tmp_path):
    ran = trained(script, tmp_path, 2, "--data", digits, fault=(0, "disk full", "step", 1))  # 1 MB for a file
    assert ran.statuses[0] not in (0, None) and "File too large" in ran.said[0], ran.said
    run = runs.read_run(tmp_path / "run")
    assert run.state == "failed" and len(run.epochs) == 1


def test_of_two_runs_that_start_together_one_gets_the_folder(script, digits, tmp_path):
    mnist_ddp.claim(tmp_path / "run")
    with pytest.raises(FileExistsError):
        mnist_ddp.claim(tmp_path / "run")
    assert trained(script, tmp_path, 2, "--data", digits).statuses == [2, 2]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["spec.json"]
