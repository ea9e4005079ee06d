"""What is measured on GPUs: overlap, memory, the doctor's table, speed. Times are recorded, and never asserted."""

import json
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from overlap import read_lanes
from training import SCRIPTS, begin, source, trained

from ddp_helpers.rank.launchers import cpus_of_rank

HERE = Path(__file__).parent


def answer(program):
    """What a program has told as JSON, when it has ended."""
    return json.loads(next(line for line in trained(program).splitlines() if line.startswith("{")))


def test_overlap(gpus, ranks, tmp_path, record):
    """The older class of NCCL lets all-reduces run beside backward, and with the newer one nothing overlaps.

    Simulated GPUs compute at once and have no kernels: there the program runs on CPUs, over gloo.
    """
    names, hidden = {"older class": 0, "newer class": 1}, {}
    if gpus.simulated:
        names, hidden, ranks = {"gloo": 0}, {"CUDA_VISIBLE_DEVICES": ""}, 2
    classes, shares = {}, {}
    for name, newer in names.items():
        words = [256 if gpus.simulated else 4096]
        env = {"TORCH_DIST_USE_NCCL2": newer, **hidden}
        classes[name] = seen = answer(begin(gpus, HERE / "overlap.py", ranks, tmp_path / name, *words, **env))
        computed = sum(end - begin for begin, end in seen["lanes"]["compute"])
        shares[name] = seen["hidden"] / min(seen["sent"], computed)  # of what can be hidden
        record(classes=classes, shares=shares)
    assert all(seen["sent"] >= seen["hidden"] >= 0 for seen in classes.values())
    if len({seen["class"] for seen in classes.values()}) == 2:  # older torch has one
        assert shares["older class"] > 0.1 and shares["newer class"] < 0.25 * shares["older class"], shares


def test_what_is_hidden_of_a_gpus_all_reduces_is_read_from_its_kernels():
    def kernel(name, begin, end):
        return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}

    events = [kernel("gemm", 1000, 3000), kernel("gemm", 3000, 5000), kernel("ncclDevKernel_AllReduce", 2000, 6000)]
    events += [{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000}, {"name": "a mark", "ts": 0}]
    seen = read_lanes(events, on_gpu=True)
    assert seen == {"lanes": {"compute": [[0, 4]], "all-reduce": [[1, 5]]}, "hidden": 3, "sent": 4}


def test_memory(gpus, ranks, tmp_path, record):
    """CUDA and NCCL take at most 1 GB beside the tensors; of simulated GPUs only tensors are counted."""
    seen = answer(begin(gpus, HERE / "memory.py", ranks, tmp_path / "run"))
    record(**seen)
    assert 0 < seen["held"] <= seen["taken"]["steps"] and seen["beside"] <= 1e9, seen


def test_doctor(gpus, ranks, digits, tmp_path, record):
    """The doctor's table of this machine, on all ranks; few CPUs, or none for each rank, make it red."""
    # Four ranks on a busy machine come late: 30 s, as a job has, were once not enough.
    flags = ("--data", digits, "--timeout", 300)
    program = begin(gpus, source("doctor"), ranks, tmp_path / "run", *flags)
    status = program.status()
    record(status=status, table=program.said().partition(" checks ")[0].splitlines())
    assert "right sums over ProcessGroupNCCL" in program.said()


# ---- speed


@contextmanager
def busy(given):
    """Note twice a second in what per cent of the time a kernel runs on the first GPU that is shown."""
    shares = []
    first = given.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    query = [
        "nvidia-smi",
        "--query-gpu=utilization.gpu",
        "--format=csv,noheader,nounits",
        f"--id={first}",
        "-lms",
        "500",
    ]
    try:
        asked = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError:
        yield shares
        return
    try:
        yield shares
    finally:
        asked.kill()
        shares += [int(word) for word in asked.communicate()[0].split() if word.isdecimal()]


def epochs_of(folder):
    """What a run has recorded: a list of its epochs for each number."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        key: [line[key] for line in lines] for key in ("seconds", "test_seconds", "images_per_second", "test_accuracy")
    }


@pytest.mark.timeout(200)
def test_speed(gpus, mnist, given_environment, tmp_path, record):
    """Seconds an epoch and how busy the GPU is, with the plain loader and with data held there; ten seeds."""
    common, bf16 = ["--data", mnist, "--run-dir", "run"], ["--bf16"] if gpus.facts["bf16"] else []
    plain, fast = source("mnist_ddp"), source("mnist_fast")
    workers, (few, epochs) = min(8, cpus_of_rank() - 1), (1, 1) if gpus.simulated else (2, 5)
    runs = {
        "plain, no workers": (plain, "--epochs", few, "--num-workers", 0),
        "plain, with workers": (plain, "--epochs", few, "--num-workers", workers),
    }
    for batch in (64, 256, 1024):
        words = ["--epochs", epochs, "--batch-size", batch, "--lr", (batch / 64) ** 0.5, *bf16]
        runs[f"fast, batch {batch}"] = (fast, *words)
    rows = {}
    for name, (script, *flags) in runs.items():
        with busy(given_environment) as shares:
            trained(begin(gpus, script, 0, tmp_path / name, *common, *flags))
        rows[name] = epochs_of(tmp_path / name) | {"gpu_share": shares[1:-1]}
        record(rows=rows)
    seeds = range(1, 3 if gpus.simulated else 11)  # side by side: of these only the accuracy
    folders = {seed: tmp_path / f"seed {seed}" for seed in seeds}
    trained(
        *(
            begin(gpus, fast, 0, folder, *common, "--epochs", epochs, "--seed", seed, *bf16)
            for seed, folder in folders.items()
        )
    )
    record(accuracy_of_seeds={str(seed): epochs_of(folder)["test_accuracy"] for seed, folder in folders.items()})


def test_example(gpus, mnist, given_environment, tmp_path, record):
    """The seconds of PyTorch's own example, started and ended, for an epoch."""
    if not (example := given_environment.get("EXAMPLE")):
        pytest.skip("EXAMPLE=…/mnist/main.py of pytorch/examples was not given")
    (tmp_path / "data").symlink_to(mnist)  # where it looks
    begins = time.time()
    program = begin(gpus, Path(example).resolve(), 0, tmp_path / "run", "--epochs", 1)
    trained(program)
    record(seconds=program.ended() - begins)


@pytest.mark.timeout(200)
def test_scaling(gpus, mnist, tmp_path, record):
    """The images per second of 1, 2, … ranks, each on a GPU of its own."""
    if gpus.count == 1:
        pytest.skip("one GPU")
    rates = {}
    for batch in (1024, 64):
        for ranks in [1 << power for power in range(gpus.ranks.bit_length())]:
            name, workers = f"{ranks} ranks, batch {batch}", min(8, cpus_of_rank() // ranks)
            flags = ["--data", mnist, "--epochs", 1, "--batch-size", batch, "--num-workers", workers]
            trained(begin(gpus, SCRIPTS / "mnist_ddp.py", ranks, tmp_path / name, *flags, "--run-dir", "run"))
            rates[name] = epochs_of(tmp_path / name)["images_per_second"][-1]
            record(images_per_second=rates)
