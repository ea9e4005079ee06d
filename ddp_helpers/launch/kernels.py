"""Start kernels that listen on files: a rank may take a port before a kernel listens on it.

A warm kernel is forked from the warm server, which has imported what notebooks import: it starts
seconds earlier.
"""

import os
import signal
import sys
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any
from uuid import uuid4

from jupyter_client import AsyncKernelManager, KernelConnectionInfo
from jupyter_client.provisioning import LocalProvisioner

from ddp_helpers.launch.engine import Processes
from ddp_helpers.launch.processes import SURE
from ddp_helpers.launch.shared import socket_folder

# What the server of warm kernels imports besides torch: a kernel, and what most notebooks import.
_OF_NOTEBOOKS = ["ipykernel.kernelapp", "pandas", "matplotlib.pyplot", "torchvision"]
_INLINE = "module://matplotlib_inline.backend_inline"


_folder = cache(socket_folder)  # one for this process, removed with it
_making = Lock()  # two threads could make two, one of which is removed at once


def file_transport() -> dict[str, str]:
    """Return options of a KernelManager that let no other user read what its cells show."""
    with _making:
        path = f"{_folder().name}/kernel-{uuid4().hex}.json"
    return {"transport": "ipc", "connection_file": path}


class KernelOnFiles(AsyncKernelManager):
    """A kernel manager for the `kernel_manager_class` of NotebookClient and papermill."""

    def __init__(self, **options: object) -> None:
        """Take the options of AsyncKernelManager."""
        super().__init__(**file_transport(), **options)


class WarmKernel(KernelOnFiles):
    """A KernelOnFiles whose kernel is forked from the warm server.

    It hides a forgotten import of a cell: committed outputs come from kernels that are not forked.
    """

    async def _async_pre_start_kernel(self, **options: Any) -> tuple:
        """Choose what starts the kernel, and return its command and the options for that."""
        if self.provisioner is None:
            self.provisioner = _Forks(
                parent=self, kernel_id=str(uuid4()), kernel_spec=self.kernel_spec
            )
        return await super()._async_pre_start_kernel(**options)


class _Forked:
    """A forked kernel, with the methods of subprocess.Popen that LocalProvisioner calls."""

    stdin = stdout = stderr = None

    def __init__(self, launch: Processes) -> None:
        self.launch, self.pid = launch, launch.process_ids[0]

    def poll(self) -> int | None:
        return self.launch.statuses()[0]

    def wait(self) -> int | None:
        self.launch.wait(SURE)
        return self.poll()

    def send_signal(self, number: int) -> None:
        self.launch.send_signal(0, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forks(LocalProvisioner):
    """Has the warm server fork a kernel; jupyter_client would start a new Python."""

    async def launch_kernel(self, cmd: list[str], **options: Any) -> KernelConnectionInfo:
        """Fork the kernel; the command is `python -m ipykernel_launcher -f FILE`."""
        launch = Processes()
        launch.call(
            _serve_cells,
            cmd[cmd.index("-f") :],
            environment=options["env"],
            folder=options.get("cwd"),
            modules=_OF_NOTEBOOKS,
        )
        self.process = _Forked(launch)  # type: ignore[assignment]
        self.pid = self.pgid = launch.process_ids[0]  # it leads a session
        return self.connection_info


def _serve_cells(argv: Sequence[str]) -> None:
    """Run a kernel as a new Python would; the forked process calls it.

    argv: the arguments of ipykernel.
    """
    import matplotlib
    from ipykernel.kernelapp import IPKernelApp

    # A new Python takes these from its command, its installation and its environment; `server` has
    # done the rest.
    sys.argv = ["ipykernel_launcher", *argv]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [*filter(None, given), *installed]
    matplotlib.rcParams["backend"] = os.environ.setdefault("MPLBACKEND", _INLINE)
    IPKernelApp.launch_instance([*argv, f"--IPKernelApp.parent_handle={os.getppid()}"])
