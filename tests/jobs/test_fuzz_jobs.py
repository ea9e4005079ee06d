"""Ten thousand odd jobs and site files: JobError and one line, or a job file of the template's lines alone."""

import random
import re
import shlex
import subprocess
from dataclasses import fields
from functools import cache
from itertools import product

from fuzzing import INPUTS, TEXT, VALUES, fuzz, put
from real import LIMIT
from refusals import outcome, refused

from ddp_helpers import ROOT
from ddp_helpers.jobs import Job, Site, render
from ddp_helpers.jobs.job import ARRAY, RUN_DIR, seconds
from ddp_helpers.jobs.site import SITES

# ---- what a rendered file may hold: the template's lines, with safe words where it has a value

WORD = r"""(?:[\w./:,=+@%-]+|'[^'\n]*'(?:"'"'[^'\n]*')*|'')"""  # as shlex.quote writes one
OURS = r"""(?:"\$run_dir"|"\$\{values\[\$SLURM_ARRAY_TASK_ID\]\}")"""


def values(expression, line):
    """What may stand in the place of an expression of the template."""
    if line.startswith("#SBATCH"):
        return r"""(?:[^\s"#]+|"[^"\n]*")"""  # a space would begin another option
    if line.startswith("#"):
        return r"[\w.-]*"
    word = f"(?:{WORD}|{OURS})" if "word" in expression else WORD
    return f"{word}(?: {word})*" if expression == "python" or re.search("quote|word", expression) else r"[\w.+ -]*"


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
SOUND = {"nodes": [1, 2], "ranks_per_node": [1, 4], "gpus_per_node": [0, 4], "time": ["5", "1-0", "00:10:00"]}
SOUND |= {
    "cpus_per_rank": [1, 8],
    "sbatch": [(), ("--mem=32G",)],
    "launcher": ["srun", "torchrun"],
    "array": [(), ("1", "2")],
}
NAMES = [one.name for one in fields(Job)]


def options(choices):
    """What a job is made from: good values, and some that are not."""
    made = GOOD | {name: choices.one(good) for name, good in SOUND.items()}
    if made["array"]:
        made["program"] += (ARRAY,)
    for name in choices.some(NAMES, 2):
        made[name] = choices.value()
        if name in ("program", "array", "sbatch") and choices.below(3):
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

    for name, value in product(NAMES, [*VALUES, *TEXT]):  # each alone: a random one seldom meets a given field
        check(GOOD | {name: value})
    few = len(files)
    fuzz(options, check)
    assert len(files) - few > INPUTS / 10
    assert strange(files[0].replace("--job-name", "--x\ntouch x; --job-name")), "the control"
    sound_to_bash(files)


def sound_to_bash(files, most=150):
    """A sample of the files is parsed by bash."""
    for text in random.Random(1).sample(files, min(most, len(files))):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert (done.returncode, done.stderr) == (0, ""), text


# ---- sites

SHIPPED = [path.read_bytes() for path in sorted(SITES.glob("*.toml"))]
ODD_TOML = ["[", "]", "[[a]]", "a.b.c = 1", "a = " + "[" * 3000, "x = 2026-99-99"]
ODD_TOML += ["x = " + "9" * 5000, "gpus = 1e999", '"""', "'''", "\r", "\0", "\ufeff", "= =", 'name = "x"']
ODD_TOML += ["gpus." + ".".join("a" * 1200) + " = 1"]


def test_a_site_file_is_read_or_refused_in_one_line(tmp_path):
    path, taken = tmp_path / "mine.toml", 0

    def content(choices):
        content = choices.one([*SHIPPED, *(text.encode() for text in ODD_TOML)])
        return choices.damaged(content) if choices.below(3) else content

    def check(content):
        nonlocal taken
        put(path, content)
        site, line = outcome(Site.load, path)
        taken += bool(site)
        assert site or repr(str(path)) in line

    fuzz(content, check)
    assert taken > INPUTS / 20


ODD_NAMES = ["x" * 300, "x" * 300 + ".toml", "a\0.toml", "\udcff.toml", "/", "..", "/.toml"]
ODD_NAMES += ["../sites/x", "/nowhere/x.toml"]


def test_any_name_of_a_site_is_known_or_refused():
    for name in [*TEXT, *ODD_NAMES]:
        refused(Site.load, name, named=[repr(name)])
