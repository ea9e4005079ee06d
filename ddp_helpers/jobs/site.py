"""Where a job runs, from a TOML file in slurm/sites checked key by key, and the sbatch file that it becomes there."""

import getpass
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from reprlib import repr as short

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ddp_helpers import ROOT
from ddp_helpers.jobs.allowed import set_up, shell, wrong
from ddp_helpers.jobs.job import ARRAY, NAME, RUN_DIR, Job, JobError, seconds

SITES = ROOT / "slurm" / "sites"
USER = re.compile(r"(?<!\$)\{user\}")  # ${user} is a variable


@dataclass(frozen=True)
class Site:
    """A cluster, as slurm/sites/TEMPLATE.toml explains it key by key. Raises JobError at what it cannot be."""

    name: str
    description: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    nodelist: str = ""
    exclude: str = ""
    exclusive: bool = False
    constraint: str = ""
    gpus: str = "--gres=gpu:{n}"
    memory: str = ""
    memory_per_cpu: str = ""
    mail_user: str = ""
    mail_type: tuple[str, ...] = ("END", "FAIL")
    time: str = ""  # of a job that does not say how long
    longest: str = ""
    cpus_per_rank: int = 0  # of a job that does not say how many; 1 without it
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = ""  # without it, the Python that writes the file
    srun: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    source: str = ""
    script_args: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """The flags that srun and sbatch need to be let onto the cluster: account, partition, QOS, reservation."""
        keys = ("account", "partition", "qos", "reservation")
        return [f"--{key}={getattr(self, key)}" for key in keys if getattr(self, key)]

    @property
    def in_container(self) -> bool:
        """Whether the ranks run in an image, in which the Python of this machine is not."""
        return bool(self.prefix) or any(word.startswith("--container-image") for word in self.srun)

    @property
    def has_data(self) -> bool:
        """Whether the site itself says where MNIST lies: in an image, say, where this machine's folders are not."""
        return any(word.partition("=")[0] == "--data" for word in self.script_args)

    def __post_init__(self) -> None:
        check_keys(f"site {self.name!r}", vars(self))

    @classmethod
    def load(cls, name: str | Path) -> "Site":
        """A site by its name in slurm/sites, or by the path of its file; what own_file() says counts more."""
        path = Path(name) if str(name).endswith(".toml") else SITES / f"{name}.toml"
        found = False
        with suppress(OSError):  # a name that no file can have
            found = path.is_file()
        if not found:
            known = ", ".join(sorted(found.stem for found in SITES.glob("[a-z]*.toml")))
            raise JobError(f"site {str(name)!r} is not known: choose one of {known}, or give the path of a .toml file")
        values = keys_of(path)
        with suppress(FileNotFoundError):
            values |= keys_of(own_file()) if path.stem != "local" else {}  # an account there is not known here
        return cls(path.stem, **values)

    def but(self, **values: str) -> "Site":
        """The same site with these values instead, where they are not empty: the account of one learner, say."""
        return replace(self, **{key: value for key, value in values.items() if value})


def own_file() -> Path:
    """The learner's own keys for every site but the local one: account, reservation, mail; not shared with others."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ddp-course" / "site.toml"


def check_keys(where: str, values: Mapping[str, object]) -> None:
    """Raise JobError, which says where they stand, unless these keys may hold these values."""
    if values.get("memory") and values.get("memory_per_cpu"):
        raise JobError(f"{where}: memory and memory_per_cpu exclude each other: give one")
    for key, value in values.items():
        if key == "exclusive":
            continue
        if key == "cpus_per_rank":
            if type(value) is not int or not 0 <= value < 10_000:
                raise JobError(f"{where}: {key} = {value!r} cannot be used: give a whole number, 1 or more")
            continue
        for word in value if isinstance(value, tuple) else [value] if value or key == "name" else []:
            if why := wrong(key, word):
                raise JobError(f"{where}: {key} = {word!r} cannot be used: {why}")
    usual, longest = values.get("time"), values.get("longest")
    if usual and longest and seconds(usual) > seconds(longest):
        raise JobError(f"{where}: time = {usual!r} is more than longest = {longest!r}: give less, or more")


def keys_of(path: Path) -> dict[str, str | bool | int | tuple[str, ...]]:
    """The keys of a site file, each of its type. Raises JobError, with its path, where one of them cannot be used."""
    where = f"site file {str(path)!r}"
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JobError(f"{where} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and what tomllib lets through
        raise JobError(f"{where} is not TOML: {error}") from None
    values = {key: typed(str(path), key, value) for key, value in values.items()}
    check_keys(where, {"name": path.stem} | values)
    return values


def typed(file: str, key: str, value: object) -> str | bool | int | tuple[str, ...]:
    """A value of the file in its place, of the key's type, with the learner's name for {user}."""
    kinds = {one.name: str(one.type) for one in fields(Site) if one.name != "name"}
    if key not in kinds:
        near = get_close_matches(key, kinds, 1)
        hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(kinds)}"
        raise JobError(f"site file {file!r}: the key {key!r} is not known: {hint}")
    if "bool" in kinds[key]:
        if not isinstance(value, bool):
            raise JobError(f"site file {file!r}: {key} = {short(value)}: give true or false, without quotes")
        return value
    if "int" in kinds[key]:
        if type(value) is not int or value < 1:
            raise JobError(f"site file {file!r}: {key} = {short(value)}: give a whole number, 1 or more")
        return value
    many = "tuple" in kinds[key]
    words = value if many else [value]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        kind = "a list of texts" if many else "a text"
        raise JobError(f"site file {file!r}: {key} = {short(value)}: give {kind} in quotes")
    words = [USER.sub(lambda _: user(), word) for word in words]
    return tuple(words) if many else words[0]


def user() -> str:
    """The learner's name on this machine, if it may stand in a file that a shell reads."""
    name = getpass.getuser()
    if not NAME.fullmatch(name):
        raise JobError(f"your user name {name!r} cannot stand in a job file for {{user}}: write it into the site file")
    return name


