"""Show a row of figures as one picture with a slider, a step in time a figure.

Lessons call it, in a notebook's process. A notebook shows a still figure beside it, for pages that
run no script.
"""

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from html import escape

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.animation import FuncAnimation
from matplotlib.artist import Artist
from PIL import Image

from ddp_helpers.draw.drawing import Picture

_DPI = 96  # a frame is shown at this many pixels an inch
# matplotlib's buttons take their signs from another host, which a laptop on a train does not reach.
_SIGNS = {
    "fast-backward": "first",
    "step-backward": "back",
    "pause": "pause",
    "play": "play",
    "step-forward": "next",
    "fast-forward": "last",
}
_STYLE = """<style>
.animation { display: block; max-width: 100%; }
.animation img { max-width: 100%; height: auto; }
.anim-controls { max-width: 100%; }
div.anim-buttons { flex-wrap: wrap; }
div.anim-buttons button { width: auto; padding: 2px 8px; }
.anim-state { display: none; }
</style>"""


def stepped(frames: Sequence[Picture]) -> HTML:
    """Return figures of one size as one that is stepped through, by matplotlib's `to_jshtml`.

    Its alt text is that of all frames, in order. Without scripts the first frame stands there.
    """
    images = [_image(frame) for frame in frames]
    height, width, _ = images[0].shape
    figure = plt.figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    shown = figure.figimage(images[0])

    def show(number: int) -> list[Artist]:
        shown.set_data(images[number])
        return [shown]

    animation = FuncAnimation(figure, show, frames=len(images))
    page = animation.to_jshtml(fps=1, default_mode="once")
    plt.close(figure)  # or the notebook would show its first frame a second time
    return HTML(_offline(page, " ".join(frame.alt for frame in frames)))


def _image(frame: Picture) -> np.ndarray:
    """Render a figure at the animation's resolution: height, width and three colours, in bytes."""
    png = io.BytesIO()
    frame.figure.savefig(png, format="png", dpi=_DPI)
    return np.asarray(Image.open(png).convert("RGB"))


def _offline(page: str, alt: str) -> str:
    """Change matplotlib's page: no other host, few bytes, and the same text at each run."""
    page = re.sub(r"<link.*?>", "", page, flags=re.S)
    page = re.sub(r'<button[^>]*>\s*<i class="fa fa-([^"]*)"></i></button>', _button, page)
    page = re.sub(r'"data:image/png;base64,(.*?)"', _small, page, flags=re.S)
    first = re.search(r'"data:image/png;base64,.*?"', page, re.S)
    name = re.search(r'id="_anim_img(\w+)"', page)
    if not first or not name:
        raise ValueError("matplotlib's to_jshtml has no frames: is its version older than 3.5?")
    image = f'id="_anim_img{name[1]}" alt="{escape(alt)}" src={first[0]}'
    page = page.replace(f'id="_anim_img{name[1]}"', image)
    digest = hashlib.sha256(page.replace(name[1], "").encode()).hexdigest()[:12]
    return _STYLE + page.replace(name[1], digest)


def _button(button: re.Match[str]) -> str:
    """Return a button with a word on it, or nothing for one that is not needed."""
    icon = f'<i class="fa fa-{button[1]}"></i>'
    return button[0].replace(icon, _SIGNS[button[1]]) if button[1] in _SIGNS else ""


def _small(source: re.Match[str]) -> str:
    """Return a frame's source with at most 64 colours: a third of the bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(source[1]))).convert("RGB")
    small = io.BytesIO()
    image = image.quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    image.save(small, "png", optimize=True)
    return f'"data:image/png;base64,{base64.b64encode(small.getvalue()).decode()}"'
