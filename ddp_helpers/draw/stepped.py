"""Show a row of figures as one picture with a slider, one figure per step in time.

Without JavaScript the first figure is shown.
"""

from collections.abc import Sequence

from IPython.display import HTML

from ddp_helpers.draw.drawing import Picture

_SHOW = "const all = this.closest('.animation'); "
_SHOW += "all.querySelector('img').src = all.dataset.pictures.split(' ')[this.value]"
_MOVE = "const slider = this.parentNode.querySelector('input'); slider.{}(); slider.oninput()"


def stepped(frames: Sequence[Picture]) -> HTML:
    """Combine figures of one size into one with a slider; its alt text joins their alt texts."""
    first = Picture(frames[0].figure, " ".join(frame.alt for frame in frames))
    sources = " ".join(frame._repr_html_().split('"')[1] for frame in frames)
    back, onward = (
        f'<button type="button" onclick="{_MOVE.format(move)}">{word}</button>'
        for word, move in (("back", "stepDown"), ("next", "stepUp"))
    )
    slider = '<input type="range" aria-label="step" value="0"'
    slider += f' max="{len(frames) - 1}" oninput="{_SHOW}">'
    return HTML(
        f'<div class="animation" data-pictures="{sources}">{first._repr_html_()}'
        f"<p>{back} {slider} {onward}</p></div>"
    )
