"""Ranks that stay: `%%ranks 2` runs a cell on two processes of one group, which keep its variables.

After a hang `%ranks again` starts new ones, on which the same cells run. All of it runs in the
driver process; `resident` has the ranks.
"""

import atexit
import json
import re
import tempfile
from pathlib import Path

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from ddp_helpers.launch.engine import LaunchError
from ddp_helpers.launch.resident import LIMIT, ResidentRanks, Stopped, UnknownName

# The first line of a cell, after `%%ranks`.
OPTIONS = re.compile(
    r"(?P<size>[1-9]\d?)"
    r"(?P<here> here)?"
    r"( limit=(?P<limit>\d+(\.\d+)?))?"
    r"(?P<fails> fails)?"
)
_FROM_THE_FIRST = "run the cells from the first with `%%ranks` on"

_ranks: ResidentRanks | None = None
# The cells that have completed, even on earlier ranks of the same number, and the time limit of
# each in seconds.
_done: list[tuple[str, float]] = []


def end() -> None:
    """End the ranks that stay, if there are any; the kernel calls it at its end."""
    global _ranks
    if _ranks:
        _ranks.end()
    _ranks = None
    _done.clear()


def ranks_of_size(size: int) -> ResidentRanks:
    """Return the present ranks; new ones if there are none, or a different number, or one ended."""
    global _ranks
    if _ranks and not _ranks.busy and not _ranks.alive():
        print("a rank has ended since the last cell: these are new ones, without its variables")
    if _ranks and _ranks.size != size:
        end()
    if _ranks and _are_lost(_ranks):
        _ranks.end()
        _ranks = None
    _ranks = _ranks or ResidentRanks(size)
    return _ranks


def _are_lost(ranks: ResidentRanks) -> bool:
    """Return whether ranks were ended in a cell, or one has ended since."""
    return ranks.busy or not ranks.alive()


def _run(size: int, cell: str, limit: float) -> None:
    """Run a cell on `size` ranks, and keep it for `%ranks again` if it completes."""
    ranks_of_size(size).run(cell, limit)
    _done.append((cell, limit))


def start(size: int, /, **variables: object) -> None:
    """Start `size` ranks, if they do not run yet, and give all of them these variables.

    They may be numbers, strings, and lists and dicts of them.
    """
    values = json.dumps(variables)
    cell = f"globals().update(__import__('json').loads({values!r}))"
    _run(size, cell, LIMIT)


def pull(name: str) -> list:
    """Fetch a variable from each rank: its value on rank 0, on rank 1, and so on.

    The values may be tensors and plain values. Raises LaunchError if there are no ranks, or they do
    not have the name.
    """
    import torch  # here: a notebook that starts no ranks does not need it

    if not _ranks or _ranks.busy or not _ranks.alive():
        raise LaunchError(f"pull({name!r}): no ranks are there: {_FROM_THE_FIRST}")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder + '/'!r} + __import__('os').environ['RANK']"
        _ranks.run(f"__import__('torch').save({name}, {path})", LIMIT)
        paths = [Path(folder) / str(rank) for rank in range(_ranks.size)]
        return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]


def ranks_magic(line: str, cell: str) -> None:
    """Run this cell on ranks that stay: `%%ranks 2`, `%%ranks 2 here`, `%%ranks 2 limit=10 fails`.

    here: run it in this kernel too; limit: seconds; fails: it is meant to fail. Raises LaunchError,
    even if such a cell does not fail, and UsageError for a line or a cell that cannot be read.
    """
    options = OPTIONS.fullmatch(line.strip())
    if not options or (options["limit"] and not float(options["limit"])):
        usage = "give a number of ranks; seconds above 0 as in `limit=10`"
        usage += ", `here` to run it in this kernel too, and `fails` if it is meant to"
        raise UsageError(f"%%ranks {line}: {usage}")
    try:
        compile(cell, "cell", "exec")
    except SyntaxError as error:
        reason = f"line {(error.lineno or 0) + 1}: {error.msg}"
        cure = "only Python runs on ranks, no `!` and no `%`"
        raise UsageError(f"%%ranks: {reason}: {cure}") from None
    if options["here"]:
        shell = get_ipython()
        assert shell is not None, "only IPython calls this magic"
        if not shell.run_cell(cell).success:
            raise LaunchError("this kernel's part failed, above: no rank has run the cell")
    try:
        _run(int(options["size"]), cell, float(options["limit"] or LIMIT))
    except LaunchError as error:
        if isinstance(error, Stopped) or not options["fails"]:
            if _done and _ranks and _are_lost(_ranks):
                error.args = (f"{error}\n{_again(len(_done))}",)
            raise
        if isinstance(error, UnknownName):
            raise LaunchError(f"{error}\nit was not meant to fail so: {_FROM_THE_FIRST}") from None
        print(error)
    else:
        if options["fails"]:
            raise LaunchError("this cell was meant to fail, and did not")


def _again(count: int) -> str:
    """Describe how ranks that were ended get their variables back."""
    cells = f"the {count} cells that" if count > 1 else "the cell that"
    return f"to continue from here, run `%ranks again`: new ranks then run {cells} these had run"


def again_magic(line: str) -> None:
    """Start new ranks, and run the cells that completed before, in order: `%ranks again`.

    It hides the output of these cells. Raises UsageError for a different line, and LaunchError if
    there were no ranks, or a cell fails this time.
    """
    global _ranks
    if line.strip() != "again":
        raise UsageError(f"%ranks {line}: `%ranks again`, or a cell that begins with `%%ranks 2`")
    if not _ranks or not _done:
        raise LaunchError(f"%ranks again: no cell has run on ranks yet: {_FROM_THE_FIRST}")
    size = _ranks.size
    _ranks.end()
    _ranks = None
    for cell, limit in _done:
        with capture_output():
            ranks_of_size(size).run(cell, limit)
    print(f"{size} new ranks have run {len(_done)} cells, as the ranks before them had")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register `%%ranks`: `%load_ext ddp_helpers.launch.ranks`."""
    register = shell.register_magic_function
    register(ranks_magic, "cell", "ranks")  # type: ignore[arg-type]  # IPython types it unbound
    register(again_magic, "line", "ranks")  # type: ignore[arg-type]
    atexit.register(end)
