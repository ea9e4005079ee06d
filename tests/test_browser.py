"""The course in a true JupyterLab, in a true browser: what a learner clicks, and what they then see.

nbmake executes every notebook. Here some are opened from the folder view and run by the menu; `make test-all` runs all
of each. What ranks that stay and what launched ones do is looked at in cells of its own.
"""

import re
import time

import nbformat
import pytest
from browser.notebook import Notebook
from browser.server import copy_of_the_course, jupyter
from nbformat.v4 import new_code_cell, new_notebook
from real import THOROUGH

from ddp_helpers import ROOT

PICTURES = ROOT / "build" / "browser"
PATHS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
OPENED = PATHS if THOROUGH else [path for path in PATHS if path.name.startswith(("04", "09"))]
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):
    """JupyterLab on a copy of the course, as new as a clone."""
    folder = tmp_path_factory.mktemp("lab")
    with jupyter(copy_of_the_course(folder), folder) as started:
        yield started


@pytest.fixture
def page(browser, lab):
    """An empty page in a browser that knows nobody; no kernel is left."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    context.set_default_timeout(60_000)
    yield context.new_page()
    context.close()
    lab.end_kernels()


@pytest.fixture
def write(lab):
    """Put a notebook of these cells beside those of the course."""

    def made(name, *sources):
        notebook = new_notebook(cells=[new_code_cell(source) for source in sources], metadata=KERNEL)
        nbformat.write(notebook, lab.course / "notebooks" / name)
        return name

    return made


@pytest.mark.parametrize("path", OPENED, ids=lambda path: path.stem)
def test_a_notebook_opens_and_runs(path, page, lab):
    notebook = Notebook(page, lab, path.name)
    committed = notebook.figures()
    assert committed == path.read_text().count('"image/png": "')
    assert notebook.bad() == []  # as the reader finds it
    assert notebook.run_all(500) == []
    assert notebook.figures() == committed
    figures = notebook.panel.locator(".jp-OutputArea-output img")
    notebook.picture(PICTURES / f"{path.stem[:2]}.png", figures.last if figures.count() else None)


STREAMS = """%%{how} 2
import time
for tick in range(100):
    print(f"tick {tick}")
    time.sleep(0.5)
"""


@pytest.mark.parametrize(("how", "processes"), [("ranks", 2), ("launch", 3)])
def test_the_lines_of_ranks_stream_and_can_be_stopped(how, processes, page, lab, write):
    load = "%load_ext ddp_helpers.notebook.launch\n%load_ext ddp_helpers.notebook.ranks"
    name = write(f"streams_{how}.ipynb", load, STREAMS.replace("{how}", how), "print('the ' + 'next')")
    notebook = Notebook(page, lab, name)
    notebook.run(0)
    notebook.run(1)
    for tick in (0, 4):
        lines = [f"[rank {rank}] tick {tick}\n" for rank in range(2)]
        notebook.wait(lambda lines=lines: all(line in notebook.cells()[1].text for line in lines), lines, 120)
        assert notebook.cells()[1].prompt == "*"
    assert len(lab.ranks()) == processes
    notebook.picture(PICTURES / f"streams_{how}.png")
    if how == "ranks":
        notebook.panel.locator("jp-button[data-command='notebook:interrupt-kernel']").click()
    else:
        notebook.menu("Kernel", "Interrupt Kernel")
    begin = time.monotonic()
    notebook.wait(lambda: not lab.ranks(), "no rank is left", 15)
    notebook.wait(lambda: notebook.cells()[1].prompt.isdigit(), "the cell has ended", 15)
    print(f"{time.monotonic() - begin:.1f} s after that, no rank is left")
    notebook.picture(PICTURES / f"stopped_{how}.png")
    stopped = {"ranks": "rank 0, 1 in line 5", "launch": "stopped: all ranks of this cell are ended"}
    assert stopped[how] in notebook.cells()[1].red[0] and "Traceback" not in notebook.cells()[1].red[0]
    notebook.run(2)
    notebook.wait(lambda: "the next" in notebook.cells()[2].text, "the next cell runs", 20)


TRAINS = """from ddp_helpers import ROOT
from ddp_helpers.notebook import launch, scripts
from ddp_helpers.rank.digits import write_digits
data = write_digits(ROOT / "build" / "bar", train=8192, test=512)
script = scripts.write("mnist_ddp", ROOT / "build" / "bar.py")
done = launch.run(script, "--data", data, "--epochs", 1, "--log-interval", 2, ranks=2)"""
BAR = re.compile(r"\[#*\.*\] (\d+)/\d+")


def test_the_bar_of_a_training_grows_in_its_place(page, lab, write):
    notebook = Notebook(page, lab, write("trains.ipynb", TRAINS))
    notebook.run(0)
    seen = []

    def three() -> bool:
        bars = BAR.findall(notebook.cells()[0].text)
        seen.extend(bars if bars and bars != seen[-1:] else [])
        assert len(bars) <= 1
        return len(seen) >= 3

    notebook.wait(three, "a bar has grown twice", 120)
    assert notebook.cells()[0].prompt == "*"
    notebook.picture(PICTURES / "progress.png")
    assert [int(bar) for bar in seen] == sorted({int(bar) for bar in seen})
    assert notebook.finish(240, above=1) == []  # the last cell run, there is a new empty one below


@pytest.mark.parametrize("name", ["03_find_your_local_rank", "09_plot_the_scaling"][: 1 + THOROUGH])
def test_after_a_restart_and_when_run_twice(name, page, lab):
    notebook = Notebook(page, lab, f"{name}.ipynb")
    notebook.restart("Restart Kernel and Run All Cells…")
    notebook.wait(lambda: any(cell.prompt == "*" for cell in notebook.cells()), "it has begun", 60)
    assert notebook.finish(240) == []
    last = int(notebook.cells()[-1].prompt)
    notebook.menu("Run", "Run All Cells")
    notebook.wait(lambda: notebook.cells()[-1].prompt == str(2 * last), "every cell has run twice", 240)
    assert notebook.problems() == []


@pytest.mark.parametrize(
    ("name", "cell", "says"),
    [
        ("09_plot_the_scaling.ipynb", "table.groupby", "NameError: name '"),
        ("04_shard_the_data.ipynb", "%%ranks", "Cell magic `%%ranks` not found"),
    ],
    ids=["a name", "a magic"],
)
def test_a_cell_without_those_before_it_says_what_is_missing(name, cell, says, page, lab):
    notebook = Notebook(page, lab, name)
    number = next(i for i, source in enumerate(notebook.sources) if cell in source)
    notebook.restart()
    notebook.wait(lambda: not any(cell.prompt for cell in notebook.cells()), "all outputs are cleared", 120)
    notebook.run(number)
    notebook.wait(lambda: notebook.cells()[number].prompt.isdigit(), "the cell has ended", 120)
    assert says in notebook.cells()[number].text
