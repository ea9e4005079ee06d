"""What faster costs: the time to a target accuracy against the device-hours of the run."""

import matplotlib.pyplot as plt
import pandas as pd

from ddp_helpers.notebook import style
from ddp_helpers.notebook.labels import at_the_right, caption, colours, setting
from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.scaling import many, unit, where

style.use()


def time_cost(per_run: pd.DataFrame, target: float, left_out: str = "") -> Picture:
    """A point a run, from what scaling.per_run gives for this target (0 to 1); its colour is the number of ranks.

    Runs that never reached the target are counted in the caption.
    """
    reached, name = per_run.dropna(subset=["to_target"]), unit(per_run)
    hues = colours(sorted(per_run["world_size"].unique()))
    figure, ax = plt.subplots(figsize=(9.5, 4.8), layout="constrained")
    labels, said = [], []
    for (scaling, cpus, ranks), rows in reached.groupby(["scaling", "cpus_per_task", "world_size"], dropna=False):
        ax.scatter(rows["device_hours"], rows["to_target"], color=hues[ranks], s=45, alpha=0.8)
        middle, text = rows[["device_hours", "to_target"]].median(), f"{many(ranks, name)}, {setting(scaling, cpus)}"
        labels.append((*middle, text, hues[ranks]))
        said.append(f"{text}: {middle['to_target']:.3g} s for {middle['device_hours']:.2g} hours")
    hours = "GPU-hours" if name == "GPU" else "device-hours (ranks times hours)"
    ax.set(xlabel=f"{hours} of the whole run", ylabel=f"seconds to {target:.0%} test accuracy", xlim=0, ylim=0)
    at_the_right(ax, labels)
    if reached.empty:
        ax.text(0.5, 0.5, f"no run reached {target:.0%}", transform=ax.transAxes, ha="center")
    figure.suptitle(f"What faster costs: {where(per_run)}", fontsize=12)
    never = len(per_run) - len(reached)
    missed = f"{many(never, 'run')} never reached {target:.0%}" if never else ""
    caption(figure, "lower is faster, further left is cheaper; a label stands at its median", missed, left_out)
    alt = f"Seconds to {target:.0%} accuracy and {hours}, {where(per_run)}"
    return described(figure, f"{alt}. {'; '.join(said) or 'No run reached it'}.")
