"""Notebook 07's exercises that submit a job file tell what is wrong with it; and its `%%slurm` cells do as they say."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from IPython.core.error import UsageError
from notebook_texts import cells
from real import LIMIT

from ddp_helpers import ROOT
from ddp_helpers.lessons import exercise_called
from ddp_helpers.lessons.exercise import RIGHT
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_helpers.lessons.submit_to_slurm import exercises as lesson
from ddp_helpers.lessons.submit_to_slurm import start, terminal

pytestmark = pytest.mark.xdist_group("07_submit_to_slurm")  # they number the same folders

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
    "--ntasks does not fix": ("job_file", FOUR.replace("-per-node=2", "=4")),
    "localhost": ("job_file", re.sub(r"ADDR=.*", "ADDR=localhost", FOUR)),
    "127.0.0.1, like localhost,": ("job_file", re.sub(r"ADDR=.*", "ADDR=127.0.0.1", FOUR)),
    "Places": ("array_job", THREE.replace("0-2", "1-3")),
    "SLURM_ARRAY_JOB_ID": ("array_job", THREE.replace("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID")),
}


def verdict(name: str, text: str) -> str:
    """What is said of a job file."""
    return exercise_called(name).verdict(lambda *_: text)


def test_a_plausible_mistake_is_seen_in_what_the_ranks_did(cluster) -> None:
    verdicts = {told: verdict(*mistake) for told, mistake in MISTAKES.items()}
    assert not {told: said for told, said in verdicts.items() if not said.startswith(f"not yet: {told}")}


def test_the_first_nodes_address_is_right_as_its_name_is(cluster) -> None:
    """The nodes of the local Slurm have the address 127.0.0.1, which a job file may ask for and not say."""
    name = 'NAME=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)'
    asked = f"{name}\nexport MASTER_ADDR=$(scontrol -o show node $NAME | sed 's/.*NodeAddr=\\([^ ]*\\).*/\\1/')"

    def job_file(nodes: int, gpus: int) -> str:
        return re.sub(r"export MASTER_ADDR=.*", lambda _: asked, SOLUTIONS["job_file"](nodes, gpus))

    assert exercise_called("job_file").verdict(job_file) == RIGHT


def test_a_job_file_that_slurm_refuses_is_told_so(cluster) -> None:
    told = verdict("job_file", "#!/bin/bash\n#SBATCH --nodes=999\nsrun python who.py\n")
    assert told.startswith("not yet: ") and "JobError" in told
    assert "sbatch: error: " in told, "Slurm's own words"


def test_without_slurm_nothing_is_said_of_a_job_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson, "available", lambda: False)
    monkeypatch.setattr(lesson.subprocess, "run", None)  # it would wait a minute for a Slurm that is gone
    assert verdict("job_file", "").startswith("not checked")


class Shell:
    """What the magic needs of IPython."""

    def __init__(self, **variables: object) -> None:
        self.user_ns = variables


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


@pytest.mark.parametrize("site", ["local", "della"])
def test_jobs_that_only_hold_nodes_run_at_the_local_site_alone(
    site, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(terminal, "available", lambda: True)
    shell = Shell(site=site)
    terminal.Terminal(shell).run("local", "echo held")
    assert (shell.user_ns["said"] == "held\n") == (site == "local") == ("left out" not in capsys.readouterr().out)
    for name in ("07_submit_to_slurm", "08_sweep_the_cluster"):
        sleepers = [cell for cell in cells(ROOT / "notebooks" / f"{name}.ipynb", "code") if "sleep 600" in cell]
        assert sleepers and all(cell.startswith("%%slurm local\n") for cell in sleepers), name


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
    with monkeypatch.context() as patch:
        patch.setenv("SIMULATED_GPUS", "4")
        assert start.flags_of("local", gpus_per_node=4) == (*flags[:3], "")
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


HELLO = written("hello.py").replace("SLURM_PROCID", "RANK").replace("SLURM_STEP_NUM_TASKS", "WORLD_SIZE")
MISTAKE = "import os\nos.environ['MASTER_PORT'] = str(int(os.environ['MASTER_PORT']) + int(os.environ['RANK']))\n"


def test_the_two_prints_tell_one_port_from_two(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(HELLO.replace("seconds=5", f"seconds={LIMIT}"))
    wrong.write_text(MISTAKE + HELLO.replace("seconds=5", "seconds=2"))
    runs = [LearnerRun(script, ranks=2) for script in (right, wrong)]
    wait_for_runs(*runs)
    met, apart = ([run.lines_of_rank(rank) for rank in (0, 1)] for run in runs)
    calls = [re.fullmatch(r"rank \d of 2 calls 127.0.0.1:(\d+)", lines[0])[1] for lines in met + apart]
    assert calls[0] == calls[1] and calls[2] != calls[3]
    assert [lines[1:] for lines in met] == [[f"rank {n} has met the others"] for n in (0, 1)]
    assert not [line for lines in apart for line in lines if "has met" in line]


def test_the_folder_to_bring_holds_the_scripts_and_nothing_of_an_earlier_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(start, "ROOT", tmp_path)
    monkeypatch.setattr(start, "RUNS", tmp_path / "runs")
    older = tmp_path / "build" / "first_job" / "mnist_ddp.py"
    older.parent.mkdir(parents=True)
    older.write_text("an older text")
    start.folders(16)
    assert sorted(path.name for path in older.parent.iterdir()) == ["mnist_ddp.py", "simple_ddp.py"]
