"""Read the record of one run, or a table of many, in one process; it needs only run folders."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

# The state of a run by Slurm's final state of its job; for COMPLETED the run's own state counts.
_ENDS = {
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "TIMEOUT": "timed out",
    "DEADLINE": "timed out",
    "OUT_OF_MEMORY": "out of memory",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted",
}
# The state of a run without a recorded state, by its job's.
_EARLY_STATES = {"PENDING": "pending", "COMPLETED": "done, no record"}
# Settings that have their own column, and settings that change no result.
_OTHER_COLUMNS = {"batch_size", "batch_size_per_rank", "seed"}
_IDLE_SETTINGS = {
    "data",
    "run_dir",
    "num_workers",
    "test_batch_size",
    "log_interval",
    "timeout",
    "save_model",
    "resume",
    "checkpoint_every",
    "vote_every",
}
# The names of two fields of a job in records from before December 2026.
_OLD_NAMES = {"tasks_per_node": "ranks_per_node", "cpus_per_task": "cpus_per_rank"}
# What a table counts, times or draws: a number, or absent. All other values have any type.
_NUMBERS = {
    "spec.json": ("batch_size", "batch_size_per_rank"),
    "env.json": ("world_size", "global_batch_size", "train_set", "cpus"),
    "job.json": ("seconds", "batch_size_per_rank", "nodes", "ranks_per_node", "cpus_per_rank"),
    "metrics.jsonl": (
        "images_per_second",
        "seconds",
        "data_seconds",
        "test_seconds",
        "train_loss",
        "test_loss",
        "train_accuracy",
        "test_accuracy",
    ),
}


@dataclass
class RunRecord:
    """The record of one run, as far as it was written. `problems` lists the unreadable parts."""

    folder: Path
    spec: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The state in which the run ended: its job's, else its recorded one.

        "unknown" if it recorded none, as when it was killed early.
        """
        of_run, of_job = self.status.get("state"), self.job.get("state") or ""
        if of_run == "preempted" and of_job == "FAILED":
            return "preempted"  # it left with an error so that it is started again
        return _ENDS.get(of_job) or of_run or _EARLY_STATES.get(of_job, "unknown")

    @property
    def damage(self) -> list[str]:
        """List the unreadable parts.

        Nothing for a job that has no record because it still waits, or trains nothing.
        """
        has_begun = self.status or self.epochs or (self.folder / "spec.json").exists()
        return self.problems if has_begun else []

    @property
    def _job_fields(self) -> dict[str, Any]:
        """The fields of the run's job: {} if it had none."""
        fields = self.job.get("job")
        return fields if isinstance(fields, dict) else {}

    @property
    def _places(self) -> list[dict[str, Any]]:
        """Where each rank ran: [] if that is not recorded in a form of the course."""
        ranks = self.env.get("ranks")
        return [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []

    def row(self) -> dict[str, Any]:
        """Return the setting of the run, and where it ran, as one row of the table."""
        env = self.env
        launcher = "single" if self.ranks == 1 else None
        return {
            "run": self.folder.name,
            "state": self.state,
            "dataset": env.get("dataset"),
            "train_set": env.get("train_set"),
            "machine": self.machine,
            "site": self.job.get("site"),
            "job_id": env.get("job_id"),
            "launcher": env.get("launcher", launcher),
            "world_size": self.ranks,
            "nodes": self.nodes,
            "cpus_per_rank": self._job_fields.get("cpus_per_rank", env.get("cpus")),
            **self._batch(),
            "seed": self.spec.get("seed"),
            "job_seconds": self.job.get("seconds"),
        }

    def _batch(self) -> dict[str, Any]:
        """The per-rank batch size and the effective batch size: None if not recorded.

        scaling: "weak" if the batch was given for one rank, else "strong".
        """
        spec, ranks = self.spec, self.ranks
        per_rank, together = spec.get("batch_size_per_rank"), spec.get("batch_size")
        per_rank = per_rank or self.job.get("batch_size_per_rank")
        scaling = "weak" if per_rank else "strong"
        if per_rank:
            together = per_rank * ranks if ranks else None
        together = self.env.get("global_batch_size") or together
        if not per_rank and together and ranks and together % ranks == 0:
            per_rank = together // ranks
        return {"batch_per_rank": per_rank, "global_batch": together, "scaling": scaling}

    @property
    def tasks(self) -> set[Path]:
        """The run folders of the tasks, if this is the job of an array and not one task."""
        if self.job.get("task"):
            return set()
        values = self._job_fields.get("array") or ()
        names = [f"{self.folder.name}-{task}" for task in range(len(values))]
        return {self.folder.with_name(name) for name in names}

    @property
    def machine(self) -> str | None:
        """The chips of all ranks, each once; in brackets after CPU if the ranks used CPUs."""
        ranks = self._places or [self.env]
        chips = sorted({str(part["chip"]) for part in [self.env, *ranks] if part.get("chip")})
        if not chips:
            return None
        names = ", ".join(chips)
        return f"CPU ({names})" if ranks[0].get("device") == "cpu" else names

    @property
    def ranks(self) -> int | None:
        """The number of ranks: the run's own, else its job's; a script without either is one."""
        job = self._job_fields
        number = 1 if self.env else None
        if self.env and {"nodes", "ranks_per_node"} <= job.keys():
            number = job["nodes"] * job["ranks_per_node"]
        return self.env.get("world_size", number)

    @property
    def nodes(self) -> int | None:
        """The number of nodes: the run's own, else its job's.

        Nodes that the launcher simulates count as nodes.
        """
        seen = sum(rank.get("local_rank") == 0 for rank in self._places)
        single = 1 if self.ranks == 1 else None
        return seen or self._job_fields.get("nodes") or single


def read_run(folder: str | Path) -> RunRecord:
    """Read the record in a run folder.

    A missing file or a half-written line is listed in `problems`, never filled in. If a text
    replaces a number, the entire run is left out: its state is "damaged", and it has no other
    values.
    """
    run = RunRecord(Path(folder))
    run.spec = _read_object(run, "spec.json")
    run.env = _read_object(run, "env.json")
    run.status = _read_object(run, "status.json")
    run.job = _read_object(run, "job.json")
    for number, line in enumerate(_metrics_lines(run), 1):
        try:
            epoch = parse_object(line)
        except ValueError:
            epoch = {}
        if type(epoch.get("epoch")) is not int:
            run.problems.append(f"metrics.jsonl line {number}: half-written, left out")
        else:
            run.epochs.append(epoch)
    if wrong := _no_number(run):
        return RunRecord(run.folder, status={"state": "damaged"}, problems=[*run.problems, wrong])
    return run


def parse_object(content: str) -> dict[str, Any]:
    """Read the JSON object in a text; a job in it gets the current names.

    Raises ValueError if the text is anything else.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} instead of names and values")
    if isinstance(job := value.get("job"), dict):
        value["job"] = {_OLD_NAMES.get(name, name): content for name, content in job.items()}
    return value


def _no_number(run: RunRecord) -> str:
    """Name the first of a record's _NUMBERS that is not a number; '' if all are."""
    contents = {
        "spec.json": [run.spec],
        "env.json": [run.env],
        "job.json": [run.job | run._job_fields],
        "metrics.jsonl": run.epochs,
    }
    for file, names in _NUMBERS.items():
        for content, name in product(contents[file], names):
            value = content.get(name)
            if not isinstance(value, int | float | None):
                return f"{file}: {name} is {short(value)}, no number: the run is left out"
    return ""


def _read_object(run: RunRecord, file: str) -> dict[str, Any]:
    """Read one of a run's JSON files; {} if it is unreadable. Adds to the run's problems."""
    try:
        return parse_object((run.folder / file).read_text())
    except (OSError, ValueError) as error:
        is_no_job = file == "job.json" and isinstance(error, FileNotFoundError)
        if not is_no_job:
            run.problems.append(f"{file}: {type(error).__name__}")
        return {}


def _metrics_lines(run: RunRecord) -> list[str]:
    """Read the lines of a run's epochs; none if they are unreadable. Adds to its problems."""
    try:
        return (run.folder / "metrics.jsonl").read_text(errors="replace").splitlines()
    except (OSError, ValueError) as error:
        is_in_first_epoch = run.status and isinstance(error, FileNotFoundError)
        if not is_in_first_epoch:
            run.problems.append(f"metrics.jsonl: {type(error).__name__}")
        return []


def table(*folders: str | Path) -> "pd.DataFrame":
    """Return every epoch of these runs: one row each, with the run's settings.

    A folder is a run folder, or contains run folders. A run without an epoch has one row, so that
    failed and cancelled runs are visible. Settings in which the runs differ, such as lr, have their
    own columns, and are in `asked`, as in lr=0.1. Prints the unreadable parts to stderr.
    """
    import pandas as pd  # here: it takes half a second, and commands that make jobs need no table

    paths = sorted(path for folder in folders for path in run_folders(Path(folder)))
    recorded = [read_run(path) for path in paths]
    for run in recorded:
        for problem in run.damage:
            print(f"{run.folder.name}: {problem}", file=sys.stderr)
    names = _different_settings(recorded)
    known = {run.folder for run in recorded}
    rows = []
    for run in recorded:
        if run.tasks and run.tasks <= known:
            continue  # each task of the array has its own run
        settings = {name: run.spec.get(name) for name in names}
        given = [f"{name}={value}" for name, value in settings.items() if value is not None]
        row = settings | {"asked": ", ".join(given)} | run.row()
        for epoch in run.epochs or [{}]:
            rows.append(row | epoch | row)  # even if a line has the same names
    return pd.DataFrame(rows)


def _different_settings(runs: Sequence[RunRecord]) -> list[str]:
    """List the names in spec.json whose values differ between runs.

    It omits settings that have a column anyway, settings that change no result, and paths in a
    run's own folder.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.spec.items():
            is_path = isinstance(value, str) and value.startswith("/")
            if not (is_path and run.folder.name in Path(value).parts):
                text = json.dumps(value, sort_keys=True, default=str)
                values.setdefault(name, set()).add(text)
    left_out = _OTHER_COLUMNS | _IDLE_SETTINGS
    return sorted(name for name in values.keys() - left_out if len(values[name]) > 1)


def run_folders(folder: Path) -> list[Path]:
    """List the folder itself, if it is a run folder, and its subfolders that are run folders."""
    folders = [folder, *folder.glob("*/")]
    files = ("spec.json", "job.json")
    return [path for path in folders if any((path / file).exists() for file in files)]


def new_run_folder(folder: str | Path, name: str) -> Path:
    """Return a run folder that does not exist yet: name-1, or the next number that is free.

    Raises FileExistsError if 99,999 exist.
    """
    for number in range(1, 100_000):
        path = Path(folder) / f"{name}-{number}"
        if not path.exists():
            return path
    raise FileExistsError(f"{folder} holds {name}-1 to {name}-99999: choose another folder")
