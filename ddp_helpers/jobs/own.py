"""Make a job of a script, one of the course's or anybody's own, and check it before it waits in a queue."""

import ast
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.jobs.job import ARRAY, NAME, RUN_DIR, Job, JobError, check
from ddp_helpers.jobs.queue import available, look
from ddp_helpers.jobs.run import submit, watch, write
from ddp_helpers.jobs.site import Site
from ddp_helpers.launch import scripts
from ddp_helpers.rank.arguments import DDP_FLAGS, RESUME_FLAGS, damage, read_flags, share_batch
from ddp_helpers.rank.launchers import stop
from ddp_helpers.records import runs

# The flags that each of the MNIST scripts has besides those of all.
FLAGS = {"mnist_single": {}, "mnist_fast": {}, "mnist_ddp": DDP_FLAGS, "mnist_ddp_resumable": RESUME_FLAGS}


def text_of(script: str | Path) -> str:
    """The source of a script: a name of the course's, or the path of a file. Raises JobError if it is not Python."""
    if str(script) in scripts.NAMES:
        return scripts.Script(str(script)).text()
    try:
        path = Path(str(script)).expanduser()
        if path.suffix != ".py" or (path.exists() and not path.is_file()):
            raise OSError(0, "no file with a name that ends with .py")
        text = path.read_text()
        ast.parse(text)
    except (OSError, RuntimeError) as error:
        known, why = ", ".join(scripts.NAMES), getattr(error, "strerror", error)
        raise JobError(f"script {str(script)!r} cannot be read ({why}): give a file, or {known}") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        why = str(error).partition(" (")[0] or "nested too deeply"
        raise JobError(f"script {str(script)!r}{place}: {why}: mend it first") from None
    return text


def check_words(flags: dict[str, tuple], job: Job, site: Site, folder: Path) -> None:
    """Read what one of the MNIST scripts is given as it will itself. Raises JobError where it would stop."""
    for value in job.array or ("",):
        words = [word.replace(RUN_DIR, str(folder)).replace(ARRAY, value) for word in job.program[1:]]
        try:
            with redirect_stderr(StringIO()) as message:
                args = read_flags(flags, words)
                if "resume" in args and not args.run_dir:
                    stop("--run-dir is missing: give --run-dir '{run_dir}' for the record and the checkpoints")
                if "batch_size_per_rank" in args:
                    share_batch(args, job.ranks)
        except SystemExit:
            raise JobError(message.getvalue().strip()) from None
    if site.in_container and not args.data.is_absolute() and "--data" in words:
        raise JobError(
            f"--data {args.data} counts from the run folder: give the whole path that it has in the container"
        )
    if not site.in_container:  # whose folders may be others
        check_data(folder / args.data)


def check_data(folder: Path) -> None:
    """Raises JobError unless MNIST lies in a folder, each file as long as its first bytes say."""
    if why := damage(folder):
        raise JobError(f"--data {folder} holds no whole MNIST ({why}): get it once, before the run")


def prepare(script: str | Path, arguments: Sequence[str], site: Site, folder: Path, **shape: object) -> Job:
    """Write a job's file, and the script that it starts, into a new run folder; or raise JobError and leave nothing.

    Nothing stays either where this process submits the job, and Slurm refuses it.

    script: as in text_of. A file's own folder is not copied: what it imports from there must be installed, or on the
    PYTHONPATH. arguments may hold {run_dir} and {array}. shape: what else a Job takes; time and cpus_per_task are the
    site's usual ones where they are None, or left out.
    """
    arguments = words_of(arguments)
    text, name = text_of(script), Path(str(script)).name.removesuffix(".py") + ".py"
    check("script", name, NAME, "a file name of letters, digits, dot, dash and underscore")
    own = list(site.script_args) if str(script) in scripts.NAMES else []  # a stranger's script knows no --no-cuda
    usual = {"time": site.time or Job.time, "cpus_per_task": site.cpus_per_rank or Job.cpus_per_task}
    shape = usual | {key: value for key, value in shape.items() if value is not None}
    job = Job(folder.name, (name, *own, *map(str, arguments)), **shape)  # of two equal flags the last one counts
    if (flags := FLAGS.get(str(script))) is not None:
        if job.requeue and "resume" not in flags:
            raise JobError(f"requeue: {script} cannot go on where it stopped: take mnist_ddp_resumable")
        check_words(flags, job, site, folder)
    if "SIGUSR2" in text and not job.requeue:
        print(
            f"{name} can save when it is warned: give --requeue to have it warned, and started again", file=sys.stderr
        )
    elif job.requeue and "SIGUSR2" not in text:
        print(f"{name} handles no SIGUSR2, which would end it: it is not warned, only started again", file=sys.stderr)
        job = replace(job, grace=0)
    write(job, site, folder, text)
    return job


def run_folder(root: Path, name: str, otherwise: str) -> Path:
    """The run folder of this name below a root, or the next free one named otherwise. Raises JobError outside it."""
    if not name:
        return runs.fresh(root, otherwise)
    if not all(NAME.fullmatch(part) for part in name.split("/")):
        cure = "letters, digits, dot, dash and underscore, or several such names with / between them"
        raise JobError(f"run={name!r} cannot be used: give a name below runs/, not a path: {cure}")
    return root / name


def words_of(arguments: Sequence[object]) -> list[str]:
    """What a script is given, as words. Raises JobError at a single text, which would become a word a letter."""
    if isinstance(arguments, list | tuple):
        return [str(word) for word in arguments]
    raise JobError(f"arguments={arguments!r} cannot be used: give a list of words, such as ['--lr', '0.1']")


def keeps_no_record(script: str | Path, words: Sequence[str]) -> bool:
    """Whether it is an MNIST script, which keeps a record where it is given --run-dir, and it is given none."""
    return str(script) in FLAGS and not any(word.startswith("--run-dir") for word in words)


def ready(site: str, nodes: int = 2, gpus_per_node: int = 2) -> bool:
    """Whether every row of the doctor is green on so many nodes and GPUs; a person on the login node calls it.

    The job is made from the site file, as a learner's jobs are. Prints what the ranks say, which is the doctor's table.
    Raises JobError where no Slurm answers, or where it refuses the job.
    """
    from ddp_helpers.rank.staging import stage  # here, since it imports torch, which no other job needs

    if not available():
        raise JobError("no Slurm answers here: go to the login node, or start one with slurm/cluster up")
    place, folder = Site.load(site), runs.fresh(ROOT / "runs", "ready")
    data = () if place.has_data else ("--data", stage(ROOT / "data").absolute())
    words = (*data, "--run-dir", "{run_dir}")
    shape = {"nodes": nodes, "tasks_per_node": gpus_per_node, "gpus_per_node": gpus_per_node, "time": "00:05:00"}
    prepare("doctor", words, place, folder, **shape)
    number = submit(folder)
    watch(folder)
    return look(number)[0].state == "COMPLETED"
