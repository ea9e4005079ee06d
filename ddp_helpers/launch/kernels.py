"""Start kernels that listen on files: a port that was free can be taken by a rank before the kernel listens on it."""

import tempfile
from uuid import uuid4

from jupyter_client import AsyncKernelManager


def on_files() -> dict[str, str]:
    """Options of a KernelManager; the files have short paths, since Linux takes no more than 107 letters."""
    return {"transport": "ipc", "connection_file": f"{tempfile.gettempdir()}/kernel-{uuid4().hex}.json"}


class KernelOnFiles(AsyncKernelManager):
    """What NotebookClient and papermill take as `kernel_manager_class`."""

    def __init__(self, **options: object) -> None:
        super().__init__(**on_files(), **options)
