"""Make the records of runs that are committed in notebooks/results, and keep finished runs there.

`make save-runs FOLDER=… NAME=…` calls it. With one path, to a folder with MNIST, it makes the runs
that notebook 09 draws for a reader without runs. It runs in one process, with or without Slurm.
"""

import json
import shutil
import struct
import sys
from itertools import product
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.data.digits import FILES
from ddp_helpers.jobs.job import NAME
from ddp_helpers.jobs.sweep import sweep
from ddp_helpers.launch.screen import shorten_paths
from ddp_helpers.rank.launchers import stop
from ddp_helpers.records import runs

RESULTS = ROOT / "notebooks" / "results"
# The sweep: images, epochs and samples in a step; nodes and ranks on each; CPUs of a rank; repeats.
_TRAIN_IMAGES, _TEST_IMAGES = 4000, 1000
_EPOCHS, _BATCH = 3, 64
_SHAPES = ((1, 1), (1, 2), (2, 2))
_CPUS, _SEEDS = (1, 2), (1, 2)


def keep(folder: Path, name: str) -> Path:
    """Copy the finished runs below a folder to notebooks/results/NAME, and return that folder.

    Weights, logs, scripts and host names are not copied. Prints to stderr which runs could not be
    read completely. Stops if there is no run, or the name is taken.
    """
    recorded = [runs.read_run(path) for path in sorted(runs.run_folders(Path(folder)))]
    kept = [run for run in recorded if run.epochs and run.state == "done"]
    target = RESULTS / name
    if not NAME.fullmatch(name):
        cure = "give letters, digits, dot, dash and underscore"
        stop(f"the name {name!r} cannot be used: {cure}")
    for run in recorded:
        if run.damage:
            outcome = "is kept without what cannot be read" if run in kept else "is left out"
            problems = ", ".join(run.damage)
            print(f"{run.folder.name!r} {outcome}: {problems}", file=sys.stderr)
    if not kept or target.exists():
        count = f"{len(kept)} finished runs for {target.relative_to(ROOT)}"
        stop(f"{folder} holds {count}: give others, and a new name")
    for run in kept:
        _copy(run, target / run.folder.name)
    return target


def _copy(run: runs.RunRecord, target: Path) -> None:
    """Write the record of a run into a new folder, without paths and hosts."""
    target.mkdir(parents=True)
    parts = {"spec": run.spec, "env": run.env, "status": run.status, "job": run.job}
    for part, content in parts.items():
        if content:
            text = json.dumps(_without_paths(content), indent=1)
            (target / f"{part}.json").write_text(text + "\n")
    shutil.copy(run.folder / "metrics.jsonl", target)


def _without_paths(content: object) -> object:
    """Return the same record, without paths and host names of this machine."""
    if isinstance(content, dict):
        cleaned = {key: _without_paths(value) for key, value in content.items()}
        if "host" in content:
            cleaned["host"] = "a host"
        return cleaned
    if isinstance(content, list):
        return [_without_paths(value) for value in content]
    if isinstance(content, str) and content.startswith("/"):
        short = shorten_paths(content)
        return f"…/{Path(content).name}" if short.startswith("/") else short
    return content


def _first_images(mnist: Path, target: Path) -> Path:
    """Write the first images of the MNIST below a folder, with their labels, as a dataset."""
    raw = target / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        content = (mnist / "MNIST" / "raw" / name).read_bytes()
        header, size = (16, 28 * 28) if "images" in name else (8, 1)  # bytes; per sample
        count = _TRAIN_IMAGES if name.startswith("train") else _TEST_IMAGES
        start = content[:4] + struct.pack(">I", count) + content[8:header]
        (raw / name).write_bytes(start + content[header : header + count * size])
    return target


def _configuration(
    scaling: str,
    shape: tuple[int, int],
    cpus: int,
    seed: int,
    data: Path,
) -> dict[str, object]:
    """Return the parameters of slurm/job.ipynb for one run.

    The batch is for all ranks together ("strong"), or for each ("weak").
    """
    nodes, gpus = shape
    batch = "batch_size" if scaling == "strong" else "batch_size_per_rank"
    return {
        "nodes": nodes,
        "gpus_per_node": gpus,
        "cpus_per_rank": cpus,
        "seed": seed,
        "epochs": _EPOCHS,
        "data": str(data),
        batch: _BATCH,
        "run": f"records/{scaling}-{nodes}x{gpus}-cpus{cpus}-seed{seed}",
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(f"kept in {keep(Path(sys.argv[1]), sys.argv[2])}")
        sys.exit()
    images = _first_images(Path(sys.argv[1]), ROOT / "build" / "records")
    settings = product(("strong", "weak"), _SHAPES, _CPUS, _SEEDS)
    sweep([_configuration(*setting, images) for setting in settings])
