"""Ten thousand odd jobs and site files: JobError and one line, or a job file of the template's lines alone."""

import random
import re
import shlex
import subprocess
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from fuzzing import INPUTS, TEXT, fuzz, put
from real import LIMIT
from refusals import outcome, refused

from ddp_helpers import ROOT
from ddp_helpers.jobs import Job, Site, allowed, render
from ddp_helpers.jobs.job import ARRAY, RUN_DIR, seconds
from ddp_helpers.jobs.site import SITES

# ---- what a rendered file may hold: the template's lines, with safe words where it has a value

WORD = r"""(?:[\w./:,=+@%-]+|'[^'\n]*'(?:"'"'[^'\n]*')*|''"""  # as shlex.quote writes one
# And as a site's is written in which $NAME is filled in: in double quotes, where a backslash keeps the rest as it is.
WORD += r"""|"(?:[^"$`\\\n]|\\[$`"\\]|\$\{[A-Za-z_]\w*(?::\?)?\}|\$[A-Za-z_]\w*)*")"""
SETS_UP = rf"""(?:{"|".join(allowed.SETUP)})(?: {WORD})* \|\| failed "(?:[^"$`\\\n]|\\\$)*\""""
SETS_UP += rf"|export [A-Za-z_]\w*={WORD}?"
OURS = r"""(?:"\$run_dir"|"\$\{values\[\$SLURM_ARRAY_TASK_ID\]\}")"""


def values(expression, line):
    """What may stand in the place of an expression of the template."""
    if expression.startswith("option"):
        return rf"--(?:{allowed.SBATCH.replace(' ', '|')})(?:=[^\s\"#]+)?"
    if line.startswith("#SBATCH"):
        return r"""(?:[^\s"#]+|"[^"\n]*")"""  # a space would begin another option
    if line.startswith("#"):
        return r"[\w.-]*"
    if expression.startswith("line"):
        return f"(?:{SETS_UP})"
    if expression in ("srun", "prefix", "python"):
        return f"{WORD}(?: {WORD})*"
    word = f"(?:{WORD}|{OURS})" if "word" in expression else WORD
    return f"{word}(?: {word})*" if "quote" in expression or "word" in expression else r"[\w.+ -]*"


def shape(line):
    """A line of the template as a pattern; what it has only now and then may be missing."""
    pieces = []
    for piece in re.split(r"{%.*?%}", line):
        parts = re.split(r"{{ *(.*?) *}}", piece)
        parts[::2] = [re.escape(part) for part in parts[::2]]
        parts[1::2] = [values(part, line) for part in parts[1::2]]
        pieces.append("".join(parts).replace(r"\ \ \#", r"\ +\#"))  # comments stand in a column
    goes_on = r"(?:\ \\)?" if line.startswith("  ") else ""  # the command, over several lines
    return pieces[0] + "".join(f"(?:{piece})?" for piece in pieces[1:]) + goes_on


TEMPLATE = (ROOT / "slurm" / "job.sbatch.jinja").read_text().splitlines()
LINE = re.compile("|".join(f"(?:{shape(line)})" for line in TEMPLATE if not line.startswith("{%")), re.ASCII)


def strange(text):
    """The lines of a job file that are none of the template's."""
    return [line for line in text.removesuffix("\n").split("\n") if not of_template(line)]


@cache
def of_template(line):
    """Whether it is a line of the template."""
    return LINE.fullmatch(line) is not None


def words_of(text):
    """The words of the program, as a shell reads its line: the last, or that behind which a requeue is asked for."""
    line, _, requeues = text.partition(" || status=$?")
    line = line.split("\n")[-1 if requeues else -2]
    means = {"$run_dir": RUN_DIR, "${values[$SLURM_ARRAY_TASK_ID]}": ARRAY}
    return [means.get(word, word) for word in shlex.split(line)]


# ---- jobs

GOOD = {"name": "try", "program": ("job.py", "--run-dir", RUN_DIR)}
SOUND = {"nodes": [1, 2], "tasks_per_node": [1, 4], "gpus_per_node": [0, 4], "time": ["5", "1-0", "00:10:00"]}
SOUND |= {"cpus_per_task": [1, 8], "memory": ["", "32G"], "launcher": ["srun", "torchrun"], "array": [(), ("1", "2")]}
NAMES = [one.name for one in fields(Job)]


def options(choices):
    """What a job is made from: good values, and some that are not."""
    made = GOOD | {name: choices.one(good) for name, good in SOUND.items()}
    if made["array"]:
        made["program"] += (ARRAY,)
    for name in choices.some(NAMES, 2):
        made[name] = choices.value()
        if name in ("program", "array") and choices.below(3):
            made[name] = tuple(choices.text() for _ in range(choices.below(4)))
    return made


