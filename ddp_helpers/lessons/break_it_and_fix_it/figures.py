"""Figures of notebook 10: how to find what is wrong with a run, and where hanging ranks stand.

The notebook draws them; they need no ranks.
"""

from typing import NamedTuple

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, write_text
from ddp_helpers.draw.style import GREEN, INK, LEFT, RIGHT, SMALL, WRONG, rank_colour


class _Question(NamedTuple):
    """A question about a run; what a "no" means, what to look at then, and the faults behind it."""

    text: str
    meaning: str
    look_at: str
    faults: list[int]


_QUESTIONS = [
    _Question(
        "Does every rank\nsay its number?",
        "it does not start",
        "address, port, tasks, what each sees",
        [1, 2, 3, 4, 6],
    ),
    _Question(
        "Do all pass the\nfirst collective?",
        "they do not meet",
        "address, port, network interface, firewall",
        [1, 6],
    ),
    _Question(
        "Is each still alive,\nor ended well?",
        "somebody died",
        "exit status; first complaint",
        [7, 11, 12, 17, 18, 19, 22, 26, 28, 29, 30],
    ),
    _Question(
        "Does it keep\nmoving?",
        "somebody waits",
        "now: py-spy; the line where each rank stands",
        [8, 9, 10, 11, 24, 27],
    ),
    _Question(
        "Is it as fast as\nit should be?",
        "it is only slow",
        "CPUs a rank; then time each part of a step",
        [5],
    ),
    _Question(
        "Are the numbers those\nof one process?",
        "it lies",
        "compare ranks, and with one process",
        [10, 13, 14, 15, 16, 31],
    ),
    _Question(
        "Does a restart go on\nwhere it stopped?",
        "it forgets",
        "what was saved, which signal came",
        [19, 20, 21, 23, 24],
    ),
    _Question(
        "Is nothing left\nat the end?",
        "processes stay",
        "the processes of the job, by its mark",
        [25],
    ),
]

# In inches, as all places of a figure.
_FIRST_ROW = 0.6
_PITCH = 0.86  # from one question to the next
_BOX_HEIGHT = 0.6
_QUESTION_WIDTH = 2.3
_QUESTION_CENTRE = LEFT + _QUESTION_WIDTH / 2
_ANSWER_LEFT = 3.3


def find_the_fault() -> Picture:
    """Draw the questions to ask of a run that goes wrong, in order, and the faults behind each."""
    height = 0.7 + _PITCH * (len(_QUESTIONS) + 0.72)
    ax = canvas(height, "Ask in this order, and stop at the first no")
    write_text(ax, RIGHT - 0.15, 0.42, "faults", ha="right", **SMALL)
    for row, question in enumerate(_QUESTIONS):
        top = _FIRST_ROW + _PITCH * row
        middle = top + _BOX_HEIGHT / 2
        bottom = top + _BOX_HEIGHT
        size = (_QUESTION_WIDTH, _BOX_HEIGHT)
        box(ax, (LEFT, top), size, question.text, INK, fill=0.06, size=11)
        size = (RIGHT - _ANSWER_LEFT, _BOX_HEIGHT)
        box(ax, (_ANSWER_LEFT, top), size, colour=WRONG, fill=0.05)
        arrow(ax, (2.42, middle), (3.28, middle))
        write_text(ax, 2.8, middle - 0.15, "no", weight="bold", color=WRONG, size=11)
        write_text(ax, 3.42, top + 0.2, question.meaning, ha="left", weight="bold", size=11)
        write_text(ax, 3.42, top + 0.44, question.look_at, ha="left", **SMALL)
        faults = _listed(question.faults)
        write_text(ax, RIGHT - 0.15, middle, faults, ha="right", weight="bold", size=12)
        arrow(ax, (_QUESTION_CENTRE, bottom), (_QUESTION_CENTRE, top + _PITCH))
        between = top + (_BOX_HEIGHT + _PITCH) / 2
        write_text(ax, _QUESTION_CENTRE + 0.1, between, "yes", ha="left", **SMALL)
    end = (LEFT, _FIRST_ROW + _PITCH * len(_QUESTIONS))
    box(ax, end, (_QUESTION_WIDTH, 0.5), "a sound run", GREEN, fill=0.2)
    sentences = []
    for question in _QUESTIONS:
        text = question.text.replace("\n", " ")
        sentences.append(f"{text} No: {question.meaning}: {_listed(question.faults)}.")
    alt = "Eight questions about a run, and the failures behind each no."
    return described(ax.figure, " ".join([alt, *sentences]))


def _listed(faults: list[int]) -> str:
    """Return the numbers of faults as text, with commas."""
    return ", ".join(map(str, faults))


class _Rank(NamedTuple):
    """A rank in a hang: what all ranks have done, where it stands, and whether it waits there."""

    done: str
    stands_in: str
    waits: bool


class _Hang(NamedTuple):
    """A fault of notebook 10 that hangs, and its two ranks."""

    name: str
    ranks: tuple[_Rank, _Rank]


_HANGS = [
    _Hang(
        "8 · A rank hangs",
        (
            _Rank("a step", "barrier()", waits=True),
            _Rank("a step", "reads from a dead file server", waits=False),
        ),
    ),
    _Hang(
        "9 · Uneven batches",
        (
            _Rank("batch 5", "barrier() after the epoch", waits=True),
            _Rank("batch 5", "backward() of batch 6", waits=True),
        ),
    ),
    _Hang(
        "11 · Evaluation on rank 0",
        (
            _Rank("backward()", "broadcast of the buffers", waits=True),
            _Rank("backward()", "broadcast of the bucket order", waits=True),
        ),
    ),
    _Hang(
        "24 · Stop at different steps",
        (
            _Rank("step 2", "writes a checkpoint", waits=False),
            _Rank("step 2", "all-reduce of step 3", waits=True),
        ),
    ),
]
_HANG_PITCH = 1.02  # from one hang to the next
_LANE_PITCH = 0.44  # from one rank to the next
_LANE_HEIGHT = 0.38


def where_they_stand() -> Picture:
    """Draw two lanes for each of four hangs of notebook 10: the line in which each rank stands."""
    height = 0.75 + _HANG_PITCH * len(_HANGS)
    ax = canvas(height, "In a hang, two ranks stand in different lines")
    write_text(ax, RIGHT, 0.27, "hatched: it waits for the other", ha="right", **SMALL)
    for row, hang in enumerate(_HANGS):
        top = 0.62 + _HANG_PITCH * row
        write_text(ax, LEFT, top + 0.42, hang.name, ha="left", weight="bold", size=11)
        for number, rank in enumerate(hang.ranks):
            lane = top + _LANE_PITCH * number
            write_text(ax, 3.2, lane + 0.19, f"rank {number}", ha="left", size=11)
            box(ax, (3.95, lane), (1.6, _LANE_HEIGHT), rank.done, INK, fill=0.06, size=11)
            hatch = "///" if rank.waits else ""
            size = (RIGHT - 5.65, _LANE_HEIGHT)
            colour = rank_colour(number)
            box(ax, (5.65, lane), size, rank.stands_in, colour, hatch=hatch, size=11)
    sentences = ["Where two ranks stand in four hangs"]
    for name, (first, second) in _HANGS:
        sentences.append(f"{name}: rank 0 in {first.stands_in}; rank 1 in {second.stands_in}")
    return described(ax.figure, ". ".join(sentences) + ".")
