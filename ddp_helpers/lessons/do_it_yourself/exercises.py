"""Exercises of notebook 13: a small one, and two projects, whose answers are run for real."""

from pathlib import Path

from ddp_helpers import ROOT
from ddp_helpers.lessons.do_it_yourself import mending, own_net, survive
from ddp_helpers.lessons.do_it_yourself.faults import FAULTS
from ddp_helpers.lessons.exercise import Exercise, Project


def how_tested(images: int, ranks: int, counted: int) -> str:
    """Classify an evaluation by the number of test images that all ranks counted together."""
    if counted <= images:
        return "each once" if counted == images else "not all"
    return "each by every rank" if counted == images * ranks else "padded"


def my_run(folder: Path) -> None:
    """Train a net of one's own in this folder, as a job. Only a notebook can: the net is from a cell of it."""
    raise NotImplementedError


def mend(text: str) -> str:
    """The script without its faults."""
    for fault in FAULTS:
        text = text.replace(fault.wrong, fault.right)
    return text


def my_resumable_script() -> Path:
    """The path of spirals_ddp.py, made to survive a kill."""
    return ROOT / "notebooks" / "solutions" / "spirals_resumable.py"


EXERCISES = [
    Exercise(
        how_tested,
        [(10, 4, 10), (10, 4, 12), (10, 4, 40), (10, 4, 8), (8, 4, 8), (513, 2, 514), (512, 2, 1024), (513, 4, 512)],
        {
            "More than there are can have two reasons: padded shards, or ranks that each test everything.": (
                lambda images, ranks, counted: (
                    "each once" if counted == images else "padded" if counted > images else "not all"
                )
            ),
            "Padding repeats images and loses none: fewer than there are has another name.": (
                lambda images, ranks, counted: {images: "each once", images * ranks: "each by every rank"}.get(
                    counted, "padded"
                )
            ),
        },
    ),
    Project(my_run, [], {}, own_net.judge),
    Project(mend, [], {}, mending.judge),
    Project(my_resumable_script, [], {}, survive.judge),
]
