"""Check the values of a site file, and quote them for the shell that reads the job file.

`site` calls `complaint` for each key, which says what is wrong with a value; `sbatch` calls
`quoted` and `quoted_setup`.
"""

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from ddp_helpers.jobs.job import MEMORY, NAME, TIME

_VARIABLE = r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
_HOME = r"(?<![^=:, ])~(?=/)"  # where a path begins
_PLACEHOLDER = r"\{(?:folder|runs|course)\}"
_FILLED_IN = re.compile(f"({_VARIABLE}|{_PLACEHOLDER}|{_HOME})", re.ASCII)
# The letters of a word that a shell is given; none of them ends it, or a quotation.
_LETTERS = r"\w./:,=+@%^\-"
_WORD = rf"(?:[{_LETTERS}]|{_VARIABLE}|{_HOME})+"
_WORDS = rf"{_WORD}(?: +{_WORD})*"
_FLAG = rf"(?:[{_LETTERS}#]|{_VARIABLE}|{_HOME}|{_PLACEHOLDER})+"
_RESOURCE = r"[\w.-]+(?::[\w.-]+)*"
_NAMES = rf"{NAME.pattern}(?:,{NAME.pattern})*"

_MODULE = "load try-load unload use unuse swap switch add rm del purge reset restore list refresh"
_MODULE_LINE = rf"(?:--?[a-z-]+ +)*(?:{'|'.join(_MODULE.split())})(?: +{_WORD})*"
_ACTIVATE = (rf"activate +{_WORD}|deactivate", "activate NAME")
# What may stand behind the first word of a line of set-up, and how to say so.
SETUP = {
    "module": (_MODULE_LINE, f"one of {_MODULE}, and names"),
    "ml": (_WORDS, "names of modules"),
    "spack": (rf"(?:load|env +activate) +{_WORDS}", "load NAME, or env activate NAME"),
    "conda": _ACTIVATE,
    "mamba": _ACTIVATE,
    "micromamba": _ACTIVATE,
    "source": (_WORDS, "a file, and what it is given"),
    "export": (rf"[A-Za-z_]\w*=(?:{_WORD})?", "NAME=value, one a line, without spaces"),
    "unset": (r"[A-Za-z_]\w*(?: +[A-Za-z_]\w*)*", "names"),
    "ulimit": (r"-[A-Za-z]+ +(?:\d+|unlimited)", "-n and a number, or alike"),
    "umask": (r"[0-7]{3,4}", "three or four digits, such as 027"),
}

# Options that a site may add to those of sbatch: the job file works with each, whatever its value.
SBATCH = (
    "acctg-freq begin comment contiguous core-spec cores-per-socket cpu-freq deadline "
    "delay-boot dependency distribution export get-user-env gpu-freq gres-flags hint "
    "licenses mcs-label mem-bind mem-per-gpu mincpus network nice oversubscribe power "
    "prefer priority profile propagate reboot sockets-per-node spread-job switches "
    "thread-spec threads-per-core time-min tmp use-min-nodes wckey"
)
_OPTIONS_OF_KEYS = "account partition qos reservation nodelist exclude exclusive constraint"
_SIZE = "nodes ntasks ntasks-per-node ntasks-per-gpu"
_OPTIONS_OF_THE_JOB = f"{_SIZE} job-name array requeue no-requeue signal"
_SBATCH_KEY = "write it into the key sbatch, and srun learns it from there"
# Options that no site may add, by the reason; first those that sbatch knows, then srun's.
_NOT_SBATCH = {
    "a key of its own says it": _OPTIONS_OF_KEYS,
    "the keys mail_user and mail_type say it": "mail-user mail-type",
    "the key gpus says it": "gres gpus gpus-per-node gpus-per-socket",
    "it hides a rank's neighbours from NCCL": "gpus-per-task",
    "the keys memory and memory_per_cpu say it": "mem mem-per-cpu",
    "the keys time and longest say it, and the job": "time",
    "the key cpus_per_rank says it, and the job": "cpus-per-gpu cpus-per-task",
    "the job says it": _OPTIONS_OF_THE_JOB,
    "the log lies in the run folder, where it is looked for": "output error open-mode chdir",
    "the course asks only the cluster on which it runs": "clusters",
}
_NOT_SRUN = {
    "the job says it": f"{_SIZE} ntasks-per-core",
    "the job file says it itself": "cpus-per-task label wait kill-on-bad-exit",
    "the ranks write into the job's log": "output error input multi-prog",
    "the job file hands on all variables; set-up can export more": "export",
    "it hides a rank's neighbours from NCCL": "gpus-per-task",
    f"the whole job must know it: {_SBATCH_KEY}": "hint",
}
_MOUNT_FLAGS = "bind|mount|volume|container-mounts"
_MOUNT = re.compile(rf":\{{folder\}}|\{{folder\}}:|--(?:{_MOUNT_FLAGS})=.*\{{folder\}}")


