"""Make a job from a script of the course or of the user, checked before it waits in a queue.

The command `job`, job.ipynb and notebook 17 call it, in one process on the login node.
"""

import ast
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ddp_helpers.jobs.job import NAME, Job, JobError, check_text
from ddp_helpers.jobs.monitor import watch
from ddp_helpers.jobs.project import Project
from ddp_helpers.jobs.queue import available, states_of_job
from ddp_helpers.jobs.run import submit, write_job
from ddp_helpers.jobs.site import Site
from ddp_helpers.rank import scripts
from ddp_helpers.records import runs


def _source_of(script: str | Path) -> str:
    """Return the text of a script: a name of the course's, or the path of a file.

    Raises JobError if it cannot be read, or is not Python.
    """
    if str(script) in scripts.NAMES:
        return scripts.script_text(str(script))
    try:
        path = Path(str(script)).expanduser()
        if path.suffix != ".py" or (path.exists() and not path.is_file()):
            raise OSError(0, "no file with a name that ends with .py")
        text = path.read_text()
        ast.parse(text)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", error)
        cure = f"give a file, or {', '.join(scripts.NAMES)}"
        raise JobError(f"script {str(script)!r} cannot be read ({reason}): {cure}") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = str(error).partition(" (")[0] or "nested too deeply"
        raise JobError(f"script {str(script)!r}{line}: {reason}: fix it first") from None
    return text


def prepare(
    script: str | Path,
    arguments: Sequence[object],
    site: Site,
    folder: Path,
    *,
    batch_size_per_rank: int = 0,
    show: bool = False,
    **fields: Any,
) -> Job:
    """Write a job's file, and the script that it starts, into a new run folder; return the job.

    script: a script of the course by its name, or the path of a file, of which a copy runs; modules
    next to it are not copied, but imported from there. arguments: the script's arguments; they may
    contain {run_dir} and {array}. batch_size_per_rank: for the record, if the arguments contain the
    effective batch size computed from this number: such runs show weak scaling. show: print the job
    file, and after it, on stderr, notices for the user. fields: more fields of a `Job`; None or ""
    counts as not given. Then cpus_per_rank and time are the site's, and the launcher is torchrun if
    the texts of the script and its modules read only torchrun's variables, else srun. sbatch is one
    text, as a shell reads it.

    Raises JobError, with nothing written, if the job would fail. No file remains if this process
    submits the job and Slurm refuses it.
    """
    arguments = as_arguments(arguments)
    text = _source_of(script)
    file_name = Path(str(script)).name.removesuffix(".py") + ".py"
    allowed = "a file name of letters, digits, dot, dash and underscore"
    check_text("script", file_name, NAME, allowed)
    given = {name: value for name, value in fields.items() if value not in (None, "")}
    usual: dict[str, Any] = {"cpus_per_rank": site.cpus_per_rank, "time": site.time}
    try:
        usual["sbatch"] = shlex.split(given.pop("sbatch", ""))
    except ValueError as error:
        raise JobError(f"sbatch={fields['sbatch']!r} cannot be split into words: {error}") from None
    # The site's arguments first, since of two equal flags the last one counts. Only the course's
    # scripts have --no-cuda.
    is_ours = str(script) in scripts.NAMES
    site_arguments = site.script_args if is_ours else ()
    project = Project(file_name, text) if is_ours else Project.around(Path(script), text)
    notices: list[str] = []
    if "launcher" not in given:
        usual["launcher"] = _launcher_of(project.whole_text, file_name, notices)
    program = (file_name, *site_arguments, *arguments)
    job = Job(folder.name, program, imports_from=project.folder, **usual | given)
    job = _fit_warning(job, file_name, "SIGUSR2" in project.whole_text, notices)
    notices += project.notices(arguments, site.in_container)
    batch = write_job(job, site, folder, text, batch_size_per_rank)
    if show:
        print(batch.read_text(), flush=True)  # before stderr, even if both are one file
    for notice in notices:
        print(notice, file=sys.stderr)
    return job


