"""The ladder of one device as a table: each rung's speed, its ratio, its share of the arithmetic limit, its memory."""

import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

import torch

from ddp_helpers.notebook import ladder
from ddp_helpers.notebook.plots.ladder import ladder as draw
from ddp_helpers.rank.data import load_data

# The most memory that one rung needs: of the GPU where there is one, else of the process (on Linux).
PEAK = """
import re, sys, torch
from pathlib import Path
from ddp_helpers.notebook import ladder
from ddp_helpers.rank.data import load_data
from ddp_helpers.rank.topology import Topology
device = Topology.from_env().device()
train_set, _ = load_data(Path(sys.argv[1]))
ladder.rungs(device)[sys.argv[2]].trainer(train_set, list(range(2048)), device)()
on_gpu = device.type == "cuda" and torch.cuda.max_memory_allocated() / 2**20
print(on_gpu or int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
"""


def climb(data: Path, device: torch.device, passes: int = 7) -> list[dict]:
    """Measure the rungs in turns, print the table, and return its rows; one process calls it."""
    train_set, _ = load_data(data)
    order = torch.randperm(len(train_set))[: 1024 if device.type == "cpu" else 60_000].tolist()
    rungs = ladder.rungs(device)
    rates = ladder.in_turns({name: rung.trainer(train_set, order, device) for name, rung in rungs.items()}, passes)
    limits = {kind: ladder.matrix_rate(kind, device) / ladder.operations() for kind in ladder.TYPES}
    print(f"{'one device, rung by rung':<28} {'images/s':>10}  {'middle half':<17} ratio  of the limit  peak MB")
    rows, plain = [], median(rates["plain loader"])
    for name, seen in rates.items():
        low, middle, high = quantiles(seen, n=4, method="inclusive")
        ratio, share, memory = middle / plain, middle / limits[rungs[name].precision], peak(data, name)
        spread = f"{low:,.0f} to {high:,.0f}"
        numbers = f"{ratio:5.2f}  {share:12.0%}  {memory:7.0f}"
        print(f"{name:<28} {middle:10,.0f}  {spread:<17} {numbers}", flush=True)
        rows.append({"name": name, "images_per_second": seen, "median": middle, "ratio": ratio})
        rows[-1] |= {"precision": rungs[name].precision, "share_of_limit": share, "peak_megabytes": memory}
    return rows


def peak(data: Path, name: str) -> float:
    """Megabytes that a rung needs at most, alone in a process."""
    run = [sys.executable, "-c", PEAK, str(data), name]
    return float(subprocess.run(run, capture_output=True, check=True, text=True).stdout)


def picture(rows: list[dict], where: str, path: Path) -> None:
    """Draw the ladder into a file."""
    rates = {row["name"]: row["median"] for row in rows}
    draw(rates, {row["name"]: row["median"] / row["share_of_limit"] for row in rows}, where).save(path)
