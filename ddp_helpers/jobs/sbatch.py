"""Render the sbatch file of a job at a site, from slurm/job.sbatch.jinja.

`run.write_job` calls it, in one process. A shell reads the file: text from the job (its name,
arguments and folder) is checked or quoted; text from the site is code, and is copied unchanged.
"""

import re
import shlex
import sys
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ddp_helpers import ROOT
from ddp_helpers.jobs.job import ARRAY, RUN_DIR, Job, JobError
from ddp_helpers.jobs.site import Site

# What the shell reads in place of a placeholder of the program.
_IN_SHELL = {RUN_DIR: '"$run_dir"', ARRAY: '"${values[$SLURM_ARRAY_TASK_ID]}"'}
_PLACEHOLDERS = re.compile(f"({re.escape(RUN_DIR)}|{re.escape(ARRAY)})")
_NOT_MOUNTED = "the run folder $0 is not in the container: mount the folder above it there"


def render(job: Job, site: Site, folder: Path) -> str:
    """Return the text of the job file; the script and the record of the job are in `folder`.

    Raises JobError for a folder that a job file cannot name.
    """
    folder = Path(folder).absolute()
    if any(letter in str(folder) for letter in "\\\"'") or not str(folder).isprintable():
        cure = "choose a path without quotes and backslashes"
        raise JobError(f"the run folder {str(folder)!r} cannot be used: {cure}")
    words = f"{site.srun} {site.container} {site.python}"
    places = {"runs": folder.parent, "course": ROOT}  # for the site's settings, which mount them
    usual_python = "python" if site.in_container else shlex.quote(sys.executable)
    return (
        _environment()
        .get_template("job.sbatch.jinja")
        .render(
            job=job,
            site=site,
            folder=str(folder),
            places={name: str(path) for name, path in places.items() if f"${name}" in words},
            python=site.python or usual_python,
            wrapper=_wrapper(job, site),
        )
    )


@cache
def _environment() -> Environment:
    """Make the jinja environment of the template, with filters that quote values for the shell."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["word"] = _argument
    environment.filters["directive"] = _directive
    environment.filters["message"] = _message
    return environment


def _argument(text: str) -> str:
    """Quote an argument of the program for the shell, except for its placeholders."""
    pieces = [piece for piece in _PLACEHOLDERS.split(text) if piece]
    return "".join(_IN_SHELL.get(piece) or shlex.quote(piece) for piece in pieces) or "''"


def _wrapper(job: Job, site: Site) -> str:
    """Return the bash line that starts the program on each node, "" if it needs none.

    In a container $0 is the run folder: files in a folder that is not mounted would be lost with
    the container.
    """
    steps = []
    if site.in_container:
        steps.append(f'[ -d "$0" ] || {{ echo "{_NOT_MOUNTED}" >&2; exit 1; }}')
    if job.launcher == "torchrun":
        steps.append('export PET_NODE_RANK="$SLURM_NODEID"')
    return "; ".join([*steps, 'exec "$@"']) if steps else ""


def _directive(value: str) -> str:
    """Quote a value for a line #SBATCH, in which a space would end it and # start a comment."""
    return value if set(value).isdisjoint(" #") else f'"{value}"'


def _message(line: str) -> str:
    """Quote a line of set-up in double quotes, to be shown unchanged."""
    return '"' + re.sub(r'([$`"\\])', r"\\\1", line) + '"'
