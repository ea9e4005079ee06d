"""One look for every figure: colours that a colour-blind reader can tell apart, and readable sizes."""

import matplotlib.pyplot as plt

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), minus its yellow, which fades on white.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
RANK_COLOURS = [BLUE, ORANGE, GREEN, PURPLE, SKY, RED, "#000000", "#C4C4C4"]
INK, GREY, PALE = "#222222", "#5A5A5A", "#F2F2F2"


def rank_colour(rank: int) -> str:
    """The colour that stands for a rank in every figure of the course."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def use() -> None:
    """Set matplotlib to the course's style; the figure modules call it once, on import."""
    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.titleweight": "bold",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": plt.cycler(color=RANK_COLOURS),
            "legend.frameon": False,
            "savefig.bbox": "tight",
        }
    )