SHELL = {RUN_DIR: '"$run_dir"', ARRAY: '"${values[$SLURM_ARRAY_TASK_ID]}"'}
UNSEEN = "the run folder $0 is not in the container: mount {runs} there, in the site file"
HOLES = re.compile(f"({re.escape(RUN_DIR)}|{re.escape(ARRAY)})")


def render(job: Job, site: Site, folder: Path) -> str:
    """The text of the file for this job, whose script and record are in `folder`. Raises JobError at an odd path."""
    folder = Path(folder).absolute()
    if any(letter in str(folder) for letter in "\\\"'") or not str(folder).isprintable():
        raise JobError(f"the run folder {str(folder)!r} cannot be used: choose a path without quotes and backslashes")
    if site.longest and seconds(job.time) > seconds(site.longest):
        raise JobError(f"time={job.time!r} is more than {site.longest}, the longest at site {site.name}: ask for less")
    python = shell(site.python) if site.python else "python" if site.in_container else shlex.quote(sys.executable)
    values = {"job": job, "site": site, "folder": str(folder), "python": python, "wrapper": wrapper}
    places = {"{folder}": str(folder), "{runs}": str(folder.parent), "{course}": str(ROOT)}
    values |= {key: " ".join(shell(word, places) for word in vars(site)[key]) for key in ("srun", "prefix")}
    text = environment().get_template("job.sbatch.jinja").render(values)
    # The comments in a column; not behind the log's path, which is the learner's.
    return re.sub(r"^(#SBATCH (?!--output).*?)  (# .*)$", lambda line: f"{line[1]:<39} {line[2]}", text, flags=re.M)


@cache
def environment() -> Environment:
    """Make the jinja environment of the template, with filters that quote values for the shell."""
    found = Environment(loader=FileSystemLoader(ROOT / "slurm"), undefined=StrictUndefined, autoescape=False)
    found.trim_blocks = found.lstrip_blocks = found.keep_trailing_newline = True
    found.filters |= {"quote": shlex.quote, "word": word, "directive": directive, "set_up": set_up}
    return found


def word(text: str) -> str:
    """Quote a word of the program for the shell, but for the variables that stand in it."""
    parts = [part for part in HOLES.split(text) if part]
    return "".join(SHELL.get(part) or shlex.quote(part) for part in parts) or "''"


def wrapper(job: Job, site: Site) -> str:
    """Return the bash line that runs on each node, in the container if there is one, before the program.

    In a container $0 is the run folder: what is written where nothing is mounted would be gone with the container.
    """
    steps = ['export PET_NODE_RANK="$SLURM_NODEID"'] if job.launcher == "torchrun" else []
    steps += [f"source {shell(site.source)}"] if site.source else []
    seen = f'[ -d "$0" ] || {{ echo "{UNSEEN}" >&2; exit 1; }}; ' if site.in_container else ""
    return seen + " && ".join([*steps, 'exec "$@"'])


def directive(value: str) -> str:
    """A value as sbatch reads it behind #SBATCH, where a space would end it and # begin a comment."""
    return value if set(value).isdisjoint(" #") else f'"{value}"'
