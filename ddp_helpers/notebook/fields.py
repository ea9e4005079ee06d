"""What the values of a run record must be to be used further on, whoever wrote the files, and whatever befell them."""

import json
from math import isfinite
from reprlib import repr as short


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
    return whole(value.get("cpus_per_task", 0)) and isinstance(value.get("array", []), list)


FIELDS = {
    "spec.json": dict.fromkeys(("batch_size", "global_batch_size", "seed", "epochs"), whole),
    "env.json": dict.fromkeys(("world_size", "cpus", "cpus_per_rank"), whole)
    | dict.fromkeys(("launcher", "job_id", "dataset", "chip", "device"), text)
    | {"ranks": ranks},
    "status.json": {"state": text},
    "job.json": dict.fromkeys(("state", "site", "task", "job_id"), text) | {"seconds": finite, "job": asked},
    "metrics.jsonl": dict.fromkeys(("train_loss", "test_loss"), number)
    | dict.fromkeys(("train_accuracy", "test_accuracy", "images_per_second"), finite)
    | dict.fromkeys(("seconds", "data_seconds", "exposed_seconds", "test_seconds"), finite)
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
    """What of a file's content fits, and a line on each value that does not; null is a value that is not there."""
    kinds = FIELDS[file].items()
    wrong = [key for key, fits in kinds if content.get(key) is not None and not fits(content[key])]
    kept = {key: value for key, value in content.items() if key not in wrong}
    return kept, [f"{key} is {short(content[key])}, left out" for key in wrong]
