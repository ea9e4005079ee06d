"""Notebook 07's exercises that submit a job file, and its `%%slurm` cells, on the course's own Slurm."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from notebook_texts import cells

from ddp_helpers import ROOT
from ddp_helpers.launch.launchers import free_port
from ddp_helpers.lessons import exercise_called
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT
from ddp_helpers.lessons.submit_to_slurm import exercises as lesson
from ddp_helpers.lessons.submit_to_slurm import start, terminal

pytestmark = pytest.mark.xdist_group("07_submit_to_slurm")  # they number the same folders

JOB_FILES = {name: exercise_called(name) for name in ("job_file", "array_job")}
SOLUTIONS: dict[str, Callable] = {}
exec(
    "\n".join(
        cell.partition("\n\n\nlessons.check")[0]
        for cell in cells(ROOT / "notebooks" / "solutions" / "07_submit_to_slurm.ipynb", "code")
    ),
    SOLUTIONS,
)
FOUR, THREE = SOLUTIONS["job_file"](2, 2), SOLUTIONS["array_job"](["0.1", "0.01", "0.001"])  # of each first case
MISTAKES = {  # by the beginning of what is told of it
    "Without srun": ("job_file", FOUR.replace("srun python", "python")),
    "The batch script's": ("job_file", FOUR.replace("srun", "export RANK=$SLURM_PROCID\nsrun")),
    "--ntasks says": ("job_file", FOUR.replace("-per-node=2", "=4")),
    "localhost": ("job_file", re.sub(r"ADDR=.*", "ADDR=localhost", FOUR)),
    "Places": ("array_job", THREE.replace("0-2", "1-3")),
    "SLURM_ARRAY_JOB_ID": ("array_job", THREE.replace("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID")),
}


class Shell:
    """What the magic needs of IPython."""

    def __init__(self, **variables: object) -> None:
        self.user_ns = variables


@pytest.mark.parametrize("name", JOB_FILES)
def test_a_right_job_file_is_right_and_a_stub_not_attempted(cluster, name: str) -> None:
    def stub(*_: object) -> str:
        raise NotImplementedError

    assert JOB_FILES[name].verdict(SOLUTIONS[name]) == RIGHT
    assert JOB_FILES[name].verdict(stub) == NOT_ATTEMPTED


@pytest.mark.parametrize("told", MISTAKES)
def test_a_plausible_mistake_is_seen_in_what_the_ranks_did(cluster, told: str) -> None:
    name, text = MISTAKES[told]
    assert JOB_FILES[name].verdict(lambda *_: text).startswith(f"not yet: {told}")


def test_a_job_file_that_slurm_refuses_is_told_so(cluster) -> None:
    verdict = JOB_FILES["job_file"].verdict(lambda *_: "#!/bin/bash\n#SBATCH --nodes=999\nsrun python who.py\n")
    assert verdict.startswith("not yet: ") and "JobError" in verdict
    assert "sbatch: error: " in verdict, "Slurm's own words"


def test_without_slurm_nothing_is_said_of_a_job_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson, "available", lambda: False)
    monkeypatch.setattr(lesson.subprocess, "run", None)  # it would wait a minute for a Slurm that is gone
    assert JOB_FILES["job_file"].verdict(lambda *_: "").startswith("not checked")


def test_a_cell_is_run_in_bash_with_the_notebooks_values(cluster, capsys: pytest.CaptureFixture) -> None:
    shell = Shell(nodes=2)
    terminal.Terminal(shell).run("", "value=x; echo {nodes} {unknown} ${value} $(sinfo -ho %R)")
    assert capsys.readouterr().out == "2 {unknown} x course\n" and shell.user_ns["said"].startswith("2 ")


def test_a_cell_that_fails_must_say_so(cluster, capsys: pytest.CaptureFixture) -> None:
    slurm = terminal.Terminal(Shell())
    slurm.run("fails", "exit 7")
    assert capsys.readouterr().out == "exit status 7\n"
    for line, cell in (("", "false; true"), ("fails", "true"), ("failing", "true")):
        with pytest.raises(UsageError):
            slurm.run(line, cell)


def test_a_cell_that_never_ends_is_stopped_with_its_job(cluster, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell()
    slurm = terminal.Terminal(shell)
    slurm.run("", 'sbatch --time=1 --output=out.log --wrap "sleep 1; echo done"')
    assert shell.user_ns["JOB"].isdecimal()
    slurm.run("until", "tail -F --lines=+1 out.log 2>/dev/null")
    assert shell.user_ns["said"] == "done\n"


def test_without_slurm_a_cell_is_left_out(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(terminal, "available", lambda: False)
    shell = Shell()
    terminal.Terminal(shell).run("", "exit 1")
    assert "left out" in capsys.readouterr().out and shell.user_ns["said"] == ""


@pytest.mark.parametrize("value", ["$(id)", "`id`", 'a" b', "a\nb", "a\\b", "a; touch b", "a > b", "[2]", "*", "it's"])
def test_bash_runs_nothing_in_a_value_and_takes_it_for_one_word_in_double_quotes(value, monkeypatch) -> None:
    monkeypatch.setattr(terminal, "available", lambda: True)
    shell = Shell(data=value)
    terminal.Terminal(shell).run("", """set -f; printf "%s|" "{data}" {data} ${HOME:+home} {x} '{data}'""")
    assert shell.user_ns["said"].rstrip("\n") == "|".join([value, *value.split(), "home", "{x}", "${data}", ""])


def test_a_sites_flags_reach_slurms_commands_and_its_gpus_the_cells(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    names = [f"{command}_{key}" for command in ("SALLOC", "SBATCH", "SLURM") for key in ("PARTITION", "ACCOUNT")]
    for name in names:  # put back afterwards, whether they were set or not
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    flags = start.flags_of("local", gpus_per_node=4)
    assert flags == ("--gres=gpu:1", "--gres=gpu:2", "--gres=gpu:4", "--no-cuda")
    assert {name: os.environ.get(name) for name in names} == {
        name: "course" if name.endswith("PARTITION") else None for name in names
    }
    (tmp_path / "real.toml").write_text('sbatch = ["--account=physics"]\ngpus = "--gpus-per-node=a100:{n}"\n')
    flags = start.flags_of(str(tmp_path / "real.toml"), gpus_per_node=4)
    assert flags == ("--gpus-per-node=a100:1", "--gpus-per-node=a100:2", "--gpus-per-node=a100:4", "")
    assert os.environ["SALLOC_ACCOUNT"] == os.environ["SBATCH_ACCOUNT"] == os.environ["SLURM_ACCOUNT"] == "physics"


def written(name: str) -> str:
    """The text of a file that a cell of 07 writes."""
    sources = cells(ROOT / "notebooks" / "07_submit_to_slurm.ipynb", "code")
    [text] = [source for source in sources if source.startswith(f"%%writefile {name}\n")]
    return text.partition("\n")[2]


def test_ranks_meet_in_every_file_where_they_meet_in_the_job_file() -> None:
    *lines, export = written("meet.sh").splitlines()
    assert "\n".join(lines) + "\n" + export in written("job.sbatch"), "the same lines, side by side"
    assert export == "export MASTER_ADDR MASTER_PORT" and "source meet.sh" in written("torchrun.sbatch")


@pytest.mark.parametrize(("apart", "met"), [(0, 2), (1, 0)])
def test_the_two_prints_tell_one_port_from_two(tmp_path: Path, apart: int, met: int) -> None:
    patience = 60 if met else 2
    (tmp_path / "hello.py").write_text(written("hello.py").replace("seconds=5", f"seconds={patience}"))
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "hello.py"],
            cwd=tmp_path,
            env=os.environ
            | {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": str(port + rank * apart)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    for rank, lines in enumerate(said):
        assert lines.startswith(f"rank {rank} of 2 calls 127.0.0.1:{port + rank * apart}\n")
    assert sum("has met the others" in lines for lines in said) == met


def test_the_folder_to_bring_holds_the_scripts_and_nothing_of_an_earlier_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(start, "ROOT", tmp_path)
    monkeypatch.setattr(start, "RUNS", tmp_path / "runs")
    older = tmp_path / "build" / "first_job" / "mnist_ddp.py"
    older.parent.mkdir(parents=True)
    older.write_text("an older text")
    start.folders(16)
    assert sorted(path.name for path in older.parent.iterdir()) == ["mnist_ddp.py", "simple_ddp.py"]
