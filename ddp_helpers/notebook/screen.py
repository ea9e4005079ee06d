"""The lines of many ranks on one screen: labelled, coloured, each rank's progress bar on a line of its own."""

import re
import sys
import time
from pathlib import Path

from ddp_helpers import ROOT

# ANSI colours that a terminal, JupyterLab and a code host all show; no two neighbours look alike.
COLOURS = [34, 33, 32, 35, 36, 31, 90, 94]
REDRAW = 0.2  # seconds from one to the next: a notebook is slow at it
PROGRESS = re.compile(r"\[#*\.*\] \d+/\d+")
PATHS = {str(ROOT): ".", sys.prefix: "<python>", sys.base_prefix: "<python>", str(Path.home()): "~"}


def tidy(line: str) -> str:
    """A line without the paths of this machine, which help nobody else."""
    for path, short in PATHS.items():
        if path != "/":  # a container's home
            line = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w-]|\.\w)", short, line)
    return line


def coloured(label: str, line: str) -> str:
    """The line behind its label, in the colour of its rank."""
    number = re.search(r"\d+", label)
    if not number:
        return line
    # Its last digits will do: what looks like a rank may be a number that is too long for int().
    return f"\x1b[{COLOURS[int(number[0][-6:]) % len(COLOURS)]}m[{label}]\x1b[0m {line}"


def mark_of(line: str) -> int:
    """The number in a line's label, by which a stable sort puts each rank's lines together."""
    label = re.match(r"\x1b\[\d+m\[\D*(\d{1,6})\]", line)
    return int(label[1]) if label else -1


class Screen:
    """One output that is updated in place in a notebook; in a terminal, plain lines."""

    def __init__(self, sort: bool = False) -> None:
        self.sort = sort  # show each rank's lines in a block of its own
        self.shown: list[str] = []
        self.bars: dict[str, int] = {}  # key: where its line stands in `shown`, to be replaced
        self.handle, self.drawn = None, 0.0  # drawn: when, 0 for never
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
            from IPython.display import DisplayHandle

            self.handle = DisplayHandle()

    def wait(self, text: str) -> None:
        """In a notebook, say what is being waited for, until there is a line: an import of torch takes seconds."""
        if self.handle is not None:
            self.handle.display({"text/plain": text}, raw=True)
            self.drawn = time.monotonic() - REDRAW  # the first line need not wait

    def add(self, label: str, line: str) -> None:
        """Show one more line; a progress bar takes the place of the one before it."""
        if not PROGRESS.search(line):
            self.bars.pop(label, None)
        self.put(label if PROGRESS.search(line) else None, coloured(label, tidy(line)))

    def put(self, key: str | None, text: str) -> None:
        """Show a line in the place of the one before it with the same key; below all others if it has none."""
        before = self.shown[self.bars[key]] if key in self.bars else ""
        if before:
            self.shown[self.bars[key]] = text
        else:
            if key:
                self.bars[key] = len(self.shown)
            self.shown.append(text)
        if self.handle is None:  # a terminal keeps every line, so one that only counts on is left out
            if not before or re.sub(r"\d+", "", before) != re.sub(r"\d+", "", text):
                print(text, flush=True)
        elif time.monotonic() - self.drawn > REDRAW:
            self.draw()

    def draw(self) -> None:
        """Bring the output up to date."""
        if self.handle is None or not (self.shown or self.drawn):
            return
        lines = sorted(self.shown, key=mark_of) if self.sort else self.shown
        text = {"text/plain": "\n".join(lines)}
        (self.handle.update if self.drawn else self.handle.display)(text, raw=True)
        self.drawn = time.monotonic()
