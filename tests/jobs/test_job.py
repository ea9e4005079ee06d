"""A job that cannot be gets one line, and nothing is written; one that can reaches the ranks word for word."""

import os
import re
import socket
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from real import LIMIT
from refusals import refused
from torch.distributed.run import parse_args

from ddp_helpers.jobs import Job, Site, render, submit, write_job
from ddp_helpers.jobs.job import seconds
from ddp_helpers.launch.launchers import free_port

GOOD = {"name": "try", "program": ("job.py", "--run-dir", "{run_dir}")}


# ---- what cannot be

NAMES = ["a\nb", "a\n", "a'b", 'a"b', "a;b", "$(touch canary)", "`id`", "a b", "", "-a", "ü", "x" * 65, None, 5, ["a"]]
TIMES = ["", "1h", "10:99", "99:99:99", "1:2:3:4", "10\n", "00:10:00\n#SBATCH --x", "-1", "1-", "1-25:00:60", "٣"]
TIMES += ["0", "00:00:00", "0-0", "infinite", "1.5", 10, None]
BAD = [("name", value, "letters, digits") for value in NAMES]
for count in ("nodes", "tasks_per_node", "cpus_per_task"):
    BAD += [(count, value, "whole number, 1 to 99999") for value in (0, -1, True, "2", 1.5, None, 10**9)]
BAD += [("gpus_per_node", value, "whole number, 0 to 99999") for value in (-1, True, "2", 1.5)]
BAD += [("time", value, "HH:MM:SS") for value in TIMES]
BAD += [
    ("sbatch", (value,), "--name=value") for value in ("-A x", "--a 1", "--a=\n", '--a="b"', "x", "--a='", "--a=\\", 5)
]
BAD += [("launcher", value, "srun") for value in ("", "mpirun", "srun\n", None, ["srun"])]
BAD += [("array", values, "values") for values in (("a b",), ("a", ""), ("$(x)",), ("a;b",), ("a\n",), (1, 2), "abc")]
BAD += [("program", value, "list of words") for value in ("job.py --epochs 1", "", (), [], None, 5)]
BAD += [("program", ("job.py", word), "line breaks") for word in ("a\nb", "a\0b", "\r", "\x1b[31m", "\x7f", "\udcff")]
BAD += [("program", ("job.py", 5), "text")]


@pytest.mark.parametrize(("what", "value", "cure"), BAD, ids=lambda value: repr(value)[:30])
def test_a_bad_value_is_named_with_its_cure(what, value, cure):
    options = GOOD | {what: value}
    if what == "array":
        options["program"] = ("job.py", "{array}")
    line = refused(Job, **options)
    assert line.startswith(what) and cure in line
    seen = value[-1] if what in ("program", "sbatch") and isinstance(value, tuple) and value else value
    assert repr(seen) in line or any(repr(one) in line for one in value)


def test_tasks_that_are_not_gpus_are_refused():
    refused(Job, **GOOD, tasks_per_node=4, gpus_per_node=2, named=["tasks_per_node=4", "gpus_per_node=2", "equal"])
    assert Job(**GOOD, tasks_per_node=4, gpus_per_node=4).ranks == Job(**GOOD, tasks_per_node=4).ranks == 4


def test_an_array_without_its_word_is_refused_and_so_is_the_word_without_an_array():
    assert "give both" in refused(Job, **GOOD, array=("1", "2"))
    assert "give both" in refused(Job, "try", ("job.py", "{array}"))
    assert Job("try", ("job.py", "{array}"), array=("1e-3", "+2", "a.b")).array == ("1e-3", "+2", "a.b")


