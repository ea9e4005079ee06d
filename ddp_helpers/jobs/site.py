"""A cluster on which jobs run, read from a site file.

The process that makes a job loads its site; `sbatch.render` makes the job file from both. A site
file is code of the person who submits: its text reaches Slurm and the shell unchanged.
"""

import getpass
import os
import tomllib
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ddp_helpers.jobs.job import Job, JobError

# slurm/sites: a link in a checkout points there; an installed package has the files themselves.
SITES = Path(__file__).with_name("sites").resolve()
# Options that every command of Slurm, not only sbatch, needs for access to a cluster.
_ADMISSION = ("--account=", "--partition=", "--qos=", "--reservation=")


@dataclass(frozen=True)
class Site:
    """A cluster, as slurm/sites/TEMPLATE.toml explains it key by key."""

    name: str
    description: str = ""
    gpus: str = "--gres=gpu:{n}"  # asks sbatch for {n} GPUs on each node; "": there are none
    cpus_per_rank: int = Job.cpus_per_rank  # of a job that does not set it
    time: str = Job.time  # of a job that does not set it
    sbatch: tuple[str, ...] = ()  # more options of sbatch, each a line #SBATCH
    setup: tuple[str, ...] = ()  # commands of bash, before anything runs
    container: str = ""  # the command before Python on each node
    python: str = ""  # without it, the Python that writes the file
    srun: str = ""  # more options of srun
    script_args: tuple[str, ...] = ()  # for the course's scripts, before the job's own

    @property
    def admission(self) -> list[str]:
        """The site's account, partition, QOS and reservation, as options of any Slurm command."""
        return [option for option in self.sbatch if option.startswith(_ADMISSION)]

    @property
    def in_container(self) -> bool:
        """Whether the ranks run in an image, which does not have this machine's Python."""
        return bool(self.container) or "--container-image" in self.srun

    @property
    def has_data(self) -> bool:
        """Whether the site itself names the folder of MNIST, as in an image."""
        return any(argument.partition("=")[0] == "--data" for argument in self.script_args)

    @classmethod
    def load(cls, name: str | Path) -> "Site":
        """Read a site by its name in slurm/sites, or by the path of its file.

        The user's file, ~/.config/ddp-course/site.toml, adds its `sbatch` options after the site's,
        since Slurm takes the last of equal ones; its other keys replace the site's. At `local`,
        which does not have the cluster's account, it does not count; scripts do not use GPUs there
        unless `ddp-course gpus` simulates them. Raises JobError if there is no such site, or a key
        of it cannot be used.
        """
        path = Path(name) if str(name).endswith(".toml") else SITES / f"{name}.toml"
        is_file = False
        with suppress(OSError, ValueError):  # a name that no file can have
            is_file = path.is_file()
        if not is_file:
            known = ", ".join(sorted(site.stem for site in SITES.glob("[a-z]*.toml")))
            cure = f"choose one of {known}, or give the path of a .toml file"
            raise JobError(f"site {str(name)!r} is not known: {cure}")
        values = _read_keys(path)
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        own = Path(config) / "ddp-course" / "site.toml"
        if path.stem != "local" and own.is_file():
            learners = _read_keys(own)
            options = values.get("sbatch", ()) + learners.get("sbatch", ())
            values |= learners | {"sbatch": options}
        if path.stem == "local" and "SIMULATED_GPUS" in os.environ:  # the ranks can use these
            values["script_args"] = ()
        return cls(path.stem, **values)


def _read_keys(path: Path) -> dict[str, Any]:
    """Read the keys of a site file, each of its type. Raises JobError with the path."""
    source = f"site file {str(path)!r}"
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise JobError(f"{source} cannot be read: {error.strerror}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # also errors that tomllib lets through
        raise JobError(f"{source} is not TOML: {error}") from None
    defaults = {field.name: field.default for field in fields(Site) if field.name != "name"}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in defaults:
            near = get_close_matches(key, defaults, 1, cutoff=0.7)
            hint = f"keys are {', '.join(defaults)}; of sbatch's options: sbatch = ['--{key}=…']"
            if near:
                hint = f"did you mean {near[0]}?"
            raise JobError(f"{source}: the key {key!r} is not known: {hint}")
        values[key] = _typed(f"{source}: {key}", value, defaults[key])
    for option in values.get("sbatch", ()):
        if not option.startswith("-"):  # Slurm prints no error, and requests less
            cure = "an option begins with --, as '--mem=32G' does"
            raise JobError(f"{source}: sbatch = [{option!r}]: {cure}")
    return values


def _typed(key: str, value: object, default: object) -> object:
    """Return a value of a site file, of the type of its default. Raises JobError, named by key."""
    if isinstance(default, int):
        if type(value) is int and value > 0:
            return value
        raise JobError(f"{key} = {value!r}: give a whole number, 1 or more")
    if isinstance(default, str):
        if isinstance(value, str):
            return value
        raise JobError(f"{key} = {value!r}: give a text in quotes")
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(text.replace("{user}", getpass.getuser()) for text in value)
    raise JobError(f"{key} = {value!r}: give a list of texts in quotes")
