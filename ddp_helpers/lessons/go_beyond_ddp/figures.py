"""Figures of notebook 13: which method to choose, who holds what, what is sent when, and what was measured of each."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, equal_parts, write_text
from ddp_helpers.draw.labels import write_caption, write_title
from ddp_helpers.draw.style import BLUE, GREEN, GREY, INK, LEFT, ORANGE, PURPLE, RIGHT, SKY, SMALL

# ---- which to choose

REPLICA, BATCH = "Does all fit: a replica with\nits state, and the batch?", "Does it fit with a\nsmaller batch?"
SMALLER = "DDP, with accumulation, autocast or recomputation"
STATE, LAYER = "Does it fit with the\noptimizer state cut?", "Does a layer fit whole,\nbeside 1/N of the rest?"
INSIDE = "activations sent inside each layer: within a node; then from stage to stage"
WAYS = [  # a question, what to take if the answer is yes, what that costs, and its colour; the last is what is left
    (REPLICA, "DDP", "nothing more; the reference for all below", BLUE),
    (BATCH, SMALLER, "small pieces, computing twice, or rounding; no more is sent", SKY),
    (STATE, "DDP, with ZeroRedundancyOptimizer", "a broadcast of the weights in each step", ORANGE),
    (LAYER, "FSDP2: fully_shard", "weights gathered twice a step; checkpoints in parts", GREEN),
    ("", "FSDP2 with tensor parallel, then pipeline", INSIDE, PURPLE),
]
BESIDE = {
    "The network is the limit, as measured:": "with DDP, a bf16 hook first, then PowerSGD",
    "The ranks have unequal numbers of batches:": "even them out in the sampler; else Join",
    "The device has units for bfloat16:": "autocast, for time",
}
STEP, HIGH, MIDDLE, WIDE = 1.0, 0.66, 1.4, 2.6


def choose() -> Picture:
    """From what fits to what to use: ask in this order, and take the first yes."""
    title = "Ask in this order, and take the first yes"
    foot = 0.6 + STEP * len(WAYS)
    ax = canvas(foot + 0.25 + 0.34 * len(BESIDE), title)
    for place, (question, name, price, colour) in enumerate(WAYS):
        y = 0.6 + STEP * place
        middle = y + HIGH / 2
        if place:
            write_text(ax, MIDDLE + 0.1, y - (STEP - HIGH) / 2, "no", ha="left", **SMALL)
        if place and question:
            arrow(ax, (MIDDLE, y - STEP + HIGH), (MIDDLE, y))
        if question:
            box(ax, (LEFT, y), (WIDE, HIGH), question, INK, fill=0.06, size=11)
            write_text(ax, 3.08, middle - 0.15, "yes", weight="bold", size=11)
        else:
            ax.plot([MIDDLE, MIDDLE], [y - STEP + HIGH, middle], color=INK, linewidth=1.6)
        arrow(ax, (LEFT + WIDE + 0.02 if question else MIDDLE, middle), (3.48, middle))
        box(ax, (3.5, y), (RIGHT - 3.5, HIGH), colour=colour, fill=0.15)
        write_text(ax, 3.65, y + 0.21, name, ha="left", weight="bold", size=11)
        write_text(ax, 3.65, y + 0.46, price, ha="left", **SMALL)
    write_text(ax, LEFT, foot + 0.02, "Beside that", ha="left", weight="bold")
    for place, (question, cure) in enumerate(BESIDE.items()):
        y = foot + 0.36 + 0.34 * place
        write_text(ax, LEFT, y, question, ha="left", size=11)
        write_text(ax, 3.65, y, cure, ha="left", weight="bold", size=11)
    lines = [f"{question} {name}.".replace("\n", " ").lstrip() for question, name, *_ in WAYS]
    lines += [f"{question} {cure}." for question, cure in BESIDE.items()]
    return described(ax.figure, f"{title}. {' '.join(lines)}")


# ---- who holds what

KINDS = {"parameters": BLUE, "gradients": SKY, "optimizer state": ORANGE, "activations": GREEN, "copies": PURPLE}
CUTS = {"DDP": [], "ZeRO": ["optimizer state"], "FSDP2": ["parameters", "gradients", "optimizer state"]}
GATHER = "FSDP2 gathers a layer to compute it, tensor parallel never does."


def who_holds(held: dict[str, float]) -> Picture:
    """Draw what each of two ranks keeps between steps, for a replica of so many bytes a kind, shards cut evenly."""
    kept = {way: sum(size / (1 + (kind in cut)) for kind, size in held.items()) / 1e6 for way, cut in CUTS.items()}
    zero, fsdp = (f"{kept[way] / kept['DDP']:.0%}" for way in ("ZeRO", "FSDP2"))
    title = f"Each of 2 ranks keeps {zero} of DDP's memory with ZeRO, {fsdp} with FSDP2"
    ax = canvas(4.55, title)
    scale = 6.3 / sum(held.values())
    for row, (way, cut) in enumerate(CUTS.items()):
        top, x = 0.95 + 1.15 * row, 1.9
        write_text(ax, LEFT, top + 0.42 - 0.21 * (way == "FSDP2"), way, ha="left", weight="bold")
        for kind, size in held.items():
            wide, share = size * scale, 1 / (1 + (kind in cut))
            if not row:
                write_text(ax, x + wide / 2, 0.72, kind, size=11)
            for rank in (0, 1):
                y, own = top + 0.46 * rank, x + (1 - share) * wide * rank
                box(ax, (x, y), (wide - 0.08, 0.38), line=":", fill=0)
                label = f"{share * size / 1e6:,.{int(size < 1e8)}f} MB"  # 9.8, but 4,000
                box(ax, (own, y), (share * wide - 0.08, 0.38), label, KINDS[kind], size=10)
            x += wide
        for rank, y in enumerate((top + 0.19, top + 0.65)):
            write_text(ax, 1.75, y, f"rank {rank}", ha="right", **SMALL)
            write_text(ax, RIGHT, y, f"{kept[way]:.0f} MB", ha="right", weight="bold")
    write_text(ax, LEFT, 3.79, "tensor parallel,\nwhere it cuts", ha="left", **SMALL)
    note = f"Computed, float32 with Adam. Dotted: on the other rank. {GATHER}"
    write_text(ax, LEFT, 4.35, note, ha="left", color=GREY, **SMALL)
    sizes = ", ".join(f"{way} {size:.0f} MB" for way, size in kept.items())
    return described(ax.figure, f"{title}: {sizes}. ZeRO cuts the optimizer state, FSDP2 all three kinds. {GATHER}")


# ---- what is sent when

FORWARD = [("in", 0.5), ("block 1", 1.0), ("block 2", 1.0), ("out", 0.5)]  # and how wide each is drawn
PHASES = {"forward": (0.4, FORWARD), "backward": (3.5, FORWARD[::-1]), "step": (7.0, [("", 0.5)])}
COLLECTIVES = {"all-reduce": BLUE, "broadcast": ORANGE, "all-gather": GREEN, "reduce-scatter": PURPLE}
BUCKETS = [("all-reduce", 1, 4.2, 1.6), ("all-reduce", 1, 6.5, 0.5)]
GATHERED = [("all-gather", 1, at, 0.4) for at in (0, 0.45, 1.2, 3.55, 4.3)]
SCATTERED = [("reduce-scatter", 1, at, 0.45) for at in (5.3, 6.02, 6.5)]
AFTER_EACH_HALF = [("all-reduce", 1, at, 0.2) for at in (1.2, 1.7, 2.2, 2.7)]  # attention, and the linear layers
BACK_FROM_EACH = [("all-reduce", many, at, 0.2) for many, at in ((1, 4.3), (3, 4.8), (1, 5.3), (3, 5.8))]
SENT = {  # what a way sends; for each message its collective, how many, when it begins, and how wide it is drawn
    "DDP": ("gradients", BUCKETS),
    "ZeRO": ("gradients,\nthen weights", [*BUCKETS, ("broadcast", 38, 7.5, 0.5)]),  # a weight each
    "FSDP2": ("weights twice,\ngradients", GATHERED + SCATTERED),
    "tensor parallel": ("activations,\ntheir gradients", AFTER_EACH_HALF + BACK_FROM_EACH),  # 3: query, key, value
}


def sent_counts(way: str) -> dict[str, dict[str, int]]:
    """How many collectives of each kind a way is drawn with in forward, in backward and in the optimizer's step."""
    found: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}
    for kind, many, begin, _ in SENT[way][1]:
        [*_, phase] = [name for name, (start, _) in PHASES.items() if begin >= start or name == "forward"]
        found[phase][kind] = found[phase].get(kind, 0) + many
    return found


