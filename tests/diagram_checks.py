"""Whether a diagram can be read: its texts are apart, in their boxes and on the page; its alt text names numbers."""

import warnings
from itertools import combinations


def texts_of(picture):
    texts = [text for text in picture.figure.axes[0].texts if text.get_text()]
    return [(text.get_text(), text.get_window_extent(), text.get_fontsize()) for text in texts]


def holds(outer, inner):
    return outer.x0 <= inner.x0 and inner.x1 <= outer.x1 and outer.y0 <= inner.y0 and inner.y1 <= outer.y1


def must_be_legible(draw, arguments, in_alt):
    """Draw a diagram without a warning, and look at every text."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = draw(**arguments)
        picture.figure.draw_without_rendering()
    assert [part for part in in_alt if part not in picture.alt] == []
    assert picture.figure.get_label() == picture.alt
    texts, patches = texts_of(picture), picture.figure.axes[0].patches
    boxes = [patch.get_window_extent() for patch in patches if hasattr(patch, "get_boxstyle")]
    for text, extent, size in texts:
        assert holds(picture.figure.bbox, extent) and size >= 10, text
        under = [box for box in boxes if box.overlaps(extent)]
        assert not under or holds(under[-1], extent), text  # the last drawn one lies on top
    for (one, here, _), (other, there, _) in combinations(texts, 2):
        assert not here.overlaps(there), (one, other)
