"""Notebook 08: its exercises, and the sweep, which executes slurm/job.ipynb once for each configuration."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pandas as pd
import psutil
from IPython.display import DisplayHandle

from ddp_helpers import ROOT
from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.notebook import runs, slurm
from ddp_helpers.notebook.parameters import check_names, execute
from ddp_helpers.notebook.slurm.files import known


def sweep_gpu_hours(sizes: list[int], repeats: int, minutes: float) -> float:
    """GPU-hours of a sweep over so many GPUs, in which every job takes so many minutes."""
    return sum(sizes) * repeats * minutes / 60


def epoch_steps(images: int, ranks: int, size: int, kind: str) -> int:
    """Optimizer steps in an epoch; size is the global batch if kind is strong, and per rank if it is weak."""
    return images // (size if kind == "strong" else size * ranks)


def to_submit(names: list[str], states: dict[str, str]) -> list[str]:
    """The runs of a sweep that need a new job, in the order of the names."""
    return [name for name in names if states.get(name) not in ("done", "running", "pending")]


def soonest(offers: dict[int, tuple], budget: float) -> int:
    """The number of GPUs whose result is there first, at no more GPU-hours than the budget; 0 if all cost more."""
    there = {gpus: wait + run for gpus, (wait, run) in offers.items() if gpus * run / 60 <= budget}
    return min(sorted(there), key=there.get, default=0)


OFFERS = {1: (0, 120), 2: (5, 65), 4: (90, 40)}

EXERCISES = [
    Exercise(
        sweep_gpu_hours,
        [([1, 2, 4, 8], 3, 6), ([1], 1, 60), ([4, 4], 2, 15)],
        {
            "A job on four GPUs costs four times its minutes: add up GPUs, not jobs.": lambda sizes, repeats, minutes: (
                len(sizes) * repeats * minutes / 60
            ),
            "Those are GPU-minutes, and an hour has 60 of them.": lambda sizes, repeats, minutes: (
                sum(sizes) * repeats * minutes
            ),
            "Each size runs as often as there are repeats.": lambda sizes, _, minutes: sum(sizes) * minutes / 60,
        },
    ),
    Exercise(
        epoch_steps,
        [(4096, 1, 256, "strong"), (4096, 4, 256, "strong"), (4096, 4, 256, "weak"), (60000, 2, 100, "weak")],
        {
            "With weak scaling the size is per rank: a step takes it from every rank.": lambda images, _, size, kind: (
                images // size
            ),
            "With strong scaling the size is the global batch: the ranks share it.": lambda images, ranks, size, _: (
                images // (size * ranks)
            ),
        },
    ),
    Exercise(
        to_submit,
        [
            (list("abcdef"), {"a": "done", "b": "running", "c": "failed", "e": "cancelled", "f": "pending"}),
            (["one", "two"], {}),
            (["two", "one"], {"one": "failed", "two": "preempted", "older": "failed"}),
        ],
        {
            "A run that ended without being done has a record, and needs another job.": lambda names, states: [
                name for name in names if name not in states
            ],
            "A run that is running or pending would be there twice: it is waited for.": lambda names, states: [
                name for name in names if states.get(name) != "done"
            ],
            "A run without a record was never submitted.": lambda names, states: [
                name for name in names if states.get(name, "done") not in ("done", "running", "pending")
            ],
        },
    ),
    Exercise(
        soonest,
        [(OFFERS, 10), (OFFERS, 2.1), (OFFERS, 1), ({4: (30, 30), 2: (10, 50)}, 5), ({8: (60, 15)}, 2)],
        {
            "The result is there after the wait and the run: add them.": lambda offers, budget: min(
                [gpus for gpus in sorted(offers) if gpus * offers[gpus][1] / 60 <= budget],
                key=lambda gpus: offers[gpus][1],
                default=0,
            ),
            "GPUs are paid for while the job runs, not while it waits.": lambda offers, budget: min(
                [gpus for gpus in sorted(offers) if gpus * sum(offers[gpus]) / 60 <= budget],
                key=lambda gpus: sum(offers[gpus]),
                default=0,
            ),
            "That costs more GPU-hours than the budget has: GPUs times run, in hours.": lambda offers, _: min(
                sorted(offers), key=lambda gpus: sum(offers[gpus])
            ),
        },
    ),
]


JOB = ROOT / "slurm" / "job.ipynb"
RUNS = ROOT / "runs"


def sweep(configurations: Sequence[Mapping[str, object]], at_once: int = 1) -> pd.DataFrame:
    """Run each configuration that has no finished run yet, so many jobs at once, and show them in a table meanwhile.

    A configuration is the parameters of slurm/job.ipynb; its `run` names the run folder. The executed notebook lies in
    that folder. Raises JobError, after the others have run, if a job fails; with nothing run, if a name is wrong or a
    run folder holds a run with other values.
    """
    for configuration in configurations:
        check_names(JOB, configuration)
    names = [configuration.get("run") for configuration in configurations]
    if not all(names) or len({*map(str, names)}) < len(names):
        raise slurm.JobError(f"run={names!r}: give each configuration a `run` of its own, the name of its folder")
    for configuration in configurations:
        check_same(configuration)
    shown, before = DisplayHandle(), state(configurations)
    shown.display(before)
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(one, configuration) for configuration in configurations]
        try:
            while wait(futures, timeout=1).not_done:
                if not (now := state(configurations)).equals(before):
                    shown.update(before := now)
        except BaseException:  # an interrupt: the job that runs goes on, and the next sweep waits for it
            end(futures)
            raise
    shown.update(state(configurations))
    if failed := [str(future.exception()) for future in futures if future.exception()]:
        raise slurm.JobError(f"{len(failed)} of {len(futures)} failed: {failed[0]}")
    return state(configurations)


def check_same(configuration: Mapping[str, object]) -> None:
    """Raise JobError if the run folder holds a run that was asked for with other values, as its notebook says."""
    copy = attempts(configuration)[-1] / JOB.name
    try:
        before = json.loads(copy.read_text())["metadata"]["papermill"]["parameters"]
    except (OSError, ValueError, KeyError):  # none there, or papermill was killed while it wrote
        before = configuration
    other = sorted(name for name in {*before, *configuration} - {"run"} if before.get(name) != configuration.get(name))
    if other:
        values = ", ".join(f"{name} was {before.get(name)!r}, now {configuration.get(name)!r}" for name in other)
        raise slurm.JobError(f"run {configuration['run']} holds another run ({values}): choose another name for it")


def one(configuration: Mapping[str, object]) -> None:
    """Run one configuration, unless it is done; wait for it, if it is under way."""
    folder = attempts(configuration)[-1]
    try:  # also where the run ended while nobody watched: what Slurm says of it is missing
        if runs.read(folder).job.get("state") == "PENDING" and under_way(folder):
            slurm.collect(folder)
    except slurm.JobError:  # Slurm has forgotten the job
        if not done(folder):
            raise
    if done(folder):
        return
    if folder.exists():  # it failed, or was cancelled: that record stays as it is
        folder = folder.with_name(f"{attempts(configuration)[0].name}-try{len(attempts(configuration)) + 1}")
    execute(JOB, folder / JOB.name, **configuration | {"run": str(folder.relative_to(RUNS))})


def attempts(configuration: Mapping[str, object]) -> list[Path]:
    """The run folders of a configuration, first to last."""
    first = RUNS / str(configuration["run"])
    later = [first.with_name(f"{first.name}-try{number}") for number in range(2, 100)]
    return [first, *(folder for folder in later if folder.exists())]


def done(folder: Path) -> bool:
    """Whether the run here is finished."""
    return runs.read(folder).state == "done"


def under_way(folder: Path) -> bool:
    """Wait for the job that was submitted here before an interruption; False if there is none."""
    if not (folder / "job.json").exists() or not (number := known(folder)["job_id"]):
        return False
    while any(task.active for task in slurm.look(number)):
        time.sleep(1)
    return True


def end(futures: Sequence[Future]) -> None:
    """Start nothing more, and end the kernels of the notebooks that are being executed."""
    for future in futures:
        future.cancel()
    for child in psutil.Process().children():
        if any("ipykernel" in word for word in child.cmdline()):
            child.kill()


def state(configurations: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """A row for each configuration: where it stands, and what came out."""
    rows = []
    for configuration in configurations:
        run = runs.read(attempts(configuration)[-1])
        last = run.epochs[-1] if run.epochs else {}
        row = {"run": run.folder.name, "state": stands(run), "job": run.job.get("job_id")}
        row |= {"ranks": run.env.get("world_size"), "epochs": len(run.epochs)}
        row |= {"images/s": rounded(last.get("images_per_second"), 0)}
        rows.append(row | {"test accuracy": rounded(last.get("test_accuracy"), 4)})
    return pd.DataFrame(rows, dtype=object).set_index("run").fillna("")


def stands(run: runs.Run) -> str:
    """The state of a run, or what happens before it has one: waits for its turn, or starts."""
    if not run.folder.exists():
        return "waits"
    return "starts" if run.state == "unknown" and run.job.get("state", "WRITTEN") == "WRITTEN" else run.state


def rounded(value: float | None, digits: int) -> float | int | None:
    """A number as short as the table shows it; None stays None."""
    return value if value is None else round(value, digits or None)
