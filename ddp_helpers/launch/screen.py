"""The lines of many ranks on one screen: labelled, coloured, one line per progress bar.

It is in the driver process: a notebook, or a terminal.
"""

import re
import sys
import time
from pathlib import Path

from ddp_helpers import ROOT

# The colours of the ranks, similar to the figures', out of the 256 that a terminal, JupyterLab and
# a code host support. A label is white on its colour: no colour is readable on both white and
# black.
COLOURS = [27, 130, 28, 126, 24, 161, 243, 97]
REDRAW = 0.2  # least seconds between two drawings: a notebook is slow at it
RATE = 100_000  # most characters per second: each drawing sends all shown lines to the browser
WIDEST = 2000  # characters of a line that a notebook shows
PROGRESS = re.compile(r"\[#*\.*\] \d+/\d+")
PATHS = {
    str(ROOT): ".",
    sys.prefix: "<python>",
    sys.base_prefix: "<python>",
    str(Path.home()): "~",
}


def shorten_paths(line: str) -> str:
    """Return a line without this machine's paths, which mean nothing elsewhere."""
    for path, short in PATHS.items():
        if path != "/":  # a container's home
            line = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w-]|\.\w)", short, line)
    return line


def cut(line: str) -> str:
    """Return a line as far as a notebook shows it, and how many more characters it has."""
    rest = len(line) - WIDEST
    return f"{line[:WIDEST]} … and {rest:,} more characters" if rest > 0 else line


def on_colour(text: str, colour: int) -> str:
    """Return a text in white on one of the 256 colours."""
    return f"\x1b[38;5;231;48;5;{colour}m{text}\x1b[0m"


def coloured_line(label: str, line: str) -> str:
    """Return a line after its label, on the colour of the rank that the label names."""
    number = re.search(r"\d+", label)
    if not number:
        return line
    # Only its last digits: what looks like a rank may be a number too long for int().
    colour = COLOURS[int(number[0][-6:]) % len(COLOURS)]
    return f"{on_colour(f'[{label}]', colour)} {line}"


def _rank_of(line: str) -> int:
    """Return the number in the label of a coloured line, -1 if there is none."""
    label = re.match(r"\x1b\[[\d;]+m\[\D*(\d{1,6})\]", line)
    return int(label[1]) if label else -1


class Screen:
    """One output that is updated in place in a notebook; in a terminal, plain lines.

    shown: the lines, as they are or will be drawn.
    """

    def __init__(self, sort: bool = False) -> None:
        """Show nothing yet. sort: show the lines of each rank in a block."""
        self.shown: list[str] = []
        self._sort = sort
        self._keyed: dict[str, int] = {}  # the index in `shown` of a line that will be replaced
        self._drawn = 0.0  # when the output was last drawn, 0 for never
        self._due = 0.0  # when it may be drawn again
        self._changed = False  # whether there is anything to draw
        self._handle = None
        if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
            from IPython.display import DisplayHandle

            self._handle = DisplayHandle()

    def wait_for_ranks(self, count: int, how: str = "") -> None:
        """In a notebook, show that ranks start, until the first line: it may take seconds."""
        if self._handle is not None:
            text = f"starting {count} rank{'s' * (count != 1)}{how} …"
            self._handle.display({"text/plain": text}, raw=True)
            self._drawn = time.monotonic()  # the first line need not wait

    def add(self, label: str, line: str) -> None:
        """Show one more line; a progress bar replaces the previous bar of its label."""
        if self._handle is not None:
            line = cut(line)
        is_bar = bool(PROGRESS.search(line))
        if not is_bar:
            self._keyed.pop(label, None)
        self.put(label if is_bar else None, coloured_line(label, shorten_paths(line)))

    def put(self, key: str | None, text: str) -> None:
        """Replace the line that has this key; without a key, add a line below all others."""
        before = ""
        if key and key in self._keyed:
            index = self._keyed[key]
            before, self.shown[index] = self.shown[index], text
        else:
            if key:
                self._keyed[key] = len(self.shown)
            self.shown.append(text)
        if self._handle is not None:
            self._changed = True
            self.refresh()
        elif not before or _without_numbers(before) != _without_numbers(text):
            print(text, flush=True)  # a terminal keeps every line: one that only counts is left out

    def refresh(self) -> None:
        """Draw what is not drawn yet, if it is time; call it often while waiting for lines."""
        if self._changed and time.monotonic() > self._due:
            self.draw()

    def draw(self) -> None:
        """Bring the output up to date."""
        if self._handle is None or not (self.shown or self._drawn):
            return
        lines = sorted(self.shown, key=_rank_of) if self._sort else self.shown
        text = "\n".join(lines)
        draw = self._handle.update if self._drawn else self._handle.display
        draw({"text/plain": text}, raw=True)
        self._drawn, self._changed = time.monotonic(), False
        self._due = self._drawn + REDRAW + len(text) / RATE


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+", "", line)
