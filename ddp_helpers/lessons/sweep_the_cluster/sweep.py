"""Run a sweep for notebook 08: slurm/job.ipynb executed by papermill, once for each configuration."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pandas as pd
import psutil
from IPython.display import DisplayHandle

from ddp_helpers import ROOT, jobs
from ddp_helpers.jobs.parameters import check_names, execute
from ddp_helpers.jobs.run import known
from ddp_helpers.records import runs

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
