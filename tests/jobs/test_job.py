"""A job that cannot be gets one line, and nothing is written; one that can reaches the ranks word for word."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from real import LIMIT
from refusals import refused
from torch.distributed.run import parse_args

from ddp_helpers.jobs import Job, Site, render, submit, write_job
from ddp_helpers.jobs.job import seconds
from ddp_helpers.launch.launchers import free_port

GOOD = {"name": "try", "program": ("job.py", "--run-dir", "{run_dir}")}


# ---- what cannot be, and what stands nearest to it and can

COUNT = [-1, 100_000, 10**19, True, "2", 1.5, None]
NO_TIME = ["10:99", "-1", "1-", "1-25:00:60", "٣", "0-0", "00:00:00", "infinite", "1.5", "1h", "1:2:3:4"]
BAD = {  # of each field: its cure, and the values
    "name": ("letters, digits", ["a\n", "a'b", "$(touch x)", "a b", "", "-a", "ü", "x" * 65, None, ["a"]]),
    "nodes": ("whole number, 1 to 99999", [0, *COUNT]),
    "ranks_per_node": ("whole number, 1 to 99999", [0, *COUNT]),
    "cpus_per_rank": ("whole number, 1 to 99999", [0, *COUNT]),
    "gpus_per_node": ("whole number, 0 to 99999", COUNT),
    "grace": ("whole number, 0 to 99999", COUNT),
    "time": ("HH:MM:SS", [*NO_TIME, "", "10\n", 10, None]),
    "sbatch": (
        "--name=value",
        [("-A x",), ("--a 1",), ("--a=\n",), ('--a="b"',), ("x",), ("--a='",), ("--a=\\",)],
    ),
    "launcher": ("srun", ["", "srun\n", None, ["srun"]]),
    "array": ("values", [("a", ""), ("a b",), ("$(x)",), ("a;b",), ("a\n",), (1, 2), "abc"]),
    "program": ("list of words", ["job.py --epochs 1", "", (), [], None, 5]),
}
NEAREST = {
    "name": ["a", "9", "x" * 64, "a.b-c_d"],
    "nodes": [1, 99_999],
    "ranks_per_node": [1, 99_999],
    "cpus_per_rank": [1, 99_999],
    "gpus_per_node": [0, 1],
    "grace": [0, 99_999],
    "time": ["1", "0:01", "00:00:01", "0-0:01"],
    "sbatch": [(), [], ("--exclusive",), ("--a=",), ("--comment=a #b $c",)],
    "launcher": ["srun", "torchrun"],
    "array": [("1",), ["-1", "1e-3", "+a.b"]],
    "program": [("job.py",), ["job.py", ""]],
}
WORDS = ["a\0b", "a\nb", "\r", "\x1b[31m", "\x7f", "\udcff", 5]


@pytest.mark.parametrize("field", BAD)
def test_a_bad_value_is_named_with_its_cure(field):
    cure, values = BAD[field]
    program = {"program": ("job.py", "{array}")} if field == "array" else {}
    for value in values:
        line = refused(Job, **(GOOD | program | {field: value}), named=[cure])
        named = value if isinstance(value, tuple) and value else [value]
        assert line.startswith(field) and any(repr(one) in line for one in named), line


@pytest.mark.parametrize("field", NEAREST)
def test_what_stands_nearest_to_a_bad_value_is_taken(field):
    program = {"program": ("job.py", "{array}")} if field == "array" else {}
    for value in NEAREST[field]:
        assert getattr(Job(**(GOOD | program | {field: value})), field) == value


def test_an_array_belongs_to_a_program_that_uses_it_and_a_warning_needs_time_to_save():
    refused(Job, **GOOD, array=("1", "2"), named=["('1', '2')", "{array}", "both"])
    refused(Job, "try", ("job.py", "{array}"), named=["{array}", "both"])
    refused(Job, **GOOD, requeue=True, time="3:00", named=["'3:00'", "more time"])
    for enough in ({"requeue": True, "time": "3:01"}, {"requeue": True, "time": "1", "grace": 0}, {"time": "1"}):
        Job(**GOOD, **enough)


def test_a_bad_word_of_the_program_and_more_tasks_than_gpus_are_named():
    for word in WORDS:
        refused(Job, "try", ("job.py", word), named=[repr(word), "text"])
    refused(Job, **GOOD, ranks_per_node=4, gpus_per_node=2, named=["ranks_per_node=4", "gpus_per_node=2", "equal"])
    assert Job(**GOOD, ranks_per_node=4, gpus_per_node=4).ranks == Job(**GOOD, ranks_per_node=4).ranks == 4


def test_a_folder_that_no_job_file_can_name_is_refused_and_not_made(tmp_path):
    for letter in "'\"\\\n\t\0\u00a0\u2028\udcff":
        refused(write_job, Job(**GOOD), Site("here"), tmp_path / f"a{letter}b", named=["quotes", "backslashes"])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        refused(write_job, Job(**GOOD), Site("here"), folder, named=[folder.name, "folder"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and not (tmp_path / "file").read_text()


@pytest.mark.parametrize("file", ["job.json", "spec.json", "metrics.jsonl", "job.sbatch"])
def test_a_folder_that_holds_another_run_is_left_alone(file, tmp_path):
    (tmp_path / file).write_text("theirs")
    refused(write_job, Job(**GOOD), Site("here"), tmp_path, named=[str(tmp_path), file, "new folder"])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(file, "theirs")]
    (tmp_path / file).rename(tmp_path / "notes.txt")
    write_job(Job(**GOOD), Site("here"), tmp_path)  # the control: notes do no harm


def test_what_was_not_written_is_not_submitted(tmp_path):
    refused(submit, tmp_path, named=[str(tmp_path)])
    (tmp_path / "job.json").write_text('{"half')
    refused(submit, tmp_path, named=[str(tmp_path)])


# ---- what can be

TIME = {"5": 300, "90": 5400, "1:30": 90, "00:30:00": 1800, "1:00:00": 3600, "100:00:00": 360_000, "10:05": 605}
TIME |= {"1-0": 86400, "1-2": 93_600, "1-02:30": 95_400, "0-00:10": 600, "2-03:04:05": 183_845, "0-1": 3600}


def test_each_form_of_a_time_limit_is_known_and_means_what_it_does_to_slurm():
    assert {time: seconds(Job(**GOOD, time=time).time) for time in TIME} == TIME


# ---- a real shell reads the file

STUBS = {
    "srun": """printf '%s\\0' "$@" >"$SAID"; env -0 >"$SAID.env" """,
    "scontrol": """[[ $2 == node ]] && echo "NodeName=n1 NodeAddr=10.0.0.7 Port=1" || printf '%s\\n' n1 n2""",
}
SLURM = {"SLURM_JOB_ID": "45678", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "3", "SLURM_NNODES": "2"}


@pytest.fixture
def read(tmp_path):
    """Run the file of a job with stubs for Slurm's commands: the words that srun got, and what it found around it."""
    stubs, elsewhere, said = (tmp_path / name for name in ("stubs", "elsewhere", "said"))
    for folder in (stubs, elsewhere):
        folder.mkdir()

    def run(job, folder, stubbed=STUBS, **env):
        for name, body in stubbed.items():
            (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
            (stubs / name).chmod(stat.S_IRWXU)
        folder.mkdir(exist_ok=True)  # it holds the file
        around = {"PATH": f"{stubs}:{os.environ['PATH']}", "SAID": str(said), **SLURM, **env}
        options = {"cwd": elsewhere, "env": around, "capture_output": True, "text": True, "timeout": LIMIT}
        done = subprocess.run(["bash", "-c", render(job, Site("here"), folder)], check=False, **options)
        assert (done.returncode, done.stderr) == (0, "") and not list(elsewhere.iterdir()), folder
        found = said.with_suffix(".env").read_text().split("\0")[:-1]
        return said.read_text().split("\0")[:-1], dict(pair.split("=", 1) for pair in found)

    return run


ODD = ["--n", "a b", "it's", '"x"', "$HOME", "$(touch canary)", "`touch canary`", "; touch canary", "& touch canary #"]
ODD += ["%j", "%%", "back\\slash", "\\", "*", "?[a]", "~", "~root", "{a,b}", "!x", "#", "-", "--", "-rf", "", " "]
ODD += ["é → 中", "a|b>c<d"]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_an_odd_word_reaches_the_ranks_as_it_is_with_each_launcher(launcher, read, tmp_path):
    job = Job("try", ("job.py", *ODD), nodes=2, ranks_per_node=2, cpus_per_rank=3, launcher=launcher)
    words, env = read(job, tmp_path / "run")
    python = words.index(sys.executable)
    assert words[-len(ODD) - 1 :] == ["job.py", *ODD]
    assert "--cpus-per-task=3" in words[:python] and "--kill-on-bad-exit=1" in words[:python]
    assert (env["MASTER_ADDR"], env["OMP_NUM_THREADS"]) == ("10.0.0.7", "3")
    assert "RANK" not in env and "WORLD_SIZE" not in env
    between = words[python + 1 : -len(ODD) - 1]
    if launcher == "srun":
        assert not between and words[0] == "--label"
    else:
        meet = {"--master-addr=10.0.0.7", f"--master-port={env['MASTER_PORT']}", "--rdzv-id=--45678-0"}
        assert {"--nnodes=2", "--nproc-per-node=2", *meet} <= {*between}
        taken = parse_args(words[words.index("torch.distributed.run") + 1 :])  # by torchrun itself
        assert (taken.training_script, taken.training_script_args) == ("job.py", ODD)
        with pytest.raises(SystemExit):
            parse_args(["--n", "2", "--", "job.py"])  # the control: --n could match --nnodes, and others


def test_the_node_has_a_cpu_for_each_of_torchruns_ranks():
    shape = {"ranks_per_node": 4, "cpus_per_rank": 3}
    of_torchrun = render(Job("try", ("job.py",), launcher="torchrun", **shape), Site("here"), Path("/run"))
    assert "#SBATCH --cpus-per-task=12 " in of_torchrun, "one task, which starts four ranks"
    assert "#SBATCH --cpus-per-task=3 " in render(Job("try", ("job.py",), **shape), Site("here"), Path("/run"))


def test_a_job_asks_to_be_requeued_at_most_ten_times(read, tmp_path):
    job, asked = Job("try", ("job.py",), requeue=True), {}
    for times in ("9", "10"):
        asked[times] = requeued(read, job, tmp_path / f"run{times}", SLURM_RESTART_COUNT=times)
    assert asked == {"9": "45678", "10": ""}


def requeued(read, job, folder, **env):
    """The job that asks to be requeued after its ranks have saved: the number that scontrol gets."""
    (said := folder.parent / "asked").write_text("")
    asks = {"srun": f'touch "$REQUEUE_FILE"; {STUBS["srun"]}', "sleep": "true"}
    asks["scontrol"] = f'[[ $1 == requeue ]] && echo "$2" >{said}\n{STUBS["scontrol"]}'
    read(job, folder, asks, **env)
    return said.read_text().strip()


def test_a_task_of_an_array_is_requeued_by_the_arrays_number(read, tmp_path):
    job = Job("try", ("job.py", "{array}"), array=("1", "2"), requeue=True)
    of_task = {"SLURM_ARRAY_JOB_ID": "45670", "SLURM_ARRAY_TASK_ID": "1"}
    assert requeued(read, job, tmp_path / "run", **of_task) == "45670_1"


def test_pyxis_mounts_the_folder_of_the_runs_in_its_container():
    text = render(Job("try", ("job.py",)), Site.load("pyxis"), Path("/there/run"))
    assert '--container-mounts="$runs:$runs,' in text and "\nruns=/there" in text


def test_a_port_that_something_on_the_node_has_is_passed_over(read, tmp_path):
    job = Job("try", ("job.py",))
    taken = next(port for port in iter(free_port, None) if port < 30_000)  # a job's port is below
    with socket.create_server(("127.0.0.1", taken)):
        _, env = read(job, tmp_path / "run", SLURM_JOB_ID=str(taken - 10_000))
    passed = int(env["MASTER_PORT"])
    assert passed != taken and 10_000 <= passed < 30_000
    _, env = read(job, tmp_path / "run", SLURM_JOB_ID=str(taken - 10_000))
    assert env["MASTER_PORT"] == str(taken), "the control: one that is free is taken"


@pytest.mark.parametrize("told", ["exit 1", "echo NodeName=n1 Port=1"])
def test_where_slurm_does_not_tell_the_address_ranks_meet_by_the_nodes_name(told, read, tmp_path):
    """As where `PrivateData=nodes` hides the nodes from who is no administrator."""
    scontrol = f"if [[ $2 == node ]]; then {told}; else printf '%s\\n' n1 n2; fi"
    _, env = read(Job("try", ("job.py",)), tmp_path / "run", STUBS | {"scontrol": scontrol})
    assert env["MASTER_ADDR"] == "n1"


def test_where_a_script_has_run_by_hand_the_job_writes_into_a_folder_of_its_own(read, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.json").touch()
    words, _ = read(Job(**GOOD), tmp_path / "run")
    assert words[-1] == str(tmp_path / "run-45678")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["spec.json"]
