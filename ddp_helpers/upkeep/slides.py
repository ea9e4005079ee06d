"""Write slides of the notebooks: a page of titles, questions to the room, and figures.

`make slides` runs it, in one process. The pages need no network, and nothing is executed. Code is
shown in JupyterLab: a cell with its output seldom fits on a slide.
"""

import base64
import re
import shutil
from pathlib import Path

import nbformat
from nbconvert.filters import markdown2html

from ddp_helpers import ROOT
from ddp_helpers.upkeep.front_page import NOTEBOOKS

SLIDES = ROOT / "build" / "slides"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
@page {{ size: 1280px 720px; margin: 0 }}
html {{ scroll-snap-type: y mandatory; font: 30px/1.4 sans-serif; color: #222; background: #fff }}
body {{ margin: 0 }}
section {{ box-sizing: border-box; height: 100vh; padding: 3vh 4vw; scroll-snap-align: start;
  display: flex; flex-direction: column; break-after: page }}
@media print {{ section {{ height: 720px }} }}
h2 {{ font-size: 36px; margin: 0 0 2vh }}
section > div {{ flex: 1; min-height: 0; display: flex; flex-direction: column;
  justify-content: center }}
img {{ width: 100%; height: 100%; object-fit: contain }}
code {{ font-size: 0.9em }}
</style>
{slides}
<script>
addEventListener("keydown", event => {{
  const onwards = ["ArrowRight", "ArrowDown", "PageDown", " "].includes(event.key)
  const step = onwards - ["ArrowLeft", "ArrowUp", "PageUp"].includes(event.key)
  if (!step) return
  event.preventDefault()
  const all = [...document.querySelectorAll("section")]
  const here = Math.round(scrollY / innerHeight)
  all[Math.min(Math.max(here + step, 0), all.length - 1)].scrollIntoView()
}})
</script>
</html>
"""


def slides(path: Path) -> tuple[list[str], list[bytes]]:
    """Return the slides of a notebook, each a section of HTML, and its figures as PNG, in order.

    An animated figure has a slide for each of its steps. A slide's title is the heading above.
    """
    cells = nbformat.read(path, as_version=4).cells
    opening = cells[0].source.partition("**You need**")[0]
    title = re.findall(r"^# (.*)", opening, re.M)[0]
    sections = [_section(title, markdown2html(opening.partition("\n")[2]))]
    figures = []
    for cell in cells[1:]:
        if cell.cell_type == "markdown":
            for heading, question in re.findall(
                r"^##+ (.*)|^> (\*\*Predict\*\*.*(?:\n> .*)*)", cell.source, re.M
            ):
                title = heading or title
                if question:
                    sections.append(_section(title, markdown2html(question.replace("\n> ", "\n"))))
        for output in cell.get("outputs", []):
            page = output.get("data", {}).get("text/html", "")
            if not page.startswith(("<img ", '<div class="animation"')):
                continue
            # An animated figure has all its steps before the picture of the first one.
            pictures, *_ = re.findall(r'(?:data-pictures|src)="([^"]*)"', page)
            [told] = re.findall(r'<img [^>]*\balt="([^"]*)"', page)
            for source in pictures.split(" "):
                sections.append(_section(title, f'<img src="{source}" alt="{told}">'))
                figures.append(base64.b64decode(source.partition(",")[2]))
    return sections, figures


def _section(title: str, body: str) -> str:
    """Return a slide."""
    heading = markdown2html(title).strip().removeprefix("<p>").removesuffix("</p>")
    return f"<section><h2>{heading}</h2><div>{body}</div></section>"


def write(path: Path, folder: Path) -> None:
    """Write the slides of a notebook into a folder, with its figures as files next to them."""
    sections, figures = slides(path)
    for number, figure in enumerate(figures, start=1):
        (folder / f"{path.stem}_{number:02}.png").write_bytes(figure)
    page = _PAGE.format(title=path.stem, slides="\n".join(sections))
    (folder / f"{path.stem}.html").write_text(page)


if __name__ == "__main__":
    shutil.rmtree(SLIDES, ignore_errors=True)  # no figure of an earlier version stays
    SLIDES.mkdir(parents=True)
    for notebook in NOTEBOOKS.values():
        write(notebook, SLIDES)
    shown = "arrow keys turn the page, and the browser prints them as PDF"
    print(f"Slides and figures are in build/slides: open one of its pages; {shown}")
