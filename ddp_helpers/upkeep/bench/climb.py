"""The ladder of one device as a table: each rung's speed, its ratio, its share of the arithmetic limit, its memory."""

import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

import torch

from ddp_helpers.lessons.train_on_one_gpu import ladder
from ddp_helpers.lessons.train_on_one_gpu.figures import ladder as draw
from ddp_helpers.lessons.train_on_one_gpu.ladder import busy
from ddp_helpers.rank.data import load_data
from ddp_helpers.rank.topology import Topology
from ddp_helpers.rank.training import has_bf16

# The most memory that one rung needs: of the GPU where there is one, else of the process (on Linux).
PEAK = """
import re, sys, torch
from pathlib import Path
from ddp_helpers.notebook import ladder
from ddp_helpers.rank.data import load_data
from ddp_helpers.rank.topology import Topology
device = Topology.from_env().device()
train_set, _ = load_data(Path(sys.argv[1]))
ladder.rungs(device)[sys.argv[2]].trainer(train_set, list(range(len(train_set)))[:2048], device)()
on_gpu = device.type == "cuda" and torch.cuda.max_memory_allocated() / 2**20
print(on_gpu or int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
"""
HEAD = f"{'one device, rung by rung':<28} {'images/s':>10}  {'middle half':<17} ratio  of the limit  peak MB  busy"


def climb(data: Path, device: torch.device, passes: int = 7) -> list[dict]:
    """Measure the rungs in turns, print the table, and return its rows; one process calls it."""
    train_set, _ = load_data(data)
    order = torch.randperm(len(train_set))[: 1024 if device.type == "cpu" else 60_000].tolist()
    rungs = ladder.rungs(device)
    trainers = {name: rung.trainer(train_set, order, device) for name, rung in rungs.items()}
    rates, cpus = ladder.in_turns(trainers, passes), Topology.from_env().cpus()
    limits = {kind: ladder.matrix_rate(kind, device) / ladder.operations() for kind in ladder.TYPES}
    print(HEAD)
    rows = []
    for name, seen in rates.items():
        kind = rungs[name].precision
        row = step(name, seen, median(rates["plain loader"]), kind, limits[kind])
        row |= {"peak_megabytes": peak(data, name), "busy": busy(trainers[name], device, cpus)}
        spread, numbers = (
            "{:,.0f} to {:,.0f}".format(*row["middle_half"]),
            f"{row['ratio']:5.2f}  {row['share_of_limit']:12.0%}",
        )
        print(
            f"{name:<28} {row['median']:10,.0f}  {spread:<17} {numbers}  {row['peak_megabytes']:7.0f}  {row['busy']}",
            flush=True,
        )
        rows.append(row)
    return rows


def step(name: str, rates: list[float], plain: float, kind: str, limit: float) -> dict:
    """A row of the ladder: what was seen, against the plain recipe and against the arithmetic limit."""
    low, middle, high = quantiles(rates, n=4, method="inclusive")
    row = {"name": name, "images_per_second": rates, "median": middle, "middle_half": [low, high]}
    return row | {"ratio": middle / plain, "precision": kind, "share_of_limit": middle / limit}


def on_ranks(name: str, rates: list[float], rows: list[dict], device: torch.device) -> dict:
    """The row of a script on ranks, beside those of the ladder."""
    kind = "bf16" if has_bf16(device) else "float32"
    same = next(row for row in rows if row["precision"] == kind)
    return step(name, rates, rows[0]["median"], kind, same["median"] / same["share_of_limit"])


def peak(data: Path, name: str) -> float:
    """Megabytes that a rung needs at most, alone in a process."""
    run = [sys.executable, "-c", PEAK, str(data), name]
    return float(subprocess.run(run, capture_output=True, check=True, text=True).stdout)


def picture(rows: list[dict], where: str, path: Path) -> None:
    """Draw the ladder, and what ranks reach, into a file."""
    rates = {row["name"]: row["median"] for row in rows}
    limits = {row["name"]: row["median"] / row["share_of_limit"] for row in rows}
    draw(rates, limits, where, {row["name"]: row["middle_half"] for row in rows}).save(path)
