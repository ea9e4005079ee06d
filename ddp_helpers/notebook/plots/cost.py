"""What a training step costs, part by part, for several settings."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ddp_helpers.lessons.wrap_the_model.cost import PARTS, Seconds
from ddp_helpers.notebook import style
from ddp_helpers.notebook.labels import caption
from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.shapes import TIMES

COLOURS = dict(zip(PARTS, (style.ORANGE, style.BLUE, style.RED, style.GREEN), strict=True))

style.use()


def cost_of_steps(panels: Mapping[str, Mapping[str, Seconds]], reference: str, where: str, remark: str = "") -> Picture:
    """A panel for each group of settings and a stacked bar for each setting: the milliseconds of its step, by part.

    panels: title -> setting -> seconds of each part. reference: the setting that the speed of the others is told by.
    where: the machine they were measured on. remark: what else the reader must know, for the caption.
    """
    counts = [len(rows) for rows in panels.values()]
    size = (9.5, 1.3 + 0.75 * len(counts) + 0.4 * sum(counts))
    figure, axes = plt.subplots(
        len(panels), figsize=size, layout="constrained", squeeze=False, gridspec_kw={"height_ratios": counts}
    )
    for ax, (title, rows) in zip(axes[:, 0], panels.items(), strict=True):
        _panel(ax, rows, reference)
        ax.set_title(title, loc="left")
    axes[-1, 0].set_xlabel("milliseconds of one step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, PARTS, loc="outside upper left", ncols=len(PARTS))
    caption(
        figure, f"measured on rank 0: {where}", "communication: what the step takes longer than inside no_sync", remark
    )
    told = " ".join(f"{title}: {_told(rows)}." for title, rows in panels.items())
    return described(figure, f"Milliseconds of one training step, by part; {where}. {told}")


def _panel(ax: Axes, rows: Mapping[str, Seconds], reference: str) -> None:
    """The bars of one group; behind each its milliseconds, and how many times as fast as the reference it is."""
    totals = {name: _total(parts) for name, parts in rows.items()}
    for row, parts in enumerate(rows.values()):
        left = 0.0
        for part in PARTS:
            ax.barh(row, 1e3 * parts[part], 0.65, left, color=COLOURS[part])
            left += 1e3 * parts[part]
    for row, total in enumerate(totals.values()):
        ax.text(total, row, f"  {total:.0f} ms ({totals[reference] / total:.2f}{TIMES})", va="center")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xlim(0, 1.22 * max(totals.values()))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)


def _total(parts: Seconds) -> float:
    """Milliseconds of all parts."""
    return 1e3 * sum(parts.values())


def _told(rows: Mapping[str, Seconds]) -> str:
    """One panel in words."""
    return "; ".join(
        f"{name} {_total(parts):.0f} ms ({', '.join(f'{part} {1e3 * parts[part]:.1f}' for part in PARTS)})"
        for name, parts in rows.items()
    )
