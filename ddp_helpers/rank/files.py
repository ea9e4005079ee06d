"""Write files atomically, even in folders in which other users may write.

Any process may call `write_atomically`. It needs only the standard library.
"""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that appears only when all of it is on the disk; any process calls it.

    Until then it has a new name each time, which no symbolic link can have: no other file is
    touched. Raises OSError, and then nothing has changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".part-{os.urandom(8).hex()}"
    try:
        with part.open("xb") as file:  # x: O_CREAT with O_EXCL, which follows no link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # first: after a power cut the named file is complete
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
