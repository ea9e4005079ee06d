"""Read a file of a run's record, and leave out values that cannot be used.

`runs` calls it for each file, and `jobs` for job.json, in one process.
"""

import json
from collections.abc import Callable
from math import isfinite
from reprlib import repr as short
from typing import Any


def _is_int(value: object) -> bool:
    """Whether it is a whole number, of a size that a table can hold."""
    return type(value) is int and abs(value) < 2**63


def _is_number(value: object) -> bool:
    """Whether it is a number; also one that is not finite, as the loss of a run that diverged."""
    return _is_int(value) or type(value) is float


def _is_finite(value: object) -> bool:
    """Whether it is a number that can be rounded, summed and drawn."""
    return isinstance(value, int | float) and _is_number(value) and isfinite(value)


def _is_text(value: object) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def _are_ranks(value: object) -> bool:
    """Whether it is a list that says of each rank where it ran."""
    return isinstance(value, list) and all(_is_rank(rank) for rank in value)


def _is_rank(value: object) -> bool:
    """Whether it names the device of a rank, and its local rank."""
    if not isinstance(value, dict):
        return False
    texts = value.get("device"), value.get("chip") or ""
    return _is_int(value.get("local_rank")) and all(map(_is_text, texts))


def _is_job(value: object) -> bool:
    """Whether it holds the fields of a job, as far as a table shows them."""
    if not isinstance(value, dict):
        return False
    counts = [value.get(name, 0) for name in ("cpus_per_task", "nodes", "tasks_per_node")]
    return all(map(_is_int, counts)) and isinstance(value.get("array", []), list)


_Check = Callable[[object], bool]
# What the values of each file must be; of other values nothing is asked.
_CHECKS: dict[str, dict[str, _Check]] = {
    "spec.json": {
        "batch_size": _is_int,
        "batch_size_per_rank": _is_int,
        "seed": _is_int,
        "epochs": _is_int,
    },
    "env.json": {
        "world_size": _is_int,
        "global_batch_size": _is_int,
        "cpus": _is_int,
        "train_set": _is_int,
        "launcher": _is_text,
        "job_id": _is_text,
        "dataset": _is_text,
        "chip": _is_text,
        "device": _is_text,
        "ranks": _are_ranks,
    },
    "status.json": {"state": _is_text},
    "job.json": {
        "state": _is_text,
        "site": _is_text,
        "task": _is_text,
        "job_id": _is_text,
        "seconds": _is_finite,
        "batch_size_per_rank": _is_int,
        "job": _is_job,
    },
    "metrics.jsonl": {
        "train_loss": _is_number,
        "test_loss": _is_number,
        "train_accuracy": _is_finite,
        "test_accuracy": _is_finite,
        "images_per_second": _is_finite,
        "seconds": _is_finite,
        "data_seconds": _is_finite,
        "test_seconds": _is_finite,
        "epoch": _is_int,
    },
}


def parse_object(content: str) -> dict[str, Any]:
    """Read the JSON object in a text. Raises ValueError if it holds anything else."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} instead of names and values")
    return value


def usable(content: dict[str, Any], file: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a file, and a line about each of them that cannot be used.

    In its place stands None, as for a value that is missing.
    """
    kept, problems = dict(content), []
    for name, is_sound in _CHECKS[file].items():
        value = content.get(name)
        if value is not None and not is_sound(value):
            kept[name] = None
            problems.append(f"{name} is {short(value)}, left out")
    return kept, problems