def test_a_job_is_refused_or_reaches_the_file_word_for_word(tmp_path):
    files = []

    def check(made):
        job, _ = outcome(Job, **made)
        if job:
            text = render(job, Site("here"), tmp_path)
            assert not strange(text) and 0 < seconds(job.time) < 10**12
            words = words_of(text)
            assert words[words.index("job.py") if "job.py" in words else -len(job.program) :] == list(job.program)
            assert f"--job-name={job.name}\n" in text
            files.append(text)

    fuzz(options, check)
    assert len(files) > INPUTS / 10
    sound_to_bash(files)


def sound_to_bash(files, most=150):
    """A sample of the files is parsed by bash."""
    for text in random.Random(1).sample(files, min(most, len(files))):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert (done.returncode, done.stderr) == (0, ""), text


# ---- sites

SHIPPED = [path.read_text() for path in sorted(SITES.glob("*.toml"))]
SHIPPED = [*SHIPPED, re.sub(r"(?m)^# (?=[a-z_]+ = )", "", SHIPPED[0])]  # TEMPLATE's examples taken in
ODD_TOML = ["[", "]", "[[a]]", "a.b.c = 1", "a = " + "[" * 3000, "x = 2026-99-99"]
ODD_TOML += ["x = " + "9" * 5000, "account = 1e999", '"""', "'''", "\r", "\0", "\ufeff", "= =", 'name = "x"']
ODD_TOML += ["account." + ".".join("a" * 1200) + " = 1"]
KEYS = [one.name for one in fields(Site)]
LISTS = [one.name for one in fields(Site) if "tuple" in str(one.type)]
OTHERS = {one.name: str(one.type) for one in fields(Site) if one.type in (bool, int)}
GOOD_WORDS = {
    "mail_type": "ALL",
    "mail_user": "a@b.c",
    "memory": "7G",
    "memory_per_cpu": "7G",
    "srun": "--a",
    "sbatch": "--nice",
    "time": "5",
    "longest": "1-0",
    "gpus": "--gres=gpu:{n}",
    "setup": "module load a",
}


def quoted(text):
    """A text as a TOML string."""
    return (
        '"'
        + "".join(letter if " " <= letter < "\x7f" and letter not in '"\\' else escape(letter) for letter in text)
        + '"'
    )


def escape(letter):
    """A letter as TOML escapes it; what it cannot hold becomes a question mark."""
    return f"\\U{ord(letter):08X}" if not "\ud800" <= letter <= "\udfff" else "?"


def line_of(choices):
    """One key with a value that is good, odd, or both."""
    key, way = choices.one(KEYS), choices.below(4)
    if key in OTHERS and way < 2:
        return f"{key} = {'true' if 'bool' in OTHERS[key] else 1 + choices.below(64)}"
    good = GOOD_WORDS.get(key, "a")
    word = [good, good, choices.text(), good + choices.text()][way]
    return f"{key} = [{quoted(word)}]" if (key in LISTS) == bool(choices.below(8)) else f"{key} = {quoted(word)}"


def site_file(choices):
    """The bytes of a site file: keys with odd values, a shipped one with lines changed, or anything."""
    way = choices.below(8)
    if way == 0:
        return choices.damaged(choices.one(SHIPPED).encode())
    lines = choices.one(SHIPPED).splitlines() if way < 4 else []
    for _ in range(1 + choices.below(3)):
        new = choices.one(ODD_TOML) if not choices.below(6) else line_of(choices)
        key = new.partition(" ")[0]
        lines = [line for line in lines if line.partition(" ")[0] != key] + [new]  # TOML takes no key twice
    return "\n".join(lines).encode()


def test_a_site_file_is_refused_or_what_it_says_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ab123")
    path, files, keys = tmp_path / "mine.toml", [], set()
    job = [Job("try", ("job.py",), 2, 4, gpus, launcher=by) for gpus, by in ((4, "srun"), (0, "torchrun"))]

    def check(content):
        put(path, content)
        site, line = outcome(Site.load, path)
        if not site:
            assert "site " in line
            return
        for key in KEYS:
            value = getattr(site, key)
            held = value if isinstance(value, tuple) else [value] if value else []
            assert key in OTHERS or not any(allowed.complaint(key, word) for word in held)
            keys.update([key] if held else [])
        text, line = outcome(render, job[len(files) % 2], site, Path("/run"))
        if not text:
            assert seconds(site.longest) < 600 and site.name in line and site.longest in line
            return
        assert not strange(text)
        files.append(text)

    fuzz(site_file, check)
    assert len(files) > INPUTS / 10 and keys == set(KEYS), "every key was filled in at least once"
    sound_to_bash(files)


