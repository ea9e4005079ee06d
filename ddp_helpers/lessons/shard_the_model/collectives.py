"""The collectives of a training step, by method: when each is sent, as a figure and as counts.

Notebook 15 calls it, in its own process; a test compares the counts with what ranks send.
"""

from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_helpers.draw.drawing import Picture, box, canvas, described, equal_parts, write_text
from ddp_helpers.draw.style import BLUE, GREEN, GREY, LEFT, ORANGE, PURPLE, SMALL


class _Layer(NamedTuple):
    """A part of a model, and how wide it is drawn."""

    name: str
    width: float


class _Phase(NamedTuple):
    """A phase of a training step: where it is drawn, and what is computed in it."""

    start: float
    layers: list[_Layer]


class _Message(NamedTuple):
    """A collective: of what kind, its number at once, where it is drawn, and how wide."""

    collective: str
    number: int
    start: float
    width: float


class _Messages(NamedTuple):
    """What a method sends in a step, in words, and its messages."""

    content: str
    messages: list[_Message]


_FORWARD = [
    _Layer("in", 0.5),
    _Layer("block 1", 1.0),
    _Layer("block 2", 1.0),
    _Layer("out", 0.5),
]
_PHASES = {
    "forward": _Phase(0.4, _FORWARD),
    "backward": _Phase(3.5, _FORWARD[::-1]),
    "step": _Phase(7.0, [_Layer("", 0.5)]),
}
_COLLECTIVES = {
    "all-reduce": BLUE,
    "broadcast": ORANGE,
    "all-gather": GREEN,
    "reduce-scatter": PURPLE,
}
_BUCKETS = [_Message("all-reduce", 1, 4.2, 1.6), _Message("all-reduce", 1, 6.5, 0.5)]
_BROADCASTS = _Message("broadcast", 38, 7.5, 0.5)  # one of each weight
_GATHERED = [_Message("all-gather", 1, start, 0.4) for start in (0, 0.45, 1.2, 3.55, 4.3)]
_SCATTERED = [_Message("reduce-scatter", 1, start, 0.45) for start in (5.3, 6.02, 6.5)]
# After attention and after the linear layers of a block; 3 at once: of query, key and value.
_FORWARD_SUMS = [_Message("all-reduce", 1, start, 0.2) for start in (1.2, 1.7, 2.2, 2.7)]
_BACKWARD_SUMS = [
    _Message("all-reduce", number, start, 0.2)
    for number, start in ((1, 4.3), (3, 4.8), (1, 5.3), (3, 5.8))
]
SENT = {
    "DDP": _Messages("gradients", _BUCKETS),
    "ZeRO": _Messages("gradients,\nthen weights", [*_BUCKETS, _BROADCASTS]),
    "FSDP2": _Messages("weights twice,\ngradients", _GATHERED + _SCATTERED),
    "tensor parallel": _Messages("activations,\ntheir gradients", _FORWARD_SUMS + _BACKWARD_SUMS),
}
_AXIS_LEFT, _UNIT = 1.6, 0.97  # where a step begins on the canvas, and how long a unit is there
_LANES_TOP, _LANE_HEIGHT = 1.1, 0.88


def sent_counts(method: str) -> dict[str, dict[str, int]]:
    """Count the collectives of each kind that a method is drawn with, by phase of the step."""
    counts: dict[str, dict[str, int]] = {phase: {} for phase in _PHASES}
    for message in SENT[method].messages:
        in_phase = counts[_phase_at(message.start)]
        in_phase[message.collective] = in_phase.get(message.collective, 0) + message.number
    return counts


def _phase_at(x: float) -> str:
    """Return the last phase that starts at or before x; before all of them, forward."""
    started = [name for name, phase in _PHASES.items() if phase.start <= x]
    return started[-1] if started else "forward"


def sent_when() -> Picture:
    """Draw the collectives of a training step, a lane for each method, for a Net of two blocks."""
    totals = []
    for method in SENT:
        total = sum(sum(kinds.values()) for kinds in sent_counts(method).values())
        times = f"{total} times" if method == "DDP" else f"{total}"
        totals.append(f"{times} with {method}")
    title = f"A step sends {', '.join(totals)}"
    ax = canvas(5.2, title)
    for name, phase in _PHASES.items():
        _draw_phase(ax, name, phase)
    for lane, method in enumerate(SENT):
        _draw_messages(ax, _LANES_TOP + _LANE_HEIGHT * lane, method)
    for x, (collective, colour) in zip((1.6, 3.2, 4.8, 6.4), _COLLECTIVES.items(), strict=True):
        box(ax, (x, 4.62), (0.3, 0.2), colour=colour, fill=0.45)
        write_text(ax, x + 0.38, 4.72, collective, ha="left", **SMALL)
    write_text(ax, LEFT, 4.72, "grey: computes", ha="left", **SMALL)
    note = "A Net of 2 blocks on 2 ranks. A number: so many at once. "
    note += "Places are in order; widths are not times."
    write_text(ax, LEFT, 5.03, note, ha="left", color=GREY, **SMALL)
    return described(ax.figure, f"{title}. {_sent_in_words()}")


def _sent_in_words() -> str:
    """Say in sentences what each method sends in each phase."""
    sentences = []
    for method in SENT:
        for phase, kinds in sent_counts(method).items():
            if kinds:
                counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
                sentences.append(f"{method}, {phase}: {counts}.")
    return " ".join(sentences)


def _draw_phase(ax: Axes, name: str, phase: _Phase) -> None:
    """Draw in each lane what a phase computes, and its names above them."""
    x = _AXIS_LEFT + _UNIT * phase.start
    width = _UNIT * sum(layer.width for layer in phase.layers)
    write_text(ax, x + width / 2, 0.71, name, weight="bold", size=11, va="baseline")
    for layer in phase.layers:
        width = _UNIT * layer.width
        write_text(ax, x + width / 2, 0.96, layer.name, va="baseline", **SMALL)
        for lane, method in enumerate(SENT):
            y = _LANES_TOP + _LANE_HEIGHT * lane
            in_halves = method == "tensor parallel" and "block" in layer.name
            _draw_compute(ax, (x, y), width, in_halves)
        x += width


def _draw_compute(ax: Axes, corner: tuple[float, float], width: float, in_halves: bool) -> None:
    """Draw what computes a layer: a box, or two, after each of which it waits for a collective."""
    x, y = corner
    wait = 0.18 if in_halves else 0.0
    count = 2 if in_halves else 1
    for start, _ in equal_parts(x, x + width - 0.04 - wait, count, wait):
        box(ax, (start, y), (width / count - 0.04 - wait, 0.26), fill=0.2)


def _draw_messages(ax: Axes, y: float, method: str) -> None:
    """Draw the lane of a method: its name, what it sends, and each message."""
    content, messages = SENT[method]
    write_text(ax, LEFT, y + 0.1, method, ha="left", weight="bold", size=11)
    write_text(ax, LEFT, y + 0.45, content, ha="left", **SMALL)
    for message in messages:
        corner = _AXIS_LEFT + _UNIT * message.start, y + 0.32
        size = _UNIT * message.width - 0.03, 0.3
        label = str(message.number) if message.number > 1 else ""
        box(ax, corner, size, label, _COLLECTIVES[message.collective], fill=0.45, size=10)
