"""Note which files beneath a folder this process reads, or lists.

Python loads this by itself at its start wherever this folder is on PYTHONPATH: in the kernel of a
notebook that `course.execute` runs, and in all that it starts, ranks too.
"""

import fcntl
import os
import sys

_BELOW = os.environ.get("DDP_OPENED_BELOW", "")
_NOTES = os.environ.get("DDP_OPENED_NOTES", "")
_noted: set[str] = set()


def _note(event: str, arguments: tuple) -> None:
    """Append the path of what is read to the notes; called at each event of sys.audit."""
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    opened = arguments[0]
    if not isinstance(opened, str | bytes):
        return
    mode, flags = arguments[1:] if event == "open" else ("", 0)
    if set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    try:
        path = os.path.abspath(os.fsdecode(opened))  # noqa: PTH100 no pathlib in every process
        if path.startswith(_BELOW + os.sep) and path not in _noted:
            _noted.add(path)
            os.write(_file, f"{path}\n".encode())
    except OSError:
        # No working directory any more, or no notes: whoever opens the file must not fail for it.
        return


if _BELOW and _NOTES:
    # Opened once, before the audit listens to what a script writes; a high number, which nobody
    # else is given.
    _first = os.open(_NOTES, os.O_WRONLY | os.O_APPEND)
    _file = fcntl.fcntl(_first, fcntl.F_DUPFD_CLOEXEC, 900)
    os.close(_first)
    sys.addaudithook(_note)
