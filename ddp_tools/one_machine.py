"""Settings for ranks that are all on this machine: a free port, only the loopback, hidden GPUs.

Needs only the standard library.
"""

import secrets
import socket
import sys
from collections import deque

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Ranks that are all on this machine use the interface that no other machine can reach.
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # and AMD's
PORTS = range(20_000, 32_768)  # from 32768 on, Linux assigns ports to clients
HELD: deque[socket.socket] = deque(maxlen=100)  # keep the last ports from other calls


def free_port() -> int:
    """Return a random free port of this machine, and reserve it against other calls.

    Rank 0 listens on it seconds later, and in between other launches ask for ports.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        probe = socket.socket()
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.close()
            continue
        if sys.platform == "linux":  # a server may bind it next to a socket that does not listen
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            HELD.append(probe)
        else:
            probe.close()
        return port