# The names in which torchrun passes a process its rank, and the call that reads them itself.
_TORCHRUNS = re.compile(r"""["'](LOCAL_RANK|RANK|WORLD_SIZE)["']|\binit_process_group\b""")


def _launcher_of(text: str, file_name: str, notices: list[str]) -> Literal["srun", "torchrun"]:
    """Choose what starts a script's ranks: torchrun if its text reads only torchrun's names.

    text: of the script and its modules. notices: a notice for the user is added to them.
    """
    if not _TORCHRUNS.search(text) or "SLURM_" in text:
        return "srun"
    known = f"{file_name} knows RANK, which torchrun sets, and nothing of Slurm's"
    notices.append(f"{known}: torchrun starts its ranks on each node")
    return "torchrun"


def _fit_warning(job: Job, file_name: str, handles_warning: bool, notices: list[str]) -> Job:
    """Return the job without a warning if its script handles none; add a notice for the user.

    handles_warning: whether the script or a module next to it names SIGUSR2, Slurm's warning.
    notices: a notice for the user is added to them.
    """
    if handles_warning and not job.requeue:
        cure = "give --requeue to have it warned, and started again"
        notices.append(f"{file_name} can save when it is warned: {cure}")
    if handles_warning or not job.requeue:
        return job
    outcome = "it is not warned, only started again. If it does, name SIGUSR2 in its text"
    notices.append(f"{file_name} handles no SIGUSR2, which would end it: {outcome}")
    return replace(job, grace=0)


def run_folder(root: Path, name: str, otherwise: str) -> Path:
    """The run folder of this name below a root, or, without a name, the next free `otherwise-N`.

    Raises JobError at a name that leads out of the root.
    """
    if not name:
        return runs.new_run_folder(root, otherwise)
    if not all(NAME.fullmatch(part) for part in name.split("/")):
        letters = "letters, digits, dot, dash and underscore"
        cure = f"give a name below runs/, not a path: {letters}"
        several = "or several such names with / between them"
        raise JobError(f"run={name!r} cannot be used: {cure}, {several}")
    return root / name


def as_arguments(arguments: Sequence[object]) -> list[str]:
    """Convert a script's arguments to texts.

    Raises JobError for a single text, each letter of which would become an argument.
    """
    if isinstance(arguments, list | tuple):
        return [str(argument) for argument in arguments]
    cure = "give a list of words, such as ['--lr', '0.1']"
    raise JobError(f"arguments={arguments!r} cannot be used: {cure}")


def keeps_no_record(script: str | Path, arguments: Sequence[str]) -> bool:
    """Whether it is an MNIST script that is not given --run-dir, so that it keeps no record."""
    has_folder = any(argument.startswith("--run-dir") for argument in arguments)
    return str(script) in scripts.NAMES and str(script).startswith("mnist") and not has_folder


def ready(
    site: str | Path, folder: Path, data: Path | None, nodes: int = 2, gpus_per_node: int = 2
) -> bool:
    """Run the doctor as a job at a site, in a new run folder; return whether all checks are ok.

    It runs on the login node. The job is made from the site file, as a learner's jobs are. data:
    the folder that has, or gets, MNIST; without it, and if the site has none, the doctor checks no
    data. Prints the doctor's table. Raises JobError if no Slurm answers, or it refuses the job.
    """
    if not available():
        cure = "go to the login node, or start one with slurm/cluster up"
        raise JobError(f"no Slurm answers here: {cure}")
    loaded = Site.load(site)
    words: list[object] = [] if loaded.has_data else ["--data", "none"]
    if data and words:
        from ddp_helpers.data.staging import stage  # it imports torch, which no other job needs

        words[1] = stage(data).absolute()
    prepare(
        "doctor",
        [*words, "--run-dir", "{run_dir}"],
        loaded,
        folder,
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        gpus_per_node=gpus_per_node,
        time="00:05:00",
    )
    job_id = submit(folder)
    watch(folder)
    return states_of_job(job_id)[0].state == "COMPLETED"
