"""One server that has torch already, from which many processes get their warm servers as forks.

It saves each of many notebooks or tests the import of torch. What it does stands in `server`; here
it is started, and connected to.
"""

import os
import resource
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

# The folder in which the server listens: an environment variable that all processes below inherit.
VARIABLE = "DDP_SERVER"


def socket_folder() -> tempfile.TemporaryDirectory:
    """Make a folder for sockets that its user alone can enter: in /tmp where TMPDIR is long.

    Linux takes 107 bytes of a socket's path, and macOS 103. 50 of them are a kernel's in Jupyter.
    """
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) <= 40
    return tempfile.TemporaryDirectory(prefix="ddp", dir=usual if is_short else "/tmp")


@contextmanager
def shared_server() -> Iterator[None]:
    """Let this process, and all below it, have servers that are forked from one with torch.

    Elsewhere than on Linux it does nothing.
    """
    if sys.platform != "linux":
        yield
        return
    with socket_folder() as folder:
        command = [sys.executable, "-m", "ddp_helpers.launch.server", f"{folder}/{_inherited()}"]
        pipe = subprocess.PIPE
        server = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        with server:
            assert server.stdin and server.stdout
            server.stdout.readline()  # it listens
            os.environ[VARIABLE] = folder
            try:
                yield
            finally:
                os.environ.pop(VARIABLE, None)
                server.stdin.close()  # which ends it


def connect() -> socket.socket | None:
    """Return a socket to a server of one's own, forked from the shared one.

    None where there is no shared one, or it is not like this process.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(f"{folder}/{_inherited()}")
    except OSError:
        connected.close()
        return None
    told = Connection(os.dup(connected.fileno()))
    told.send((dict(os.environ), str(Path.cwd())))
    told.close()
    return connected


def _inherited() -> str:
    """Return a checksum of what a process has from the one that forks it, beside its environment.

    A process in another installation or namespace, of another user, on other CPUs or in a job finds
    no server by it, and starts its own.
    """
    spaces = [Path("/proc/self/ns", name).stat().st_ino for name in ("net", "mnt", "pid", "user")]
    limits = [resource.getrlimit(number) for number in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)]
    at_import = [os.environ.get(name) for name in ("PYTHONPATH", "LD_PRELOAD", "SLURM_JOB_ID")]
    facts = [sys.prefix, __file__, os.geteuid(), os.sched_getaffinity(0), spaces, limits, at_import]
    return f"{zlib.crc32(repr(facts).encode()):08x}"
