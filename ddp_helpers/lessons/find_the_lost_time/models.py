"""Two models on a network that is turned down: what each one sends beside what it computes, and its memory."""

import json
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from ddp_helpers import ROOT
from ddp_helpers.draw.drawing import Picture, tint
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import GREY, WIDTH, rank_colour
from ddp_helpers.launch.machine import provenance
from ddp_helpers.lessons.find_the_lost_time import dial

RANKS = dial.RANKS.with_name("models_ranks.py")
RECORD = ROOT / "notebooks" / "results" / "letters" / "two_cpu_cores.json"
DRAWN = ("MNIST's Net", "letters.Net(64)", "letters.Net(512)")  # of their speed; of the memory, all

KINDS = {"parameters": 16, "activations": 1}  # bytes of memory for each: of a parameter four numbers, with Adam


def recorded() -> dict:
    """Read the record: its provenance, and `models`, what `models_ranks` found of each; seconds and bytes."""
    found = json.loads(RECORD.read_text())
    for one in found["models"].values():
        one["two"] = {int(mbit): seconds for mbit, seconds in one["two"].items()}
    return found


def needed(one: Mapping) -> float:
    """Compute the Mbit/s at which the all-reduce of two ranks, on one link for both, takes as long as backward."""
    return 8 * 2 * 4 * one["parameters"] / one["backward"] / 1e6


def bounds(one: Mapping, mbit: float) -> tuple[float, float]:
    """Predict the seconds of a step on two ranks: if backward hides all that it can of the all-reduce, and nothing."""
    wire = one["backward"] * needed(one) / mbit
    return one["two"][0] + max(0.0, wire - one["backward"]), one["two"][0] + wire


def draw_efficiency(ax: Axes, models: Mapping[str, Mapping]) -> None:
    """Draw the efficiency of two ranks by bandwidth: measured, and the band in which it is predicted."""
    rates = sorted(filter(None, models[DRAWN[0]]["two"]))
    fine, away = np.geomspace(rates[0] / 1.5, 2 * rates[-1], 200), 5 * rates[-1]
    for number, name in enumerate(DRAWN):
        one, look = models[name], {"color": rank_colour(number)}
        low, high = np.array([[one["alone"] / seconds for seconds in bounds(one, mbit)] for mbit in fine]).T
        ax.fill_between(fine, low, high, alpha=0.2, linewidth=0, **look)
        ax.plot([*rates, away], [one["alone"] / one["two"][mbit] for mbit in (*rates, 0)], "o", label=name, **look)
        ax.axvline(needed(one), linestyle=":", linewidth=1, **look)
    ax.set(xscale="log", xlabel="bandwidth of the loopback device [Mbit/s]", ylabel="efficiency of 2 ranks", ylim=0)
    ax.set_xticks([*rates, away], [*(f"{rate:,}" for rate in rates), "open"])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:.0%}")
    ax.legend(loc="lower right", frameon=True, framealpha=1, edgecolor="none")  # no line through its words


def draw_memory(ax: Axes, models: Mapping[str, Mapping]) -> None:
    """Draw the memory of a rank in float32 with Adam, and the share of it that does not depend on the batch."""
    state, kept = (np.array([n * one[what] for one in models.values()]) / 1e6 for what, n in KINDS.items())
    rows = range(len(models))
    ax.barh(rows, state, color=GREY, label="state")
    bars = ax.barh(rows, kept, left=state, color=tint(GREY, 0.35), label="activations")
    ax.bar_label(bars, [f"{share:.0%} state" for share in state / (state + kept)], padding=4)
    ax.set(yticks=rows, yticklabels=list(models), xlabel="memory of a rank [MB]")
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0.35)  # room for the numbers
    ax.legend(loc="upper right")


def side_by_side(found: Mapping) -> Picture:
    """Draw efficiency and memory of the recorded models."""
    models = found["models"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.9), layout="constrained")
    draw_efficiency(left, models)
    draw_memory(right, models)
    mnist, *others = (needed(one) / 1e3 for one in models.values())
    title = f"MNIST's Net needs {mnist:.1f} Gbit/s to hide its all-reduce, "
    title += f"letters.Net {min(others):.1f} to {max(others):.1f}"
    drawn = "bands: predicted, from all hidden to nothing; dotted: the all-reduce takes as long as backward. State: "
    drawn += "parameters, gradients, Adam's two averages"
    return captioned(figure, title, f"2 ranks, {found['machine']}", drawn)


def record() -> None:
    """Measure the models on this machine, in minutes; a quiet one."""
    models = dial.run_two_ranks(RANKS, timeout=900)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(provenance() | {"models": models}, indent=1) + "\n")


if __name__ == "__main__":
    record()
