"""The house as CONTRIBUTING describes it: imports lead down, a lesson stands alone, each notebook has one."""

from itertools import pairwise

from ddp_helpers import ROOT
from ddp_helpers.upkeep.architecture import above, imports, modules, room

SHARED = {"", "exercise", "on_ranks", "run_script"}  # what all lessons may import


def upward(found):
    """Imports of a wing that stands above, and of one lesson by another."""
    rooms = [(who, whom, room(who), room(whom)) for who, whom in found]
    wrong = [(who, whom) for who, whom, one, other in rooms if one[0] and other[0] and above(other[0], one[0])]
    return wrong + [
        (who, whom)
        for who, whom, one, other in rooms
        if one[0] == other[0] == "lessons" and one[1] != other[1] and one[1] and other[1] not in SHARED
    ]


def test_no_import_leads_up_and_no_lesson_needs_another():
    found = imports()
    assert len(found) > 200 and upward(found) == []
    planted = ("ddp_helpers.rank.model", "ddp_helpers.records.runs")
    between = ("ddp_helpers.lessons.shard_the_data", "ddp_helpers.lessons.wrap_the_model.figures")
    assert upward({*found, planted, between}) == [planted, between]


def test_each_notebook_has_a_lesson_of_its_name():
    lessons = {room(name)[1] for name in modules() if room(name)[0] == "lessons"} - SHARED
    notebooks = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    assert lessons == {path.stem[3:] for path in notebooks}
    assert all(int(after.stem[:2]) == int(before.stem[:2]) + 1 for before, after in pairwise(notebooks))


def test_no_module_is_too_long_to_be_read():
    long = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not {name: count for name, count in long.items() if count > 300}
