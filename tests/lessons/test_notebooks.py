"""The committed notebooks, as files: their outputs are true, and a reader can find the way. nbmake executes them."""

import html
import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from notebook_texts import MEANT, cells

from ddp_helpers import ROOT
from ddp_helpers.rank.scripts import NAMES, script_text
from ddp_helpers.upkeep.course import code_checksum

PATHS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
OUTDATED = re.compile(r"\b(?:Future|Deprecation)Warning: (.*)")
HOME = re.compile(r"(?<![\w.~])/(?:root|home|work|Users|tmp|opt|usr)/[\w./-]{3,}")


def problems(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """What is wrong with a notebook that is about to be committed, a line each."""
    lines = []
    if notebook.metadata.get("executed") != code_checksum(notebook):
        lines.append("its outputs are those of other cells: run `make notebooks`")
    if not any("parameters" in cell.metadata.get("tags", []) for cell in notebook.cells):
        lines.append("no cell is tagged `parameters`")
    for number, cell in enumerate(notebook.cells):
        kind = {"markdown": markdown_problems, "code": code_problems}[cell.cell_type]
        lines += [f"cell {number}: {problem}" for problem in kind(cell, folder)]
    return lines


def markdown_problems(cell: nbformat.NotebookNode, folder: Path) -> list[str]:
    """Python that nothing runs, code that is shown as math, and links to nowhere."""
    problems = ["fenced Python that nothing runs"] if re.search(r"```\s*(python|py)\b", cell.source) else []
    if re.search(r"^[ >]+```[^`]*\$[^`]*\$", cell.source, re.M):
        problems.append("a fence in a quote or a list, with $: JupyterLab takes what is between two of them for math")
    links = [link for link in LINK.findall(cell.source) if "://" not in link]
    return problems + [f"the link {link} leads nowhere" for link in links if not (folder / link).exists()]


def code_problems(cell: nbformat.NotebookNode, folder: Path) -> list[str]:
    """Cells that never ran, failed, show an unmeant red box, what is outdated, a machine's path, or no alt text."""
    problems = []
    if cell.execution_count is None and cell.source.strip():
        problems.append("never run")
    for output in cell.outputs:
        if output.output_type == "error":
            problems.append(f"the error {output.ename}")
        if output.get("name") == "stderr" and output.text.replace(MEANT, ""):
            problems.append(f"the red box {output.text!r}")
        data = output.get("data", {})
        text = "\n".join([output.get("text", ""), *(str(value) for kind, value in data.items() if "image" not in kind)])
        problems += [f"the path {path}" for path in HOME.findall(text)]
        problems += [f"outdated: {warning}" for warning in OUTDATED.findall(text)]
        # Of an image/png JupyterLab drops the alt text, though the notebook keeps it beside the image.
        images = re.findall(r"<img [^>]*>", data.get("text/html", ""))
        if "image/png" in data or not all(re.search(r'alt="[^"]{20,}"', image) for image in images):
            problems.append("a figure without alt text")
    return problems


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_fit_to_be_read(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook, path.parent) == []
    assert path.stat().st_size < 1_500_000


def test_the_source_of_a_script_that_a_notebook_shows_is_that_of_today() -> None:
    texts, whole = "\n\n\n".join(map(script_text, NAMES)), []
    for path in PATHS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code" and re.search(r"show\.(functions\(text|source\(script)", cell.source):
                shown = cell.outputs[-1].data
                other = [part for part in shown["text/plain"].split("\n\n\n") if part not in texts]
                assert other == [], f"run: make notebooks ONLY={path.stem.partition('_')[0]}"
                whole += re.findall(r"all of (\w+)\.py.*?</summary>(.*)</details>", shown["text/html"], re.S)
    [(name, text)] = whole
    assert html.unescape(re.sub("<[^>]+>", "", text)).strip() == script_text(name).strip(), "make notebooks ONLY=06b"


def test_06b_tells_each_flag_of_the_script() -> None:
    text = "\n".join(cells(ROOT / "notebooks" / "06b_take_a_script_home.ipynb", "markdown"))
    flags = re.findall(r"(--[\w-]+)`", "".join(re.findall(r"^\| `--[^|]*", text, re.M)))
    assert sorted(flags) == sorted(re.findall(r'add\("(--[\w-]+)"', script_text("mnist_ddp")))


def test_the_course_is_a_chain_and_each_notebook_has_a_lesson_of_its_name() -> None:
    chain = [path for path in PATHS if path.stem.partition("_")[0].isdigit()]
    assert [path.stem[:2] for path in chain] == [f"{number:02}" for number in range(1, len(chain) + 1)]
    for path in chain:
        lesson = ROOT / "ddp_helpers" / "lessons" / path.stem[3:]
        assert lesson.is_dir() or lesson.with_suffix(".py").is_file(), lesson
    for before, after in pairwise(chain):
        assert f"({after.name})" in nbformat.read(before, as_version=4).cells[0].source, f"{before.name} has no next"
        assert f"({before.name})" in nbformat.read(after, as_version=4).cells[0].source, f"{after.name} has no previous"


def test_the_set_up_of_the_core_is_folded_in_jupyterlab_and_on_the_pages() -> None:
    core = [path for path in PATHS if re.match(r"0\d_", path.stem)]
    assert core
    for path in core:
        code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        set_up = next(cell for cell in code if "parameters" not in cell.metadata.get("tags", []))
        assert "import" in set_up.source, path.name
        folded = {"jupyter": {"source_hidden": True}, "tags": ["hide-input"]}
        assert set_up.metadata == folded, f"{path.name}: give its set-up cell the metadata {folded}"


def test_an_appendix_and_the_notebook_that_it_belongs_to_lead_to_each_other() -> None:
    appendices = [path for path in PATHS if not path.stem.partition("_")[0].isdigit()]
    assert appendices, "10b and others have the number of a notebook, and a letter"
    for appendix in appendices:
        [owner] = [path for path in PATHS if path.stem.startswith(f"{appendix.stem[:2]}_")]
        assert f"({appendix.name})" in nbformat.read(owner, as_version=4).cells[0].source
        assert f"({owner.name})" in nbformat.read(appendix, as_version=4).cells[0].source


def test_what_is_set_for_a_short_test_are_parameters_of_the_notebook_and_of_their_kinds() -> None:
    seen = 0
    for path in PATHS:
        for cell in nbformat.read(path, as_version=4).cells:
            if mock := cell.metadata.get("nbmake", {}).get("mock"):
                given: dict = {}
                exec(cell.source, given)
                lists = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
                others = [name for name, value in mock.items() if not isinstance(value, type(lists.get(name)))]
                assert not others, f"{path.name}: {others}"
                seen += 1
    assert seen > 1
