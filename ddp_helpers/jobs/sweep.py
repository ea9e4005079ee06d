"""Run a sweep: slurm/job.ipynb, executed by papermill once for each configuration.

papermill does not check the names of parameters: `check_names` does, before anything runs, and in
job.ipynb itself. It runs on a login node or a laptop.
"""

import ast
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from difflib import get_close_matches
from pathlib import Path

import pandas as pd
import psutil
from IPython.display import DisplayHandle

from ddp_helpers import ROOT, RUNS
from ddp_helpers.jobs.files import read_job_record
from ddp_helpers.jobs.job import JobError
from ddp_helpers.jobs.monitor import collect
from ddp_helpers.jobs.queue import states_of_job
from ddp_helpers.records import runs

JOB = ROOT / "slurm" / "job.ipynb"
Configuration = Mapping[str, object]  # the parameters of slurm/job.ipynb
# Names that every kernel has.
_KERNEL_NAMES = {"In", "Out", "exit", "quit", "open", "get_ipython"}


def sweep(configurations: Sequence[Configuration], at_once: int = 1) -> pd.DataFrame:
    """Run each configuration that has no finished run yet, and show them in a table meanwhile.

    The `run` of a configuration names its run folder, in which the executed notebook is kept.
    at_once: the number of jobs that run at the same time. Returns the table; see `state`.
    Raises JobError after all have run if a job fails; with nothing run, if a name is wrong or a run
    folder has a run with different values.
    """
    _check(configurations)
    display = DisplayHandle()
    table = sweep_table(configurations)
    display.display(table)
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(_run, configuration) for configuration in configurations]
        try:
            while wait(futures, timeout=1).not_done:
                current = sweep_table(configurations)
                if not current.equals(table):
                    table = current
                    display.update(table)
        except BaseException:
            # An interrupt: the running job continues, and the next sweep waits for it.
            _end(futures)
            raise
    table = sweep_table(configurations)
    display.update(table)
    errors = [str(error) for future in futures if (error := future.exception())]
    if errors:
        raise JobError(f"{len(errors)} of {len(futures)} failed: {errors[0]}")
    return table


def _check(configurations: Sequence[Configuration]) -> None:
    """Raise JobError if a name is no parameter, or two configurations share a run folder."""
    for configuration in configurations:
        check_names(JOB, configuration)
    names = [configuration.get("run") for configuration in configurations]
    distinct = {str(name) for name in names}
    if not all(names) or len(distinct) < len(names):
        advice = "give each configuration a `run` of its own, the name of its folder"
        raise JobError(f"run={names!r}: {advice}")
    for configuration in configurations:
        _check_values(configuration)


def _check_values(configuration: Configuration) -> None:
    """Raise JobError if the notebook in the run folder has different values."""
    copy = _attempts(configuration)[-1] / JOB.name
    try:
        recorded = json.loads(copy.read_text())["metadata"]["papermill"]["parameters"]
    except (OSError, ValueError, KeyError):
        return  # no notebook, or papermill was killed while writing
    different = [
        f"{name} was {recorded.get(name)!r}, now {configuration.get(name)!r}"
        for name in sorted({*recorded, *configuration} - {"run"})
        if recorded.get(name) != configuration.get(name)
    ]
    if different:
        mistake = f"run {configuration['run']} holds another run ({', '.join(different)})"
        raise JobError(f"{mistake}: choose another name for it")


def _run(configuration: Configuration) -> None:
    """Run one configuration, unless it is done; wait for its job, if one is under way."""
    attempts = _attempts(configuration)
    folder = attempts[-1]
    _collect_if_abandoned(folder)
    if runs.read_run(folder).state == "done":
        return
    if folder.exists():  # it failed, or was cancelled: that record stays unchanged
        folder = folder.with_name(f"{attempts[0].name}-try{len(attempts) + 1}")
    parameters = {**configuration, "run": str(folder.relative_to(RUNS))}
    execute(JOB, folder / JOB.name, **parameters)


def _collect_if_abandoned(folder: Path) -> None:
    """Collect a job that was not watched to its end, so that its record has Slurm's data.

    Raises JobError if Slurm no longer has a job whose run is not done.
    """
    try:
        if runs.read_run(folder).job.get("state") == "PENDING" and _wait_for_job(folder):
            collect(folder)
    except JobError:
        if runs.read_run(folder).state != "done":
            raise