class Form(NamedTuple):
    """What a key may hold: how to say so, its letters, and a pattern for the whole value."""

    allowed: str
    letters: str
    pattern: str
    # Whether $NAME, ~/ and the placeholders {folder}, {runs} and {course} are filled in.
    filled_in: bool = False


_NODES = Form("names of nodes, such as node[01-04]", r"\w.,\[\]-", r".+")
_NAME = Form("letters, digits, dot, dash and underscore", r"\w.-", NAME.pattern)
_TIME = Form("minutes, HH:MM:SS or D-HH:MM:SS, such as 02:00:00", r"\d:-", TIME.pattern)
_PATH = Form(
    "a path without spaces; it may hold $NAME, and begin with ~/",
    _LETTERS,
    _WORD,
    filled_in=True,
)
_MAIL_TYPES = "BEGIN|END|FAIL|REQUEUE|TIME_LIMIT|ALL"
_GRES = rf"--gres=(?:{_RESOURCE},)*gpu:(?:[\w.-]+:)?\{{n\}}(?:,{_RESOURCE})*"
_GPUS_PER_NODE = r"--gpus-per-node=(?:[\w.-]+:)?\{n\}"
_GPU_FLAGS = "--gres=gpu:{n}, --gres=gpu:a100:{n} or --gpus-per-node={n}"
# A key that is not here holds a name, as _NAME.
FORMS = {
    "description": Form("one line of text", r"\x20-\x7e\x80-\U0010ffff", r".*"),
    "account": Form(
        "letters, digits, dot, dash, underscore, slash and @",
        r"\w./@-",
        r"[A-Za-z0-9].{0,63}",
    ),
    "partition": Form("one partition, or several with commas", r"\w.,-", _NAMES),
    "reservation": Form("one reservation, or several with commas", r"\w.,-", _NAMES),
    "gpus": Form(
        f"{_GPU_FLAGS}: GPUs of each node; or nothing, if it has none",
        r"\w.:,={}-",
        f"{_GRES}|{_GPUS_PER_NODE}",
    ),
    "nodelist": _NODES,
    "exclude": _NODES,
    "memory": Form(
        "a number with K, M, G or T, such as 32G, or 0 for all",
        r"\w",
        rf"0|{MEMORY.pattern}",
    ),
    "memory_per_cpu": Form("a number with K, M, G or T, such as 4G", r"\w", MEMORY.pattern),
    "mail_user": Form("an address, such as {user}@example.org", r"\w.+@-", r"[\w.+-]+@[\w.-]+"),
    "mail_type": Form("BEGIN, END, FAIL, REQUEUE, TIME_LIMIT or ALL", r"\w", _MAIL_TYPES),
    "constraint": Form("features, joined by & or |", r"\w.&|!*\[\]()-", r".+"),
    "time": _TIME,
    "longest": _TIME,
    "sbatch": Form(
        "--name or --name=value, the long form",
        r"\w./:,=+@%*&|()\[\]!-",
        r"--[a-z][a-z-]*(?:=.+)?",
    ),
    "setup": Form(
        f"a line that begins with one of {', '.join(SETUP)}",
        f"{_LETTERS} ",
        r".+",
        filled_in=True,
    ),
    "python": _PATH,
    "source": _PATH,
    "prefix": Form(
        "a word without spaces; it may hold $NAME and {runs}",
        f"{_LETTERS}#",
        _FLAG,
        filled_in=True,
    ),
    "srun": Form(
        "a flag of srun's, such as --container-image=…",
        f"{_LETTERS}#",
        rf"--{_FLAG}",
        filled_in=True,
    ),
    "script_args": Form("a word without spaces", r"\w./:,=+@-", r".+"),
}


