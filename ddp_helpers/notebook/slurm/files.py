"""The files of a job's run folder: job.json, which says what was asked and what came of it, and where tasks write."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ddp_helpers.notebook.runs import parsed, text
from ddp_helpers.notebook.screen import tidy
from ddp_helpers.notebook.slurm.job import NAME, Job, JobError, check

BATCH = "job.sbatch"
PREPARED: dict[Path, list[Path]] = {}  # by run folder: what this process made there, and takes back if Slurm refuses


def keep(folder: Path, said: dict) -> None:
    """Write job.json whole, or not at all."""
    part = folder / "job.part"
    part.write_text(json.dumps(said, indent=1) + "\n")
    part.replace(folder / "job.json")


def missing(folder: Path, *names: str) -> list[Path]:
    """List what is not there yet: of a job's files and these, then of the run folder and its parents, inside out."""
    files = [folder / name for name in ("job.json", "job.part", BATCH, *names)]
    return [path for path in (*files, folder, *folder.parents) if not os.path.lexists(path)]


def discard(made: Iterable[Path]) -> None:
    """Remove what was made for a job that was never submitted, but for folders in which something else lies."""
    for path in made:
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def known(folder: Path) -> dict:
    """Read job.json. Raises JobError where there is no job, or where it is damaged."""
    try:
        said = parsed((Path(folder) / "job.json").read_text())
        if said["job_id"] is None:  # then it is still to be submitted, or ran here
            job_of(said)
        else:
            check("job_id", said["job_id"], NAME, "the number that sbatch said")
        if not text(said["state"]):
            raise TypeError
        return said
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"{tidy(str(folder))} holds no job ({type(error).__name__}): write one first") from None


def job_of(said: dict) -> Job:
    """The job that job.json tells of. Raises JobError and the like if that is none."""
    return Job(**{key: tuple(value) if isinstance(value, list) else value for key, value in said["job"].items()})


def folder_of(folder: Path, task: str) -> Path:
    """The run folder of one task of an array; of a job without one, the folder itself."""
    return folder.with_name(f"{folder.name}-{task}") if task else folder


def log_path(folder: Path, job_id: str | None) -> Path:
    """The log of a job, or of one task of an array; of a job without Slurm, if it has no id."""
    return Path(folder) / (f"slurm-{job_id}.log" if job_id else "torchrun.log")
