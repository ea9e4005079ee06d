"""A figure together with its alt text, so that a screen reader gets the figure's message too."""

import base64
import io
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

DPI = 130  # sharp on most screens, and half the bytes of 160; the page shows it at the figure's size in inches
CSS_PIXELS_PER_INCH = 96


class Picture:
    """A figure that shows itself in a notebook as an image with alt text."""

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure, self.alt = figure, alt

    def save(self, path: str | Path) -> Path:
        """Write the figure to a file (the suffix says the format), and give its path."""
        self.figure.savefig(path, dpi=DPI)
        return Path(path)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict, dict]:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI)
        buffer = reduced(buffer)
        png = buffer.getvalue()
        pixels = int.from_bytes(png[16:20], "big")  # the width, where PNG's first chunk keeps it
        shown = {"alt": self.alt, "width": pixels * CSS_PIXELS_PER_INCH // DPI}
        return {"image/png": base64.b64encode(png).decode(), "text/plain": self.alt}, {"image/png": shown}

    def __repr__(self) -> str:
        return self.alt


def reduced(png: io.BytesIO) -> io.BytesIO:
    """The same image with at most 256 colours: a third of the bytes, and no eye sees it in a figure of the course."""
    small = io.BytesIO()
    Image.open(png).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        small, "png", optimize=True
    )
    return small


def described(figure: Figure, alt: str) -> Picture:
    """Attach the alt text to a finished figure; every plotting function ends with this."""
    figure.set_label(alt)
    plt.close(figure)  # or the notebook would show it a second time, without the alt text
    return Picture(figure, alt)
