"""05's exercises on its own ranks: the way back after a hang, its verdict, and one verdict where all have the same."""

import re

import nbformat
import pytest
from changed_text import replaced
from notebook_texts import cells
from real import LIMIT

from ddp_helpers import ROOT
from ddp_helpers.launch import ranks
from ddp_helpers.launch.engine import LaunchError

NOTEBOOK = ROOT / "notebooks" / "05_wrap_the_model.ipynb"
SOLUTIONS = [cell for cell in cells(ROOT / "notebooks" / "solutions" / NOTEBOOK.name, "code") if "def " in cell]
ON_RANKS = re.compile(r"%%ranks (2.*)\n")


def answer(name, *changes):
    """The cell that solves an exercise, with changes in it."""
    [cell] = [cell for cell in SOLUTIONS if f"def {name}(" in cell]
    return replaced(cell, changes) if changes else cell


def run(cell):
    """Run a `%%ranks` cell as the notebook does."""
    options = ON_RANKS.match(cell)
    ranks.ranks_magic(re.sub(r"limit=\d+", f"limit={LIMIT}", options[1]), cell[options.end() :])


@pytest.fixture(scope="module")
def way_back(tmp_path_factory):
    """New ranks after a hang, on which `%ranks again` has run the cells up to the one with `same`."""
    sources = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    last = next(number for number, source in enumerate(sources) if "def same(" in source)
    parameters: dict = {}
    exec(sources[0], parameters)
    del parameters["__builtins__"]
    ranks.end()
    ranks.start(2, path=str(tmp_path_factory.mktemp("checkpoint") / "it.pt"), **parameters)
    for source in filter(ON_RANKS.match, sources[: last + 1]):
        run(source)
    with pytest.raises(LaunchError, match=r"rank 0 in line 3, `dist.barrier\(\)`(.|\n)*run `%ranks again`: new ranks"):
        ranks.ranks_magic("2 limit=5", "if rank == 0:\n    dist.barrier()")
    ranks.again_magic("again")
    yield
    ranks.end()


# Exercise 3 in the notebook's own words.
WITH_NULLCONTEXT = """%%ranks 2
def accumulate(ddp_model, optimizer, pieces):
    total = sum(len(labels) for _, labels in pieces)
    optimizer.zero_grad()
    for number, (x, y) in enumerate(pieces, 1):
        with ddp_model.no_sync() if number < len(pieces) else nullcontext():
            (F.cross_entropy(ddp_model(x), y) * len(y) / total).backward()
    optimizer.step()


lessons.check(accumulate)"""
WITH_SAME = """%%ranks 2
def drifted(model):
    return [name for name, parameter in model.named_parameters() if not same(parameter)]


lessons.check(drifted)"""


@pytest.mark.parametrize("cell", [WITH_SAME, answer("average_in_one"), WITH_NULLCONTEXT], ids=["1", "2", "3"])
def test_after_a_hang_one_line_leads_back_to_each_exercise(cell, way_back, capsys):
    run(cell)
    shown = capsys.readouterr().out
    assert shown.count("right") == 1 and "rank 1" not in shown, "once, by rank 0"


def test_a_verdict_of_all_ranks_is_shown_once_and_an_error_by_each_rank_that_it_stops(way_back, capsys):
    stub = "%%ranks 2\ndef drifted(model):\n    raise NotImplementedError\n\n\nlessons.check(drifted)"
    shown = {}
    for name, cell in {
        "stub": stub,
        "wrong": answer("average_in_one", ("    bucket /= dist.get_world_size()\n", "")),
        "stopped": answer("average_in_one", ("    bucket = torch.cat", "    undefined\n    bucket = torch.cat")),
    }.items():
        run(cell)
        shown[name] = capsys.readouterr().out
    assert shown["stub"].count("not attempted") == shown["wrong"].count("not yet") == 1
    assert "rank 1]" not in shown["stub"] + shown["wrong"]
    assert shown["stopped"].count("not yet") == 2 and "(rank 1, line" in shown["stopped"]


ON_RANK_0 = """%%ranks 2
def drifted(model):
    if rank:
        return []
    return [name for name, parameter in model.named_parameters() if not same(parameter)]


lessons.check(drifted)"""


def test_of_a_collective_that_one_rank_alone_calls_the_other_says_so_before_the_limit(way_back, capsys):
    with pytest.raises(LaunchError, match=r"not done after 25 s:\nrank 0 in line \d+, `copies|`dist|`return"):
        ranks.ranks_magic("2 limit=25", ON_RANK_0.partition("\n")[2])
    shown = capsys.readouterr().out
    assert "rank 1]" in shown and "Do all ranks call the same collectives" in " ".join(shown.split()), shown
