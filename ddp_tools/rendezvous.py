"""A key-value store that listens at one address only; as a program, torchrun with such a store.

Ranks on one machine find each other at 127.0.0.1. PyTorch's own TCPStore listens at all addresses
of a machine, whichever it is given: on a laptop, to the entire network. Needs torch.
"""

import socket
import sys
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist


class TCPStore(dist.TCPStore):
    """PyTorch's TCPStore, whose server listens at `host_name` only."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        """Start the server or connect to it; the parameters are PyTorch's."""
        if is_master:
            with suppress(OSError):  # without a socket, PyTorch's own tries and reports the error
                listener = socket.create_server((host_name, port))
                port = listener.getsockname()[1]
                master_listen_fd = listener.detach()
        super().__init__(
            host_name,
            port,
            world_size,
            is_master,
            timeout=timeout,
            wait_for_workers=wait_for_workers,
            multi_tenant=multi_tenant,
            master_listen_fd=master_listen_fd,
            use_libuv=use_libuv,
        )


def listen_narrowly() -> None:
    """Use this class for all stores of this process; call it before init_process_group."""
    for module in (dist, sys.modules["torch.distributed.rendezvous"]):
        vars(module)["TCPStore"] = TCPStore


if __name__ == "__main__":
    listen_narrowly()
    from torch.distributed.run import main

    main()
