"""Start kernels that listen on files: a rank may take a port before a kernel listens on it.

Whoever executes a notebook calls it: upkeep, jobs and tests.
"""

import tempfile
from uuid import uuid4

from jupyter_client import AsyncKernelManager


def file_transport() -> dict[str, str]:
    """Return options of a KernelManager.

    The files have short paths: Linux takes no more than 107 letters.
    """
    path = f"{tempfile.gettempdir()}/kernel-{uuid4().hex}.json"
    return {"transport": "ipc", "connection_file": path}


class KernelOnFiles(AsyncKernelManager):
    """A kernel manager for the `kernel_manager_class` of NotebookClient and papermill."""

    def __init__(self, **options: object) -> None:
        """Take the options of AsyncKernelManager."""
        super().__init__(**file_transport(), **options)
