"""The `%%clinic` magic, and 10 and 10b: each failure has its row, its section, its cells, and its true message."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from clusters import program
from diagram_checks import must_be_legible
from IPython.core.error import UsageError
from notebook_texts import cells
from real import LIMIT, until
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers import ROOT, jobs
from ddp_helpers.launch import forked_script
from ddp_helpers.launch.engine import LaunchError
from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.lessons import run_script
from ddp_helpers.lessons.break_it_and_fix_it import clinic
from ddp_helpers.lessons.break_it_and_fix_it.figures import find_the_fault, where_they_stand

TEN, REFERENCE = (ROOT / "notebooks" / f"{name}.ipynb" for name in ("10_break_it_and_fix_it", "10b_look_up_a_fault"))
NUMBERS = [str(number) for number in range(1, 32)]
ELSEWHERE = {"21": "without the optimizer               wrong: the weights"}  # its section leads to who shows it


# ---- the magic

DIES = """# a fault
print("rank", rank, "begins with", os.environ["COLOUR"])
faulthandler.dump_traceback(all_threads=False)  # line 4 of the cell, whose first has the magic
dist.barrier()
if rank == 1 and not FIXED:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""
SLEEPS = "print('begins')\nif not FIXED: time.sleep(60)"
EXITS = "import sys\nif not FIXED: sys.exit(3)"


def test_the_fault_and_its_cure_are_shown_with_each_ranks_lines_and_end(capsys):
    clinic.clinic_magic("2 aborts COLOUR=blue", DIES)
    broken, fixed = capsys.readouterr().out.split("fixed: ")
    assert re.match(r"broken: rank 0 exit status 1, rank 1 ended by SIGKILL; \d+ s\n", broken)
    assert re.match(r"rank 0 exit status 0, rank 1 exit status 0; \d+ s\n", fixed)
    for text in (broken, fixed):
        assert "[rank 0]\x1b[0m rank 0 begins with blue\n" in text
        assert "[rank 1]\x1b[0m rank 1 begins with blue\n" in text
        assert text.count(" in line 4 of the cell\n") == 2
    assert "caused by a remote worker" in broken, "the survivor's own complaint"


def test_a_hang_is_ended_at_its_limit(capsys):
    clinic.clinic_magic("1 hangs bare", SLEEPS)
    assert re.search(r"^broken: rank 0 .*\blimit\b", capsys.readouterr().out)


def test_who_is_left_when_another_has_failed_is_ended(capsys, monkeypatch):
    monkeypatch.setattr(forked_script, "GRACE", 0.5)
    clinic.clinic_magic("2 fails bare", "if not FIXED:\n    assert os.environ['RANK'] != '0'\n    time.sleep(60)")
    assert "broken: rank 0 exit status 1, rank 1 ended by SIGTERM; " in capsys.readouterr().out


def test_what_goes_as_said_passes_and_what_does_not_raises():
    for line, cell in (("1 fails", EXITS), ("1 lies", "print(1)"), ("1 fails bare", EXITS)):
        clinic.clinic_magic(line, cell)
    for line, cell, message in (
        ("1 fails", "print('sound')", "should be one that fails, but: rank 0 exit status 0"),
        ("1 aborts", EXITS, "should be one that aborts, but: rank 0 exit status 3"),
        ("1 lies", EXITS, "should be one that lies, but: rank 0 exit status 3"),
        ("1 hangs", "print('sound')", "should be one that hangs, but: rank 0 exit status 0"),
        ("1 fails", "raise SystemExit(4)", "the fixed run still fails: rank 0 exit status 4"),
    ):
        with pytest.raises(LaunchError, match=re.escape(message)):
            clinic.clinic_magic(line, cell)


def test_a_line_that_cannot_be_read_says_what_to_give():
    for line in ("", "2", "fails", "0 fails", "2 breaks", "2 fails twice", "-1 lies", "2 fails x=1"):
        with pytest.raises(UsageError, match="give the ranks, then fails, aborts, lies or hangs"):
            clinic.clinic_magic(line, "")


