"""A notebook that is open in JupyterLab: what a person does with it, and what they see."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nbformat
from notebook_texts import MEANT
from playwright.sync_api import Locator, Page
from real import LIMIT

from browser.server import Lab

# One entry a code cell. JupyterLab shows an error as it shows what goes to stderr: in a red box.
LOOK = """notebook => [...notebook.querySelectorAll('.jp-CodeCell')].map(cell => {
    const outputs = [...cell.querySelectorAll('.jp-OutputArea-output')];
    const red = output => output.dataset.mimeType === 'application/vnd.jupyter.stderr';
    return {
        prompt: cell.querySelector('.jp-InputPrompt').textContent.replace(/[^0-9*]/g, ''),
        text: outputs.map(output => output.textContent).join('\\n'),
        red: outputs.filter(red).map(output => output.textContent),
        figures: [...cell.querySelectorAll('.jp-OutputArea-output img')].map(
            image => image.complete && image.naturalWidth > 0 && image.offsetWidth > 0 && image.alt !== ''),
    };
})"""


@dataclass(frozen=True)
class Cell:
    """What a code cell shows: its prompt ('' if it has not run, '*' while it runs), what it put out."""

    prompt: str
    text: str
    red: list[str]  # the boxes of errors and stderr
    figures: list[bool]  # whether each shows, and has an alt text


class Notebook:
    """A notebook of the course's folder `notebooks`: opened by its address, or by what `open` clicks."""

    def __init__(self, page: Page, lab: Lab, name: str, open: Callable[[], None] | None = None) -> None:
        self.page = page
        cells = nbformat.read(lab.course / "notebooks" / name, as_version=4).cells
        self.sources = [cell.source for cell in cells if cell.cell_type == "code"]
        if open:
            open()
        else:
            page.goto(f"{lab.url}/lab/workspaces/{time.monotonic_ns()}/tree/notebooks/{name}?token={lab.token}")
        self.panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self.status = self.panel.locator(".jp-Notebook-ExecutionIndicator")
        self.panel.locator(".jp-CodeCell").first.wait_for()
        self.wait(lambda: len(self.cells()) == len(self.sources), "all cells are there")
        self.wait(self.idle, "the kernel is up")

    def idle(self) -> bool:
        """Whether the kernel waits for something to do, as the circle at the top right says."""
        return self.status.get_attribute("data-status") == "idle"

    def menu(self, name: str, entry: str) -> None:
        """Choose an entry of a menu."""
        self.page.locator(".lm-MenuBar-itemLabel").get_by_text(name, exact=True).click()
        self.page.locator(".lm-Menu-itemLabel").get_by_text(entry, exact=True).click()

    def restart(self, entry: str = "Restart Kernel and Clear Outputs of All Cells…") -> None:
        """Restart the kernel, and say yes when asked."""
        self.menu("Kernel", entry)
        self.page.locator(".jp-Dialog .jp-mod-accept").click()

    def cells(self) -> list[Cell]:
        """The code cells as they are now."""
        return [Cell(**cell) for cell in self.panel.locator(".jp-Notebook").evaluate(LOOK)]

    def code(self, number: int) -> Locator:
        """A code cell, counted from 0."""
        return self.panel.locator(".jp-CodeCell").nth(number)

    def choose_kernel(self) -> None:
        """Answer JupyterLab's question for a kernel, if it asks; no other dialog is expected."""
        dialog = self.page.locator(".jp-Dialog")
        if dialog.is_visible():
            assert "Select Kernel" in (words := dialog.inner_text()), words
            dialog.locator("select").select_option('{"name":"python3"}')
            dialog.locator(".jp-mod-accept").click()

    def start(self, number: int, command: Callable[[], None]) -> None:
        """Have a command run this cell; again where nothing came of it, as a person would.

        On a busy machine the circle says idle a moment before JupyterLab has its session, and it drops what is run
        then, or asks for a kernel.
        """
        before = self.cells()[number].prompt
        for _ in range(3):
            self.choose_kernel()
            command()
            with suppress(AssertionError):
                return self.wait(lambda: self.cells()[number].prompt not in ("", before), "the cell runs", 30)
        raise AssertionError(f"cell {number} does not run")

    def run(self, number: int) -> None:
        """Click into a cell, and press Shift-Enter."""

        def press() -> None:
            self.code(number).locator(".cm-content").click()
            self.page.keyboard.press("Shift+Enter")

        self.start(number, press)

    def run_all(self) -> list[str]:
        """Restart, clear, run all cells; what went wrong, a line each."""
        self.menu("View", "Expand All Code")  # a folded cell has no prompt
        self.restart()
        self.wait(lambda: not any(cell.prompt for cell in self.cells()), "all outputs are cleared")
        self.start(0, lambda: self.menu("Run", "Run All Cells"))
        return self.finish()

    def finish(self) -> list[str]:
        """Wait for the cells that were started; errors, other red boxes, and cells that did not run, a line each."""

        def over() -> bool:
            prompts = [cell.prompt for cell in self.cells()]
            return self.idle() and any(prompts) and "*" not in prompts

        self.wait(over, "no cell is running any more", 2 * LIMIT)  # a whole notebook takes minutes
        idle = [i for i, cell in enumerate(self.cells()) if not cell.prompt.isdigit()]
        return self.bad() + [f"code cell {number} did not run" for number in idle]

    def bad(self) -> list[str]:
        """Errors and other red boxes, and figures that do not show or have no alt text."""
        problems = []
        for number, cell in enumerate(self.cells()):
            red = [box for box in cell.red if box.replace(MEANT, "")]
            problems += [f"code cell {number}: {box.strip().splitlines()[-1]}" for box in red]
            if not all(cell.figures):
                problems.append(f"code cell {number}: a figure does not show, or has no alt text")
        return problems

    def figures(self) -> int:
        """How many figures there are; `bad` says whether they show."""
        return sum(len(cell.figures) for cell in self.cells())

    def wait(self, condition: Callable[[], object], what: str, seconds: float = LIMIT) -> None:
        """Wait until it is so; the browser goes on meanwhile."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            self.page.wait_for_timeout(200)

    def picture(self, path: Path, of: Locator | None = None) -> None:
        """Keep a screenshot, with what is asked for in its middle."""
        for _ in range(2):  # what is above gets its true height only as it comes into view
            (of or self.code(0)).evaluate("element => element.scrollIntoView({block: 'center'})")
            self.page.wait_for_timeout(300)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)
