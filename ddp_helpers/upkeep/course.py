"""Execute the notebooks of the course: into build/, two at a time, or in place.

The command `run` calls it, in one process that starts a kernel for each notebook. In place it makes
the outputs that are committed.
"""

import asyncio
import base64
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from ddp_helpers import ROOT
from ddp_helpers.launch.kernels import KernelOnFiles
from ddp_helpers.rank.launchers import stop
from ddp_helpers.upkeep.stale import made_from, noting, sources

NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"
_CELL_SECONDS = 900  # that one cell may take


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
        """Count a cell; nbclient calls it behind each."""
        self.done += 1
        if sys.stdout.isatty():
            self._print(end="")

    def finish(self) -> None:
        """Write the line a last time."""
        self._print(end="\n")

    def _print(self, end: str) -> None:
        bar = "#" * (20 * self.done // max(1, self.cells))
        count = f"{self.done}/{self.cells} cells {self.seconds:5.0f} s"
        print(f"\r{self.name:<28} [{bar:.<20}] {count}", end=end, flush=True)


def execute(path: Path, target: Path) -> Outcome:
    """Run every cell of the notebook at `path` in a new kernel, and write it to `target`.

    An error ends the run, and stands in the outcome.
    """
    notebook = nbformat.read(path, as_version=4)
    progress = _Progress(path.stem, sum(cell.cell_type == "code" for cell in notebook.cells))
    client = NotebookClient(
        notebook,
        on_cell_executed=progress.step,
        kernel_name="python3",
        kernel_manager_class=KernelOnFiles,
        timeout=_CELL_SECONDS,
        record_timing=False,
    )
    client.resources = {"metadata": {"path": str(NOTEBOOKS)}}
    error = ""
    with TemporaryDirectory() as folder:
        notes = Path(folder) / "opened"
        try:
            # In any thread, and its event loop is closed.
            asyncio.run(client.async_execute(env=noting(notes)))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as problem:
            lines = [line for line in str(problem).splitlines() if line.strip()]
            error = lines[-1] if lines else "the kernel died"
        paths = sources(notes)
    progress.finish()
    notebook.metadata["made_from"] = made_from(notebook, paths)
    notebook.metadata.pop("widgets", None)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    figures = _write_figures(notebook, path.stem)
    return Outcome(path.stem, progress.seconds, figures, error)


def _write_figures(notebook: NotebookNode, stem: str) -> list[Path]:
    """Write the figures of an executed notebook to build/figures, and return where they are."""
    folder = BUILD / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for figure in folder.glob(f"{stem}_*.png"):
        figure.unlink()
    paths: list[Path] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if image := output.get("data", {}).get("image/png"):
                paths.append(folder / f"{stem}_{len(paths) + 1}.png")
                paths[-1].write_bytes(base64.b64decode(image))
    return paths


def _sends_jobs(path: Path) -> bool:
    """Whether a notebook sends jobs and watches them.

    Such notebooks share the queue and runs/, and go one by one. One that only waits for a single
    job of its own may wait behind theirs.
    """
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    return bool(re.search(r"%%slurm|jobs\.(submit|watch|cancel)", code))


def _execute_lanes(lanes: Sequence[Sequence[Path]], folder: Path) -> list[Outcome]:
    """Execute each lane's notebooks one after the other, the lanes side by side, into a folder.

    Ctrl-C ends all kernels.
    """
    outcomes: list[Outcome] = []
    stopped = threading.Event()

    def drive(lane: Sequence[Path]) -> None:
        for path in lane:
            if not stopped.is_set():
                outcomes.append(execute(path, folder / path.name))

    threads = [threading.Thread(target=drive, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stopped.set()
        for kernel in psutil.Process().children():
            kernel.terminate()
        raise
    return sorted(outcomes, key=lambda outcome: outcome.name)


def run(only: list[str], in_place: bool) -> int:
    """Execute the notebooks whose names begin with one of `only`, or all; return the exit status.

    in_place: one after the other, since beside committed outputs nothing ran; else two lanes, into
    build/notebooks. The status is 1 if one fails. Stops if there is no such notebook.
    """
    paths = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
    if only:
        paths = [path for path in paths if path.stem.startswith(tuple(only))]
    if not paths:
        stop(f"no notebook begins with {' or '.join(only)}: give numbers, such as 03")
    folder, begin = NOTEBOOKS if in_place else BUILD / "notebooks", time.monotonic()
    lanes = [paths]
    if not in_place:
        sending = [path for path in paths if _sends_jobs(path)]
        lanes = [sending, [path for path in paths if path not in sending]]
    try:
        outcomes = _execute_lanes(lanes, folder)
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