def test_frames_are_left_out_and_messages_are_kept():
    lines = [
        "Traceback (most recent call last):",
        '  File "./build/cells/clinic_1.py", line 3, in <module>',
        "    raise ValueError(1)",
        "ValueError: 1",
        "ValueError: 1",
        "frame #0: c10::Error + 0x9d",
        "[E1121 07:52:25.874749411 socket.cpp:1028] [c10d] The client socket has timed out",
        "[rank0]: RuntimeError: [/a/b/gloo/gloo/transport/tcp/pair.cc:545] Read error",
        "  what():  no match",
        '  File "./build/cells/clinic_1.py", line 12 in <module>',
        '  File "./other.py", line 12 in <module>',
        "x" * 1000,
    ]
    kept = [
        "ValueError: 1",
        "The client socket has timed out",
        "RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error",
    ]
    kept += ["what():  no match", "in line 12 of the cell"]
    assert run_script.telling_lines(lines) == [*kept, "x" * run_script.LINE_WIDTH + " …"]
    assert len(run_script.telling_lines([f"line {number}" for number in range(99)])) == run_script.MOST_LINES


# ---- the notebooks

ROW = re.compile(r"^\| \[(\d+)\]\(([\w.]*)#fault-\1\) \| (.*?) \|.*\|$", re.M)  # number, notebook, what one sees
SECTION = re.compile(r'<a id="fault-(\d+)"></a>\n### \1 · \w')


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def markdown(path: Path) -> str:
    """The markdown cells of a notebook."""
    return "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


