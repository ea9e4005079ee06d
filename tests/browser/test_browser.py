"""The course in a true JupyterLab, in a true browser: what a learner clicks, and what they then see.

nbmake executes every notebook. Here, in `make test`, cells written for it run on ranks, whose lines stream and can be
stopped; and the server is for this machine alone. `make test-all` looks at each thing that only a browser shows, and
opens and runs every notebook.
"""

import json
import re
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from real import LIMIT, until, weekly

from browser.notebook import Notebook
from browser.server import copy_of_the_course, jupyter
from ddp_helpers import ROOT
from ddp_helpers.jobs import available
from ddp_tools import PlainError
from ddp_tools.simulated_gpus.build import build

PICTURES = ROOT / "build" / "browser"
PATHS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


@pytest.fixture(scope="module")
def lab(browser, local_slurm, tmp_path_factory):
    """JupyterLab on a copy of the course, as new as a clone, and a Slurm beside it, as `make lab` starts one."""
    folder = tmp_path_factory.mktemp("lab")
    with suppress(PlainError):  # where none can be, notebooks do without
        build()  # the simulated GPUs: a cell that compiles them says so on stderr
    with jupyter(copy_of_the_course(folder), folder) as started:
        yield started


@pytest.fixture
def page(browser, lab):
    """An empty page in a browser that knows nobody; no kernel is left."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    context.set_default_timeout(1000 * LIMIT)
    yield context.new_page()
    context.close()
    lab.end_kernels()


@pytest.fixture
def written(page, lab):
    """Open a notebook of these cells, which stands beside those of the course."""

    def opened(name, *sources):
        notebook = new_notebook(cells=[new_code_cell(source) for source in sources], metadata=KERNEL)
        nbformat.write(notebook, lab.course / "notebooks" / name)
        return Notebook(page, lab, name)

    return opened


def figures_in(path):
    """How many figures a notebook holds, those that are stepped through among them."""
    return path.read_text().count("<img ")


def status(lab, query=""):
    """The answer to somebody who asks for the files."""
    try:
        return urllib.request.urlopen(f"{lab.url}/api/contents{query}", timeout=LIMIT).status
    except urllib.error.HTTPError as error:
        return error.code


def test_jupyter_is_for_this_machine_and_asks_for_its_token(lab):
    port = int(lab.url.rpartition(":")[2])
    listening = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port]
    assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
    assert status(lab) == status(lab, "?token=x") == 403 and status(lab, f"?token={lab.token}") == 200


def test_nobody_else_can_listen_to_a_kernel_also_where_the_path_of_its_files_would_be_too_long(tmp_path):
    (long := tmp_path / ("t" * 120)).mkdir()
    with jupyter(copy_of_the_course(tmp_path), tmp_path, TMPDIR=str(long)) as lab:
        name = f"kernel-{lab.ask('kernels', 'POST')['id']}.json"
        words = [word for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or []]
        told = next(Path(word) for word in words if word.endswith(name))
        channels = json.loads(told.read_text())
        assert channels["transport"] == "ipc"  # ipykernel listens at one port more: it takes what its children print
        files = [Path(f"{channels['ip']}-{number}") for part, number in channels.items() if part.endswith("_port")]
        until(lambda: all(map(Path.is_socket, files)), "five channels")
        assert {file.parent.stat().st_mode & 0o777 for file in files} == {0o700} and len(files) == 5
    assert not told.parent.exists()


def test_the_course_opens_at_its_page_whose_links_work_and_its_animations_do_so_before_any_cell_has_run(page, lab):
    page.goto(f"{lab.url}/?token={lab.token}")
    readme = page.locator(".jp-MarkdownViewer")
    readme.locator("summary").click()  # the fold of all notebooks
    notebook = Notebook(page, lab, PATHS[4].name, readme.get_by_role("link", name="05 Wrap the model").click)
    figure = notebook.panel.locator(".animation").first
    before = figure.locator("img").get_attribute("src")
    figure.locator("button", has_text="next").click()
    notebook.wait(lambda: figure.locator("img").get_attribute("src") != before, "the next picture")
    notebook.picture(PICTURES / "next.png", figure)
    notebook.panel.locator("a[href*='docs/troubleshooting.md']").first.click()
    page.locator(".jp-MarkdownViewer h1", has_text="Troubleshooting").wait_for()
    page.screenshot(path=PICTURES / "link.png")


LOAD = "%load_ext ddp_helpers.launch.launch\n%load_ext ddp_helpers.launch.ranks"
DRAWS = """from ddp_helpers.draw.drawing import canvas, described
described(canvas(1, "A figure").figure, "A title, and nothing else")"""


@weekly
def test_all_cells_run_twice_and_a_restart_leaves_no_rank(written, lab):
    notebook = written("runs.ipynb", LOAD, "%%ranks 2\nprint('here')", DRAWS)
    notebook.start(0, lambda: notebook.restart("Restart Kernel and Run All Cells…"))
    for time_around in (1, 2):
        last = str(3 * time_around)
        notebook.wait(lambda last=last: notebook.cells()[-1].prompt == last, f"prompt {last}")
        assert notebook.finish() == [] and notebook.figures() == 1
        assert all(f"[rank {rank}] here" in notebook.cells()[1].text for rank in range(2))
        if time_around == 1:
            notebook.start(0, lambda: notebook.menu("Run", "Run All Cells"))
    assert len(lab.ranks()) == 2
    notebook.restart()
    notebook.wait(lambda: not lab.ranks() and notebook.idle(), "no rank is left")
    notebook.run(2)  # the new kernel answers


STREAMS = """%%{how} 2
import time
for tick in range(1000):
    print(f"tick {tick}")
    time.sleep(0.5)