def sent_when() -> Picture:
    """Draw the collectives of one training step at their places, a lane for each way, for a Net of two blocks."""
    times = {way: sum(sum(phase.values()) for phase in sent_counts(way).values()) for way in SENT}
    ddp, *others = (f"{count} with {way}" for way, count in times.items())
    title = f"A step sends {ddp.replace(' ', ' times ', 1)}, {', '.join(others)}"
    ax = canvas(5.2, title)
    left, unit = 1.6, 0.97
    for phase, (begin, places) in PHASES.items():
        x, wide = left + unit * begin, unit * sum(wide for _, wide in places)
        write_text(ax, x + wide / 2, 0.71, phase, weight="bold", size=11, va="baseline")
        for name, wide in places:
            write_text(ax, x + unit * wide / 2, 0.96, name, va="baseline", **SMALL)
            for lane, way in enumerate(SENT):
                waits = 0.18 if way == "tensor parallel" and "block" in name else 0
                for half, _ in equal_parts(x, x + unit * wide - 0.04 - waits, 1 + bool(waits), waits):
                    box(ax, (half, 1.1 + 0.88 * lane), (unit * wide / (1 + bool(waits)) - 0.04 - waits, 0.26), fill=0.2)
            x += unit * wide
    for lane, (way, (what, messages)) in enumerate(SENT.items()):
        y = 1.1 + 0.88 * lane
        write_text(ax, LEFT, y + 0.1, way, ha="left", weight="bold", size=11)
        write_text(ax, LEFT, y + 0.45, what, ha="left", **SMALL)
        for kind, many, begin, wide in messages:
            place, text = (left + unit * begin, y + 0.32), many if many > 1 else ""
            box(ax, place, (unit * wide - 0.03, 0.3), text, COLLECTIVES[kind], fill=0.45, size=10)
    for x, (kind, colour) in zip((1.6, 3.2, 4.8, 6.4), COLLECTIVES.items(), strict=True):
        box(ax, (x, 4.62), (0.3, 0.2), colour=colour, fill=0.45)
        write_text(ax, x + 0.38, 4.72, kind, ha="left", **SMALL)
    write_text(ax, LEFT, 4.72, "grey: computes", ha="left", **SMALL)
    note = "A Net of 2 blocks on 2 ranks. A number: so many at once. Places are in order; widths are not times."
    write_text(ax, LEFT, 5.03, note, ha="left", color=GREY, **SMALL)
    lines = [
        f"{way}, {phase}: {', '.join(f'{many} {kind}' for kind, many in kinds.items())}."
        for way in SENT
        for phase, kinds in sent_counts(way).items()
        if kinds
    ]
    return described(ax.figure, f"{title}. {' '.join(lines)}")


