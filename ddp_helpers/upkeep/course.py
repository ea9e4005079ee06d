"""Execute notebooks of the course: into build/, two at a time, or in place.

`make run` and `make notebooks` call it, in one process that starts a kernel for each notebook. In
place it produces the committed outputs.
"""

import asyncio
import base64
import hashlib
import os
import re
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from ddp_helpers import ROOT, own_folder
from ddp_helpers.launch.engine import end_launches
from ddp_helpers.launch.kernels import KernelOnFiles, WarmKernel
from ddp_helpers.launch.shared import shared_server
from ddp_helpers.rank.launchers import stop
from ddp_tools import PlainError

NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"
CORE = tuple(f"{number:02}" for number in range(1, 10))
_CELL_SECONDS = 900  # time limit of one cell


@dataclass
class Outcome:
    """The outcome of executing one notebook; `error` is '' if all its cells ran."""

    name: str
    seconds: float
    figures: list[Path]
    error: str = ""


class _Progress:
    """A line that shows how far a notebook is.

    It grows in a terminal, and is written once in a log.
    """

    def __init__(self, name: str, cells: int) -> None:
        self.name, self.cells = name, cells
        self.done, self.begin = 0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begin

    def step(self, cell: NotebookNode, cell_index: int, execute_reply: object) -> None:
        """Count a cell; nbclient calls it after each."""
        self.done += 1
        if sys.stdout.isatty():
            self._print(end="")

    def finish(self) -> None:
        """Write the line for the last time."""
        self._print(end="\n")

    def _print(self, end: str) -> None:
        bar = "#" * (20 * self.done // max(1, self.cells))
        count = f"{self.done}/{self.cells} cells {self.seconds:5.0f} s"
        print(f"\r{self.name:<28} [{bar:.<20}] {count}", end=end, flush=True)


def execute(path: Path, target: Path, is_warm: bool) -> Outcome:
    """Run every cell of the notebook at `path` in a new kernel, and write it to `target`.

    is_warm: whether the kernel is forked. An error ends the run, and is in the outcome.
    """
    notebook = nbformat.read(path, as_version=4)
    progress = _Progress(path.stem, sum(cell.cell_type == "code" for cell in notebook.cells))
    client = NotebookClient(
        notebook,
        on_cell_executed=progress.step,
        kernel_name="python3",
        kernel_manager_class=WarmKernel if is_warm else KernelOnFiles,
        timeout=_CELL_SECONDS,
        record_timing=False,
        coalesce_streams=True,
    )
    client.resources = {"metadata": {"path": str(NOTEBOOKS)}}
    error = ""
    try:
        asyncio.run(client.async_execute())  # in any thread, and its event loop is closed
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as problem:
        lines = [line for line in str(problem).splitlines() if line.strip()]
        error = lines[-1] if lines else "the kernel died"
    progress.finish()
    notebook.metadata["executed"] = code_checksum(notebook)
    notebook.metadata["seconds"] = round(progress.seconds)  # _Queue reads it
    notebook.metadata.pop("widgets", None)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    figures = _write_figures(notebook, path.stem)
    return Outcome(path.stem, progress.seconds, figures, error)


def code_checksum(notebook: NotebookNode) -> str:
    """Return a checksum of the code cells: a test compares it with the executed notebook's."""
    codes = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()[:16]


def _write_figures(notebook: NotebookNode, stem: str) -> list[Path]:
    """Write the figures of an executed notebook to build/figures, and return their paths."""
    folder = BUILD / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for figure in folder.glob(f"{stem}_*.png"):
        figure.unlink()
    paths: list[Path] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            html = output.get("data", {}).get("text/html", "")
            if image := re.match('<img src="data:image/png;base64,([^"]*)"', html):
                paths.append(folder / f"{stem}_{len(paths) + 1}.png")
                paths[-1].write_bytes(base64.b64decode(image[1]))
    return paths


def _sends_jobs(notebook: NotebookNode) -> bool:
    """Whether a notebook sends jobs and watches them.

    Such notebooks share the queue and runs/, and run one by one. A notebook that only waits for one
    job may wait for theirs.
    """
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return bool(re.search(r"%%slurm|papermill|jobs\.(submit|watch|cancel)", code))


class _Queue:
    """Notebooks to execute: those that took longest at their last execution come first.

    Several threads take notebooks from it.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        notebooks = {path: nbformat.read(path, as_version=4) for path in paths}
        seconds = {path: book.metadata.get("seconds", 0) for path, book in notebooks.items()}
        self._waiting = sorted(paths, key=lambda path: -seconds[path])
        self._sending = {path for path, notebook in notebooks.items() if _sends_jobs(notebook)}
        self._sender: Path | None = None  # the notebook that has the queue of Slurm now
        self._changed = threading.Condition()

    def take(self) -> Path | None:
        """Wait for a notebook that can start, and return it; None if no more are left."""
        with self._changed:
            while self._waiting:
                for path in self._waiting:
                    if path not in self._sending or not self._sender:
                        self._waiting.remove(path)
                        if path in self._sending:
                            self._sender = path
                        return path
                self._changed.wait()
            return None

    def give_back(self, path: Path) -> None:
        """Record that a notebook has ended."""
        with self._changed:
            if self._sender == path:
                self._sender = None
            self._changed.notify_all()

    def close(self) -> None:
        """Give nothing more."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()


def _execute_all(paths: Sequence[Path], folder: Path, in_place: bool) -> list[Outcome]:
    """Execute notebooks into a folder, in place one after the other. Ctrl-C ends all kernels."""
    outcomes: list[Outcome] = []
    waiting = _Queue(paths)

    def drive() -> None:
        while path := waiting.take():
            try:
                outcomes.append(execute(path, folder / path.name, is_warm=not in_place))
            finally:
                waiting.give_back(path)

    threads = [threading.Thread(target=drive) for _ in range(1 if in_place else 2)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        waiting.close()
        end_launches()
        for kernel in psutil.Process().children():
            kernel.terminate()
        raise
    return sorted(outcomes, key=lambda outcome: outcome.name)


def run(only: list[str], every: bool, in_place: bool) -> int:
    """Execute the core of the course, 01 to 09, and return the exit status: 1 if one fails.

    only: instead, those whose names start with one of these; every: instead, all. in_place: one
    after the other, so that nothing else runs while outputs are made, each in a new Python, which
    shows a forgotten import; else two at a time, in forked kernels, into build/notebooks. Stops if
    there is no such notebook.
    """
    paths = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
    if not every:
        paths = [path for path in paths if path.stem.startswith(tuple(only or CORE))]
    if not paths:
        stop(f"no notebook begins with {' or '.join(only or CORE)}: give numbers, such as 03")
    folder, begin = NOTEBOOKS if in_place else BUILD / "notebooks", time.monotonic()
    try:
        for needed in (folder, BUILD / "figures"):
            own_folder(needed)
    except PlainError as problem:
        stop(str(problem))
    try:
        if not in_place:  # on two CPUs, two notebooks' waiting threads would spin
            os.environ["GOMP_SPINCOUNT"] = "0"
        with nullcontext() if in_place else shared_server():
            outcomes = _execute_all(paths, folder, in_place)
    except KeyboardInterrupt:
        sys.exit(f"stopped by Ctrl-C: what was executed until then is in {folder}")
    _print_table(outcomes)
    print(f"executed copies: {folder.relative_to(ROOT)}/, {time.monotonic() - begin:.0f} s in all")
    errors = [f"{outcome.name}: {outcome.error}" for outcome in outcomes if outcome.error]
    for error in errors:
        print(error, file=sys.stderr)
    return int(len(outcomes) < len(paths) or bool(errors))


def _print_table(outcomes: Sequence[Outcome]) -> None:
    """Print how each notebook ended, and which took longest."""
    print(f"\n{'notebook':<28} {'result':<8} {'seconds':>7}  figures")
    for outcome in outcomes:
        figures = "none"
        if outcome.figures:
            figures = f"build/figures/{outcome.name}_1..{len(outcome.figures)}.png"
        result = "FAILED" if outcome.error else "ok"
        print(f"{outcome.name:<28} {result:<8} {outcome.seconds:7.0f}  {figures}")
    slowest = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:3]
    times = [f"{outcome.name} {outcome.seconds:.0f} s" for outcome in slowest]
    print("slowest:", ", ".join(times))


if __name__ == "__main__":
    parser = ArgumentParser(description="Execute notebooks: 01 to 09, if none is named.")
    parser.add_argument("only", nargs="*", help="beginnings of names, such as 03")
    parser.add_argument("--all", action="store_true", help="every notebook")
    in_place = "keep the outputs in notebooks/, to be committed"
    parser.add_argument("--in-place", action="store_true", help=in_place)
    given = parser.parse_args()
    sys.exit(run(given.only, given.all, given.in_place))
