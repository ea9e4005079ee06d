"""What each key of a site file may hold, what is wrong with a value that it may not, and how a shell is given one."""

import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from ddp_helpers.jobs.job import MEMORY, NAME, TIME

VARIABLE = r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
HOME = r"(?<![^=:, ])~(?=/)"  # where a path begins
HOLE = r"\{(?:folder|runs|course)\}"
FILLED = re.compile(f"({VARIABLE}|{HOLE}|{HOME})", re.ASCII)
LETTERS = r"\w./:,=+@%^\-"  # of a word that a shell is given; none of them ends it, or a quotation
WORD = rf"(?:[{LETTERS}]|{VARIABLE}|{HOME})+"
WORDS = rf"{WORD}(?: +{WORD})*"
FLAG = rf"(?:[{LETTERS}#]|{VARIABLE}|{HOME}|{HOLE})+"
RESOURCE = r"[\w.-]+(?::[\w.-]+)*"

_MODULE = "load try-load unload use unuse swap switch add rm del purge reset restore list refresh"
_ACTIVATE = (rf"activate +{WORD}|deactivate", "activate NAME")
# What may stand behind the first word of a line of set-up, and how to say so.
SETUP = {
    "module": (rf"(?:--?[a-z-]+ +)*(?:{'|'.join(_MODULE.split())})(?: +{WORD})*", f"one of {_MODULE}, and names"),
    "ml": (WORDS, "names of modules"),
    "spack": (rf"(?:load|env +activate) +{WORDS}", "load NAME, or env activate NAME"),
    "conda": _ACTIVATE,
    "mamba": _ACTIVATE,
    "micromamba": _ACTIVATE,
    "source": (WORDS, "a file, and what it is given"),
    "export": (rf"[A-Za-z_]\w*=(?:{WORD})?", "NAME=value, one a line, without spaces"),
    "unset": (r"[A-Za-z_]\w*(?: +[A-Za-z_]\w*)*", "names"),
    "ulimit": (r"-[A-Za-z]+ +(?:\d+|unlimited)", "-n and a number, or alike"),
    "umask": (r"[0-7]{3,4}", "three or four digits, such as 027"),
}

# Options that a site may add to those of sbatch: the job file works with each of them, whatever its value.
SBATCH = (
    "acctg-freq begin comment contiguous core-spec cores-per-socket cpu-freq deadline delay-boot dependency "
    "distribution export get-user-env gpu-freq gres-flags hint licenses mcs-label mem-bind mem-per-gpu mincpus "
    "network nice oversubscribe power prefer priority profile propagate reboot sockets-per-node spread-job switches "
    "thread-spec threads-per-core time-min tmp use-min-nodes wckey"
)
# Options that no site may add, by the reason; first those that sbatch knows, then srun's.
NOT_SBATCH = {
    "a key of its own says it": "account partition qos reservation nodelist exclude exclusive constraint",
    "the keys mail_user and mail_type say it": "mail-user mail-type",
    "the key gpus says it": "gres gpus gpus-per-node gpus-per-socket",
    "it hides a rank's neighbours from NCCL": "gpus-per-task",
    "the keys memory and memory_per_cpu say it": "mem mem-per-cpu",
    "the keys time and longest say it, and the job": "time",
    "the key cpus_per_rank says it, and the job": "cpus-per-gpu cpus-per-task",
    "the job says it": "nodes ntasks ntasks-per-node ntasks-per-gpu job-name array requeue no-requeue signal",
    "the log lies in the run folder, where it is looked for": "output error open-mode chdir",
    "the course asks only the cluster on which it runs": "clusters",
}
NOT_SRUN = {
    "the job says it": "nodes ntasks ntasks-per-node ntasks-per-gpu ntasks-per-core",
    "the job file says it itself": "cpus-per-task label wait kill-on-bad-exit",
    "the ranks write into the job's log": "output error input multi-prog",
    "the job file hands on all variables; set-up can export more": "export",
    "it hides a rank's neighbours from NCCL": "gpus-per-task",
    "the whole job must know it: write it into the key sbatch, and srun learns it from there": "hint",
}
_MOUNT = re.compile(r":\{folder\}|\{folder\}:|--(?:bind|mount|volume|container-mounts)=.*\{folder\}")


class Form(NamedTuple):
    """What a key may hold: how to say so, the letters, and the whole as a pattern."""

    words: str
    letters: str
    pattern: str
    filled: bool = False  # whether $NAME, ~/ and the places {folder}, {runs} and {course} are filled in