def complaint(key: str, value: object) -> str:
    """Say in a line what is wrong with one text of a key, and what to give; '' if nothing is."""
    form = FORMS.get(key, _NAME)
    if not isinstance(value, str) or not value:
        return f"give {form.allowed}"
    if letter := _forbidden_letter(value, form):
        return f"{letter}: give {form.allowed}"
    if not re.fullmatch(form.pattern, value, re.ASCII):
        return f"give {form.allowed}"
    if key == "setup":
        return _wrong_setup(value)
    option = value[2:].partition("=")[0]
    if key == "sbatch" and (reason := _wrong_sbatch(option)):
        return reason
    if key == "srun" and (reason := _wrong_srun(option)):
        return reason
    if key in ("srun", "prefix") and _MOUNT.search(value):
        cure = "mount {runs}, the folder above, instead"
        return f"the records of an array's tasks lie beside {{folder}}: {cure}"
    return ""


def _wrong_setup(line: str) -> str:
    """Say what is wrong with a line of set-up; '' if it can be used."""
    command, _, arguments = line.partition(" ")
    if command not in SETUP:
        return f"{command!r} is no line of set-up: give {FORMS['setup'].allowed}"
    pattern, allowed = SETUP[command]
    fits = re.fullmatch(pattern, arguments.strip(" "), re.ASCII)
    return "" if fits else f"behind {command} give {allowed}"


def _wrong_sbatch(option: str) -> str:
    """Say why a site may not add this option of sbatch; '' if it may."""
    if option in SBATCH.split():
        return ""
    for reason, options in _NOT_SBATCH.items():
        if option in options.split():
            return f"{reason}: leave it out"
    return f"a site may add only {', '.join(SBATCH.split())}"


def _wrong_srun(option: str) -> str:
    """Say why a site may not add this option of srun; '' if it may.

    srun takes the beginning of an option's name for the option.
    """
    if option == "gpus":
        return ""
    for reason, options in _NOT_SRUN.items():
        if any(name.startswith(option) for name in options.split()):
            return f"{reason}: leave it out"
    return ""


_REASONS = {
    "`": "no command is run in a value",
    "~": "it stands for your home folder only where a path begins, as ~/x",
    " ": "a value is one word",
}
_REASONS |= dict.fromkeys(";&|<>", "it would end the command")
_REASONS |= dict.fromkeys("'\"", "the job file puts quotes where they are needed")


def _forbidden_letter(value: str, form: Form) -> str:
    """Name the first letter that may not stand in a value, and say why; '' if there is none."""
    checked = _FILLED_IN.sub("", value) if form.filled_in else value
    letter = re.search(rf"[^{form.letters}]", checked, re.ASCII)
    if not letter:
        return ""
    dollar = "nothing is filled in here"
    if form.filled_in:
        dollar = "only $NAME and ${NAME} are filled in"
    reason = (_REASONS | {"$": dollar}).get(letter[0])
    return f"{letter[0]!r} may not stand in it" + (f" ({reason})" if reason else "")


def quoted(text: str, paths: Mapping[str, str] | None = None, optional: str = "") -> str:
    """Quote a word for the shell, in which the variables of the text are filled in.

    paths: what stands for {folder}, {runs} and {course}. The shell ends the job at a variable that
    is not set, but for the one called `optional`.
    """
    paths = paths or {}
    pieces = _FILLED_IN.split(text)  # at odd indices what is filled in
    if not any(_is_variable(piece) for piece in pieces[1::2]):
        return shlex.quote("".join(paths.get(piece, piece) for piece in pieces))
    quoted = []
    for index, piece in enumerate(pieces):
        if index % 2 and _is_variable(piece):
            name = "HOME" if piece == "~" else piece.strip("${}")
            quoted.append(piece if name == optional else f"${{{name}:?}}")
        else:
            quoted.append(re.sub(r'([$`"\\])', r"\\\1", paths.get(piece, piece)))
    return f'"{"".join(quoted)}"'


def _is_variable(piece: str) -> bool:
    """Whether the shell fills in this piece of a word: $NAME, ${NAME} or ~."""
    return piece.startswith(("$", "~"))


def quoted_setup(line: str) -> str:
    """Quote a line of set-up for the shell: a line that fails ends the job."""
    command, *arguments = line.split()
    if command == "export":  # it fails only where a name is not set, and that ends the job anyway
        name, _, value = arguments[0].partition("=")
        return f"export {name}={quoted(value, optional=name) if value else ''}"
    text = " ".join([command, *map(quoted, arguments)])
    message = line.replace("$", "\\$")
    return f'{text} || failed "{message}"'
