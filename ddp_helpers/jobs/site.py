"""A cluster on which jobs run, read from a site file that is checked key by key.

Whoever makes a job loads its site, in one process; `sbatch.render` makes the job file from both.
"""

import getpass
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ddp_helpers import SLURM
from ddp_helpers.jobs.allowed import complaint
from ddp_helpers.jobs.job import NAME, JobError, seconds

SITES = SLURM / "sites"
_USER = re.compile(r"(?<!\$)\{user\}")  # ${user} is a variable

_Value = str | bool | int | tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """A cluster, as slurm/sites/TEMPLATE.toml explains it key by key.

    Raises JobError at a value that a key cannot have.
    """

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
        """The flags by which srun and sbatch are let onto the cluster, such as --account=NAME."""
        values = {
            "account": self.account,
            "partition": self.partition,
            "qos": self.qos,
            "reservation": self.reservation,
        }
        return [f"--{key}={value}" for key, value in values.items() if value]

    @property
    def in_container(self) -> bool:
        """Whether the ranks run in an image, in which the Python of this machine is not."""
        return bool(self.prefix) or any(flag.startswith("--container-image") for flag in self.srun)

    @property
    def has_data(self) -> bool:
        """Whether the site itself says where MNIST lies, as in an image."""
        return any(argument.partition("=")[0] == "--data" for argument in self.script_args)

    def __post_init__(self) -> None:
        _check_keys(f"site {self.name!r}", vars(self))

    @classmethod
    def load(cls, name: str | Path) -> "Site":
        """Read a site by its name in slurm/sites, or by the path of its file.

        The keys of the learner's own file (`_learners_file`) count more, but not at `local`.
        Raises JobError where there is no such site, or a key of it cannot be used.
        """
        path = Path(name) if str(name).endswith(".toml") else SITES / f"{name}.toml"
        is_file = False
        with suppress(OSError):  # a name that no file can have
            is_file = path.is_file()
        if not is_file:
            known = ", ".join(sorted(site.stem for site in SITES.glob("[a-z]*.toml")))
            cure = f"choose one of {known}, or give the path of a .toml file"
            raise JobError(f"site {str(name)!r} is not known: {cure}")
        values: dict[str, Any] = _read_keys(path)  # each of its key's type
        with suppress(FileNotFoundError):
            if path.stem != "local":  # there an account of another cluster is not known
                values |= _read_keys(_learners_file())
        return cls(path.stem, **values)

    def but(
        self,
        *,
        account: str = "",
        partition: str = "",
        qos: str = "",
        reservation: str = "",
        nodelist: str = "",
        exclude: str = "",
        constraint: str = "",
        memory: str = "",
        memory_per_cpu: str = "",
        time: str = "",
    ) -> "Site":
        """Return the same site with these values, where they are not empty: a learner's account."""
        return replace(
            self,
            account=account or self.account,
            partition=partition or self.partition,
            qos=qos or self.qos,
            reservation=reservation or self.reservation,
            nodelist=nodelist or self.nodelist,
            exclude=exclude or self.exclude,
            constraint=constraint or self.constraint,
            memory=memory or self.memory,
            memory_per_cpu=memory_per_cpu or self.memory_per_cpu,
            time=time or self.time,
        )


def _learners_file() -> Path:
    """The file of a learner's own keys for every site but `local`: account, reservation, mail."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "ddp-course" / "site.toml"


def _check_keys(source: str, values: Mapping[str, object]) -> None:
    """Raise JobError, which names the source of the values, unless each key may hold its value."""
    if values.get("memory") and values.get("memory_per_cpu"):
        raise JobError(f"{source}: memory and memory_per_cpu exclude each other: give one")
    for key, value in values.items():
        if key != "exclusive":
            _check_key(source, key, value)
    usual, longest = values.get("time"), values.get("longest")
    if not (usual and longest):
        return
    if seconds(str(usual)) > seconds(str(longest)):
        pair = f"time = {usual!r} is more than longest = {longest!r}"
        raise JobError(f"{source}: {pair}: give less, or more")


def _check_key(source: str, key: str, value: object) -> None:
    """Raise JobError, which names the source of the value, unless the key may hold it."""
    if key == "cpus_per_rank":
        if type(value) is not int or not 0 <= value < 10_000:
            cure = "give a whole number, 1 or more"
            raise JobError(f"{source}: {key} = {value!r} cannot be used: {cure}")
        return
    if not value and key != "name":
        return  # the key is not given
    for text in value if isinstance(value, tuple) else (value,):
        if reason := complaint(key, text):
            raise JobError(f"{source}: {key} = {text!r} cannot be used: {reason}")


def _read_keys(path: Path) -> dict[str, _Value]:
    """Read the keys of a site file, each of its type.

    Raises FileNotFoundError, or JobError with the path where a key cannot be used.
    """
    source = f"site file {str(path)!r}"
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JobError(f"{source} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and what tomllib lets through
        raise JobError(f"{source} is not TOML: {error}") from None
    values = {key: _typed(path, key, value) for key, value in content.items()}
    _check_keys(source, {"name": path.stem, **values})
    return values


def _typed(path: Path, key: str, value: object) -> _Value:
    """Return a value of a site file in its key's type, with the learner's name for {user}."""
    defaults = {field.name: field.default for field in fields(Site) if field.name != "name"}
    if key not in defaults:
        near = get_close_matches(key, defaults, 1)
        hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(defaults)}"
        raise JobError(f"site file {str(path)!r}: the key {key!r} is not known: {hint}")
    default = defaults[key]
    seen = f"site file {str(path)!r}: {key} = {short(value)}"
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise JobError(f"{seen}: give true or false, without quotes")
        return value
    if isinstance(default, int):
        if type(value) is not int or value < 1:
            raise JobError(f"{seen}: give a whole number, 1 or more")
        return value
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise JobError(f"{seen}: give a list of texts in quotes")
        return tuple(_with_user(text) for text in value)
    if not isinstance(value, str):
        raise JobError(f"{seen}: give a text in quotes")
    return _with_user(value)


def _with_user(text: str) -> str:
    """Fill in {user}. Raises JobError at a user name that may not stand in a job file."""
    return _USER.sub(lambda _: _user(), text)


def _user() -> str:
    """The learner's name on this machine, if it may stand in a file that a shell reads."""
    name = getpass.getuser()
    if not NAME.fullmatch(name):
        cure = "write it into the site file"
        raise JobError(f"your user name {name!r} cannot stand in a job file for {{user}}: {cure}")
    return name
