"""What the doctor looks at: on each rank alone, before the ranks meet, and then together."""

import hashlib
import io
import ipaddress
import os
import platform
import shutil
import socket
import struct
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
import torchvision

from ddp_helpers.rank.data import check_data
from ddp_helpers.rank.doctor.facts import SHARED, Facts
from ddp_helpers.rank.topology import Topology, whole


class Overheard(io.StringIO):
    """What the main thread says on stderr, kept. Other threads speak on: the alarm of meet() ends the process."""

    def __init__(self, out: io.TextIOBase) -> None:
        super().__init__()
        self.out = out

    def write(self, text: str) -> int:
        """Keep it, or let it through."""
        return super().write(text) if current_thread() is main_thread() else self.out.write(text)


def overhear(call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call gives, or the one line with which it stops or fails, and which then ends no process. Any rank."""
    said = Overheard(sys.stderr)
    result, line, lines = None, "", []
    try:
        with redirect_stderr(said):
            result = call()
        lines = said.getvalue().splitlines()
    except SystemExit:
        *lines, line = said.getvalue().splitlines() or ["stopped without a word"]
    except Exception as error:  # whatever it is, this rank must come to the next collective
        lines, line = said.getvalue().splitlines(), str(error).partition("\n")[0] or type(error).__name__
    for other in lines:  # warnings
        print(other, file=sys.stderr)
    return result, line


def versions() -> dict[str, str]:
    """What must be the same on all ranks."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "torchvision": torchvision.__version__}
    if torch.cuda.is_available():
        found |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def gpu_of(device: torch.device) -> str:
    """The GPU's own number: cuda:0 is another one in each process that is shown one GPU only."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def interface(me: Topology, backend: str) -> tuple[str, bool]:
    """The network interface that this rank uses, and whether it is loopback. Raises OSError if there is none."""
    names = [name for _, name in socket.if_nameindex()]
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    if named := os.environ.get(variable):
        if backend == "gloo" and (unknown := set(named.split(",")) - set(names)):
            raise OSError(f"{variable}={named}, but {', '.join(sorted(unknown))} is not among {', '.join(names)}")
        return f"{variable}={named}", "lo" in named.removeprefix("=").split(",")
    family, *_, place = socket.getaddrinfo(me.master_addr, me.master_port or 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # asks for the way, and sends nothing
        address = probe.getsockname()[0].partition("%")[0]
    name = next((name for name in names if address_of(name) == address), "")
    return f"{name} ({address})" if name else address, ipaddress.ip_address(address).is_loopback


def address_of(name: str) -> str:
    """The IPv4 address of a network interface, where the system is Linux."""
    with suppress(OSError, ImportError):
        from fcntl import ioctl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # SIOCGIFADDR
            return socket.inet_ntoa(ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))[20:24])
    return ""


def dataset(root: Path) -> str:
    """The data's name, and for a generated set a digest, since two of them can differ. Stops unless it is whole."""
    name, sums = check_data(root), Path(root) / "MNIST" / "raw" / "MD5SUMS"
    return f"{name} {hashlib.md5(sums.read_bytes()).hexdigest()[:8]}" if sums.is_file() else name


def free(path: Path) -> int:
    """Bytes free where this path is, or would be."""
    path = Path(path).absolute()
    for place in (path, *path.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def look(me: Topology, args: Namespace) -> Facts:
    """What a rank finds out alone; every rank calls it. Stops at a variable that is no number."""
    node = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    facts = Facts(me.rank, me.local_rank, me.world_size, me.node, me.launcher, platform.node())
    facts.tasks = whole(os.environ, "SLURM_NTASKS", 1) if me.launcher == "single" else 1
    facts.asked = whole(os.environ, "SLURM_CPUS_PER_TASK", 1)
    facts.versions, facts.cpus, facts.machine = versions(), sorted(node), os.cpu_count() or 1
    facts.threads, facts.workers = int(threads) if threads.isdecimal() else 1, args.num_workers
    device, facts.device_error = overhear(lambda: me.device(cuda=not args.no_cuda))
    if device:
        facts.device, facts.gpu = str(device), gpu_of(device)
        facts.backend = "nccl" if device.type == "cuda" else "gloo"
    found, facts.interface_error = overhear(lambda: interface(me, facts.backend))
    facts.interface, facts.loopback = found or ("", False)
    facts.data, facts.data_error = overhear(lambda: dataset(args.data))
    facts.folder, facts.free = str(args.run_dir), free(args.run_dir)
    facts.shm = free(Path("/dev/shm")) if Path("/dev/shm").exists() else SHARED
    return facts