def _attempts(configuration: Configuration) -> list[Path]:
    """List the run folders of a configuration, first to last; the first need not exist."""
    first = RUNS / str(configuration["run"])
    later = [first.with_name(f"{first.name}-try{number}") for number in range(2, 100)]
    return [first, *(folder for folder in later if folder.exists())]


def _wait_for_job(folder: Path) -> bool:
    """Wait for the job that was submitted here before an interruption; False if there is none."""
    if not (folder / "job.json").exists():
        return False
    job_id = read_job_record(folder)["job_id"]
    if not job_id:
        return False
    while any(task.active for task in states_of_job(job_id)):
        time.sleep(0.5)
    return True


def _end(futures: Sequence[Future]) -> None:
    """Start nothing more, and end the kernels of the notebooks that are being executed."""
    for future in futures:
        future.cancel()
    for child in psutil.Process().children():
        if any("ipykernel" in argument for argument in child.cmdline()):
            child.kill()


def sweep_table(configurations: Sequence[Configuration]) -> pd.DataFrame:
    """Tabulate the state and the results of each configuration: one row per run."""
    rows = [_row(runs.read_run(_attempts(configuration)[-1])) for configuration in configurations]
    return pd.DataFrame(rows, dtype=object).set_index("run").fillna("")


def _row(run: runs.RunRecord) -> dict[str, object]:
    """Make the row of a run."""
    last = run.epochs[-1] if run.epochs else {}
    speed, accuracy = last.get("images_per_second"), last.get("test_accuracy")
    return {
        "run": run.folder.name,
        "state": _state(run),
        "job": run.job.get("job_id"),
        "ranks": run.env.get("world_size"),
        "epochs": len(run.epochs),
        "images/s": "" if speed is None else round(speed),
        "test accuracy": "" if accuracy is None else round(accuracy, 4),
    }


def _state(run: runs.RunRecord) -> str:
    """Return the state of a run; before it has one, that it waits or starts."""
    if not run.folder.exists():
        return "waits"
    if run.state == "unknown" and run.job.get("state", "WRITTEN") == "WRITTEN":
        return "starts"
    return run.state


def check_names(notebook: str | Path, names: Iterable[str]) -> None:
    """Raise JobError for a name that is no parameter of the notebook.

    notebook: its path, relative to the checkout. Names of the kernel, and names that start with an
    underscore, are ignored. papermill would run a name that is no identifier as code.
    """
    known = _parameter_names(ROOT / notebook)
    for name in names:
        is_private = name.startswith("_") and name.isidentifier()
        if name in known or name in _KERNEL_NAMES or is_private:
            continue
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
        raise JobError(f"{Path(notebook).name} has no parameter {name!r}: {hint}")


def _parameter_names(notebook: Path) -> list[str]:
    """The names that the cell tagged `parameters` gives a value."""
    cells = json.loads(notebook.read_text())["cells"]
    for cell in cells:
        if "parameters" in cell["metadata"].get("tags", []):
            statements = ast.parse("".join(cell["source"])).body
            assignments = [node for node in statements if isinstance(node, ast.Assign)]
            return [ast.unparse(node.targets[0]) for node in assignments]
    return []


def execute(notebook: str | Path, output: str | Path, **parameters: object) -> None:
    """Execute a notebook with these parameters; keep the copy at `output`.

    notebook: its path, relative to the checkout. Raises JobError, with nothing executed, if it has
    no such parameter; or if one of its cells fails.
    """
    import papermill  # here: it takes a second, and the job's kernel only checks names
    from papermill.exceptions import PapermillExecutionError

    from ddp_helpers.launch.kernels import KernelOnFiles

    check_names(notebook, parameters)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    try:
        papermill.execute_notebook(
            _braced(ROOT / notebook),
            _braced(output),
            parameters,
            kernel_name="python3",
            progress_bar=False,
            log_output=False,
            kernel_manager_class=KernelOnFiles,
        )
    except PapermillExecutionError as error:
        name = Path(notebook).name
        raise JobError(f"{name} failed: {error.ename}: {error.evalue}") from None


def _braced(path: str | Path) -> str:
    """Double the braces of a path: papermill would treat them as placeholders."""
    return str(path).replace("{", "{{").replace("}", "}}")
