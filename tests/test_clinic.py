"""The `%%clinic` magic, and notebook 10: each failure has its row, its section, its cells, and its true message."""

import re

import nbformat
import pytest
from IPython.core.error import UsageError
from legible import must_be_legible

from ddp_helpers import ROOT
from ddp_helpers.launch import forked_script
from ddp_helpers.launch.launch import LaunchError
from ddp_helpers.lessons import run_script
from ddp_helpers.lessons.break_it_and_fix_it import clinic
from ddp_helpers.lessons.break_it_and_fix_it.figures import find_the_fault, where_they_stand

NOTEBOOK = ROOT / "notebooks" / "10_break_it_and_fix_it.ipynb"
NUMBERS = [str(number) for number in range(1, 30)]


# ---- the magic

DIES = """
print("rank", rank, "begins with", os.environ["COLOUR"])
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
    assert "caused by a remote worker" in broken, "the survivor's own complaint"


def test_a_hang_is_ended_at_its_limit(capsys):
    clinic.clinic_magic("1 hangs limit=1 bare", SLEEPS)
    assert re.search(r"^broken: rank 0 .*\blimit\b", capsys.readouterr().out)


def test_who_is_left_when_another_has_failed_is_ended(capsys, monkeypatch):
    monkeypatch.setattr(forked_script, "GRACE", 0.5)
    clinic.clinic_magic("2 fails bare", "if not CURED:\n    assert os.environ['RANK'] != '0'\n    time.sleep(60)")
    assert "broken: rank 0 exit status 1, rank 1 ended by SIGTERM; " in capsys.readouterr().out


@pytest.mark.parametrize(("line", "cell"), [("1 fails", EXITS), ("1 lies", "print(1)"), ("1  fails bare", EXITS)])
def test_what_goes_as_said_passes(line, cell):
    clinic.clinic_magic(line, cell)


@pytest.mark.parametrize(
    ("line", "cell", "message"),
    [
        ("1 fails", "print('sound')", "was to be one that fails, but: exit status 0"),
        ("1 aborts", EXITS, "was to be one that aborts, but: exit status 3"),
        ("1 lies", EXITS, "was to be one that lies, but: exit status 3"),
        ("1 hangs limit=60", "print('sound')", "was to be one that hangs, but: exit status 0"),
        ("1 fails", "raise SystemExit(4)", "the cured run is not cured: exit status 4"),
    ],
)
def test_what_does_not_go_as_said_raises(line, cell, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        clinic.clinic_magic(line, cell)


@pytest.mark.parametrize(
    "line", ["", "2", "fails", "0 fails", "2 breaks", "2 fails twice", "2 hangs", "-1 lies", "2 fails x=1"]
)
def test_a_line_that_cannot_be_read_says_what_to_give(line):
    with pytest.raises(UsageError, match="fails, aborts, lies or hangs limit=SECONDS"):
        clinic.clinic_magic(line, "")


def test_a_script_keeps_the_line_numbers_of_its_cell_and_runs_bare_where_that_is_said():
    framed, bare = (
        clinic.write_cell_script("one = 1\ntwo = 2", frame, True).read_text().splitlines() for frame in (1, 0)
    )
    assert bare == ["; ".join(["CURED = True", *clinic.IMPORTS]), "one = 1", "two = 2"]
    first = "; ".join(["CURED = True", *clinic.IMPORTS, *clinic.JOIN])
    assert framed == [first, "one = 1", "two = 2", *clinic.LEAVE]
    shown = [line for line in clinic.FRAME.splitlines() if line and not line.startswith("#")]
    assert shown == [*clinic.IMPORTS, *clinic.JOIN, *clinic.LEAVE], "what the notebook shows is what is run"


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


# ---- the notebook


def problems(notebook: nbformat.NotebookNode) -> list[str]:
    """What the 29 failures lack, a line each."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    rows = dict(re.findall(r"^\| \[(\d+)\]\(#fault-\1\) \| (.*?) \|.*\|$", text, re.M))
    headings = re.findall(r'^<a id="fault-(\d+)"></a>\n### \1 · \w', text, re.M)
    found = [] if list(rows) == NUMBERS else [f"rows of the table: {list(rows)}"]
    found += [] if headings == NUMBERS else [f"headings: {headings}"]
    said = spoken(notebook)
    for number, row in rows.items():
        if number not in said:
            found.append(f"{number}: no cell that was run")
            continue
        found += [f"{number}: no cell says {word}" for word in re.findall("`([^`]+)`", row) if word not in said[number]]
    return found


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


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_each_failure_has_a_row_a_section_and_its_true_message(notebook):
    assert problems(notebook) == []
    quoted = re.findall(r"^\| \[\d+\]\(#fault-\d+\) \| ([^|]*`)", "\n".join(c.source for c in notebook.cells), re.M)
    assert len(quoted) >= 15, "failures that say something are found by their message"


# ---- its figures


def test_the_figure_leads_to_every_failure():
    assert set(re.findall(r"\d+", find_the_fault().alt)) == set(NUMBERS)


@pytest.mark.parametrize("figure", [find_the_fault, where_they_stand])
def test_a_figure_can_be_read(figure):
    must_be_legible(figure, {}, [])
