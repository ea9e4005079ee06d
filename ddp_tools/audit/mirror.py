"""A copy-on-write copy of a folder: links to its files, each replaced before a script writes to it.

The audit's command makes one for each run with `--cwd`; the observer, on every rank, replaces a
link with a copy before the script writes to the file. Needs no torch.
"""

import os
import shutil
from pathlib import Path

MIRRORED = "DDP_AUDIT_MIRRORED"  # the environment variable with the path of the folder
_MOST = 100_000  # files; as many links take seconds


def mirror(folder: Path, to: Path, without: Path) -> None:
    """Recreate the tree of a folder in another one, with a link to each file.

    Links to folders become links. without: a folder that is left out. Raises PlainError if there
    are too many files.
    """
    from ddp_tools import PlainError  # imported here: ranks cannot import the course's package

    count = 0
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [
            name for name in folders if name not in links and Path(place, name) != without
        ]
        count += len(files)
        if count > _MOST:
            cure = "give a folder with only the script's files, and a link to the data"
            raise PlainError(f"--cwd {folder} holds more than {_MOST} files: {cure}")
        here = to / Path(place).relative_to(folder)
        here.mkdir(exist_ok=True)
        for name in [*files, *links]:
            (here / name).symlink_to(Path(place, name))


def part(path: Path, empties: bool) -> None:
    """Replace a link of the mirror with a copy of its file, before a write.

    empties: whether the write truncates the file, so that an empty one will do. Any rank calls it.
    """
    mirrored = os.environ.get(MIRRORED)
    if not mirrored or not path.is_symlink():
        return
    target = path.readlink()
    if not target.is_relative_to(mirrored) or not target.is_file():
        return
    own = path.with_name(f"{path.name}.{os.getpid()}")
    if empties:
        own.touch()
    else:
        shutil.copy2(target, own)
    own.replace(path)  # atomic, since another rank may read it
