"""The one look of the course's figures: colours, sizes, signs."""

import matplotlib.pyplot as plt

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), minus its yellow, which fades on white.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
RANK_COLOURS = [BLUE, ORANGE, GREEN, PURPLE, SKY, RED, "#000000", "#C4C4C4"]
INK, GREY = "#222222", "#5A5A5A"

LOOK = {"figure.dpi": 110, "figure.facecolor": "white", "font.size": 11, "savefig.bbox": "tight"}
LOOK |= {"axes.titlesize": 12, "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False}
LOOK |= {"axes.prop_cycle": plt.cycler(color=RANK_COLOURS), "legend.frameon": False}
LOOK["hatch.linewidth"] = 0.7  # thin enough to read a number on it
plt.rcParams.update(LOOK)
WIDTH, LEFT, RIGHT = 9.5, 0.1, 9.4  # the page, and where its contents begin and end
WRONG = "#C00000"  # no rank's colour: a thing that fails
SMALL, CODE = {"size": 10}, {"size": 10, "family": "monospace"}
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"


def rank_colour(rank: int) -> str:
    """The colour that stands for a rank in every figure of the course."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]