_NODES = Form("names of nodes, such as node[01-04]", r"\w.,\[\]-", r".+")
_NAMED = Form("letters, digits, dot, dash and underscore", r"\w.-", NAME.pattern)
_TIME = Form("minutes, HH:MM:SS or D-HH:MM:SS, such as 02:00:00", r"\d:-", TIME.pattern)
_PATH = Form("a path without spaces; it may hold $NAME, and begin with ~/", LETTERS, WORD, filled=True)
FORMS = {
    "description": Form("one line of text", r"\x20-\x7e\x80-\U0010ffff", r".*"),
    "account": Form("letters, digits, dot, dash, underscore and slash", r"\w./-", r"[A-Za-z0-9].{0,63}"),
    "partition": Form("one partition, or several with commas", r"\w.,-", rf"{NAME.pattern}(?:,{NAME.pattern})*"),
    "reservation": Form("one reservation, or several with commas", r"\w.,-", rf"{NAME.pattern}(?:,{NAME.pattern})*"),
    "gpus": Form(
        "--gres=gpu:{n}, --gres=gpu:a100:{n} or --gpus-per-node={n}: GPUs of each node; or nothing, if it has none",
        r"\w.:,={}-",
        rf"--gres=(?:{RESOURCE},)*gpu:(?:[\w.-]+:)?\{{n\}}(?:,{RESOURCE})*|--gpus-per-node=(?:[\w.-]+:)?\{{n\}}",
    ),
    "nodelist": _NODES,
    "exclude": _NODES,
    "memory": Form("a number with K, M, G or T, such as 32G, or 0 for all", r"\w", rf"0|{MEMORY.pattern}"),
    "memory_per_cpu": Form("a number with K, M, G or T, such as 4G", r"\w", MEMORY.pattern),
    "mail_user": Form("an address, such as {user}@example.org", r"\w.+@-", r"[\w.+-]+@[\w.-]+"),
    "mail_type": Form("BEGIN, END, FAIL, REQUEUE, TIME_LIMIT or ALL", r"\w", "BEGIN|END|FAIL|REQUEUE|TIME_LIMIT|ALL"),
    "constraint": Form("features, joined by & or |", r"\w.&|!*\[\]()-", r".+"),
    "time": _TIME,
    "longest": _TIME,
    "sbatch": Form("--name or --name=value, the long form", r"\w./:,=+@%*&|()\[\]!-", r"--[a-z][a-z-]*(?:=.+)?"),
    "setup": Form(f"a line that begins with one of {', '.join(SETUP)}", f"{LETTERS} ", r".+", filled=True),
    "python": _PATH,
    "source": _PATH,
    "prefix": Form("a word without spaces; it may hold $NAME and {runs}", f"{LETTERS}#", FLAG, filled=True),
    "srun": Form("a flag of srun's, such as --container-image=…", f"{LETTERS}#", rf"--{FLAG}", filled=True),
    "script_args": Form("a word without spaces", r"\w./:,=+@-", r".+"),
}


def wrong(key: str, value: object) -> str:
    """What is wrong with one text of a key, and what to give; nothing, if it can be used."""
    form = FORMS.get(key, _NAMED)
    if not isinstance(value, str) or not value:
        return f"give {form.words}"
    if odd := _odd(value, form):
        return f"{odd}: give {form.words}"
    if not re.fullmatch(form.pattern, value, re.ASCII):
        return f"give {form.words}"
    if key == "setup":
        first, _, rest = value.partition(" ")
        pattern, words = SETUP.get(first, ("", ""))
        if not pattern:
            return f"{first!r} is no line of set-up: give {form.words}"
        return "" if re.fullmatch(pattern, rest.strip(" "), re.ASCII) else f"behind {first} give {words}"
    name = value[2:].partition("=")[0]
    if key == "sbatch" and name not in SBATCH.split():
        reasons = [why for why, options in NOT_SBATCH.items() if name in options.split()]
        return f"{reasons[0]}: leave it out" if reasons else f"a site may add only {', '.join(SBATCH.split())}"
    if key == "srun" and name != "gpus":  # srun takes the beginning of an option's name for the option
        for why, options in NOT_SRUN.items():
            if any(option.startswith(name) for option in options.split()):
                return f"{why}: leave it out"
    if key in ("srun", "prefix") and _MOUNT.search(value):
        return "the records of an array's tasks lie beside {folder}: mount {runs}, the folder above, instead"
    return ""


WHY = (
    {
        "`": "no command is run in a value",
        "~": "it stands for your home folder only where a path begins, as ~/x",
        " ": "a value is one word",
    }
    | dict.fromkeys(";&|<>", "it would end the command")
    | dict.fromkeys("'\"", "the job file puts quotes where they are needed")
)


def _odd(value: str, form: Form) -> str:
    """What may not stand in a value: the first such letter, and why."""
    letter = re.search(rf"[^{form.letters}]", FILLED.sub("", value) if form.filled else value, re.ASCII)
    if not letter:
        return ""
    dollar = "only $NAME and ${NAME} are filled in" if form.filled else "nothing is filled in here"
    why = (WHY | {"$": dollar}).get(letter[0])
    return f"{letter[0]!r} may not stand in it" + (f" ({why})" if why else "")


def shell(text: str, places: Mapping[str, str] | None = None, own: str = "") -> str:
    """Quote a word for the shell; a $NAME in it must be set where it is read, but for the name `own`.

    places: what stands for {folder}, {runs} and {course}.
    """
    places, pieces = places or {}, FILLED.split(text)
    if not any(piece[:1] in ("$", "~") for piece in pieces[1::2]):
        return shlex.quote("".join(places.get(piece, piece) for piece in pieces))
    for at, piece in enumerate(pieces):
        if at % 2 and piece[:1] in ("$", "~"):
            name = piece.strip("${}") if piece != "~" else "HOME"
            pieces[at] = piece if name == own else f"${{{name}:?}}"
        else:
            pieces[at] = re.sub(r'([$`"\\])', r"\\\1", places.get(piece, piece))
    return f'"{"".join(pieces)}"'


def set_up(line: str) -> str:
    """A line of set-up for the shell: what is filled in stays one word, and a line that fails ends the job."""
    first, *words = line.split()
    if first == "export":  # it fails only where a name is not set, and that ends the job by itself
        name, _, value = words[0].partition("=")
        return f"export {name}={shell(value, own=name) if value else ''}"
    said = line.replace("$", "\\$")
    return f'{" ".join([first, *map(shell, words)])} || failed "{said}"'