"""
ANSWER = """from ddp_helpers import lessons
def batch_plan(samples, world_size, global_batch):
    {returns}
lessons.check(batch_plan)"""
RIGHT = """if global_batch % world_size:
        return None
    per_rank, shard = global_batch // world_size, -(-samples // world_size)
    steps = -(-shard // per_rank)
    last = shard - (steps - 1) * per_rank
    return {"per_rank": per_rank, "shard": shard, "steps": steps, "last_batch": last}"""


def test_the_lines_of_ranks_stream_and_can_be_stopped_and_the_next_cells_are_judged_in_colour(written, lab):
    streams = [STREAMS.replace("{how}", how) for how in ("ranks", "launch")]
    answers = [ANSWER.replace("{returns}", answer) for answer in ("return {}", RIGHT)]
    notebook = written("streams.ipynb", LOAD, *streams, *answers)
    notebook.run(1)
    notebook.wait(lambda: "Cell magic `%%ranks` not found" in notebook.cells()[1].text, "what is missing is said")
    notebook.run(0)
    button = notebook.panel.locator("jp-button[data-command='notebook:interrupt-kernel']")
    ways = [(1, 2, button.click, "rank 0, 1 in line 5")]
    ways += [(2, 3, lambda: notebook.menu("Kernel", "Interrupt Kernel"), "stopped: all ranks of this cell are ended")]
    for number, processes, interrupt, stopped in ways:
        notebook.run(number)
        for tick in (0, 4):
            lines = [f"[rank {rank}] tick {tick}\n" for rank in range(2)]
            notebook.wait(lambda: all(line in notebook.cells()[number].text for line in lines), lines)  # noqa: B023
            assert notebook.cells()[number].prompt == "*"
        assert len(lab.ranks()) == processes
        notebook.picture(PICTURES / f"streams_{number}.png")
        interrupt()
        notebook.wait(lambda: not lab.ranks(), "no rank is left")
        notebook.wait(lambda: notebook.cells()[number].prompt.isdigit(), "the cell has ended")  # noqa: B023
        said = notebook.cells()[number].red[0]
        assert stopped in said and "Traceback" not in said
    for number, word, colour in ((3, "not yet", "rgb(215, 0, 95)"), (4, "right", "rgb(0, 135, 0)")):
        notebook.run(number)
        said = notebook.code(number).locator(".jp-OutputArea-output span", has_text=word)
        said.wait_for()
        look = said.evaluate("said => [getComputedStyle(said).color, getComputedStyle(said).backgroundColor]")
        assert look == ["rgb(255, 255, 255)", colour]
    notebook.picture(PICTURES / "verdict.png")


TRAINS = """from ddp_helpers import ROOT
from ddp_helpers.launch import launch
from ddp_helpers.rank import scripts
from ddp_helpers.data.digits import write_digits
data = write_digits(ROOT / "build" / "bar", train=4096, test=64)
script = scripts.write_script("mnist_ddp", ROOT / "build" / "bar.py")
done = launch.run(script, "--data", data, "--epochs", 1, "--batch-size", 2, "--log-interval", 2, ranks=2)"""
BAR = re.compile(r"\[#*\.*\] (\d+)/\d+")


@weekly
def test_the_bar_of_a_training_grows_in_its_place(written):
    notebook = written("trains.ipynb", TRAINS)
    notebook.run(0)
    seen = []

    def three() -> bool:
        bars = BAR.findall(notebook.cells()[0].text)
        seen.extend(bars if bars and bars != seen[-1:] else [])
        assert len(bars) <= 1
        return len(seen) >= 3

    notebook.wait(three, "a bar has grown twice")
    notebook.picture(PICTURES / "progress.png")
    assert [int(bar) for bar in seen] == sorted({int(bar) for bar in seen})
    assert notebook.cells()[0].prompt == "*" and notebook.bad() == []


@weekly
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_notebook_opens_and_runs(path, page, lab):
    notebook = Notebook(page, lab, path.name)
    committed = notebook.figures()
    assert committed == figures_in(path)
    assert notebook.bad() == []  # as the reader finds it
    assert notebook.run_all() == []
    without = [number for number, cell in enumerate(notebook.cells()) if "left out: no Slurm" in cell.text]
    assert not (without and available()), f"code cells {without} met no Slurm"
    assert notebook.figures() == committed
    figures = notebook.panel.locator(".jp-OutputArea-output img")
    notebook.picture(PICTURES / f"{path.stem[:2]}.png", figures.last if figures.count() else None)