def test_a_line_that_a_value_brought_in_would_be_found(monkeypatch):
    text = render(Job("try", ("job.py",)), Site("here", account="physics", setup=("module purge",)), Path("/run"))
    assert not strange(text)
    for old, new in (("physics", "a\ntouch x"), ("module purge", "module purge; touch x"), ("=physics", "=a $(x)")):
        assert strange(text.replace(old, new))
    monkeypatch.setitem(allowed.FORMS, "account", allowed.Form("anything", r"\s\S", r"[\s\S]*"))
    site = Site("here", account="a\n#SBATCH --wrap=x")
    assert strange(render(Job("try", ("job.py",)), site, Path("/run"))) == ["#SBATCH --wrap=x"]


# ---- what a shell makes of a site's words

HELD = {"A": "a b", "b_1": "$(touch x)", "HOME": "/h'o", "SCRATCH": '"; touch x; "', "PATH": "`touch x`:\\n*"}
PIECES = [
    *"$${}~/:=,.^%#@a-_",
    "$A",
    "${A}",
    "$b_1",
    "${SCRATCH}",
    "$PATH",
    "~/",
    ":~/",
    "=~/",
    "--a=",
    "{folder}",
    "{runs}",
]
PIECES += [
    "$(touch x)",
    "`touch x`",
    "; touch x",
    "&",
    "|",
    ">x",
    '"',
    "'",
    "\\",
    " ",
    "\n",
    "!",
    "*",
    "?",
    "(",
    "$1",
    "$$",
    "é",
]
PLACES = {"{folder}": "/r s/$A", "{runs}": "/r s", "{course}": "/c`"}
BEGINS = [
    "module load ",
    "module ",
    "ml ",
    "source ",
    "export B=",
    "export PATH=",
    "unset ",
    "umask ",
    "conda activate ",
]


def filled(word):
    """What a word stands for, by the rule as TEMPLATE.toml says it."""
    word = re.sub(r"(?:(?<=[=:,])|^)~(?=/)", "$HOME", word)
    held = HELD | {name[1:-1]: place for name, place in PLACES.items()}
    return re.sub(r"\$\{(\w+)\}|\$(\w+)|\{(\w+)\}", lambda name: held[name[1] or name[2] or name[3]], word)


def test_a_shell_finds_in_a_sites_words_what_they_stand_for_and_nothing_to_execute(tmp_path):
    lines, means, refusals = [], [], 0

    def words(choices):
        return choices.one(["", *BEGINS]), "".join(choices.some(PIECES, 5))

    def check(made):
        nonlocal refusals
        begin, rest = made
        key = "setup" if begin else "srun" if rest.startswith("--") else "prefix"
        if not rest or allowed.complaint(key, begin + rest):
            refusals += 1
        elif {*re.findall(r"\$\{?(\w+)", rest)} - {*HELD}:
            pass  # a variable that is not set: a test of test_sites
        elif begin:
            lines.append(allowed.quoted_setup(begin + rest))
            first, *words = (begin + rest).split()
            head, value = words[0].split("=", 1) if first == "export" else ("", "")
            means.append([first, *([f"{head}={filled(value)}"] if head else map(filled, words))])
        else:
            lines.append(f"words {allowed.quoted(rest, PLACES)}")
            means.append(["words", filled(rest)])

    fuzz(words, check)
    assert len(lines) > INPUTS / 20 and refusals > INPUTS / 20
    commands = ("words", *allowed.SETUP)  # functions of these names take the place of bash's own
    say = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\" ''; }}\n" for name in commands)
    script = f"{say}failed() {{ exit 1; }}\n" + "\n".join(lines)
    done = subprocess.run(
        ["/bin/bash", "-c", script], env=HELD, cwd=tmp_path, capture_output=True, check=True, timeout=LIMIT
    )
    said = [word for words in means for word in (*words, "")]
    assert done.stdout.decode().split("\0")[:-1] == said and not done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", [*TEXT, "x" * 300, "x" * 300 + ".toml", "a\0.toml", "\udcff.toml", "/", "..", "/.toml"]
)
def test_any_name_of_a_site_is_known_or_refused(name):
    line = refused(Site.load, name)
    assert repr(name) in line or "name = " in line
