"""Read run records, one as an object, many as one table, and leave out values that cannot be used."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING


def whole(value: object) -> bool:
    """Whether it is a whole number, of a size that a table can hold."""
    return type(value) is int and abs(value) < 2**63


def number(value: object) -> bool:
    """Whether it is a number; one that is not finite too, as the loss of a run that diverged."""
    return whole(value) or type(value) is float


def finite(value: object) -> bool:
    """Whether it is a number that can be rounded, summed and drawn."""
    return number(value) and isfinite(value)


def text(value: object) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def ranks(value: object) -> bool:
    """Whether it says of each rank where it ran."""
    return isinstance(value, list) and all(isinstance(one, dict) and sound_rank(one) for one in value)


def sound_rank(one: dict) -> bool:
    """Whether it says which rank of its node this was, or of which node, and its device."""
    return whole(one.get("local_rank", one.get("node"))) and text(one.get("device")) and text(one.get("chip", ""))


def asked(value: object) -> bool:
    """Whether it is what was asked of Slurm, as far as a table shows it."""
    if not isinstance(value, dict):
        return False
    counts = (value.get(name, 0) for name in ("cpus_per_task", "nodes", "tasks_per_node"))
    return all(map(whole, counts)) and isinstance(value.get("array", []), list)


FIELDS = {
    "spec.json": dict.fromkeys(("batch_size", "batch_size_per_rank", "global_batch_size", "seed", "epochs"), whole),
    "env.json": dict.fromkeys(("world_size", "global_batch_size", "cpus", "cpus_per_rank", "train_set"), whole)
    | dict.fromkeys(("launcher", "job_id", "dataset", "chip", "device"), text)
    | {"ranks": ranks},
    "status.json": {"state": text},
    "job.json": dict.fromkeys(("state", "site", "task", "job_id"), text) | {"seconds": finite, "job": asked},
    "metrics.jsonl": dict.fromkeys(("train_loss", "test_loss"), number)
    | dict.fromkeys(("train_accuracy", "test_accuracy", "images_per_second"), finite)
    | dict.fromkeys(("seconds", "data_seconds", "test_seconds"), finite)
    | {"epoch": whole},
}


def parsed(content: str) -> dict:
    """The JSON object in a text. Raises ValueError if it holds anything else."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} instead of names and values")
    return found


def fitting(content: dict, file: str) -> tuple[dict, list[str]]:
    """Keep the values of a file that have the right type; report each other one in a line. None is a missing value."""
    kinds = FIELDS[file].items()
    wrong = [key for key, fits in kinds if content.get(key) is not None and not fits(content[key])]
    return content | dict.fromkeys(wrong), [f"{key} is {short(content[key])}, left out" for key in wrong]


if TYPE_CHECKING:
    import pandas as pd

# Slurm's last word on a job, as the state of its run; COMPLETED leaves it to the run itself.
ENDS = dict.fromkeys(("FAILED", "NODE_FAIL", "BOOT_FAIL"), "failed") | dict.fromkeys(
    ("TIMEOUT", "DEADLINE"), "timed out"
)
ENDS |= {"OUT_OF_MEMORY": "out of memory", "CANCELLED": "cancelled", "PREEMPTED": "preempted"}
SHOWN_OR_IDLE = {"batch_size", "batch_size_per_rank", "global_batch_size", "seed", "data", "run_dir", "num_workers"}
SHOWN_OR_IDLE |= {
    "test_batch_size",
    "log_interval",
    "timeout",
    "save_model",
    "resume",
    "checkpoint_every",
    "vote_every",
}


@dataclass
class Run:
    """One run record, as far as it was written. `problems` names what could not be read."""

    folder: Path
    spec: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    status: dict = field(default_factory=dict)
    job: dict = field(default_factory=dict)
    epochs: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The state in which the run ended: its job's, else the one it recorded; unknown if it was killed early."""
        if self.status.get("state") == "preempted" and self.job.get("state") == "FAILED":
            return "preempted"  # it left with an error so that it is started again
        early = {"PENDING": "pending", "COMPLETED": "done, no record"}.get(self.job.get("state"), "unknown")
        return ENDS.get(self.job.get("state")) or self.status.get("state") or early

    @property
    def damage(self) -> list[str]:
        """List what could not be read; nothing for a job that still waits or trains nothing, which has no record."""
        begun = self.status or self.epochs or (self.folder / "spec.json").exists()
        return self.problems if begun else []

    def row(self) -> dict:
        """Return the setting of the run, and where it ran, as one row of the table."""
        env, asked = self.env, self.job.get("job") or {}
        row = {"run": self.folder.name, "state": self.state, "dataset": env.get("dataset")}
        row |= {"train_set": env.get("train_set"), "machine": self.machine, "site": self.job.get("site")}
        row |= {"job_id": env.get("job_id"), "launcher": env.get("launcher", "single" if self.ranks == 1 else None)}
        row |= {"world_size": self.ranks, "nodes": self.nodes}
        row |= {"cpus_per_task": asked.get("cpus_per_task", env.get("cpus", env.get("cpus_per_rank")))}
        return row | self.batch() | {"seed": self.spec.get("seed"), "job_seconds": self.job.get("seconds")}

    def batch(self) -> dict:
        """The samples of a step, of one rank and of all, None where no record says; strong, or weak: given per rank."""
        spec, ranks = self.spec, self.ranks
        per_rank, together = spec.get("batch_size_per_rank"), spec.get("batch_size")
        if "global_batch_size" in spec:  # in such records batch_size is that of a rank
            together = spec["global_batch_size"]
            per_rank = None if together else spec.get("batch_size")
        kind = "weak" if per_rank else "strong"
        if per_rank:
            together = per_rank * ranks if ranks else None
        together = self.env.get("global_batch_size") or together
        if not per_rank and together and ranks and together % ranks == 0:
            per_rank = together // ranks
        return {"batch_per_rank": per_rank, "global_batch": together, "scaling": kind}

    @property
    def tasks(self) -> set[Path]:
        """The folders of the tasks, where this is the job of an array and no task of one."""
        values = () if self.job.get("task") else (self.job.get("job") or {}).get("array") or ()
        return {self.folder.with_name(f"{self.folder.name}-{task}") for task in range(len(values))}

    @property
    def machine(self) -> str | None:
        """The chips that made the run, as in 4 x NVIDIA A100; or 2 ranks on a processor."""
        ranks = self.env.get("ranks") or [self.env]
        chips = sorted({one["chip"] for one in [self.env, *ranks] if one.get("chip")})
        if not chips:
            return None
        return ", ".join(chips) if ranks[0].get("device") != "cpu" else f"CPU ({', '.join(chips)})"

    @property
    def ranks(self) -> int | None:
        """The number of ranks: what the run says, else what its job was asked for; a script without either is one."""
        asked = self.job.get("job") or {}
        number = asked["nodes"] * asked["tasks_per_node"] if {"nodes", "tasks_per_node"} <= asked.keys() else 1
        return self.env.get("world_size", number if self.env else None)

    @property
    def nodes(self) -> int | None:
        """On how many nodes it ran, or was to run; what the launcher pretends to be several counts as such."""
        ranks = self.env.get("ranks") or []
        numbered = {one["node"] for one in ranks if "node" in one}  # by runs of the first edition
        seen = len(numbered) or sum(one["local_rank"] == 0 for one in ranks)
        return seen or (self.job.get("job") or {}).get("nodes") or (1 if self.ranks == 1 else None)


