"""Write a job's files into a run folder, and submit it, for the first time or again.

The driver process calls it, on the login node. `monitor` shows the job's progress.
"""

from dataclasses import asdict
from pathlib import Path

from ddp_helpers.jobs.files import (
    BATCH,
    SUBMITTED,
    JobRecord,
    discard,
    ids_of,
    keep,
    missing,
    read_job_record,
)
from ddp_helpers.jobs.job import Job, JobError
from ddp_helpers.jobs.local import run_here
from ddp_helpers.jobs.monitor import states_of
from ddp_helpers.jobs.queue import available, send
from ddp_helpers.jobs.sbatch import render
from ddp_helpers.jobs.site import Site
from ddp_helpers.launch.screen import shorten_paths
from ddp_helpers.rank.files import write_atomically

# By run folder: the files of this process there, removed if Slurm refuses the job.
_MADE: dict[Path, list[Path]] = {}


def write_job(
    job: Job,
    site: Site,
    folder: Path,
    script: str | None = None,
    batch_size_per_rank: int = 0,
) -> Path:
    """Write the sbatch file into a run folder, next to the script that it starts; return its path.

    script: the text of that script, also written; then all files are removed if Slurm refuses the
    job. batch_size_per_rank: recorded in job.json, if it is not 0. Raises JobError, with nothing
    written, if the folder has a different run, or a different script of that name.
    """
    folder = Path(folder).absolute()
    text = render(job, site, folder)
    made = missing(folder, job.program[0])
    try:
        _check_free(folder)
        folder.mkdir(parents=True, exist_ok=True)
        record: JobRecord = {"job": asdict(job), "site": site.name}
        record |= {"job_id": None, "state": "WRITTEN"}
        if batch_size_per_rank:
            record["batch_size_per_rank"] = batch_size_per_rank
        keep(folder, record)
        write_atomically(folder / BATCH, text.encode())
        if script is not None:
            _write_script(folder / job.program[0], script)
            _MADE[folder] = made
    except OSError as error:
        discard(made)
        reason = f"cannot take the job ({error.strerror})"
        raise JobError(f"{shorten_paths(str(folder))} {reason}: choose another folder") from None
    return folder / BATCH


def _check_free(folder: Path) -> None:
    """Raise JobError if the folder holds a run."""
    for name in ("job.json", "spec.json", "metrics.jsonl", BATCH):
        if (folder / name).exists():
            taken = f"holds another run already (its {name})"
            raise JobError(f"{shorten_paths(str(folder))} {taken}: choose a new folder")


def _write_script(path: Path, text: str) -> None:
    """Write a script that may already exist. Raises FileExistsError if it differs."""
    if path.is_file() and path.read_text(errors="replace") == text:
        return
    with path.open("x") as file:
        file.write(text)


def submit(folder: Path) -> str:
    """Submit the job that was written here, and return its id.

    A job of the site `local` runs here under torchrun if no Slurm answers; its id is "". Raises
    JobError if Slurm refuses it: then the files of prepare() are removed, and files written by hand
    stay.
    """
    folder, record = Path(folder).absolute(), read_job_record(folder)
    ids = ids_of(folder, record)
    if ids or record["state"] != "WRITTEN":
        before = f"as job {ids[-1]}" if ids else "and ran here, without Slurm"
        cure = "write a new job into a new folder"
        if record["job"].get("requeue"):
            cure = f"to resume: ddp-course job --again {shorten_paths(str(folder))}"
        raise JobError(f"{shorten_paths(str(folder))} was submitted already, {before}: {cure}")
    try:
        return _start(folder, record)
    except JobError:
        discard(_MADE.pop(folder, ()))
        raise


def resubmit(folder: Path) -> str:
    """Submit a job again, to resume where it stopped, and return its new id.

    Raises JobError if its script cannot resume, if it was copied from a different folder, or while
    it still waits or runs.
    """
    folder, record = Path(folder).absolute(), read_job_record(folder)
    if not record["job"].get("requeue"):
        cure = "write a new job"
        raise JobError(
            f"{shorten_paths(str(folder))}: its script cannot resume where it stopped: {cure}"
        )
    if (original := record.get("folder", str(folder))) != str(folder):
        copied = f"{shorten_paths(str(folder))} was copied from {shorten_paths(original)}"
        raise JobError(f"{copied}: resume it there")
    for state in states_of(folder, record):
        if state.active:
            activity = f"job {state.job_id} is {state.state.lower()}"
            raise JobError(f"{activity}: it continues by itself, watch it")
    return _start(folder, record)


def _start(folder: Path, record: JobRecord) -> str:
    """Submit the job to Slurm, record and return its id; without Slurm run it here: id ""."""
    if not available():
        if record["site"] != "local":
            reason = f"no Slurm answers here, and {record['site']} is a real cluster"
            cure = "go to its login node, or try again; to run on this machine: job local"
            raise JobError(f"{reason}: {cure}")
        run_here(folder, record)
        return ""
    job_id = send(folder / BATCH)
    with (folder / SUBMITTED).open("a") as file:  # the job file notes it too, but may wait for days
        file.write(f"{job_id}\n")
    keep(folder, record | {"job_id": job_id, "state": "PENDING", "folder": str(folder)})
    print(f"submitted: job {job_id}")
    return job_id
