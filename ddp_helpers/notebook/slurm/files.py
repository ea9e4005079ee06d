"""The files of a job's run folder: job.json, which says what was asked and what came of it, and where tasks write."""

import json
from contextlib import suppress
from pathlib import Path

from ddp_helpers.notebook.fields import parsed, text
from ddp_helpers.notebook.screen import tidy
from ddp_helpers.notebook.slurm.job import NAME, Job, JobError, check

BATCH = "job.sbatch"
PREPARED: dict[Path, str] = {}  # by run folder: the script of a job that this process takes back if Slurm refuses it


def keep(folder: Path, said: dict) -> None:
    """Write job.json whole, or not at all."""
    part = folder / "job.part"
    part.write_text(json.dumps(said, indent=1) + "\n")
    part.replace(folder / "job.json")


def discard(folder: Path, *names: str) -> None:
    """Remove a job that was never submitted, with these files too, and its folder if nothing else lies in it."""
    with suppress(OSError):
        for name in (BATCH, "job.json", "job.part", *names):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def known(folder: Path) -> dict:
    """What job.json holds. Raises JobError where there is no job, or where it is damaged."""
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
