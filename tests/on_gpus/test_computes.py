"""The course's scripts compute on GPUs what they shall: each ends well, alike on one rank and several, graph or not."""

import pytest
from changed_text import replaced
from training import SCRIPTS, begin, difference, read, source, trained

MNIST = ["--epochs", 1, "--num-workers", 0, "--save-model", "--run-dir", "run"]
SPIRALS = ["--epochs", 1, "--save", "weights.pt"]


def test_scripts(gpus, digits, tmp_path, record):
    """Each script ends well on one device, and Python warns of nothing, not even while it ends."""
    (tmp_path / "control.py").write_text("held = [open(__file__)]\n")
    data, short = ["--data", digits], ["--epochs", 1, "--num-workers", 0]
    flags = {"doctor": data, "simple_ddp": [], "mnist_ddp": data + short, "mnist_fast": data + short[:2]}
    flags |= {"mnist_ddp_resumable": [*data, *short, "--run-dir", "resumable"], "spirals_ddp": short[:2], "control": []}
    started = {
        name: gpus.start(
            tmp_path / f"{name}.log",
            ("-W", "error", tmp_path / "control.py" if name == "control" else source(name), *words),
        )
        for name, words in flags.items()
    }
    statuses = {name: program.status() for name, program in started.items()}
    warned = [name for name, program in started.items() if "Warning" in program.said()]
    record(statuses=statuses, warned=warned)
    assert not any(statuses.values()) and warned == ["control"], "".join(each.said() for each in started.values())


def test_same_model(gpus, ranks, tmp_path, record):
    """simple_ddp has the same model on all ranks."""
    said = trained(begin(gpus, source("simple_ddp"), ranks, tmp_path / "run"))
    record(ranks=ranks)
    assert f"all {ranks} ranks hold the same model" in said
    assert len({line.split()[-1] for line in said.splitlines() if "sum is" in line}) == 1
    assert all(f"rank {rank} on cuda:{min(rank, gpus.count - 1)}: " in said for rank in range(ranks))


# A GPU's dropout draws other numbers than a CPU's, and each rank its own.
NO_DROPOUT = [("nn.Dropout(0.25), nn.Dropout(0.5)", "nn.Dropout(0.0), nn.Dropout(0.0)")]
TRAINED = {  # what one process runs, on how many ranks; the flags, and the file with the weights
    "spirals_ddp": ("spirals", [1, 4], SPIRALS, "weights.pt"),
    "spirals_resumable": ("spirals_resumable", [1, 2, 4], SPIRALS, "weights.pt"),
    "mnist_ddp": ("mnist_ddp", [1, 2, 4], MNIST, "run/mnist_cnn.pt"),
    "mnist_ddp_resumable": ("mnist_ddp_resumable", [1, 4], MNIST, "run/mnist_cnn.pt"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_equal(name, gpus, digits, tmp_path, record):
    """One rank computes what one process computes, several ranks the same up to rounding, and GPUs what a CPU does."""
    alone, numbers, flags, file = TRAINED[name]
    changes = NO_DROPOUT if name.startswith("mnist") else []
    for each in {name, alone}:
        (tmp_path / f"{each}.py").write_text(replaced(source(each).read_text(), changes))
    flags = [*flags, "--data", digits] if changes else flags
    one, several = tmp_path / f"{alone}.py", tmp_path / f"{name}.py"
    started = {
        "process": begin(gpus, one, 0, tmp_path / "process", *flags),
        "cpu": begin(gpus, one, 0, tmp_path / "cpu", *flags, CUDA_VISIBLE_DEVICES=""),
        "control": begin(gpus, one, 0, tmp_path / "control", *flags, "--lr", 0.05),
    }
    for number in sorted({min(number, gpus.ranks) for number in numbers}):
        started[number] = begin(gpus, several, number, tmp_path / str(number), *flags)
    trained(*started.values())
    kept = {str(each): read(tmp_path / str(each) / file) for each in started}
    off = {each: difference(kept["process"], weights) for each, weights in kept.items()}
    record(off=off)
    for number in [each for each in started if isinstance(each, int)]:
        used = {f", cuda:{min(rank, gpus.count - 1)}\n" for rank in range(number)}
        assert all(device in started[number].said() for device in used), started[number].said()
    control, cpu = off.pop("control"), off.pop("cpu")
    # Of a real GPU's convolutions the page says nothing: other batches take other algorithms, in TF32.
    near = control / 10 if changes and not gpus.simulated else 1e-4
    assert control > 1e-2 and max(off.values()) < near and cpu < (1e-4 if gpus.simulated else control), off


def test_graph(gpus, digits, tmp_path, record):
    """The CUDA graph of mnist_fast ends with the weights of the same steps without it; the last batch is smaller."""
    text, step = (SCRIPTS / "mnist_fast.py").read_text(), "Step = Callable"
    exact = "torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False\n"
    text = replaced(text, [(step, exact + step)])
    if not gpus.simulated:  # a graph draws other numbers
        text = replaced(text, [("Dropout(0.25), Dropout(0.5)", "Dropout(0.0), Dropout(0.0)")])
    (tmp_path / "graph.py").write_text(text)
    eager = replaced(text, [("as_graph(step, args.batch_size, device) if on_gpu else step", "step")])
    (tmp_path / "eager.py").write_text(eager)
    flags = ["--epochs", 2 if gpus.simulated else 12, "--batch-size", 60, "--save-model", "--data", digits]
    runs = {"eager": [], "again": [], "graph": [], "control": ["--gamma", 1]}
    trained(
        *(
            begin(gpus, tmp_path / f"{'graph' if name == 'graph' else 'eager'}.py", 0, tmp_path / name, *flags, *more)
            for name, more in runs.items()
        )
    )
    kept = {name: read(tmp_path / name / "mnist_cnn.pt") for name in runs}
    off = {name: difference(kept["eager"], weights) for name, weights in kept.items()}
    record(off=off)
    near = 0 if gpus.simulated else max(10 * off["again"], off["control"] / 100)
    assert off["graph"] <= near < off["control"], off
