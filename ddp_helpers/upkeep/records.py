"""Make the records that notebook 09 draws for who has no runs: 08's sweep in full, on MNIST's first images."""

import struct
import sys
from itertools import product
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.lessons.sweep_the_cluster import sweep
from ddp_helpers.rank.digits import FILES

TRAIN, TEST, EPOCHS, BATCH = 4000, 1000, 3, 64
SHAPES, CPUS, SEEDS = ((1, 1), (1, 2), (2, 2)), (1, 2), (1, 2)  # nodes and ranks on each; CPUs of a rank; repeats


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
    asked |= {"data": str(data), "global_batch_size" if kind == "strong" else "batch_size": BATCH}
    return asked | {"run": f"records/{kind}-{nodes}x{gpus}-cpus{cpus}-seed{seed}"}


if __name__ == "__main__":
    images = cut(Path(sys.argv[1]), ROOT / "build" / "records")
    sweep([configuration(*each, images) for each in product(("strong", "weak"), SHAPES, CPUS, SEEDS)])
