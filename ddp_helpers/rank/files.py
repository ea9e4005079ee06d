"""Write files whole or not at all, also in folders in which others may write.

Any process calls `write_atomically`, ranks and the learner's alike. It needs the standard library.
"""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file in its place when all of it is on the disk; any process calls it.

    Until then it has a name that is new each time, and that no symbolic link can have: nobody
    else's file is touched. Raises OSError, and then nothing has changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".part-{os.urandom(8).hex()}"
    try:
        with part.open("xb") as file:  # x: O_CREAT with O_EXCL, which follows no link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # first: after a power cut the name has all of it behind it
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
