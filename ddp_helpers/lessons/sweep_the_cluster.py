"""Notebook 08: a sweep, slurm/job.ipynb executed once for each configuration; its figures, and its exercises."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import psutil
from IPython.display import DisplayHandle

from ddp_helpers import ROOT, jobs
from ddp_helpers.draw import drawing
from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, LEFT, ORANGE, RIGHT, TIMES, rank_colour
from ddp_helpers.jobs.parameters import check_names, execute
from ddp_helpers.jobs.run import known
from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.records import runs
from ddp_helpers.records.scaling import many, where

JOB = ROOT / "slurm" / "job.ipynb"
RUNS = ROOT / "runs"
Configuration = Mapping[str, object]  # the parameters of slurm/job.ipynb


def sweep(configurations: Sequence[Configuration], at_once: int = 1) -> pd.DataFrame:
    """Run each configuration that has no finished run yet, so many jobs at once, and show them in a table meanwhile.

    The `run` of a configuration names the run folder, in which the executed notebook is kept. Raises JobError, after
    the others have run, if a job fails; with nothing run, if a name is wrong or a run folder holds a run with other
    values.
    """
    for configuration in configurations:
        check_names(JOB, configuration)
    names = [configuration.get("run") for configuration in configurations]
    if not all(names) or len({*map(str, names)}) < len(names):
        raise jobs.JobError(f"run={names!r}: give each configuration a `run` of its own, the name of its folder")
    for configuration in configurations:
        check_same(configuration)
    shown, before = DisplayHandle(), state(configurations)
    shown.display(before)
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(run_one, configuration) for configuration in configurations]
        try:
            while wait(futures, timeout=1).not_done:
                if not (now := state(configurations)).equals(before):
                    shown.update(before := now)
        except BaseException:  # an interrupt: the job that runs goes on, and the next sweep waits for it
            end(futures)
            raise
    shown.update(found := state(configurations))
    if failed := [str(future.exception()) for future in futures if future.exception()]:
        raise jobs.JobError(f"{len(failed)} of {len(futures)} failed: {failed[0]}")
    return found


def check_same(configuration: Configuration) -> None:
    """Raise JobError if the run folder holds a run that was asked for with other values, as its notebook says."""
    copy = attempts(configuration)[-1] / JOB.name
    try:
        before = json.loads(copy.read_text())["metadata"]["papermill"]["parameters"]
    except (OSError, ValueError, KeyError):  # none there, or papermill was killed while it wrote
        before = configuration
    other = sorted(name for name in {*before, *configuration} - {"run"} if before.get(name) != configuration.get(name))
    if other:
        values = ", ".join(f"{name} was {before.get(name)!r}, now {configuration.get(name)!r}" for name in other)
        raise jobs.JobError(f"run {configuration['run']} holds another run ({values}): choose another name for it")


def run_one(configuration: Configuration) -> None:
    """Run one configuration, unless it is done; wait for it, if it is under way."""
    folder = attempts(configuration)[-1]
    try:  # also where the run ended while nobody watched: what Slurm says of it is missing
        if runs.read(folder).job.get("state") == "PENDING" and under_way(folder):
            jobs.collect(folder)
    except jobs.JobError:  # Slurm has forgotten the job
        if runs.read(folder).state != "done":
            raise
    if runs.read(folder).state == "done":
        return
    if folder.exists():  # it failed, or was cancelled: that record stays as it is
        folder = folder.with_name(f"{attempts(configuration)[0].name}-try{len(attempts(configuration)) + 1}")
    execute(JOB, folder / JOB.name, **configuration | {"run": str(folder.relative_to(RUNS))})


def attempts(configuration: Configuration) -> list[Path]:
    """The run folders of a configuration, first to last."""
    first = RUNS / str(configuration["run"])
    later = [first.with_name(f"{first.name}-try{number}") for number in range(2, 100)]
    return [first, *(folder for folder in later if folder.exists())]


def under_way(folder: Path) -> bool:
    """Wait for the job that was submitted here before an interruption; False if there is none."""
    if not (folder / "job.json").exists() or not (number := known(folder)["job_id"]):
        return False
    while any(task.active for task in jobs.look(number)):
        time.sleep(0.5)
    return True


def end(futures: Sequence[Future]) -> None:
    """Start nothing more, and end the kernels of the notebooks that are being executed."""
    for future in futures:
        future.cancel()
    for child in psutil.Process().children():
        if any("ipykernel" in word for word in child.cmdline()):
            child.kill()


def state(configurations: Sequence[Configuration]) -> pd.DataFrame:
    """A row for each configuration: where it stands, and what came out."""
    rows = []
    for configuration in configurations:
        run = runs.read(attempts(configuration)[-1])
        row = {"run": run.folder.name, "state": stands(run), "job": run.job.get("job_id")}
        row |= {"ranks": run.env.get("world_size"), "epochs": len(run.epochs)}
        last = run.epochs[-1] if run.epochs else {}
        for shown, name, digits in (("images/s", "images_per_second", None), ("test accuracy", "test_accuracy", 4)):
            row[shown] = "" if last.get(name) is None else round(last[name], digits)
        rows.append(row)
    return pd.DataFrame(rows, dtype=object).set_index("run").fillna("")


def stands(run: runs.Run) -> str:
    """The state of a run, or what happens before it has one: waits for its turn, or starts."""
    if not run.folder.exists():
        return "waits"
    return "starts" if run.state == "unknown" and run.job.get("state", "WRITTEN") == "WRITTEN" else run.state


def bricks(images: int, batch: int, sizes: Sequence[int]) -> Picture:
    """Draw the steps of an epoch for each number of ranks: a batch of all ranks, cut up (strong), or of each (weak)."""
    steps, unit = images // batch, 0.3
    fewest = -(-steps // max(sizes))
    title = f"Strong cuts a batch up: always {steps} steps. Weak adds batches: {fewest} steps on {max(sizes)} ranks"
    ax = drawing.canvas(1.15 + sum(max(0.55, size * unit) + 0.25 for size in sizes), title)
    columns, width = (LEFT + 1.1, (LEFT + RIGHT) / 2 + 0.75), (RIGHT - LEFT) / 2 - 1.0
    for left, name in zip(columns, ("strong: {} images a step", "weak: {} images a step and rank"), strict=True):
        drawing.write(ax, left, 0.75, name.format(batch), ha="left", weight="bold")
    top = 1.0
    for size in sizes:
        height = max(0.55, size * unit)
        drawing.write(ax, LEFT, top + height / 2, many(size, "rank"), ha="left")
        for left, taken, tall in ((columns[0], steps, unit / size), (columns[1], -(-steps // size), unit)):
            for step in range(taken):
                for rank in range(size):
                    corner = (left + step * width / steps, top + (height - size * tall) / 2 + rank * tall)
                    drawing.box(ax, corner, (width / steps - 0.03, tall - 0.02), "", rank_colour(rank), fill=0.55)
        top += height + 0.25
    return drawing.described(ax.figure, f"Bricks, one a step and rank. {title}. The area is the same everywhere.")


def speeds(jobs: pd.DataFrame) -> Picture:
    """Draw images per second of each run, a row a setting: strong blue, weak orange; jobs: from scaling.per_run."""
    _, alone = next(iter(jobs.groupby(["world_size", "cpus_per_task"])["images_per_second"]))  # the least of both
    rows = []
    for (kind, ranks, cpus), rates in jobs.groupby(["scaling", "world_size", "cpus_per_task"])["images_per_second"]:
        rows.append((rates.median(), f"{kind}, {many(int(ranks), 'rank')} {TIMES} {many(int(cpus), 'CPU')}", rates))
    rows.sort(key=lambda row: row[0])
    figure, ax = plt.subplots(figsize=(8.5, 0.45 * len(rows) + 1.3), layout="constrained")
    ax.axvspan(alone.min(), alone.max(), color=GREY, alpha=0.2, linewidth=0)
    for place, (_, name, rates) in enumerate(rows):
        ax.plot(rates, [place] * len(rates), "o-", color=BLUE if name.startswith("strong") else ORANGE, markersize=8)
    ax.set_yticks(range(len(rows)), [name for _, name, _ in rows])
    ax.set_xlim(left=0)
    ax.set_xlabel("images per second; grey: equal runs of one rank, so a smaller difference means nothing")
    best, fastest, _ = [row for row in rows if row[1].startswith("strong")][-1]
    verb, times = "is" if " 1 rank " in fastest else "are", f"{best / alone.median():.1f} {TIMES}"
    return captioned(figure, f"{fastest.replace('strong,', 'Strong:')} {verb} {times} as fast as one rank", where(jobs))


def wait_and_run(times: Mapping[str, tuple[float, float]], source: str) -> Picture:
    """Draw for each size the seconds until its job starts and the seconds that it runs, one bar behind the other."""
    figure, ax = plt.subplots(figsize=(8.5, 0.5 * len(times) + 1.3), layout="constrained")
    names, (waits, took) = list(times), zip(*times.values(), strict=True)
    ax.barh(names, waits, color="#C4C4C4", label="waits")
    bars = ax.barh(names, took, left=waits, color=BLUE, label="runs")
    ax.bar_label(bars, [f"{sum(both):.0f} s" for both in times.values()], padding=5)
    ax.margins(x=0.1)
    ax.invert_yaxis()
    ax.set_xlabel("seconds from now")
    ax.legend(loc="upper right", bbox_to_anchor=(1, 1.25), ncols=2, fontsize=10)
    first = min(times, key=lambda name: sum(times[name]))
    return captioned(figure, f"{first} has the result first, after {sum(times[first]):.0f} s", source)


def sweep_gpu_hours(sizes: list[int], repeats: int, minutes: float) -> float:
    """GPU-hours of a sweep over so many GPUs, in which every job takes so many minutes."""
    return sum(sizes) * repeats * minutes / 60


HOURS_TRAPS = {
    "A job on four GPUs costs four times its minutes: add up GPUs.": lambda sizes, n, took: len(sizes) * n * took / 60,
    "Those are GPU-minutes, and an hour has 60 of them.": lambda sizes, n, took: sum(sizes) * n * took,
    "Each size runs as often as there are repeats.": lambda sizes, n, took: sum(sizes) * took / 60,
}


def epoch_steps(images: int, ranks: int, size: int, kind: str) -> int:
    """Optimizer steps in an epoch; size is the global batch if kind is strong, and per rank if it is weak."""
    return images // (size if kind == "strong" else size * ranks)


STEPS_TRAPS = {
    "With weak scaling the size is per rank: a step takes it from every rank.": lambda n, ranks, size, kind: n // size,
    "With strong scaling the ranks share the global batch.": lambda n, ranks, size, kind: n // (size * ranks),
    "Strong is the global batch, which the ranks share; weak is the batch of each rank.": (
        lambda n, ranks, size, kind: n // (size * ranks if kind == "strong" else size)
    ),
}


def soonest(offers: dict[int, tuple], budget: float) -> int:
    """The number of GPUs whose result is there first, at no more GPU-hours than the budget; 0 if all cost more."""
    return first_of(offers, budget)


def first_of(offers: dict[int, tuple], budget: float, compared: slice = slice(2), paid: slice = slice(1, 2)) -> int:
    """The same, with the parts of (wait, run) that are compared, and those that are paid for."""
    there = {gpus: sum(one[compared]) for gpus, one in offers.items() if gpus * sum(one[paid]) / 60 <= budget}
    return min(sorted(there), key=there.get, default=0)


OFFERS, RUN = {1: (0, 120), 2: (5, 65), 4: (90, 40)}, slice(1, 2)
SOONEST_TRAPS = {
    "The result is there after the wait and the run: add them.": lambda *case: first_of(*case, compared=RUN),
    "GPUs are paid for while the job runs, not while it waits.": lambda *case: first_of(*case, paid=slice(2)),
    "That costs more GPU-hours than the budget has: GPUs times run, in hours.": (
        lambda offers, budget: first_of(offers, math.inf)
    ),
}

EXERCISES = [
    Exercise(sweep_gpu_hours, [([1, 2, 4, 8], 3, 6), ([1], 1, 60), ([4, 4], 2, 15)], HOURS_TRAPS),
    Exercise(
        epoch_steps,
        [(4096, 1, 256, "strong"), (4096, 4, 256, "strong"), (4096, 4, 256, "weak"), (60000, 2, 100, "weak")],
        STEPS_TRAPS,
    ),
    Exercise(
        soonest,
        [(OFFERS, 10), (OFFERS, 2.1), (OFFERS, 1), ({4: (30, 30), 2: (10, 50)}, 5), ({8: (60, 15)}, 2)],
        SOONEST_TRAPS,
    ),
]
