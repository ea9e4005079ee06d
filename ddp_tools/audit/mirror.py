"""A folder in which a script finds another one's files, and writes without changing them.

The audit's command makes one for each run with `--cwd`; the observer, on every rank, has a file
parted from the other folder before the script writes to it. Needs no torch.
"""

import os
import shutil
from pathlib import Path

MIRRORED = "DDP_AUDIT_MIRRORED"  # the variable that tells the ranks which folder it is
_MOST = 100_000  # files, which take seconds


def mirror(folder: Path, to: Path, without: Path) -> None:
    """Make the folders below one folder anew in another, with a link to each file.

    A link stays one, also to a folder. without: a folder that is left out. Raises PlainError where
    there are too many files.
    """
    from ddp_tools import PlainError  # here: the ranks' script does not see the course

    count = 0
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        folders[:] = [
            name for name in folders if name not in links and Path(place, name) != without
        ]
        count += len(files)
        if count > _MOST:
            cure = "give a folder with what the script needs, in which a link leads to the data"
            raise PlainError(f"--cwd {folder} holds more than {_MOST} files: {cure}")
        here = to / Path(place).relative_to(folder)
        here.mkdir(exist_ok=True)
        for name in [*files, *links]:
            (here / name).symlink_to(Path(place, name))


def part(path: Path, empties: bool) -> None:
    """Put a file of its own in the place of a link of the mirror, about to be written to.

    empties: whether that begins with an empty file. Every rank may call it.
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
    own.replace(path)  # at once, since another rank may read it
