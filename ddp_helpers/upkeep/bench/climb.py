"""The ladder of one device as a table: each rung's speed, its ratio, its share of the arithmetic limit, its memory."""

from pathlib import Path
from statistics import median, quantiles

import torch

from ddp_helpers.lessons.train_on_one_gpu import ladder
from ddp_helpers.lessons.train_on_one_gpu.figures import ladder as draw
from ddp_helpers.lessons.train_on_one_gpu.ladder import busy
from ddp_helpers.notebook.launchers import cpus
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.training import has_bf16

HEAD = f"{'one device, rung by rung':<28} {'images/s':>10}  {'middle half':<17} ratio  of the limit  busy"


def climb(data: Path, device: torch.device, passes: int = 7) -> list[dict]:
    """Measure the rungs in turns, print the table, and return its rows; one process calls it."""
    train_set, _ = datasets(data)
    order = torch.randperm(len(train_set))[: 1024 if device.type == "cpu" else 60_000].tolist()
    rungs = ladder.rungs(device)
    trainers = {name: rung.trainer(train_set, order, device) for name, rung in rungs.items()}
    rates = ladder.in_turns(trainers, passes)
    limits = {kind: ladder.matrix_rate(kind, device) / ladder.operations() for kind in ladder.TYPES}
    print(HEAD)
    rows = []
    for name, seen in rates.items():
        kind = rungs[name].precision
        row = step(name, seen, median(rates["plain loader"]), kind, limits[kind])
        row["busy"] = busy(trainers[name], device, cpus())
        spread = "{:,.0f} to {:,.0f}".format(*row["middle_half"])
        numbers = f"{row['ratio']:5.2f}  {row['share_of_limit']:12.0%}  {row['busy']}"
        print(f"{name:<28} {row['median']:10,.0f}  {spread:<17} {numbers}", flush=True)
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


def picture(rows: list[dict], where: str, path: Path) -> None:
    """Draw the ladder, and what ranks reach, into a file."""
    rates = {row["name"]: row["median"] for row in rows}
    limits = {row["name"]: row["median"] / row["share_of_limit"] for row in rows}
    draw(rates, limits, where, {row["name"]: row["middle_half"] for row in rows}).save(path)
