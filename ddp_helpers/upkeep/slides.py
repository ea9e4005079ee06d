"""Write build/slides.pdf for trainers: a page for each figure of the notebooks, under its notebook and section."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from matplotlib import image
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from ddp_helpers import ROOT

HEADINGS = re.compile(r"^#+ (.+)$", re.M)
SIZE = 13.33, 7.5  # inches, as a wide screen


def pictures(notebook: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each figure of an executed notebook as PNG, with the section that it stands in."""
    section = ""
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "markdown":
            section = (HEADINGS.findall(cell.source) or [section])[-1]
        for output in cell.get("outputs", []):
            if picture := output.get("data", {}).get("image/png"):
                yield section, base64.b64decode(picture)


def page(title: str, section: str, picture: bytes) -> Figure:
    """Draw one page: the notebook's title small, the section large, the figure below them."""
    figure = Figure(SIZE)
    figure.text(0.04, 0.94, title, color="0.35", size=16)
    figure.text(0.04, 0.865, section.replace("`", ""), size=26, weight="bold")
    ax = figure.add_axes((0.04, 0.03, 0.92, 0.79))
    ax.imshow(image.imread(io.BytesIO(picture)), interpolation="none")
    ax.axis("off")
    return figure


def write(target: Path = ROOT / "build" / "slides.pdf") -> int:
    """Write the pages of all notebooks, in order, and return how many there are."""
    target.parent.mkdir(exist_ok=True)
    with PdfPages(target) as pdf:
        for notebook in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
            title = notebook.stem.replace("_", " ", 1).replace("_", " ")
            for section, picture in pictures(notebook):
                pdf.savefig(page(title, section, picture))
        return pdf.get_pagecount()


if __name__ == "__main__":
    print(f"wrote build/slides.pdf, {write()} pages")
