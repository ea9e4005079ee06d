"""Colours that share a figure stay apart for colour-blind readers: simulated, and measured.

The simulation is Machado, Oliveira and Fernandes' (2009, doi:10.1109/TVCG.2009.113): one matrix on linear RGB for each
kind, here at severity 1. The distance is CIE 1976's ΔE*ab, in CIELAB under D65; about 2.3 of it can barely be seen.
"""

import re
from itertools import combinations

import numpy as np
import pytest
from colours import XYZ, linear

from ddp_helpers import ROOT
from ddp_helpers.notebook import style

APART = 15
SEEN_BY = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
NAMES = {name: getattr(style, name) for name in ("BLUE", "ORANGE", "GREEN", "PURPLE", "SKY", "RED", "GREY")}


def lab(rgb: np.ndarray) -> np.ndarray:
    part = XYZ @ rgb / XYZ.sum(axis=1)
    x, y, z = np.where(part > (6 / 29) ** 3, np.cbrt(part), part / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str, eyes: np.ndarray) -> float:
    """ΔE*ab between two colours, as one kind of eyes sees them."""
    return float(np.linalg.norm(np.subtract(*(lab(np.clip(eyes @ linear(colour), 0, 1)) for colour in (one, other)))))


def least(pair: frozenset[str]) -> float:
    return min(distance(*pair, eyes) for eyes in SEEN_BY.values())


def together() -> set[frozenset[str]]:
    """Every two colours that one module of figures draws with. Ink and pale grounds tell nothing, and are left out."""
    pairs = set()
    folder = ROOT / "ddp_helpers" / "notebook"
    for path in [*folder.glob("plots/*.py"), *folder.glob("diagrams/*.py")]:
        text = path.read_text()
        colours = {colour for name, colour in NAMES.items() if re.search(rf"\b{name}\b", text)}
        if "rank_colour(" in text:
            colours |= set(style.RANK_COLOURS)
        pairs |= {frozenset(pair) for pair in combinations(colours, 2)}
    return pairs


def test_the_distance_is_right() -> None:
    assert np.allclose(lab(linear("#FFFFFF")), (100, 0, 0), atol=0.02)
    assert np.allclose(lab(linear("#FF0000")), (53.24, 80.09, 67.20), atol=0.05)  # sRGB's red, under D65
    assert distance("#000000", "#FFFFFF", np.eye(3)) == pytest.approx(100, abs=0.02)
    for eyes in SEEN_BY.values():  # greys look the same to all eyes
        assert distance("#000000", "#FFFFFF", eyes) == pytest.approx(100, abs=0.02)


def test_colours_that_share_a_figure_stay_apart() -> None:
    pairs = together()
    assert len(pairs) >= 28, "the eight colours of the ranks make 28 pairs"
    near = {pair: round(least(pair), 1) for pair in pairs if least(pair) < APART}
    assert not near, f"too near for some reader (ΔE*ab under {APART}): {near}"


def test_red_and_green_of_equal_lightness_are_found() -> None:
    pair = ("#B85C00", "#5C8A00")  # well apart, but not for all
    assert distance(*pair, SEEN_BY["all cones"]) > 2 * APART
    assert least(frozenset(pair)) < APART
