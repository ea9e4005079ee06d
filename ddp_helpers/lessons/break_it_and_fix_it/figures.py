"""Figures of notebook 10: how to find what is wrong with a run, and where ranks hang.

The notebook draws them; they need no ranks.
"""

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, write_left, write_text
from ddp_helpers.draw.style import GREEN, INK, LEFT, RIGHT, SMALL, WRONG, rank_colour

_QUESTIONS = [  # a question about a run, what "no" means, what to check then, and the faults
    (
        "Does every rank\nprint its number?",
        "it does not start",
        "address, port, tasks, what each rank sees",
        "1, 2, 3, 4, 6",
    ),
    (
        "Do all pass the\nfirst collective?",
        "no rendezvous",
        "address, port, network interface, firewall",
        "1, 6",
    ),
    (
        "Is each alive, or ended\nwell or by a timeout?",
        "a rank has died",
        "exit status; first complaint",
        "7, 11, 12, 17, 18, 19, 22, 26, 28, 29, 30",
    ),
    (
        "Does it keep\nmoving?",
        "a rank waits",
        "now: py-spy; after it: the watchdog's lines",
        "8, 9, 10, 11, 24, 27",
    ),
    (
        "Is it as fast as\nit should be?",
        "it is only slow",
        "CPUs per rank; then time each part of a step",
        "5",
    ),
    (
        "Are the numbers those\nof one process?",
        "silent error",
        "compare ranks, and with one process",
        "10, 13, 14, 15, 16, 31",
    ),
    (
        "Does a restart resume\nwhere it stopped?",
        "state is lost",
        "what was saved, which signal came",
        "19, 20, 21, 23, 24",
    ),
    (
        "Is nothing left\nat the end?",
        "processes stay",
        "the processes of the job, by its mark",
        "25",
    ),
]


def find_the_fault() -> Picture:
    """Draw the questions to ask of a run that goes wrong, in order, and the faults for each."""
    ax = canvas(8.2, "Ask in this order, and stop at the first no")
    write_text(ax, 9.25, 0.42, "faults", ha="right", **SMALL)
    alt = "Eight questions about a run, and the faults for each no."
    for row, (question, meaning, look_at, faults) in enumerate(_QUESTIONS):
        top = 0.6 + 0.86 * row
        box(ax, (LEFT, top), (2.3, 0.6), question, INK, fill=0.06, size=11)
        box(ax, (3.3, top), (6.1, 0.6), colour=WRONG, fill=0.05)
        arrow(ax, (2.42, top + 0.3), (3.28, top + 0.3))
        write_text(ax, 2.8, top + 0.15, "no", weight="bold", color=WRONG, size=11)
        write_text(ax, 3.42, top + 0.2, meaning, ha="left", weight="bold", size=11)
        write_text(ax, 3.42, top + 0.44, look_at, ha="left", **SMALL)
        write_text(ax, 9.25, top + 0.3, faults, ha="right", weight="bold", size=12)
        arrow(ax, (1.25, top + 0.6), (1.25, top + 0.86))
        write_text(ax, 1.35, top + 0.73, "yes", ha="left", **SMALL)
        alt += f" {question} No: {meaning}: {faults}.".replace("\n", " ")
    box(ax, (LEFT, 7.48), (2.3, 0.5), "a correct run", GREEN, fill=0.2)
    return described(ax.figure, alt)


_HANGS = [  # a fault that hangs, what all ranks have done, and where ranks 0 and 1 are
    ("8 · A rank hangs", "a step", "barrier()", "reads from a dead file server"),
    ("9 · Uneven batches", "batch 5", "barrier() after the epoch", "backward() of batch 6"),
    (
        "11 · Evaluation on rank 0,\nwith NCCL",
        "backward()",
        "broadcast of the buffers",
        "broadcast of the bucket order",
    ),
    ("24 · Stop at different steps", "step 2", "writes a checkpoint", "all-reduce of step 3"),
    ("27 · Rank 0 is busy", "an epoch", "evaluates alone", "all-reduce of the next epoch"),
]
# These wait for no other rank.
_BUSY = ("reads from a dead file server", "writes a checkpoint", "evaluates alone")


def where_they_stand() -> Picture:
    """Draw two lanes for each of five hangs of notebook 10: the line in which each rank is."""
    ax = canvas(5.85, "In a hang, two ranks are in different lines")
    write_text(ax, RIGHT, 0.27, "hatched: it waits for the other", ha="right", **SMALL)
    sentences = ["The lines of two ranks in five hangs"]
    for row, (name, done, *places) in enumerate(_HANGS):
        top = 0.62 + 1.02 * row
        write_left(ax, top + 0.42, name, weight="bold", size=11)
        for rank, place in enumerate(places):
            y = top + 0.44 * rank
            write_text(ax, 3.2, y + 0.19, f"rank {rank}", ha="left", size=11)
            box(ax, (3.95, y), (1.6, 0.38), done, INK, fill=0.06, size=11)
            hatch = "" if place in _BUSY else "///"
            box(ax, (5.65, y), (3.75, 0.38), place, rank_colour(rank), hatch=hatch, size=11)
        alt = f"{name}: rank 0 in {places[0]}; rank 1 in {places[1]}"
        sentences.append(alt.replace("\n", " "))
    return described(ax.figure, ". ".join(sentences) + ".")
