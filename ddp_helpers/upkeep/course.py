"""Execute the notebooks of the course: into build/, two at a time, or in place, which makes the committed outputs."""

import asyncio
import base64
import re
import sys
import threading
import time
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


@dataclass
class Outcome:
    """The outcome of executing one notebook."""

    name: str
    seconds: float
    figures: list[Path]
    error: str = ""


def progress(name: str, done: int, cells: int, seconds: float, last: bool) -> None:
    """One line a notebook: it grows in a terminal, and is written once in a log."""
    bar = "#" * (20 * done // max(1, cells))
    if last or sys.stdout.isatty():
        print(f"\r{name:<28} [{bar:.<20}] {done}/{cells} cells {seconds:5.0f} s", end="\n" if last else "", flush=True)


def execute(path: Path, target: Path) -> Outcome:
    """Run every cell of the notebook at `path` in a new kernel, and write it with its outputs to `target`."""
    notebook, begin = nbformat.read(path, as_version=4), time.monotonic()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    done = [0]

    def step(**_: object) -> None:
        done[0] += 1
        progress(path.stem, done[0], len(code), time.monotonic() - begin, last=False)

    options = {"kernel_name": "python3", "kernel_manager_class": KernelOnFiles, "timeout": 900, "record_timing": False}
    client = NotebookClient(notebook, on_cell_executed=step, **options)
    client.resources = {"metadata": {"path": str(NOTEBOOKS)}}
    error = ""
    with TemporaryDirectory() as folder:
        notes = Path(folder) / "opened"
        try:
            asyncio.run(client.async_execute(env=noting(notes)))  # in any thread, and its event loop is closed
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as problem:
            error = next((line for line in reversed(str(problem).splitlines()) if line.strip()), "the kernel died")
        paths = sources(notes)
    progress(path.stem, done[0], len(code), time.monotonic() - begin, last=True)
    notebook.metadata["made_from"] = made_from(notebook, paths)
    notebook.metadata.pop("widgets", None)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return Outcome(path.stem, time.monotonic() - begin, figures(notebook, path.stem), error)


def figures(notebook: NotebookNode, stem: str) -> list[Path]:
    """Write the figures of an executed notebook to build/figures, and return where they are."""
    folder, found = BUILD / "figures", []
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{stem}_*.png"):
        old.unlink()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if image := output.get("data", {}).get("image/png"):
                found.append(folder / f"{stem}_{len(found) + 1}.png")
                found[-1].write_bytes(base64.b64decode(image))
    return found


def sends_jobs(path: Path) -> bool:
    """Say whether a notebook sends jobs and watches them: such notebooks share the queue and runs/, and go one by one.

    One that only waits for a single job of its own may wait behind theirs.
    """
    code = (cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    return bool(re.search(r"%%slurm|jobs\.(submit|watch|cancel)", "\n".join(code)))


def in_lanes(lanes: list[list[Path]], folder: Path) -> list[Outcome]:
    """Execute each lane's notebooks one after the other, the lanes side by side; Ctrl-C ends all kernels."""
    outcomes: list[Outcome] = []
    stopped = threading.Event()

    def drive(lane: list[Path]) -> None:
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
    return sorted(outcomes, key=lambda one: one.name)


def run(only: list[str], in_place: bool) -> int:
    """Execute the notebooks whose names start with one of `only` (all if it is empty). Returns the exit status."""
    paths = [p for p in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")) if not only or p.stem.startswith(tuple(only))]
    if not paths:
        stop(f"no notebook begins with {' or '.join(only)}: give numbers, such as 03")
    folder, begin = NOTEBOOKS if in_place else BUILD / "notebooks", time.monotonic()
    lanes = [[p for p in paths if sends_jobs(p) is jobs] for jobs in (True, False)]
    try:
        outcomes = in_lanes([paths] if in_place else lanes, folder)  # committed outputs: nothing ran beside them
    except KeyboardInterrupt:
        sys.exit(f"stopped by Ctrl-C: what was executed until then is in {folder}")
    print(f"\n{'notebook':<28} {'result':<8} {'seconds':>7}  figures")
    for one in outcomes:
        where = f"build/figures/{one.name}_1..{len(one.figures)}.png" if one.figures else "none"
        print(f"{one.name:<28} {'FAILED' if one.error else 'ok':<8} {one.seconds:7.0f}  {where}")
    slowest = sorted(outcomes, key=lambda each: -each.seconds)[:3]
    print("slowest:", ", ".join(f"{each.name} {each.seconds:.0f} s" for each in slowest))
    print(f"executed copies: {folder.relative_to(ROOT)}/, {time.monotonic() - begin:.0f} s in all")
    for one in outcomes:
        if one.error:
            print(f"{one.name}: {one.error}", file=sys.stderr)
    return int(len(outcomes) < len(paths) or any(one.error for one in outcomes))
