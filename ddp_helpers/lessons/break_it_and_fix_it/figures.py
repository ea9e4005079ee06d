"""How to find what is wrong with a run: eight questions, and where the ranks of a hang stand."""

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, write
from ddp_helpers.draw.style import GREEN, INK, LEFT, RIGHT, SMALL, WRONG, rank_colour

# A question; where "no" leads, what to look at there, and the numbers of the failures.
QUESTIONS = [
    ("Does every rank\nsay its number?", "it does not start", "address, port, tasks, what each sees", "1 2 3 4 6"),
    ("Do all pass the\nfirst collective?", "they do not meet", "address, port, network interface, firewall", "1 6"),
    ("Do all live on\nto the end?", "somebody died", "exit status; first complaint", "7 11 12 17 18 19 22 26 28 29"),
    ("Does it keep\nmoving?", "somebody waits", "now: py-spy; the line where each rank stands", "8 9 10 11 24 27"),
    ("Is it as fast as\nit should be?", "it is only slow", "CPUs a rank; then time each part of a step", "5"),
    ("Are the numbers those\nof one process?", "it lies", "compare ranks, and with one process", "10 13 14 15 16"),
    ("Does a restart go on\nwhere it stopped?", "it forgets", "what was saved, which signal came", "19 20 21 23 24"),
    ("Is nothing left\nat the end?", "processes stay", "the processes of the job, by its mark", "25"),
]
STEP, HIGH, MIDDLE = 0.86, 0.6, 1.25


def find_the_fault() -> Picture:
    """The questions to ask of a run that goes wrong, in order, and the failures of notebook 10 behind each."""
    ax = canvas(0.7 + STEP * (len(QUESTIONS) + 0.72), "Ask in this order, and stop at the first no")
    write(ax, RIGHT - 0.15, 0.42, "faults", ha="right", **SMALL)
    for place, (question, name, look, numbers) in enumerate(QUESTIONS):
        y = 0.6 + STEP * place
        box(ax, (LEFT, y), (2.3, HIGH), question, INK, fill=0.06, size=11)
        box(ax, (3.3, y), (RIGHT - 3.3, HIGH), colour=WRONG, fill=0.05)
        arrow(ax, (2.42, y + HIGH / 2), (3.28, y + HIGH / 2))
        write(ax, 2.8, y + HIGH / 2 - 0.15, "no", weight="bold", color=WRONG, size=11)
        write(ax, 3.42, y + 0.2, name, ha="left", weight="bold", size=11)
        write(ax, 3.42, y + 0.44, look, ha="left", **SMALL)
        write(ax, RIGHT - 0.15, y + HIGH / 2, ", ".join(numbers.split()), ha="right", weight="bold", size=12)
        arrow(ax, (MIDDLE, y + HIGH), (MIDDLE, y + STEP))
        write(ax, MIDDLE + 0.1, y + (HIGH + STEP) / 2, "yes", ha="left", **SMALL)
    box(ax, (LEFT, 0.6 + STEP * len(QUESTIONS)), (2.3, 0.5), "a sound run", GREEN, fill=0.2)
    told = (
        f"{question} No: {name}: {', '.join(numbers.split())}.".replace("\n", " ")
        for question, name, _, numbers in QUESTIONS
    )
    return described(ax.figure, f"Eight questions about a run, and the failures behind each no. {' '.join(told)}")


# A failure, and for each rank: what both have done, where it stands, and whether it waits there.
HANGS = [
    ("8 · A rank hangs", ("a step", "barrier()", True), ("a step", "reads from a dead file server", False)),
    ("9 · Uneven batches", ("batch 5", "barrier() after the epoch", True), ("batch 5", "backward() of batch 6", True)),
    (
        "11 · Evaluation on rank 0",
        ("backward()", "broadcast of the buffers", True),
        ("backward()", "all-reduce of the gradients", True),
    ),
    (
        "24 · Stop at different steps",
        ("step 2", "writes a checkpoint", False),
        ("step 2", "all-reduce of step 3", True),
    ),
]


def where_they_stand() -> Picture:
    """Two lanes for each of four hangs of notebook 10: the line in which each rank stands."""
    ax = canvas(0.75 + 1.02 * len(HANGS), "In a hang, two ranks stand in different lines")
    write(ax, RIGHT, 0.27, "hatched: it waits for the other", ha="right", **SMALL)
    for row, (name, *ranks) in enumerate(HANGS):
        y = 0.62 + 1.02 * row
        write(ax, LEFT, y + 0.42, name, ha="left", weight="bold", size=11)
        for rank, (done, stands, waits) in enumerate(ranks):
            lane, colour = y + 0.44 * rank, rank_colour(rank)
            write(ax, 3.2, lane + 0.19, f"rank {rank}", ha="left", size=11)
            box(ax, (3.95, lane), (1.6, 0.38), done, INK, fill=0.06, size=11)
            box(ax, (5.65, lane), (RIGHT - 5.65, 0.38), stands, colour, hatch="///" if waits else "", size=11)
    where = (f"{name}: " + "; ".join(f"rank {rank} in {ranks[rank][1]}" for rank in (0, 1)) for name, *ranks in HANGS)
    return described(ax.figure, f"Where two ranks stand in four hangs. {'. '.join(where)}.")
