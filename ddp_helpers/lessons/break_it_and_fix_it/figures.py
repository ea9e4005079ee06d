"""How to find what is wrong with a run: eight questions, and where each answer leads."""

from ddp_helpers.notebook.drawing import (
    GREEN,
    INK,
    LEFT,
    RIGHT,
    SMALL,
    WRONG,
    Picture,
    arrow,
    box,
    canvas,
    described,
    write,
)

# A question; where "no" leads, what to look at there, and the numbers of the failures.
QUESTIONS = [
    ("Does every rank\nsay its number?", "it does not start", "address, port, tasks, what each sees", "1 2 3 4 6"),
    ("Do all pass the\nfirst collective?", "they do not meet", "address, port, network interface, firewall", "1 6"),
    ("Do all live on\nto the end?", "somebody died", "exit status; the first complaint", "7 11 12 17 18 19 22"),
    ("Does it keep\nmoving?", "somebody waits", "now: py-spy; the line where each rank stands", "8 9 10 11 24"),
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
    return described(
        ax.figure,
        "Eight questions about a run, and the failures behind each no. "
        + " ".join(
            f"{question.replace(chr(10), ' ')} No: {name}, look at {look}: {', '.join(numbers.split())}."
            for question, name, look, numbers in QUESTIONS
        ),
    )
