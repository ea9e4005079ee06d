"""Where a job runs: what one cluster asks for, from a TOML file in slurm/sites, checked key by key."""

import getpass
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as short

from ddp_helpers import ROOT
from ddp_helpers.notebook.slurm.job import MEMORY, NAME, JobError

SITES = ROOT / "slurm" / "sites"
WORD = re.compile(r"[\w./:,=+@-]+", re.ASCII)
SETUP = re.compile(
    r"module purge|module (load|unload|use|swap)( [\w./:+@-]+)+|(conda|mamba|micromamba) activate [\w./-]+"
    r"|source [\w./+~-]+|export [A-Z_][A-Z0-9_]*=[\w./:,+=@-]*",
    re.ASCII,
)
# What each key may hold, and how to say so.
ALLOWED = {
    "description": (re.compile(r"[^\x00-\x1f\x7f]*"), "one line of text"),
    "gpus": (re.compile(r"--gres=gpu:(\w+:)?\{n\}|--gpus-per-node=(\w+:)?\{n\}", re.ASCII), "--gres=gpu:{n} or alike"),
    "memory": (MEMORY, "a number with K, M, G or T, such as 32G"),
    "mail_user": (re.compile(r"[\w.+-]+@[\w.-]+", re.ASCII), "an address, such as {user}@example.org"),
    "mail_type": (re.compile(r"BEGIN|END|FAIL|REQUEUE|TIME_LIMIT|ALL"), "BEGIN, END, FAIL, REQUEUE, TIME_LIMIT or ALL"),
    "constraint": (re.compile(r"[\w.&|-]+", re.ASCII), "features, joined by & or |"),
    "setup": (SETUP, "module …, conda activate …, source … or export NAME=value"),
    "python": (re.compile(r"[\w./+-]+", re.ASCII), "a command or a path, without spaces"),
    "source": (re.compile(r"[\w./+-]+", re.ASCII), "the path of a file"),
    "prefix": (WORD, "words without spaces, quotes and dollar signs"),
    "script_args": (WORD, "words without spaces, quotes and dollar signs"),
}


@dataclass(frozen=True)
class Site:
    """A cluster, as slurm/sites/TEMPLATE.toml explains it key by key. Raises JobError at what it cannot be."""

    name: str
    description: str = ""
    account: str = ""
    partition: str = ""
    constraint: str = ""
    gpus: str = "--gres=gpu:{n}"
    memory: str = ""
    mail_user: str = ""
    mail_type: tuple[str, ...] = ("END", "FAIL")
    setup: tuple[str, ...] = ()
    python: str = ""  # without it, the Python that writes the file
    prefix: tuple[str, ...] = ()
    source: str = ""
    script_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for one in fields(self):
            pattern, allowed = ALLOWED.get(one.name, (NAME, "letters, digits, dot, dash and underscore"))
            value = getattr(self, one.name)
            for word in value if isinstance(value, tuple) else [value] if value or one.name in ("name", "gpus") else []:
                if not (isinstance(word, str) and pattern.fullmatch(word)):
                    raise JobError(f"site {self.name!r}: {one.name} = {word!r} cannot be used: give {allowed}")

    @classmethod
    def load(cls, name: str | Path) -> "Site":
        """A site by its name in slurm/sites, or by the path of its file."""
        path = Path(name) if str(name).endswith(".toml") else SITES / f"{name}.toml"
        found = False
        with suppress(OSError):  # a name that no file can have
            found = path.is_file()
        if not found:
            known = ", ".join(sorted(found.stem for found in SITES.glob("[a-z]*.toml")))
            raise JobError(f"site {str(name)!r} is not known: choose one of {known}, or give the path of a .toml file")
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise JobError(f"site file {path.name!r} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # TOMLDecodeError, and what tomllib lets through
            raise JobError(f"site file {path.name!r} is not TOML: {error}") from None
        return cls(path.stem, **{key: typed(path.name, key, value) for key, value in values.items()})

    def but(self, **values: str) -> "Site":
        """The same site with these values instead, where they are not empty: the account of one learner, say."""
        return replace(self, **{key: value for key, value in values.items() if value})


def typed(file: str, key: str, value: object) -> str | tuple[str, ...]:
    """A value of the file in its place: text or a list of text, with the learner's name for {user}."""
    kinds = {one.name: str(one.type) for one in fields(Site) if one.name != "name"}
    if key not in kinds:
        near = get_close_matches(key, kinds, 1)
        hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(kinds)}"
        raise JobError(f"site file {file!r}: the key {key!r} is not known: {hint}")
    many = "tuple" in kinds[key]
    words = value if many else [value]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        kind = "a list of texts" if many else "a text"
        raise JobError(f"site file {file!r}: {key} = {short(value)}: give {kind} in quotes")
    words = [word.replace("{user}", user()) if "{user}" in word else word for word in words]
    return tuple(words) if many else words[0]


def user() -> str:
    """The learner's name on this machine, if it may stand in a file that a shell reads."""
    name = getpass.getuser()
    if not NAME.fullmatch(name):
        raise JobError(f"your user name {name!r} cannot stand in a job file for {{user}}: write it into the site file")
    return name