@pytest.mark.parametrize("folder", ["a'b", 'a"b', "a\\b", "a\nb", "a\tb", "a\x00b", "a\u00a0b", "a\u2028b", "a\udcffb"])
def test_a_folder_that_no_job_file_can_name_is_refused_and_not_made(folder, tmp_path):
    refused(write_job, Job(**GOOD), Site("here"), tmp_path / folder, named=["quotes", "backslashes"])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        refused(write_job, Job(**GOOD), Site("here"), folder, named=[folder.name, "folder"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and not (tmp_path / "file").read_text()


@pytest.mark.parametrize("file", ["job.json", "spec.json", "metrics.jsonl", "job.sbatch"])
def test_a_folder_that_holds_another_run_is_left_alone(file, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("these do no harm")
    write_job(Job(**GOOD), Site("here"), folder)
    for path in folder.iterdir():
        path.unlink()
    (folder / file).write_text("theirs")
    refused(write_job, Job(**GOOD), Site("here"), folder, named=[str(folder), file, "new folder"])
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(file, "theirs")]


def test_what_was_not_written_is_not_submitted(tmp_path):
    refused(submit, tmp_path, named=[str(tmp_path)])
    (tmp_path / "job.json").write_text('{"half')
    refused(submit, tmp_path, named=[str(tmp_path)])


# ---- what can be

TIME = {"5": 300, "90": 5400, "1:30": 90, "00:30:00": 1800, "1:00:00": 3600, "100:00:00": 360_000, "10:05": 605}
TIME |= {"1-0": 86400, "1-2": 93_600, "1-02:30": 95_400, "0-00:10": 600, "2-03:04:05": 183_845, "0-1": 3600}


@pytest.mark.parametrize(("time", "means"), TIME.items())
def test_each_form_of_a_time_limit_is_known_and_means_what_it_does_to_slurm(time, means):
    assert seconds(Job(**GOOD, time=time).time) == means


def test_a_comment_never_touches_its_directive():
    job = Job(**GOOD, tasks_per_node=2, gpus_per_node=2)
    text = render(job, Site("here", gpus="--gpus-per-node=nvidia_h100_80gb_hbm3:{n}"), "run")
    assert "\n#SBATCH --gpus-per-node=nvidia_h100_80gb_hbm3:2  # on each node" in text
    assert not re.search(r"^#SBATCH .*\S#", text, re.M) and len(re.findall(r"^#SBATCH .* # ", text, re.M)) > 4


# ---- a real shell reads the file

STUBS = {
    "srun": """printf '%s\\0' "$@" >>"$SAID"; env -0 >"$SAID.env" """,
    "scontrol": """[[ $2 == node ]] && echo "NodeName=n1 NodeAddr=10.0.0.7 Port=1" || printf '%s\\n' n1 n2""",
}
SLURM = {"SLURM_JOB_ID": "45678", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "3", "SLURM_NNODES": "2"}


def lines_read(text, tmp_path, **env):
    """Run a job file with stubs for Slurm's commands: the words that srun got, and what it found around it."""
    stubs = tmp_path / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(stat.S_IRWXU)
    around = {"PATH": f"{stubs}:{os.environ['PATH']}", "SAID": str(tmp_path / "said"), **SLURM, **env}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    command = ["bash", "-c", text]
    done = subprocess.run(
        command, cwd=elsewhere, env=around, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and not list(elsewhere.iterdir())
    variables = dict(pair.split("=", 1) for pair in (tmp_path / "said.env").read_text().split("\0")[:-1])
    return (tmp_path / "said").read_text().split("\0")[:-1], variables


ODD = [
    "--n",
    "a b",
    "it's",
    '"x"',
    "$HOME",
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "& touch canary #",
    "%j",
    "%%",
]
ODD += [
    "back\\slash",
    "\\",
    "*",
    "?[a]",
    "~",
    "~root",
    "{a,b}",
    "!x",
    "#",
    "-",
    "--",
    "-rf",
    "",
    " ",
    "é → 中",
    "a|b>c<d",
]
FOLDERS = [word for word in ODD if word and word.isprintable() and set(word).isdisjoint("\\'\"")]
FOLDERS += ["a  # b", "-dash", "x=y", "a JobState=FAILED", "a,b"]


def test_an_odd_word_reaches_the_ranks_as_it_is_with_each_launcher(tmp_path):
    for launcher in ("srun", "torchrun"):
        here = tmp_path / launcher
        here.mkdir()
        job = Job("try", ("job.py", *ODD), nodes=2, tasks_per_node=2, cpus_per_task=3, launcher=launcher)
        words, env = lines_read(
            render(job, Site("here"), here / "run"),
            make(here),
        )
        python = words.index(sys.executable)
        assert words[-len(ODD) - 1 :] == ["job.py", *ODD]
        assert "--cpus-per-task=3" in words[:python] and "--kill-on-bad-exit=1" in words[:python]
        assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["OMP_NUM_THREADS"]) == ("10.0.0.7", "15678", "3")
        assert "RANK" not in env and "WORLD_SIZE" not in env
        between = words[python + 1 : -len(ODD) - 1]
        if launcher == "srun":
            assert not between and words[0] == "--label"
        else:
            meet = {"--master-addr=10.0.0.7", "--master-port=15678", "--rdzv-id=--45678-0"}
            assert {"--nnodes=2", "--nproc-per-node=2", *meet} <= {*between}
            taken = parse_args(words[words.index("torch.distributed.run") + 1 :])  # by torchrun itself
            assert (taken.training_script, taken.training_script_args) == ("job.py", ODD)
            with pytest.raises(SystemExit):
                parse_args(["--n", "2", "--", "job.py"])  # the control: --n could match --nnodes, and others


def test_a_port_that_something_on_the_node_has_is_passed_over(tmp_path):
    text = render(Job("try", ("job.py",)), Site("here"), tmp_path)
    taken = next(port for port in iter(free_port, None) if port < 30_000)  # a job's port is below
    with socket.create_server(("127.0.0.1", taken)):
        _, env = lines_read(text, tmp_path, SLURM_JOB_ID=str(taken - 10_000))
    passed = int(env["MASTER_PORT"])
    assert passed != taken and 10_000 <= passed < 30_000
    _, env = lines_read(text, tmp_path, SLURM_JOB_ID=str(passed - 10_000))
    assert env["MASTER_PORT"] == str(passed), "the control: one that is free is taken"


@pytest.mark.parametrize("told", ["exit 1", "echo NodeName=n1 Port=1"])
def test_where_slurm_does_not_tell_the_address_ranks_meet_by_the_nodes_name(told, tmp_path, monkeypatch):
    """As where `PrivateData=nodes` hides the nodes from who is no administrator."""
    monkeypatch.setitem(STUBS, "scontrol", f"if [[ $2 == node ]]; then {told}; else printf '%s\\n' n1 n2; fi")
    _, env = lines_read(render(Job("try", ("job.py",)), Site("here"), tmp_path), tmp_path)
    assert env["MASTER_ADDR"] == "n1"


def make(folder):
    """A run folder must be there before its job runs: it holds the file."""
    (folder / "run").mkdir()
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_an_odd_folder_is_the_ranks_folder_and_nothing_in_it_is_executed(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    text = render(Job(**GOOD), Site("here"), folder)
    words, env = lines_read(text, tmp_path)
    assert words[-3:] == ["job.py", "--run-dir", str(folder)]
    assert env["PWD"] == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["claim", "submitted"]
    [output] = re.findall(r"^#SBATCH --output=(.*)/slurm-%j.log$", text, re.M)
    assert output.strip('"').replace("%%", "%") == str(folder)
    assert (output[0] == '"') == any(letter in name for letter in " #")


def test_a_task_of_an_array_has_its_value_and_its_folder(tmp_path):
    job = Job("try", ("job.py", "{array}", "{run_dir}", "{run_dir}x"), array=("1e-3", "-2", "c"))
    text = render(job, Site("here"), make(tmp_path) / "run")
    assert "\n#SBATCH --array=0-2 " in text
    words, _ = lines_read(text, tmp_path, SLURM_ARRAY_TASK_ID="1")
    folder = tmp_path / "run-1"
    assert words[-4:] == ["job.py", "-2", str(folder), f"{folder}x"] and folder.is_dir()


def test_submitted_again_by_hand_it_writes_into_a_folder_of_its_own(tmp_path):
    text = render(Job(**GOOD), Site("here"), make(tmp_path) / "run")
    assert lines_read(text, tmp_path)[0][-1] == str(tmp_path / "run")
    words, _ = lines_read(text, tmp_path, SLURM_JOB_ID="45679")  # before the first has written any record
    assert words[-1] == str(tmp_path / "run-45679") and (tmp_path / "run-45679").is_dir()
    assert (tmp_path / "run" / "submitted").read_text() == "45678\n"  # whose record it is


def test_where_a_script_has_run_by_hand_the_job_writes_into_a_folder_of_its_own(tmp_path):
    text = render(Job(**GOOD), Site("here"), make(tmp_path) / "run")
    (tmp_path / "run" / "spec.json").touch()
    assert lines_read(text, tmp_path)[0][-1] == str(tmp_path / "run-45678")


def test_a_job_that_is_changed_is_checked_again():
    assert "nodes=0" in refused(replace, Job(**GOOD), nodes=0)
