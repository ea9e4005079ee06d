"""Where the seconds of an epoch went, for some runs."""

import matplotlib.pyplot as plt

from ddp_helpers.notebook import style
from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.runs import Run


def seconds_of_an_epoch(runs: list[Run]) -> Picture:
    """A bar a run: the seconds of its last epoch spent waiting for data, in steps, and in the test."""
    style.use()
    figure, ax = plt.subplots(figsize=(9.5, 1.6 + 0.7 * len(runs)), layout="constrained")
    labels = [f"{run.folder.name}\nworld size {run.row()['world_size']}, {run.row()['launcher']}" for run in runs]
    begins = [0.0] * len(runs)
    for part, colour in (("data", style.ORANGE), ("steps", style.BLUE), ("test", style.GREY)):
        seconds = [parts(run)[part] for run in runs]
        ax.barh(labels, seconds, left=begins, color=colour, label=part, height=0.6)
        begins = [begin + more for begin, more in zip(begins, seconds, strict=True)]
    for row, total in enumerate(begins):
        ax.text(total, row, f" {total:.1f} s", va="center")
    ax.margins(x=0.12)
    ax.set(title=f"Where an epoch's seconds went ({' and '.join(sorted({r.env['dataset'] for r in runs}))})")
    ax.set_xlabel("seconds")
    ax.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    told = "; ".join(f"{run.folder.name}: {describe(run)}" for run in runs)
    return described(figure, f"Seconds of the last epoch of each run. {told}.")


def parts(run: Run) -> dict[str, float]:
    """The seconds of the last epoch, by what they went into."""
    last = run.epochs[-1]
    return {"data": last["data_seconds"], "steps": last["seconds"] - last["data_seconds"], "test": last["test_seconds"]}


def describe(run: Run) -> str:
    """The same in words."""
    return ", ".join(f"{seconds:.1f} s {part}" for part, seconds in parts(run).items())
