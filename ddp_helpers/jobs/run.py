"""Write a job's files into a run folder, and submit it, for the first time or once more.

The learner's process calls it, on the login node. `monitor` shows what becomes of the job.
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

# By run folder: what this process made there, and takes back if Slurm refuses the job.
_MADE: dict[Path, list[Path]] = {}


def write_job(
    job: Job,
    site: Site,
    folder: Path,
    script: str | None = None,
    batch_size_per_rank: int = 0,
) -> Path:
    """Write the sbatch file into a run folder, beside the script that it starts; return its path.

    script: the text of that script, to be written too; then all is taken back if Slurm refuses the
    job. batch_size_per_rank: noted in job.json, if it is not 0. Raises JobError, with nothing
    written, if the folder holds another run, or another script of that name.
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
    """Write a script that may lie there already. Raises FileExistsError at another one."""
    if path.is_file() and path.read_text(errors="replace") == text:
        return
    with path.open("x") as file:
        file.write(text)


def submit(folder: Path) -> str:
    """Submit the job that was written here, and return its id.

    A job of the site `local` runs here under torchrun where no Slurm answers; its id is "". Raises
    JobError where Slurm refuses it: what prepare() wrote is gone then, and what was written by
    hand stays.
    """
    folder, record = Path(folder).absolute(), read_job_record(folder)
    ids = ids_of(folder, record)
    if ids or record["state"] != "WRITTEN":
        before = f"as job {ids[-1]}" if ids else "and ran here, without Slurm"
        cure = "write a new job into a new folder"
        if record["job"].get("requeue"):
            cure = f"to go on: ddp-course job --again {shorten_paths(str(folder))}"
        raise JobError(f"{shorten_paths(str(folder))} was submitted already, {before}: {cure}")
    try:
        return _start(folder, record)
    except JobError:
        discard(_MADE.pop(folder, ()))
        raise


def resubmit(folder: Path) -> str:
    """Submit a job once more, to go on where it stopped, and return its new id.

    Raises JobError where its script cannot go on, where it was copied from another folder, or
    while it still waits or runs.
    """
    folder, record = Path(folder).absolute(), read_job_record(folder)
    if not record["job"].get("requeue"):
        cure = "write a new job"
        raise JobError(
            f"{shorten_paths(str(folder))}: its script cannot go on where it stopped: {cure}"
        )
    if (original := record.get("folder", str(folder))) != str(folder):
        copied = f"{shorten_paths(str(folder))} was copied from {shorten_paths(original)}"
        raise JobError(f"{copied}: let it go on there")
    for state in states_of(folder, record):
        if state.active:
            activity = f"job {state.job_id} is {state.state.lower()}"
            raise JobError(f"{activity}: it goes on by itself, watch it")
    return _start(folder, record)


def _start(folder: Path, record: JobRecord) -> str:
    """Hand the job to Slurm, note its id, and return it; without Slurm run it here: id ""."""
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
