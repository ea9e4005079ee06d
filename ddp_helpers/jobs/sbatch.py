"""Render the sbatch file of a job at a site, from slurm/job.sbatch.jinja.

`run.write` calls it, and the commands `job` and `site`, in one process. A shell reads the file:
each value in it is quoted, or has been checked.
"""

import re
import shlex
import sys
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ddp_helpers import ROOT, SLURM
from ddp_helpers.jobs.allowed import quoted, quoted_setup
from ddp_helpers.jobs.job import ARRAY, RUN_DIR, Job, JobError, seconds
from ddp_helpers.jobs.site import Site

# What the shell reads in the place of a placeholder of the program.
_IN_SHELL = {RUN_DIR: '"$run_dir"', ARRAY: '"${values[$SLURM_ARRAY_TASK_ID]}"'}
_PLACEHOLDERS = re.compile(f"({re.escape(RUN_DIR)}|{re.escape(ARRAY)})")
_NOT_MOUNTED = "the run folder $0 is not in the container: mount {runs} there, in the site file"
_COMMENT_COLUMN = 39


def render(job: Job, site: Site, folder: Path) -> str:
    """Return the text of the job file; the script and the record of the job are in `folder`.

    Raises JobError at a folder that a job file cannot name, or a time longer than the site allows.
    """
    folder = Path(folder).absolute()
    if any(letter in str(folder) for letter in "\\\"'") or not str(folder).isprintable():
        cure = "choose a path without quotes and backslashes"
        raise JobError(f"the run folder {str(folder)!r} cannot be used: {cure}")
    if site.longest and seconds(job.time) > seconds(site.longest):
        longest = f"{site.longest}, the longest at site {site.name}"
        raise JobError(f"time={job.time!r} is more than {longest}: ask for less")
    paths = {"{folder}": str(folder), "{runs}": str(folder.parent), "{course}": str(ROOT)}
    template = _environment().get_template("job.sbatch.jinja")
    text = template.render(
        job=job,
        site=site,
        folder=str(folder),
        python=_python(site),
        wrapper=_wrapper,
        srun=" ".join(quoted(flag, paths) for flag in site.srun),
        prefix=" ".join(quoted(word, paths) for word in site.prefix),
    )
    return _with_comments_in_a_column(text)


def _python(site: Site) -> str:
    """The Python that runs the program, quoted for the shell."""
    if site.python:
        return quoted(site.python)
    return "python" if site.in_container else shlex.quote(sys.executable)


def _with_comments_in_a_column(text: str) -> str:
    """Move the comments behind directives to one column; not behind the path of the log."""
    comment = re.compile(r"^(#SBATCH (?!--output).*?)  (# .*)$", re.M)
    return comment.sub(lambda line: f"{line[1]:<{_COMMENT_COLUMN}} {line[2]}", text)


@cache
def _environment() -> Environment:
    """Make the jinja environment of the template, with filters that quote values for the shell."""
    environment = Environment(
        loader=FileSystemLoader(SLURM),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["word"] = _argument
    environment.filters["directive"] = _directive
    environment.filters["set_up"] = quoted_setup
    return environment


def _argument(text: str) -> str:
    """Quote an argument of the program for the shell, but for the placeholders in it."""
    pieces = [piece for piece in _PLACEHOLDERS.split(text) if piece]
    return "".join(_IN_SHELL.get(piece) or shlex.quote(piece) for piece in pieces) or "''"


def _wrapper(job: Job, site: Site) -> str:
    """Return the bash line that runs on each node, in the container if there is one.

    It starts the program at its end. In a container $0 is the run folder: what is written where
    nothing is mounted would be gone with the container.
    """
    steps = []
    if job.launcher == "torchrun":
        steps.append('export PET_NODE_RANK="$SLURM_NODEID"')
    if site.source:
        steps.append(f"source {quoted(site.source)}")
    steps.append('exec "$@"')
    check = ""
    if site.in_container:
        check = f'[ -d "$0" ] || {{ echo "{_NOT_MOUNTED}" >&2; exit 1; }}; '
    return check + " && ".join(steps)


def _directive(value: str) -> str:
    """Quote a value for a line #SBATCH, where a space would end it and # begin a comment."""
    return value if set(value).isdisjoint(" #") else f'"{value}"'
