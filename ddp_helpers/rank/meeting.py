"""A meeting place that listens at its own address alone; run as a program, torchrun with such a one.

PyTorch's listens at all addresses of a machine, whichever it is given: on a laptop, to the whole
network. The ranks that a notebook starts meet at 127.0.0.1. This file needs torch alone.
"""

import socket
import sys
from contextlib import suppress

import torch.distributed as dist


class TCPStore(dist.TCPStore):
    """PyTorch's store, whose server, where this process is to have it, listens at `host_name` alone."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *args: object,
        **options: object,
    ) -> None:
        """Start the server, or come to it; as PyTorch's own."""
        if is_master:
            with suppress(OSError):  # without a socket, PyTorch's own tries, and says what is wrong
                listener = socket.create_server((host_name, port))
                port = listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, *args, **options)


def listen_narrowly() -> None:
    """Let this process's stores be such, also those of init_process_group; call it before it."""
    dist.TCPStore = sys.modules["torch.distributed.rendezvous"].TCPStore = TCPStore


if __name__ == "__main__":
    listen_narrowly()
    from torch.distributed.run import main

    main()
