"""The lines of many ranks on one screen: labelled, coloured, each rank's progress bar on a line of its own."""

import re
import sys
import time
from pathlib import Path

from ddp_helpers import ROOT

# ANSI colours that a terminal, JupyterLab and a code host all show; no two neighbours look alike.
COLOURS = [34, 33, 32, 35, 36, 31, 90, 94]
REDRAW = 0.2  # seconds from one to the next, at least: a notebook is slow at it
RATE = 100_000  # characters a second, at most: each time, all that is shown goes to the browser anew
WIDEST = 2000  # characters of a line that a notebook shows
PROGRESS = re.compile(r"\[#*\.*\] \d+/\d+")
PATHS = {str(ROOT): ".", sys.prefix: "<python>", sys.base_prefix: "<python>", str(Path.home()): "~"}


def tidy(line: str) -> str:
    """A line without the paths of this machine, which help nobody else."""
    for path, short in PATHS.items():
        if path != "/":  # a container's home
            line = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w-]|\.\w)", short, line)
    return line


def cut(line: str) -> str:
    """The line as far as a notebook shows it, and how many characters it goes on."""
    more = len(line) - WIDEST
    return f"{line[:WIDEST]} … and {more:,} more characters" if more > 0 else line


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
        self.due, self.fresh = 0.0, False  # when it may be drawn again; whether there is anything to draw
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
            from IPython.display import DisplayHandle

            self.handle = DisplayHandle()

    def wait(self, text: str) -> None:
        """In a notebook, say what is being waited for, until there is a line: an import of torch takes seconds."""
        if self.handle is not None:
            self.handle.display({"text/plain": text}, raw=True)
            self.drawn = time.monotonic()  # the first line need not wait

    def add(self, label: str, line: str) -> None:
        """Show one more line; a progress bar takes the place of the one before it."""
        line = line if self.handle is None else cut(line)
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
        if self.handle is not None:
            self.fresh = True
            self.refresh()
        elif not before or re.sub(r"\d+", "", before) != re.sub(r"\d+", "", text):
            print(text, flush=True)  # a terminal keeps every line, so one that only counts on is left out

    def refresh(self) -> None:
        """Draw what is not drawn yet, if it is time; who waits for lines calls it again and again."""
        if self.fresh and time.monotonic() > self.due:
            self.draw()

    def draw(self) -> None:
        """Bring the output up to date."""
        if self.handle is None or not (self.shown or self.drawn):
            return
        lines = sorted(self.shown, key=mark_of) if self.sort else self.shown
        text = "\n".join(lines)
        (self.handle.update if self.drawn else self.handle.display)({"text/plain": text}, raw=True)
        self.drawn, self.fresh = time.monotonic(), False
        self.due = self.drawn + REDRAW + len(text) / RATE
