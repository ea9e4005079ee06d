"""The sbatch file of a job at a site: complete, commented, and safe for the shell that reads it."""

import re
import shlex
import sys
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ddp_helpers import ROOT
from ddp_helpers.notebook.slurm.job import ARRAY, RUN_DIR, Job, JobError
from ddp_helpers.notebook.slurm.site import Site

TEMPLATE = "job.sbatch.jinja"
SHELL = {RUN_DIR: '"$run_dir"', ARRAY: '"${values[$SLURM_ARRAY_TASK_ID]}"'}
HOLES = re.compile(f"({re.escape(RUN_DIR)}|{re.escape(ARRAY)})")


def render(job: Job, site: Site, folder: Path) -> str:
    """The text of the file for this job, whose script and record are in `folder`. Raises JobError at an odd path."""
    folder = Path(folder).absolute()
    if any(letter in str(folder) for letter in "\\\"'") or not str(folder).isprintable():
        raise JobError(f"the run folder {str(folder)!r} cannot be used: choose a path without quotes and backslashes")
    python = site.python or ("python" if site.in_container else sys.executable)
    values = {"job": job, "site": site, "folder": str(folder), "python": python, "wrapper": wrapper}
    text = environment().get_template(TEMPLATE).render(values)
    # The comments in a column; not behind the log's path, which is the learner's.
    return re.sub(r"^(#SBATCH (?!--output).*?)  (# .*)$", lambda line: f"{line[1]:<39} {line[2]}", text, flags=re.M)


@cache
def environment() -> Environment:
    """What the template is read with, and how its values are made safe for the shell."""
    found = Environment(loader=FileSystemLoader(ROOT / "slurm"), undefined=StrictUndefined, autoescape=False)
    found.trim_blocks = found.lstrip_blocks = found.keep_trailing_newline = True
    found.filters |= {"quote": shlex.quote, "word": word, "directive": directive, "pattern": pattern}
    found.filters |= {"inserted": inserted, "quoted_value": quoted_value}
    return found


def word(text: str) -> str:
    """A word of the program as the shell must see it: as it is, but for the variables that stand in it."""
    parts = [part for part in HOLES.split(text) if part]
    return "".join(SHELL.get(part) or shlex.quote(part) for part in parts) or "''"


def wrapper(job: Job, site: Site) -> str:
    """What bash does on each node, in the container if there is one, before it becomes the program."""
    steps = ['export PET_NODE_RANK="$SLURM_NODEID"'] if job.launcher == "torchrun" else []
    steps += [f"source {site.source}"] if site.source else []
    return " && ".join([*steps, 'exec "$@"'])


def inserted(text: str, folder: str) -> str:
    """A word of the site file with the run's folder in it, where it asks for that: to mount it in a container."""
    return text.replace("{folder}", folder)


def quoted_value(line: str) -> str:
    """A line of set-up; what it exports stays one word, whatever its variable holds."""
    return re.sub(r"=(\$.*)", r'="\1"', line)


def pattern(path: str) -> str:
    """A path for --output, in which %j and its like mean something."""
    return path.replace("%", "%%")


def directive(value: str) -> str:
    """A value as sbatch reads it behind #SBATCH, where a space would end it and # begin a comment."""
    return value if set(value).isdisjoint(" #") else f'"{value}"'
