"""Run slurm/job.ipynb once for each configuration, and go on after an interruption where it was left."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pandas as pd
import psutil
from IPython.display import display

from ddp_helpers import ROOT
from ddp_helpers.notebook import runs, slurm
from ddp_helpers.notebook.parameters import check_names, execute
from ddp_helpers.notebook.slurm.files import known

JOB = ROOT / "slurm" / "job.ipynb"
RUNS = ROOT / "runs"


def sweep(configurations: Sequence[Mapping[str, object]], at_once: int = 1) -> pd.DataFrame:
    """Run each configuration that has no finished run yet, so many jobs at once, and show them in a table meanwhile.

    A configuration is the parameters of slurm/job.ipynb; its `run` names the run folder. The executed notebook lies in
    that folder. Raises JobError, after the others have run, if a job fails; with nothing run, if a name is wrong.
    """
    for configuration in configurations:
        check_names(JOB, configuration)
    shown = display(state(configurations), display_id=True)
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(one, configuration) for configuration in configurations]
        try:
            while wait(futures, timeout=1).not_done:
                shown.update(state(configurations))
        except BaseException:  # an interrupt: the job that runs goes on, and the next sweep waits for it
            end(futures)
            raise
    shown.update(state(configurations))
    if failed := [str(future.exception()) for future in futures if future.exception()]:
        raise slurm.JobError(f"{len(failed)} of {len(futures)} failed: {failed[0]}")
    return state(configurations)


def one(configuration: Mapping[str, object]) -> None:
    """Run one configuration, unless it is done; wait for it, if it is under way."""
    folder = attempts(configuration)[-1]
    if not done(folder) and under_way(folder):
        slurm.collect(folder)
    if done(folder):
        return
    if folder.exists():  # it failed, or was cancelled: that record stays as it is
        folder = folder.with_name(f"{attempts(configuration)[0].name}-{len(attempts(configuration)) + 1}")
    execute(JOB, folder / JOB.name, **configuration | {"run": str(folder.relative_to(RUNS))})


def attempts(configuration: Mapping[str, object]) -> list[Path]:
    """The run folders of a configuration, first to last."""
    first = RUNS / str(configuration["run"])
    later = [first.with_name(f"{first.name}-{number}") for number in range(2, 100)]
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
        row = {
            "run": run.folder.name,
            "state": run.state if run.folder.exists() else "waits",
            "job": run.job.get("job_id"),
        }
        row |= {
            "ranks": run.env.get("world_size"),
            "epochs": len(run.epochs),
            "images/s": last.get("images_per_second"),
        }
        rows.append(row | {"test accuracy": last.get("test_accuracy")})
    return pd.DataFrame(rows).set_index("run").fillna("")
