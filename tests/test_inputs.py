"""Wrong inputs, as one table for each command: each is told in one line, or in a red row, and nothing is left behind.

A row has what is given, and what the line must name: the value or the flag, and the cure. Words in capitals stand for
the files of `desk`. What is accepted with a word on it stands apart, and so does what is rightly accepted.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from real import LIMIT, python
from refusals import ended, refused

from ddp_helpers import ROOT, jobs
from ddp_helpers.__main__ import main
from ddp_helpers.launch.launchers import free_port
from ddp_helpers.rank.scripts import doctor, mnist_ddp, mnist_ddp_resumable, mnist_fast, mnist_single

ALL = ("--data", "DATA", "--run-dir", "{run_dir}")  # what a training script needs

# ---- python -m ddp_helpers job local, and what follows

JOB = {
    # the site and the script
    "no such file": (["nowhere.py"], ["'nowhere.py'", "No such file", "mnist_ddp"]),
    "no script of the course": (["mnist"], ["'mnist'", ".py", "mnist_ddp"]),
    "not Python": (["BAD"], ["bad.py", "line 2"]),
    "no text": (["BINARY"], ["binary.py", "mend it"]),
    "nested too deeply": (["DEEP"], ["deep.py", "mend it"]),
    "no file but a pipe": (["FIFO"], ["fifo.py", ".py"]),
    "no file but a folder": (["FOLDER"], ["folder.py", ".py"]),
    "a name with a space": (["SPACED"], ["my script.py", "letters"]),
    "no such person": (["~nosuchuser/x.py"], ["'~nosuchuser/x.py'", "home"]),
    # the run folder
    "outside": (["MINE", "--run", "../evil"], ["'../evil'", "below runs/"]),
    "a path": (["MINE", "--run", "/tmp/x"], ["'/tmp/x'", "below runs/"]),
    "shell in a name": (["MINE", "--run", "a;$(touch x)"], ["'a;$(touch x)'", "letters"]),
    "a folder with a run": (["MINE", "--run", "taken"], ["runs/taken", "job.json", "new folder"]),
    "a file in its place": (["MINE", "--run", "file"], ["runs/file", "another folder"]),
    # the shape
    "no node": (["MINE", "--nodes", "0"], ["nodes=0", "1 to 99999"]),
    "less than none": (["MINE", "--nodes", "-1"], ["nodes=-1", "1 to 99999"]),
    "too many nodes": (["MINE", "--nodes", "99999999999999999999"], ["nodes=99999999999999999999", "1 to 99999"]),
    "no number of nodes": (["MINE", "--nodes", "two"], ["--nodes", "'two'"]),
    "no GPU": (["MINE", "--gpus", "0"], ["--gpus"]),
    "less than no GPU": (["MINE", "--gpus", "-1"], ["--gpus"]),
    "no CPU": (["MINE", "--cpus", "0"], ["cpus_per_task=0", "--cpus"]),
    "no time": (["MINE", "--time", "1h"], ["'1h'", "HH:MM:SS"]),
    "four parts of time": (["MINE", "--time", "1:2:3:4"], ["'1:2:3:4'", "HH:MM:SS"]),
    "time that is none": (["MINE", "--time", "00:00:00"], ["'00:00:00'", "more than 0"]),
    "no such launcher": (["MINE", "--launcher", "mpirun"], ["'mpirun'", "torchrun"]),
    "a value with a space": (["MINE", "--array", "a b", "--", "{array}"], ["'a b'", "letters"]),
    "an array for nobody": (["MINE", "--array", "1", "2"], ["{array}", "both"]),
    "a word for no array": (["MINE", "--", "{array}"], ["{array}", "both"]),
    "too short to be warned": (["mnist_ddp_resumable", "--requeue", "--time", "2", "--", *ALL], ["'2'", "more time"]),
    "no such flag": (["MINE", "--gpu-type", "a100"], ["--gpu-type", "--help"]),
    # what is the script's
    "-- forgotten": (["mnist_ddp", "--data", "D"], ["--data D", "behind --", "-- --data D"]),
    "-- forgotten for one word": (["MINE", "--lr", "1", "--", "--seed", "2"], ["--lr 1", "behind --"]),
    "a word of two lines": (["MINE", "--", "a\nb"], ["'a\\nb'", "line breaks"]),
    "no flag of the script": (["mnist_ddp", "--", *ALL, "--lrr", "1"], ["--lrr 1", "--help"]),
    "no number": (["mnist_single", "--", *ALL, "--epochs", "abc"], ["--epochs", "'abc'"]),
    "no epoch": (["mnist_ddp", "--", *ALL, "--epochs", "0"], ["--epochs 0", "range"]),
    "an epoch and a half": (["mnist_ddp", "--", *ALL, "--epochs", "1.5"], ["--epochs", "'1.5'"]),
    "no rate": (["mnist_ddp", "--", *ALL, "--lr", "nan"], ["--lr nan", "range"]),
    "a rate without end": (["mnist_ddp", "--", *ALL, "--lr", "inf"], ["--lr inf", "range"]),
    "a rate below 0": (["mnist_ddp", "--", *ALL, "--lr", "-1"], ["--lr -1", "range"]),
    "a seed below 0": (["mnist_ddp", "--", *ALL, "--seed", "-1"], ["--seed -1", "range"]),
    "one rate of three": (
        ["mnist_fast", "--array", "1", "0", "2", "--", *ALL, "--lr", "{array}"],
        ["--lr 0.0", "range"],
    ),
    "far too many workers": (["mnist_ddp", "--", *ALL, "--num-workers", "2000000000"], ["--num-workers 2000000000"]),
    "an uneven batch": (
        ["mnist_ddp_resumable", "--nodes", "2", "--", *ALL, "--batch-size", "63"],
        ["--batch-size 63", "2 ranks"],
    ),
    "no data": (["mnist_ddp", "--", "--data", "/nowhere"], ["--data /nowhere", "get it once"]),
    "half of the data": (["mnist_ddp", "--", "--data", "HALF"], ["--data", "t10k-images-idx3-ubyte", "cut short"]),
    "an empty file": (["mnist_ddp", "--", "--data", "EMPTY"], ["--data", "train-images-idx3-ubyte", "empty"]),
    "labels of other images": (["mnist_ddp", "--", "--data", "MIXED"], ["--data", "200 images", "512 labels"]),
    "no record to go on from": (["mnist_ddp_resumable", "--requeue", "--", "--data", "DATA"], ["--run-dir"]),
    "requeued to no end": (["mnist_ddp", "--requeue", "--", *ALL], ["requeue", "mnist_ddp_resumable"]),
}
# Written, with a line on what it will not do.
JOB_TOLD = {
    "no record": (["mnist_ddp", "--", "--data", "DATA"], ["no record", "--run-dir '{run_dir}'"]),
    "never warned": (["mnist_ddp_resumable", "--", *ALL], ["--requeue"]),
}
JOB_RIGHT = {
    "words that a shell would read": ["MINE", "--", "a b", "$(touch x)", "é", "--", ""],
    "a file beside a home": ["MINE", "--run", "a/b.c-1", "--time", "1-0", "--array", "1e-3", "+2", "--", "{array}"],
}

# ---- a site file

SITE = {
    "a slip": ('acount = "a"', ["'acount'", "account"]),
    "one too many": ('partitions = "a"', ["'partitions'", "partition"]),
    "spelt apart": ('set_up = ["module purge"]', ["'set_up'", "setup"]),
    "in capitals": ('Gpus = "a"', ["'Gpus'", "gpus"]),
    "half a key": ('mail = "a@b.c"', ["'mail'", "mail_user"]),
    "like no key": ('zzz = "a"', ["'zzz'", "account"]),
    "a number": ("account = 5", ["account = 5", "in quotes"]),
    "true": ("account = true", ["account = True", "in quotes"]),
    "a date": ("account = 2026-01-01", ["account", "in quotes"]),
    "a list": ('account = ["a"]', ["account = ['a']", "in quotes"]),
    "a table": ("[account]\nx = 1", ["account", "in quotes"]),
    "no list": ('setup = "module purge"', ["setup = 'module purge'", "list"]),
    "a list of numbers": ("setup = [1]", ["setup = [1]", "list"]),
    "a list of lists": ('setup = [["module purge"]]', ["setup", "list"]),
    "a table of words": ("prefix = {}", ["prefix", "list"]),
    "mail once": ("mail_type = 'END'", ["mail_type", "list"]),
    "yes": ('exclusive = "yes"', ["exclusive = 'yes'", "true or false"]),
    "no quotes": ("account = physics", ["TOML"]),
    "no value": ("account = ", ["TOML"]),
    "no key": ("= 5", ["TOML"]),
    "half a text": ('account = "a', ["TOML"]),
    "half a table": ("[[", ["TOML"]),
    "twice": ('account = "a"\naccount = "b"', ["TOML"]),
    "Latin-1": ('account = "é"'.encode("latin-1"), ["TOML"]),
    "a null byte": (b"\x00", ["TOML"]),
    "a byte order mark": (b'\xef\xbb\xbfaccount = "a"', ["TOML"]),
    "a space": ('account = "a b"', ["'a b'", "letters"]),
    "a line break": ('account = "a\\nb"', ["account", "letters"]),
    "a quote": ('account = "a\'b"', ["account", "letters"]),
    "a semicolon": ('account = "a;b"', ["'a;b'", "letters"]),
    "a backslash": ('partition = "a\\\\b"', ["partition", "partition"]),
    "a command": ('qos = "$(touch x)"', ["'$(touch x)'", "letters"]),
    "more than set-up": ('setup = ["module purge; rm -rf x"]', ["rm -rf x", "module"]),
    "what runs a command": ('setup = ["export A=$(touch x)"]', ["touch x", "export"]),
    "no GPUs to count": ('gpus = "--gres=gpu"', ["--gres=gpu", "{n}"]),
    "a unit": ('memory = "32 GB"', ["'32 GB'", "32G"]),
    "memory twice": ('memory = "1G"\nmemory_per_cpu = "1G"', ["memory_per_cpu", "give one"]),
    "no occasion": ('mail_type = ["SOMETIMES"]', ["'SOMETIMES'", "END"]),
    "no address": ('mail_user = "me"', ["'me'", "example.org"]),
    "ranks of its own": ('srun = ["--ntasks=1"]', ["--ntasks=1"]),
    "nothing handed on": ('srun = ["--export=NONE"]', ["--export=NONE"]),
}
SITE_RIGHT = {
    "nothing": "",
    "a comment": "# mine\r\n",
    "a description": 'description = "Zürich: ours: $(x)"',
    "all": 'account = "a_1"\nmemory = "0"\nexclusive = true\nsetup = ["ml a/1.2", "export A_B=c:d"]',
}
NO_SITE = ["nowhere", "", "../sites/x", "a\nb", "FOLDER.toml", "FIFO.toml", "/nowhere/x.toml", "a b.toml"]

# ---- a script: what it is given, around it, and what its line must name

SCRIPT = {
    "no such flag": (mnist_single, ["--lrr", "1"], ["--lrr 1", "--help"]),
    "half a flag": (mnist_single, ["--epoch", "1"], ["--epoch 1", "--help"]),
    "no number": (mnist_single, ["--batch-size", "x"], ["--batch-size", "'x'"]),
    "no epoch": (mnist_fast, ["--epochs", "0"], ["--epochs 0", "range"]),
    "no rate": (mnist_fast, ["--lr", "nan"], ["--lr nan", "range"]),
    "no such precision": (mnist_single, ["--precision", "float64"], ["float64", "bf16"]),
    "too many workers": (mnist_ddp, ["--num-workers", "2000000000"], ["--num-workers 2000000000"]),
    "no data": (mnist_single, ["--data", "/nowhere"], ["--data /nowhere", "before the run"]),
    "half of the data": (mnist_ddp, ["--data", "HALF"], ["--data", "t10k-images-idx3-ubyte", "cut short"]),
    "an empty file": (mnist_fast, ["--data", "EMPTY"], ["--data", "train-images-idx3-ubyte", "empty"]),
    "labels of other images": (mnist_single, ["--data", "MIXED"], ["--data", "200 images", "512 labels"]),
    "a folder with a run": (mnist_single, ["--data", "DATA", "--run-dir", "TAKEN"], ["--run-dir", "new folder"]),
    "a file as a folder": (mnist_single, ["--data", "DATA", "--run-dir", "FILE"], ["--run-dir", "choose a"]),
    "nowhere to record": (mnist_ddp_resumable, ["--data", "DATA"], ["--run-dir is missing"]),
    "half a rank": (mnist_ddp, ["RANK=1"], ["RANK", "export neither"]),
    "no number of a rank": (mnist_ddp, ["RANK=a", "WORLD_SIZE=2", "LOCAL_RANK=0"], ["'a'", "export neither"]),
    "a rank too high": (mnist_ddp, ["RANK=2", "WORLD_SIZE=2", "LOCAL_RANK=0"], ["'2'", "export neither"]),
    "a size without a rank": (mnist_ddp_resumable, ["WORLD_SIZE=2"], ["WORLD_SIZE", "export neither"]),
}
TWO = ("RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=FREE", "--timeout", "2")
JOINING = {  # these come as far as the group, in a process of their own
    "an uneven batch": (mnist_ddp, [*TWO, "--batch-size", "63"], ["--batch-size 63", "2 ranks"]),
    "no port": (mnist_ddp, [*TWO, "MASTER_PORT=abc"], ["abc", "MASTER_PORT"]),
    "no such host": (mnist_ddp, [*TWO, "MASTER_ADDR=no.such.host"], ["no.such.host", "MASTER_ADDR"]),
    "nobody else": (mnist_ddp, TWO, ["rank 0 of 2", "do all run?"]),
    "no such checkpoint": (
        mnist_ddp_resumable,
        ["--run-dir", "NEW", "--resume", "/nope.pt"],
        ["--resume /nope.pt", "checkpoints", "auto"],
    ),
}
COMMAND = {
    "no command": ([], ["--help"]),
    "no such command": (["scripts"], ["scripts", "script"]),
    "an unknown script": (["script", "mnist_dpp", "x.py"], ["'mnist_dpp'", "mnist_ddp"]),
    "no path": (["script", "mnist_ddp"], ["path"]),
    "one word too many": (["script", "mnist_ddp", "x.py", "more"], ["more", "--help"]),
    "below a file": (["script", "simple_ddp", "FILE/x.py"], ["file/x.py", "another path"]),
    "in the place of a folder": (["script", "simple_ddp", "FOLDER"], ["folder.py", "another path"]),
    "over one's own": (["script", "simple_ddp", "FILE"], ["file", "--force"]),
    "over one's script": (["script", "simple_ddp", "MINE"], ["mine.py", "--force"]),
    "no room": (["script", "simple_ddp", "/dev/full"], ["/dev/full", "No space left"]),
    "data into a file": (["data", "FILE"], ["file", "another folder"]),
    "data that is damaged": (["data", "HALF"], ["half", "remove"]),
    "kept outside": (["keep", "runs", "../x"], ["../x"]),
    "no such notebook": (["run", "99"], ["99"]),
    "no site to ask": (["ready", "nowhere"], ["Slurm", "slurm/cluster up"]),
    "a flag of the doctor's": (["doctor", "--dat", "x"], ["--dat", "--help"]),
    "no time for the doctor": (["doctor", "--timeout", "0"], ["--timeout 0", "range"]),
    "words of an audit": (["audit", "MINE", "--lr", "1"], ["--lr 1", "behind --"]),
    "no model": (["fits", "MINE:Nothing"], ["'Nothing'", "mine.py"]),
}

# ---- slurm/job.ipynb: its cells, with these values for its parameters

NOTEBOOK = {
    "a slip in a name": ({"node": 2}, ["'node'", "nodes"]),
    "like no name": ({"zzz": 2}, ["'zzz'", "nodes"]),
    "no text for a script": ({"script": 5}, ["'5'", ".py"]),
    "no such script": ({"script": "mnist"}, ["'mnist'", ".py"]),
    "no such site": ({"site": "nowhere"}, ["'nowhere'", "local"]),
    "no node": ({"nodes": 0}, ["nodes=0", "1 to 99999"]),
    "nodes as text": ({"nodes": "2"}, ["nodes='2'", "1 to 99999"]),
    "no GPU": ({"gpus_per_node": 0}, ["gpus_per_node"]),
    "less than no CPU": ({"cpus_per_task": -1}, ["cpus_per_task=-1", "1 to 99999"]),
    "no such launcher": ({"launcher": "mpirun"}, ["'mpirun'", "torchrun"]),
    "no time": ({"time": "1h"}, ["'1h'", "HH:MM:SS"]),
    "no epoch": ({"epochs": 0}, ["--epochs 0", "range"]),
    "no number": ({"epochs": "x"}, ["--epochs", "'x'"]),
    "a seed below 0": ({"seed": -1}, ["--seed -1", "range"]),
    "an uneven batch": ({"batch_size": 63}, ["--batch-size 63", "2 ranks"]),
    "less than no batch for each rank": ({"batch_size_per_rank": -1}, ["--batch-size-per-rank -1", "range"]),
    "no data": ({"data": "/nowhere"}, ["--data /nowhere"]),
    "a single text": ({"arguments": "--lr 1"}, ["'--lr 1'", "list of words"]),
    "no words": ({"arguments": 5}, ["arguments=5", "list of words"]),
    "no such flag": ({"arguments": ["--lrr", "1"]}, ["--lrr 1", "--help"]),
    "an odd account": ({"account": "a b"}, ["'a b'", "letters"]),
    "a path for a run": ({"run": "/tmp/x"}, ["'/tmp/x'", "below runs/"]),
}
NOTEBOOK_RIGHT = {
    "numbers where texts are": {"time": 5, "run": 7},
    "words of every kind": {"arguments": ("--lr", 0.5)},
    "a batch for each rank": {"batch_size_per_rank": 63, "batch_size": 63},
}


def rows(table: dict) -> pytest.MarkDecorator:
    """A test for each row of a table."""
    return pytest.mark.parametrize("row", table.values(), ids=table)


@pytest.fixture
def desk(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files of all kinds, by the words that stand for them, in an empty folder in which the commands are given."""
    texts = {
        "mine": "import sys\n",
        "bad": "import os\nif:\n",
        "deep": f"x = {200_000 * '-'}1\n",
        "my script": "pass\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\xff\x00")
    for name in ("folder.py", "FOLDER.toml", "runs/taken"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("fifo.py", "FIFO.toml"):
        os.mkfifo(tmp_path / name)
    taken = [f"runs/taken/{name}" for name in ("job.json", "spec.json", "metrics.jsonl")]
    for name in ("file", "runs/file", *taken):
        (tmp_path / name).write_text("precious\n")
    for name in ("half", "empty", "mixed"):
        shutil.copytree(digits, tmp_path / name)
    raw = Path("MNIST", "raw")
    with (tmp_path / "half" / raw / "t10k-images-idx3-ubyte").open("r+b") as file:
        file.truncate(1000)
    (tmp_path / "empty" / raw / "train-images-idx3-ubyte").write_bytes(b"")
    images = tmp_path / "mixed" / raw
    shutil.copy(images / "t10k-images-idx3-ubyte", images / "train-images-idx3-ubyte")
    monkeypatch.chdir(tmp_path)
    run_folder = jobs.run_folder
    monkeypatch.setattr(jobs, "run_folder", lambda root, *names: run_folder(tmp_path / "runs", *names))
    named = {"MINE": "mine.py", "BAD": "bad.py", "DEEP": "deep.py", "SPACED": "my script.py", "BINARY": "binary.py"}
    named |= {"FIFO": "fifo.py", "FOLDER": "folder.py", "HALF": "half", "EMPTY": "empty", "MIXED": "mixed"}
    named |= {"FILE": "file", "TAKEN": "runs/taken", "NEW": "new"}
    return {word: str(tmp_path / name) for word, name in named.items()} | {"DATA": str(digits)}


def filled(words: list[str], desk: dict[str, str]) -> list[str]:
    """The words, with paths for those in capitals, also where one is the beginning of a path."""
    cut = [word.partition("/") if not word.startswith("/") else (word, "", "") for word in words]
    cut = [
        word.partition(":") if word.partition(":")[0] in desk else parts for word, parts in zip(words, cut, strict=True)
    ]
    return [f"{desk.get(first, first)}{mark}{rest}" for first, mark, rest in cut]


def tree(folder: Path) -> dict[Path, bytes | None]:
    """What lies below a folder: each path, and what is in it if it is a file; not what Python keeps of an import."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def told(capfd: pytest.CaptureFixture, call, *args: object) -> str:
    """The line with which a call ends, with exit status 2, all that is printed, and everything as it was."""
    before = tree(Path.cwd())
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        call(*args)
    line = ended(end.value.code, *capfd.readouterr())
    assert tree(Path.cwd()) == before, "something is left behind"
    return line


def names(line: str, pieces: list[str]) -> None:
    """The line names all of these."""
    assert [piece for piece in pieces if piece not in line] == [], line


@rows(JOB)
def test_a_wrong_job(row, desk, capfd) -> None:
    names(told(capfd, main, ["job", "local", *filled(row[0], desk)]), row[1])


@rows(JOB_TOLD)
def test_a_job_that_lacks_something_is_written_with_a_line_on_it(row, desk, capfd) -> None:
    assert main(["job", "local", *filled(row[0], desk), *([] if "--" in row[0] else ["--"])]) == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "it is not submitted" not in line]
    assert len(lines) == 1, lines
    names(lines[0], row[1])


@rows(JOB_RIGHT)
def test_a_right_job_is_written_without_a_word(row, desk, capfd) -> None:
    assert main(["job", "local", *filled(row, desk)]) == 0
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and "sbatch " in err and "#SBATCH" in out


@rows(SITE)
def test_a_wrong_site_file(row, desk, capfd) -> None:
    path = Path("mine.toml")
    path.write_bytes(row[0] if isinstance(row[0], bytes) else row[0].encode())
    names(told(capfd, main, ["site", str(path)]), ["mine.toml", *row[1]])


@rows(SITE_RIGHT)
def test_a_right_site_file(row, desk, capfd) -> None:
    Path("mine.toml").write_text(row)
    assert main(["site", "mine.toml"]) == 0 and "is sound" in capfd.readouterr().err


@pytest.mark.parametrize("name", NO_SITE)
def test_no_site_file(name, desk, capfd) -> None:
    names(told(capfd, main, ["site", name]), [repr(name), "local", ".toml"])


def test_who_has_an_odd_name_or_an_own_file_that_is_wrong(desk, capfd, monkeypatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "a;b")
    Path("mine.toml").write_text('mail_user = "{user}@example.org"')
    names(told(capfd, main, ["site", "mine.toml"]), ["'a;b'", "site file"])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path.cwd()))
    own = Path("ddp-course", "site.toml")
    own.parent.mkdir()
    own.write_text('acount = "a"')
    names(told(capfd, main, ["site", "classroom"]), [str(own), "'acount'", "account"])


def around(words: list[str], desk: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """What a script is given, and the variables around it."""
    env = dict(word.split("=", 1) for word in words if word[0].isupper() and "=" in word)
    return filled([word for word in words if not (word[0].isupper() and "=" in word)], desk), env


@rows(SCRIPT)
def test_a_script_that_is_given_something_wrong(row, desk, capfd, monkeypatch) -> None:
    script, words, pieces = row
    given, env = around(words, desk)
    monkeypatch.setattr(sys, "argv", ["script.py", *given, "--no-cuda"])
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    names(told(capfd, script.main), pieces)


@rows(JOINING)
def test_a_rank_that_cannot_join(row, desk, digits) -> None:
    script, words, pieces = row
    (given, env), before = around(list(words), desk), tree(Path.cwd())
    given += ["--data", str(digits), "--no-cuda"]
    env |= {"MASTER_PORT": str(free_port())} if env.get("MASTER_PORT") == "FREE" else {}
    done = python("-m", script.__name__, *given, env={**os.environ, "PYTHONPATH": str(ROOT), **env})
    names(ended(done.returncode, "", done.stderr), pieces)
    assert tree(Path.cwd()) == before


@rows(COMMAND)
def test_a_wrong_command(row, desk, capfd, monkeypatch) -> None:
    monkeypatch.setattr("ddp_helpers.jobs.script_jobs.available", lambda: False)
    names(told(capfd, main, filled(row[0], desk)), row[1])


@pytest.mark.parametrize("place", ["/nowhere", "HALF", "EMPTY"])
def test_the_doctor_has_a_red_row_for_data_that_is_not_whole(place, desk, capfd) -> None:
    with pytest.raises(SystemExit) as end:
        doctor.main(["--data", desk.get(place, place), "--run-dir", str(Path.cwd()), "--no-cuda"])
    red = [line for line in capfd.readouterr().out.splitlines() if " RED " in line or " cure: " in line]
    assert end.value.code == 1
    names(" ".join(red), ["data", desk.get(place, place), "get it"])
    if place == "/nowhere":  # what to type where the course is, and where a script stands alone
        names(" ".join(red), ["python -m ddp_helpers data /nowhere", "download_data.py --data /nowhere"])


def cells(parameters: dict[str, object], until: str) -> dict[str, object]:
    """Execute the cells of slurm/job.ipynb as papermill does, with these values behind their parameters."""
    space: dict[str, object] = {}
    for cell in nbformat.read(ROOT / "slurm" / "job.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            if until in cell.source:
                return space
            exec(cell.source, space)
            if "parameters" in cell.metadata.get("tags", ()):
                space |= parameters
    raise AssertionError(f"no cell has {until}")


@pytest.fixture
def job_notebook(desk, monkeypatch):
    """The cells up to the submission, with the runs on the desk."""

    def execute(parameters: dict[str, object]) -> dict[str, object]:
        return cells({"data": desk["DATA"]} | parameters, "jobs.submit")

    return execute


@rows(NOTEBOOK)
def test_a_wrong_value_in_the_job_notebook(row, job_notebook) -> None:
    before = tree(Path.cwd())
    names(refused(job_notebook, row[0]), row[1])
    assert tree(Path.cwd()) == before


@rows(NOTEBOOK_RIGHT)
def test_a_right_value_in_the_job_notebook(row, job_notebook) -> None:
    space = job_notebook(row)
    assert space["folder"].is_relative_to(Path.cwd() / "runs") and (space["folder"] / "job.sbatch").is_file()
    assert json.loads((space["folder"] / "job.json").read_text())["state"] == "WRITTEN"


def test_what_a_shell_types_ends_with_the_line_and_status_2(desk) -> None:
    """The control: what is called in this process above is what the command line does."""
    command = [sys.executable, "-m", "ddp_helpers", "job", "local", "mnist_ddp", "--data", "D"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    ended(done.returncode, done.stdout, done.stderr, "--data D", "behind --")
