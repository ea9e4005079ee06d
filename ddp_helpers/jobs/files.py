"""The files of a job in its run folder: job.json, the ids of its submissions, its log.

`run`, `local` and `monitor` write and read these files, in the process that submits or collects.
"""

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_helpers.jobs.job import NAME, Job, JobError, check_text
from ddp_helpers.launch.screen import shorten_paths
from ddp_helpers.rank.files import write_atomically
from ddp_helpers.records.runs import parse_object

BATCH = "job.sbatch"
SUBMITTED = "submitted"  # the file in which the job file notes the id of each submission
# How srun, and torchrun as the job file starts it, mark a rank's line.
RANK = re.compile(r" *(\d+): ?(.*)")

# The content of job.json: "job" (the fields of a Job), "site", "job_id" (None before it is
# submitted), "state", and, once it has ended, the values of State.record(). "folder" is the folder
# in which it ran; "batch_size_per_rank" is present if it was given.
JobRecord = dict[str, Any]


def keep(folder: Path, record: JobRecord) -> None:
    """Write job.json atomically."""
    write_atomically(folder / "job.json", f"{json.dumps(record, indent=1)}\n".encode())


def missing(folder: Path, *names: str) -> list[Path]:
    """List the files and folders that do not exist yet, innermost first.

    First a job's own files and those called `names`, then the run folder and its parents.
    """
    files = [folder / name for name in ("job.json", BATCH, *names)]
    return [path for path in (*files, folder, *folder.parents) if not os.path.lexists(path)]


def discard(paths: Iterable[Path]) -> None:
    """Remove files, and then empty folders, of a job that was never submitted."""
    for path in paths:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def read_job_record(folder: Path) -> JobRecord:
    """Read job.json. Raises JobError if there is no job, or it is damaged."""
    try:
        record = parse_object((Path(folder) / "job.json").read_text())
        if record["job_id"] is None:  # it is not submitted yet, or ran on this machine
            job_from_record(record)
        else:
            check_text("job_id", record["job_id"], NAME, "the number that sbatch said")
        check_text("state", record["state"], NAME, "a state of Slurm's")
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        raise JobError(
            f"{shorten_paths(str(folder))} holds no job ({kind}): write one first"
        ) from None


def job_from_record(record: JobRecord) -> Job:
    """Rebuild the job from job.json. Raises JobError and the like if it describes none."""
    fields: dict[str, Any] = {}
    for name, value in record["job"].items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    return Job(**fields)


def ids_of(folder: Path, record: JobRecord) -> list[str]:
    """List the ids of all submissions of a job, oldest first.

    They include submissions by hand once these have started.
    """
    path = folder / SUBMITTED
    ids = path.read_text(errors="replace").split() if path.is_file() else []
    if record["job_id"]:
        ids.append(record["job_id"])
    return list(dict.fromkeys(job_id for job_id in ids if NAME.fullmatch(job_id)))


def folder_of(folder: Path, task: str) -> Path:
    """The run folder of one task of an array; of a job without one, the folder itself."""
    return folder.with_name(f"{folder.name}-{task}") if task else folder


def log_path(folder: Path, job_id: str | None) -> Path:
    """The log of a job, or of one task of an array; without an id, of a job that ran here."""
    return Path(folder) / (f"slurm-{job_id}.log" if job_id else "torchrun.log")


def log_of(folder: Path, job_id: str | None) -> list[str]:
    """The lines of a job's log; none if there is no log yet."""
    log = log_path(folder, job_id)
    return log.read_text(errors="replace").splitlines() if log.exists() else []
