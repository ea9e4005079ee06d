"""Make a job of a script, one of the course's or anybody's own, and check it before it waits in a queue."""

import ast
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_helpers.notebook import runs, scripts
from ddp_helpers.notebook.slurm.files import BATCH
from ddp_helpers.notebook.slurm.job import NAME, Job, JobError, check
from ddp_helpers.notebook.slurm.run import write
from ddp_helpers.notebook.slurm.site import Site


def text_of(script: str | Path) -> str:
    """The source of a script: a name of the course's, or the path of a file. Raises JobError if it is not Python."""
    if str(script) in scripts.NAMES:
        return scripts.standalone(str(script))
    path = Path(script).expanduser()
    try:
        if path.suffix != ".py":
            raise OSError(0, "no name that ends with .py")
        text = path.read_text()
        ast.parse(text)
    except OSError as error:
        known = ", ".join(scripts.NAMES)
        raise JobError(f"script {str(script)!r} cannot be read ({error.strerror}): give a file, or {known}") from None
    except (SyntaxError, ValueError) as error:
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise JobError(f"script {str(script)!r}{place}: {str(error).partition(' (')[0]}: mend it first") from None
    return text


def prepare(script: str | Path, arguments: Sequence[str], site: Site, folder: Path, **shape: object) -> Job:
    """Write a job's file, and the script that it starts, into a new run folder; or raise JobError and leave nothing.

    script: as in text_of. A file's own folder is not copied: what it imports from there must be installed, or on the
    PYTHONPATH. arguments may hold {run_dir} and {array}. shape: what else a Job takes.
    """
    text, name = text_of(script), Path(script).name.removesuffix(".py") + ".py"
    check("script", name, NAME, "a file name of letters, digits, dot, dash and underscore")
    own = list(site.script_args) if str(script) in scripts.NAMES else []  # a stranger's script knows no --no-cuda
    job = Job(folder.name, (name, *map(str, arguments), *own), **shape)
    new = not folder.exists()
    write(job, site, folder)
    try:
        (folder / name).write_text(text)
    except OSError as error:
        with suppress(OSError):
            for part in (BATCH, "job.json", name):
                (folder / part).unlink(missing_ok=True)
            if new:
                folder.rmdir()
        raise JobError(f"{folder} cannot take the script ({error.strerror}): choose a folder with room") from None
    return job


def run_folder(root: Path, name: str, otherwise: str) -> Path:
    """The run folder of this name below a root, or the next free one named otherwise. Raises JobError outside it."""
    if not name:
        return runs.fresh(root, otherwise)
    for part in name.split("/"):
        check("run", part, NAME, "a name of letters, digits, dot, dash and underscore, or several with /")
    return root / name
