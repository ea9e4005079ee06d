"""Colours, sizes and signs that all figures of the course share.

Importing it sets matplotlib's defaults in this process.
"""

from typing import Any

import matplotlib.pyplot as plt

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), without its yellow: it fades on white.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
)
# Two of Paul Tol's (https://personal.sron.nl/~pault/) for ranks 6 and 7: black, grey are no rank.
INDIGO, OLIVE = "#332288", "#999933"
RANK_COLOURS = [BLUE, ORANGE, GREEN, PURPLE, SKY, RED, INDIGO, OLIVE]
INK, GREY = "#222222", "#5A5A5A"
WRONG = "#C00000"  # a failure; no rank has this colour

WIDTH, LEFT, RIGHT = 9.5, 0.1, 9.4  # inches: the page, and where its contents start and end
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"

Colour = str | tuple[float, ...]
Look = dict[str, Any]  # how a text or an arrow looks: matplotlib's options by name

# Looks to pass with other options, as in write_text(…, ha="left", **SMALL).
SMALL: Look = {"size": 10}
CODE: Look = {"size": 10, "family": "monospace"}

plt.rcParams["figure.dpi"] = 110
plt.rcParams["figure.facecolor"] = "white"
plt.rcParams["font.size"] = 11
plt.rcParams["savefig.bbox"] = "tight"
plt.rcParams["axes.titlesize"] = 12
plt.rcParams["axes.titleweight"] = "bold"
plt.rcParams["axes.spines.top"] = False
plt.rcParams["axes.spines.right"] = False
plt.rcParams["axes.prop_cycle"] = plt.cycler(color=RANK_COLOURS)
plt.rcParams["legend.frameon"] = False
plt.rcParams["hatch.linewidth"] = 0.7  # thin enough to read a number on it


def rank_colour(rank: int) -> str:
    """Return the colour of a rank, the same in every figure of the course."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]
