"""Make the records that notebook 09 draws for who has no runs; keep records for good, small enough to be committed."""

import json
import shutil
import struct
import sys
from itertools import product
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.jobs.job import NAME
from ddp_helpers.launch.screen import tidy
from ddp_helpers.lessons.sweep_the_cluster.sweep import sweep
from ddp_helpers.rank.digits import FILES
from ddp_helpers.rank.launchers import stop
from ddp_helpers.records import runs

RESULTS = ROOT / "notebooks" / "results"
TRAIN, TEST, EPOCHS, BATCH = 4000, 1000, 3, 64
SHAPES, CPUS, SEEDS = ((1, 1), (1, 2), (2, 2)), (1, 2), (1, 2)  # nodes and ranks on each; CPUs of a rank; repeats


def keep(folder: Path, name: str) -> Path:
    """Copy the finished runs below a folder to notebooks/results/NAME; the learner's process calls it.

    Weights, logs and scripts stay behind; so do the names of hosts. Says which runs could not be read, or not whole.
    Stops where there is no run, or the name is taken.
    """
    read = [runs.read(each) for each in sorted(runs.run_folders(Path(folder)))]
    found, target = [run for run in read if run.epochs and run.state == "done"], RESULTS / name
    if not NAME.fullmatch(name):
        stop(f"the name {name!r} cannot be used: give letters, digits, dot, dash and underscore")
    for run in (run for run in read if run.damage):
        what = "is kept without what cannot be read" if run in found else "is left out"
        print(f"{run.folder.name!r} {what}: {', '.join(run.damage)}", file=sys.stderr)
    if not found or target.exists():
        stop(f"{folder} holds {len(found)} finished runs for {target.relative_to(ROOT)}: give others, and a new name")
    for run in found:
        (target / run.folder.name).mkdir(parents=True)
        for part in ("spec", "env", "status", "job"):
            if content := getattr(run, part):
                text = json.dumps(without_paths(content), indent=1)
                (target / run.folder.name / f"{part}.json").write_text(text + "\n")
        shutil.copy(run.folder / "metrics.jsonl", target / run.folder.name)
    return target


def without_paths(content: object) -> object:
    """The same record, without paths and host names of this machine."""
    if isinstance(content, dict):
        hosts = {"host": "a host"} if "host" in content else {}
        return {key: without_paths(value) for key, value in (content | hosts).items()}
    if isinstance(content, list):
        return [without_paths(value) for value in content]
    if isinstance(content, str) and content.startswith("/"):
        return tidy(content) if not tidy(content).startswith("/") else f"…/{Path(content).name}"
    return content


def cut(mnist: Path, target: Path) -> Path:
    """Write the first TRAIN and TEST images of the MNIST below a folder, with their labels, as a dataset of its own."""
    raw = target / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        content = (mnist / "MNIST" / "raw" / name).read_bytes()
        header, size = (16, 28 * 28) if "images" in name else (8, 1)
        count = TRAIN if name.startswith("train") else TEST
        (raw / name).write_bytes(
            content[:4] + struct.pack(">I", count) + content[8:header] + content[header : header + count * size]
        )
    return target


def configuration(kind: str, shape: tuple[int, int], cpus: int, seed: int, data: Path) -> dict[str, object]:
    """Return the parameters of slurm/job.ipynb for one run; BATCH is that of all ranks (strong), or of each (weak)."""
    nodes, gpus = shape
    asked = {"nodes": nodes, "gpus_per_node": gpus, "cpus_per_task": cpus, "seed": seed, "epochs": EPOCHS}
    asked |= {"data": str(data), "batch_size" if kind == "strong" else "batch_size_per_rank": BATCH}
    return asked | {"run": f"records/{kind}-{nodes}x{gpus}-cpus{cpus}-seed{seed}"}


if __name__ == "__main__":
    images = cut(Path(sys.argv[1]), ROOT / "build" / "records")
    sweep([configuration(*each, images) for each in product(("strong", "weak"), SHAPES, CPUS, SEEDS)])
