"""One server that has imported torch, from which many processes fork their warm servers.

It saves each of many notebooks or tests the import of torch. `server` has its code; this module
starts it and connects to it.
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

# An environment variable with the folder in which the server listens; child processes inherit it.
VARIABLE = "DDP_SERVER"


def socket_folder() -> tempfile.TemporaryDirectory:
    """Make a folder for sockets that only its user can enter: in /tmp if TMPDIR is long.

    A socket's path has at most 107 bytes on Linux, and 103 on macOS. A Jupyter kernel needs 50.
    """
    usual = tempfile.gettempdir()
    is_short = len(os.fsencode(usual)) <= 40
    return tempfile.TemporaryDirectory(prefix="ddp", dir=usual if is_short else "/tmp")


@contextmanager
def shared_server() -> Iterator[None]:
    """Let this process and its descendants fork their servers from one that has torch.

    On systems other than Linux it does nothing.
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
    """Return a socket to this process's own server, forked from the shared one.

    None if there is no shared one, or it differs from this process.
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
    """Return a checksum of what a process inherits by fork, besides its environment.

    A process in a different installation or namespace, of a different user, on different CPUs or in
    a job finds no server with its checksum, and starts its own.
    """
    spaces = [Path("/proc/self/ns", name).stat().st_ino for name in ("net", "mnt", "pid", "user")]
    limits = [resource.getrlimit(number) for number in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)]
    at_import = [os.environ.get(name) for name in ("PYTHONPATH", "LD_PRELOAD", "SLURM_JOB_ID")]
    facts = [sys.prefix, __file__, os.geteuid(), os.sched_getaffinity(0), spaces, limits, at_import]
    return f"{zlib.crc32(repr(facts).encode()):08x}"
