"""Read run records: one as an object, many as one table."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd


@dataclass
class Run:
    """One run record, as far as it was written. `problems` names what could not be read."""

    folder: Path
    spec: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    status: dict = field(default_factory=dict)
    epochs: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Running, done or failed; unknown where the run was killed too early to say."""
        return self.status.get("state", "unknown")


def read(folder: str | Path) -> Run:
    """The record in a run folder. A missing file or a half-written line is named in `problems`, never invented."""
    run = Run(Path(folder))
    for name in ("spec", "env", "status"):
        try:
            setattr(run, name, json.loads((run.folder / f"{name}.json").read_text()))
        except (OSError, ValueError) as error:
            run.problems.append(f"{name}.json: {type(error).__name__}")
    try:
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    except (OSError, ValueError) as error:
        run.problems.append(f"metrics.jsonl: {type(error).__name__}")
        lines = []
    for number, line in enumerate(lines, 1):
        try:
            epoch = json.loads(line)
            epoch["epoch"] += 0
            run.epochs.append(epoch)
        except (ValueError, TypeError, KeyError):
            run.problems.append(f"metrics.jsonl line {number}: half-written, left out")
    return run


def table(folder: str | Path) -> pd.DataFrame:
    """Every epoch of every run in a folder of run folders: a row each, with the run's setting beside it."""
    rows = []
    for path in sorted(Path(folder).glob("*/spec.json")):
        run = read(path.parent)
        for problem in run.problems:
            print(f"{path.parent.name}: {problem}", file=sys.stderr)
        setting = {"run": path.parent.name, "state": run.state, "dataset": run.env.get("dataset")}
        setting |= {name: run.env.get(name) for name in ("launcher", "world_size")}
        setting |= {"batch_size": run.spec.get("batch_size")}
        rows += [setting | epoch for epoch in run.epochs or [{}]]
    return pd.DataFrame(rows)