def read(folder: str | Path) -> Run:
    """The record in a run folder. A missing file or a half-written line is named in `problems`, never invented."""
    run = Run(Path(folder))
    for name in ("spec", "env", "status", "job"):
        try:
            content, wrong = fitting(parsed((run.folder / f"{name}.json").read_text()), f"{name}.json")
            setattr(run, name, content)
            run.problems += [f"{name}.json: {what}" for what in wrong]
        except (OSError, ValueError) as error:
            if name != "job" or not isinstance(error, FileNotFoundError):  # not every run was a job
                run.problems.append(f"{name}.json: {type(error).__name__}")
    try:
        lines = (run.folder / "metrics.jsonl").read_text(errors="replace").splitlines()
    except (OSError, ValueError) as error:
        if not (run.status and isinstance(error, FileNotFoundError)):  # a run that is in its first epoch has none yet
            run.problems.append(f"metrics.jsonl: {type(error).__name__}")
        lines = []
    for number, line in enumerate(lines, 1):
        try:
            epoch, wrong = fitting(parsed(line), "metrics.jsonl")
            epoch["epoch"] += 0
        except (ValueError, TypeError, KeyError):
            run.problems.append(f"metrics.jsonl line {number}: half-written, left out")
        else:
            run.epochs.append(epoch)
            run.problems += [f"metrics.jsonl line {number}: {what}" for what in wrong]
    return run


def table(*folders: str | Path) -> "pd.DataFrame":
    """Every epoch of these runs: a row each, with the run's setting beside it. A folder is a run's, or holds such.

    A run without an epoch has one row, so that a failed or cancelled one is seen too. What the runs were asked for
    with different values, such as lr, has columns of its own, and stands in `asked`, as in lr=0.1.
    """
    import pandas as pd  # here, since it takes half a second, and a command that makes a job has no table

    rows, found = [], []
    for path in sorted(path for folder in folders for path in run_folders(Path(folder))):
        run = read(path)
        for problem in run.damage:
            print(f"{path.name}: {problem}", file=sys.stderr)
        found.append(run)
    different, known = differing(found), {run.folder for run in found}
    for run in found:
        if run.tasks and run.tasks <= known:
            continue  # each task of the array has a run of its own
        own = {name: run.spec.get(name) for name in different}
        own["asked"] = ", ".join(f"{name}={value}" for name, value in own.items() if value is not None)
        setting = own | run.row()
        rows += [setting | epoch | setting for epoch in run.epochs or [{}]]  # whatever else a line holds
    return pd.DataFrame(rows)


def differing(found: Sequence[Run]) -> list[str]:
    """List the spec values that differ between runs, but those that have a column anyway, or change no result."""
    values: dict[str, set] = {}
    for run in found:
        for name, value in run.spec.items():
            where = Path(value).parts if isinstance(value, str) and value.startswith("/") else ()
            if run.folder.name not in where:  # a path in the run's own folder is no setting
                values.setdefault(name, set()).add(json.dumps(value, sort_keys=True, default=str))
    return sorted(name for name, seen in values.items() if len(seen) > 1 and name not in SHOWN_OR_IDLE)


def run_folders(folder: Path) -> list[Path]:
    """The folder itself, if a run was asked for here, or those of its folders where one was."""
    return [
        path for path in [folder, *folder.glob("*/")] if (path / "spec.json").exists() or (path / "job.json").exists()
    ]


def fresh(folder: str | Path, name: str) -> Path:
    """A run folder that does not exist yet: name-1, or the next number that is free."""
    numbers = (number for number in range(1, 100_000) if not (Path(folder) / f"{name}-{number}").exists())
    return Path(folder) / f"{name}-{next(numbers)}"