def spoken(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """What the executed cells of each failure's section print."""
    said, number = {}, ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for started in re.findall(r'<a id="fault-(\d+)">|^## ()', cell.source, re.M):
                number = started[0]
        elif number and cell.execution_count:
            shown = [str(output.get("text", "")) + str(output.get("data", "")) for output in cell.outputs]
            said[number] = said.get(number, "") + "".join(shown)
    return said


def shown_elsewhere(number: str) -> str:
    """What the notebooks say to which the section of a failure leads."""
    [section] = re.findall(rf'<a id="fault-{number}"></a>(.*?)(?=<a id="fault|\Z)', markdown(REFERENCE), re.S)
    names = re.findall(r"\]\((\d\w+\.ipynb)", section)
    cells = [cell for name in names for cell in read(REFERENCE.with_name(name)).cells]
    return "".join(str(cell.get("outputs", "")) for cell in cells)


def problems(table: str) -> list[str]:
    """What the failures lack, a line each: a row of the table, a section where the row leads, a cell that says it."""
    rows = ROW.findall(table)
    lines = [] if [number for number, *_ in rows] == NUMBERS else [f"rows: {[number for number, *_ in rows]}"]
    sections = {path.name: SECTION.findall(markdown(path)) for path in (TEN, REFERENCE)}
    said = spoken(read(TEN)) | spoken(read(REFERENCE))
    for number, name, row in rows:
        if number not in sections[name or REFERENCE.name]:
            lines.append(f"{number}: its row leads to no section")
        elif number in ELSEWHERE:
            lines += [] if ELSEWHERE[number] in shown_elsewhere(number) else [f"{number}: not shown elsewhere"]
        elif number not in said:
            lines.append(f"{number}: no cell that was run")
        else:
            words = re.findall("`([^`]+)`", row)
            lines += [f"{number}: no cell says {word}" for word in words if word not in said[number]]
    return lines


def test_each_failure_has_a_row_a_section_and_its_true_message():
    table = markdown(REFERENCE)
    assert problems(table) == []
    assert problems(table.replace("](#fault-1)", f"]({TEN.name}#fault-1)")) == ["1: its row leads to no section"]
    assert problems(table.replace("`invalid device ordinal`", "`lost device`")) == ["4: no cell says lost device"]
    assert sorted(SECTION.findall(markdown(TEN) + markdown(REFERENCE)), key=int) == NUMBERS, "one section each"


# ---- a job that hangs now: what 10's table says to type, on the job file of 07

STUCK = """import faulthandler, os, signal, time
faulthandler.register(signal.SIGUSR1)
print("hangs", flush=True)
time.sleep(1000)
"""
TYPED = re.findall(r"^\| `(srun (?:--label )?--jobid=.*?)` \|", markdown(TEN), re.M)


def file_of(notebook: Path, name: str) -> str:
    """The file that a cell of a notebook writes."""
    [text] = [cell for cell in cells(notebook, "code") if re.match(rf"%%writefile \S*{name}\n", cell)]
    return text.partition("\n")[2]


@pytest.fixture
def typed(cluster, tmp_path, monkeypatch):
    """A folder with 07's job file, a script that hangs, and each_rank.sh; what is typed there, and what it says."""
    (tmp_path / "job.sbatch").write_text(file_of(TEN.with_name("07_submit_to_slurm.ipynb"), "job.sbatch"))
    (tmp_path / "mnist_ddp.py").write_text(STUCK)
    (tmp_path / "each_rank.sh").write_text(file_of(TEN, "each_rank.sh"))
    program(tmp_path / "bin" / "nvidia-smi", "echo GPUs of $SLURMD_NODENAME")  # a node has no GPU here
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    started = []

    def run(command: str) -> subprocess.CompletedProcess:
        job = {"JOB": started[-1]} if started else {}
        options = {"cwd": tmp_path, "env": os.environ | job, "capture_output": True, "text": True, "timeout": LIMIT}
        ended = subprocess.run(["bash", "-c", command], check=False, **options)
        started.extend(ended.stdout.split() if command.startswith("sbatch --parsable") else [])
        return ended

    yield run
    for number in started:
        jobs.cancel(number)


def test_what_is_typed_for_a_job_that_hangs_asks_each_rank_of_each_node_and_the_job_goes_on(typed, tmp_path):
    shape = "--nodes=2 --ntasks-per-node=2 --gres=gpu:2 --cpus-per-task=1"
    job = typed(f"sbatch --parsable {shape} job.sbatch").stdout.strip()
    log = tmp_path / f"slurm-{job}.log"
    until(lambda: log.exists() and log.read_text().count(": hangs") == 4, "all ranks hang")
    gpus, spy, signal = TYPED
    assert sorted(re.findall("GPUs of (.*)", typed(gpus).stdout)) == ["node1", "node2"]
    for command in (spy, signal):
        ended = typed(command)
        assert sorted(re.findall(r"rank (\d): process", ended.stdout)) == [*"0123"], (command, ended)
    until(lambda: len(re.findall(r'^\d: .*mnist_ddp.py", line 4 in', log.read_text(), re.M)) == 4, "four stacks")
    one_node = re.sub(r"--nodes=\$\(.*?\) ", "", spy)
    assert sorted(re.findall(r"rank (\d): process", typed(one_node).stdout)) == [*"01"], "the control: half of them"
    assert jobs.states_of_job(job)[0].state == "RUNNING"


def test_where_a_job_has_no_rank_the_commands_say_so_and_its_batch_script_gets_no_signal(typed):
    job = typed("sbatch --parsable --output=none.log --nodes=2 --wrap='echo begins; sleep 1000'").stdout.strip()
    until(lambda: "begins" in typed("cat none.log").stdout, "it runs")
    ended = typed(TYPED[2])
    assert ended.returncode and len(re.findall("no rank of job .* on node[12]", ended.stderr)) == 2, ended
    assert jobs.states_of_job(job)[0].state == "RUNNING"


# ---- its figures


def test_the_figures_can_be_read_and_the_first_leads_to_every_failure():
    for figure in (find_the_fault, where_they_stand):
        must_be_legible(figure, {}, [])
    assert set(re.findall(r"\d+", find_the_fault().alt)) == set(NUMBERS)


def test_when_rank_0_evaluates_alone_it_shows_after_the_first_step_and_not_after_a_later_one():
    """As fault 11 says: after a later step its broadcast meets the one of rank 1's next training step."""

    def train(evaluated):
        model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
        for step in (1, 2, 3, 4):
            model.train()(torch.ones(8, 4)).sum().backward()
            if dist.get_rank() == 0 and step == evaluated:
                with torch.no_grad():
                    model.eval()(torch.ones(8, 4))
        dist.barrier()
        return True

    assert on_ranks(2, lambda: train(3)) == [True, True]
    with pytest.raises((RuntimeError, ChildProcessError)):
        on_ranks(2, lambda: train(1))
