"""The `%%clinic` magic, and 10 and 10b: each failure has its row, its section, its cells, and its true message."""

import re
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from diagram_checks import must_be_legible
from IPython.core.error import UsageError
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_helpers import ROOT
from ddp_helpers.launch import forked_script
from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.launch.launch import LaunchError
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
if rank == 1 and not CURED:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""
SLEEPS = "print('begins')\nif not CURED: time.sleep(60)"
EXITS = "import sys\nif not CURED: sys.exit(3)"


def test_the_fault_and_its_cure_are_shown_with_each_ranks_lines_and_end(capsys):
    clinic.clinic_magic("2 aborts COLOUR=blue", DIES)
    broken, cured = capsys.readouterr().out.split("cured: ")
    assert re.match(r"broken: rank 0 exit status 1, rank 1 ended by SIGKILL; \d+ s\n", broken)
    assert re.match(r"rank 0 exit status 0, rank 1 exit status 0; \d+ s\n", cured)
    for text in (broken, cured):
        assert "[rank 0]\x1b[0m rank 0 begins with blue\n" in text
        assert "[rank 1]\x1b[0m rank 1 begins with blue\n" in text
        assert text.count(" in line 4 of the cell\n") == 2
    assert "caused by a remote worker" in broken, "the survivor's own complaint"


def test_a_hang_is_ended_at_its_limit(capsys):
    clinic.clinic_magic("1 hangs bare", SLEEPS)
    assert re.search(r"^broken: rank 0 .*\blimit\b", capsys.readouterr().out)


def test_who_is_left_when_another_has_failed_is_ended(capsys, monkeypatch):
    monkeypatch.setattr(forked_script, "GRACE", 0.5)
    clinic.clinic_magic("2 fails bare", "if not CURED:\n    assert os.environ['RANK'] != '0'\n    time.sleep(60)")
    assert "broken: rank 0 exit status 1, rank 1 ended by SIGTERM; " in capsys.readouterr().out


def test_what_goes_as_said_passes_and_what_does_not_raises():
    for line, cell in (("1 fails", EXITS), ("1 lies", "print(1)"), ("1 fails bare", EXITS)):
        clinic.clinic_magic(line, cell)
    for line, cell, message in (
        ("1 fails", "print('sound')", "was to be one that fails, but: rank 0 exit status 0"),
        ("1 aborts", EXITS, "was to be one that aborts, but: rank 0 exit status 3"),
        ("1 lies", EXITS, "was to be one that lies, but: rank 0 exit status 3"),
        ("1 hangs", "print('sound')", "was to be one that hangs, but: rank 0 exit status 0"),
        ("1 fails", "raise SystemExit(4)", "the cured run is not cured: rank 0 exit status 4"),
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
    quoted = [row for *_, row in ROW.findall(table) if "`" in row]
    assert len(quoted) >= 15, "failures that say something are found by their message"
    assert problems(table.replace("](#fault-1)", f"]({TEN.name}#fault-1)")) == ["1: its row leads to no section"]
    assert problems(table.replace("`invalid device ordinal`", "`lost device`")) == ["4: no cell says lost device"]
    assert sorted(SECTION.findall(markdown(TEN) + markdown(REFERENCE)), key=int) == NUMBERS, "one section each"


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
