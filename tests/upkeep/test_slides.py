"""The slides have each notebook's questions and figures, under the headings of the notebook, and need no network."""

import json
import re

import pytest

from ddp_helpers.upkeep import slides
from ddp_helpers.upkeep.front_page import NOTEBOOKS


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_slides_have_all_questions_and_figures_and_no_address(number, tmp_path):
    path = NOTEBOOKS[number]
    slides.write(path, tmp_path)
    page = (tmp_path / f"{path.stem}.html").read_text()
    cells = json.loads(path.read_text())["cells"]
    prose = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "markdown")
    assert page.count("<strong>Predict</strong>") == len(re.findall(r"^> \*\*Predict\*\*", prose, re.M))
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    shown = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    pictures = [source for text in shown for source in re.findall(r"data:image/png;base64,[^\" ]+", text)]
    assert all(picture in page for picture in pictures)
    files = sorted(tmp_path.glob("*.png"))
    assert len(files) == page.count("<img ") >= len({*pictures})
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert not re.search(r"<(?:script|img|link)[^>]*(?:src|href)=.(?!data:)", page)


def test_a_figure_that_moves_has_a_slide_for_each_step_with_the_heading_above():
    sections, figures = slides.slides(NOTEBOOKS["16"])
    ring = [section for section in sections if section.startswith("<section><h2>The ring") and "<img " in section]
    assert len(ring) == 7 and len(figures) == 10