# ---- memory, bytes and speed as measured

MEANS = "copies: weights in another precision or gathered from other ranks"
SPEED = "speed: DDP's time for a step, divided by this way's; the line spans the middle half of the turns"


def memory_and_speed(table: pd.DataFrame, where: str) -> Picture:
    """A row for each way: memory stacked by kind, bytes sent in a step, speed. table: MB and ratios, a way a row.

    Columns: the KINDS, held, sent (MB, NaN where nobody knows), speed, low, high (of DDP's speed in the same run).
    """
    table = table.sort_values("held", ascending=False, kind="stable")
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.6 + 0.42 * len(table)), width_ratios=[5, 2, 2.6], sharey=True)
    for ax, draw in zip(axes, (_memory, _sent, _speed), strict=True):
        draw(ax, table)
        ax.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(table)), table.index)
    axes[0].invert_yaxis()
    axes[0].set_title(" ", pad=10)  # makes room for the legend, which is wider than its axes
    legend = axes[0].legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=5, fontsize=10)
    legend.set_in_layout(False)
    share = table["held"].min() / table["held"]["DDP"]
    title = f"{table.index[-1]} holds the least: {share:.0%} of what DDP holds"
    write_title(figure, title)
    write_caption(figure, where, MEANS, SPEED)
    figure.set_layout_engine("constrained", wspace=0.05)
    rows = [f"{name} {row.held:.1f} MB, {row.speed:.2f} of DDP's speed" for name, row in table.iterrows()]
    return described(figure, f"{title}; {where}. {'; '.join(rows)}.")


def _memory(ax: Axes, table: pd.DataFrame) -> None:
    """Stacked bars in MB, with their sums."""
    begin = pd.Series(0.0, index=table.index)
    for kind, colour in KINDS.items():
        ax.barh(range(len(table)), table[kind].astype(float), 0.7, begin, color=colour, label=kind)
        begin = begin + table[kind].astype(float)
    for place, total in enumerate(begin):
        ax.text(total, place, f" {total:.0f}", va="center")
    ax.set(xlabel="MB held by rank 0", xlim=(0, 1.12 * begin.max()))


def _sent(ax: Axes, table: pd.DataFrame) -> None:
    """Bars in MB; a word where nobody counted."""
    megabytes = table["sent"].astype(float)
    for place, value in enumerate(megabytes.fillna(0)):
        ax.barh(place, value, 0.7, color=GREY)
        text = f"{value:.1f}" if megabytes.notna().iloc[place] else "not counted"
        ax.text(value, place, f" {text}", va="center", fontsize=10)
    ax.set(xlabel="MB sent in a step", xlim=(0, 1.35 * (megabytes.max() if megabytes.notna().any() else 1)))


def _speed(ax: Axes, table: pd.DataFrame) -> None:
    """A point and a line for each way, and DDP's speed as a line."""
    ax.axvline(1, color=GREY, linewidth=1, linestyle="--")
    for place, row in enumerate(table.itertuples()):
        ax.plot([row.low, row.high], [place, place], color=INK, linewidth=2, solid_capstyle="butt")
        ax.plot(row.speed, place, "o", color=INK, markersize=7)
        ax.text(1.02, place, f"{row.speed:.2f}", va="center", fontsize=10, transform=ax.get_yaxis_transform())
    ax.set(xlabel="speed (DDP is 1)", xlim=(0, 1.1 * max(table["high"].max(), table["speed"].max(), 1)))
