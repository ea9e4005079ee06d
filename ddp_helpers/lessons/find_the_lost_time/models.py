"""Two models on a network that is turned down: their record, figure and predicted times.

Notebook 12 calls it, in its own process, and draws what `models_ranks` measured of each model on
two ranks. As a script it measures anew and writes the record.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from ddp_helpers import ROOT
from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import WIDTH, rank_colour
from ddp_helpers.launch.machine import provenance
from ddp_helpers.lessons.find_the_lost_time import dial

_RANKS = dial.RANKS.with_name("models_ranks.py")
_RECORD = ROOT / "notebooks" / "results" / "letters" / "two_cpu_cores.json"

_GRADIENT_BYTES = 4  # float32


@dataclass(frozen=True)
class Measured:
    """What `models_ranks` measured of a model: the least seconds of a step of each kind."""

    parameters: int  # how many
    backward: float  # seconds, in a step of one rank alone
    alone: float  # seconds of that step
    two: dict[int, float]  # seconds of a step of two ranks, by Mbit/s; 0 for the open network


@dataclass(frozen=True)
class Record:
    """The measured models, by name, and the machine on which they were measured."""

    machine: str
    models: dict[str, Measured]


def read_record() -> Record:
    """Read the record that is part of the course."""
    record = json.loads(_RECORD.read_text())
    models = {}
    for name, measured in record["models"].items():
        two = {int(mbit): seconds for mbit, seconds in measured["two"].items()}
        models[name] = Measured(**{**measured, "two": two})
    return Record(record["machine"], models)


def needed_mbit(model: Measured) -> float:
    """Compute the Mbit/s at which the all-reduce of two ranks takes as long as backward.

    Both ranks send on one link.
    """
    sent = 2 * _GRADIENT_BYTES * model.parameters
    return 8 * sent / model.backward / 1e6


def step_bounds(model: Measured, mbit: float) -> tuple[float, float]:
    """Predict the least and the most seconds of a step on two ranks, at so many Mbit/s.

    The least: backward hides all of the all-reduce that it can. The most: it hides nothing.
    """
    all_reduce = model.backward * needed_mbit(model) / mbit
    exposed = max(0.0, all_reduce - model.backward)
    return model.two[0] + exposed, model.two[0] + all_reduce


def draw_models(record: Record) -> Picture:
    """Draw the efficiency of two ranks by bandwidth, for each of the recorded models."""
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    _draw_efficiency(ax, record.models)
    mnist, *others = (needed_mbit(model) / 1e3 for model in record.models.values())
    title = f"MNIST's Net needs {mnist:.1f} Gbit/s to hide its all-reduce, "
    title += f"letters.Net {min(others):.1f} to {max(others):.1f}"
    legend = "bands: predicted, from all hidden to nothing; "
    legend += "dotted: the all-reduce takes as long as backward"
    return captioned(figure, title, f"2 ranks, {record.machine}", legend)


def _draw_efficiency(ax: Axes, models: Mapping[str, Measured]) -> None:
    """Draw the efficiency of two ranks by bandwidth: as measured, and the predicted band."""
    rates = sorted({mbit for model in models.values() for mbit in model.two if mbit})
    band_rates = np.geomspace(rates[0] / 1.5, 2 * rates[-1], 200)
    at_open = 5 * rates[-1]  # where the open network is drawn
    for number, (name, model) in enumerate(models.items()):
        colour = rank_colour(number)
        efficiency = [model.alone / model.two[mbit] for mbit in (*rates, 0)]
        band = [[model.alone / s for s in step_bounds(model, mbit)] for mbit in band_rates]
        hidden, exposed = np.array(band).T  # all of the all-reduce that can be, or none
        ax.fill_between(band_rates, hidden, exposed, alpha=0.2, linewidth=0, color=colour)
        ax.plot([*rates, at_open], efficiency, "o", label=name, color=colour)
        ax.axvline(needed_mbit(model), linestyle=":", linewidth=1, color=colour)
    ax.set(xscale="log", xlabel="bandwidth of the loopback device [Mbit/s]")
    ax.set(ylabel="efficiency of 2 ranks", ylim=0)
    ax.set_xticks([*rates, at_open], [*(f"{rate:,}" for rate in rates), "open"])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:.0%}")
    # Opaque: no line runs through the names.
    ax.legend(loc="lower right", frameon=True, framealpha=1, edgecolor="none")


def _write_record() -> None:
    """Measure the models on this machine, which takes minutes, and write the record.

    Nothing else should run meanwhile.
    """
    models = dial.run_two_ranks(_RANKS, timeout=900)
    _RECORD.parent.mkdir(parents=True, exist_ok=True)
    _RECORD.write_text(json.dumps(provenance() | {"models": models}, indent=1) + "\n")


if __name__ == "__main__":
    _write_record()
