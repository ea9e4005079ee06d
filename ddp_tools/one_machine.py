"""What ranks that are all on this machine need: a port, the loopback alone, no GPU to see.

It needs the standard library alone.
"""

import secrets
import socket
import sys
from collections import deque

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Ranks that are all on this machine talk over what no other machine can reach.
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # and AMD's
PORTS = range(20_000, 32_768)  # from 32768 on, Linux gives them to whoever asks for any port
HELD: deque[socket.socket] = deque(maxlen=100)  # each keeps a port that was asked for last


def free_port() -> int:
    """Return a port of this machine that is free, at random, and keep it from other calls.

    Rank 0 listens on it seconds later, and meanwhile others start and ask for many.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        probe = socket.socket()
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.close()
            continue
        if sys.platform == "linux":  # a server may take it beside a socket that only holds it
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            HELD.append(probe)
        else:
            probe.close()
        return port
