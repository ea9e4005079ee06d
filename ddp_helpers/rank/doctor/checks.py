"""The checks that need nobody's help: each gives what was seen, or raises Red."""

import hashlib
import ipaddress
import os
import platform
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import torch
import torchvision

from ddp_helpers.rank.doctor.case import Case, Red, overhear
from ddp_helpers.rank.staging import check_data
from ddp_helpers.rank.topology import Topology, whole

SHARED = 64 * 2**20  # bytes of /dev/shm, which is what a container gives without being asked


def plural(number: int, thing: str) -> str:
    """A number of things in words."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def check_ranks(case: Case) -> str:
    """Ranks from one launcher, each with a local rank of its own; who did not answer is added by rank 0."""
    me, tasks = case.me, whole(os.environ, "SLURM_NTASKS", 1)
    if me.world_size == 1 < tasks and me.launcher in ("single", "slurm"):
        raise Red(f"alone, but the job has SLURM_NTASKS={tasks}", "start it with srun, torchrun or mpirun")
    by = f"started by {me.launcher.replace('single', 'no launcher')}"
    said = f"{plural(me.world_size, 'rank')} on {plural(case.count('hosts'), 'host')}, {by}"
    if (first := case.first("ranks", said)) != said:
        raise Red(f"{said}, where rank 0 says {first}")
    if case.count(f"local rank {case.place} {me.local_rank}") > 1:
        raise Red(f"local rank {me.local_rank} on {case.host} twice")
    return said


def check_versions(case: Case) -> str:
    """Python, torch, torchvision, CUDA and NCCL are the same on all ranks."""
    said = f"python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}"
    if torch.cuda.is_available():
        said += f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    if (first := case.first("versions", said)) != said:
        raise Red(said, f"use one environment on all nodes; rank 0 has {first}")
    return said


def claim(me: Topology, cuda: bool) -> tuple[str, str]:
    """This rank's device, and the GPU's own number. Raises Red where this torch has no code for the GPU."""
    device = me.device(cuda)
    if device.type == "cpu":
        return "cpu", ""
    its, built = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if not runs_on(its, built):
        raise Red(f"{device} is sm_{its[0]}{its[1]}; torch {torch.__version__} is built for {' '.join(built)}")
    return str(device), str(torch.cuda.get_device_properties(device).uuid)


def runs_on(its: tuple[int, int], built: list[str]) -> bool:
    """Whether code that was built for these runs there: sm_ on the same major number, compute_ on any later one."""
    known = [match.groups() for name in built if (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)", name))]
    fits = [kind == "compute" or int(a) == its[0] for kind, a, b in known if (int(a), int(b)) <= its]
    return any(fits) or not known  # not NVIDIA's


def check_devices(case: Case) -> str:
    """Every rank has a GPU of its own that this torch can use, or none has one."""
    if case.device_error:
        raise Red(case.device_error)
    if not case.gpu and case.count("gpus"):
        raise Red("no GPU, where others have one")
    if case.gpu and case.count(f"gpu {case.host} {case.gpu}") > 1:
        raise Red(f"GPU {case.gpu} on {case.host} is shared")
    return case.device


def check_cpus(case: Case) -> str:
    """Each rank has the CPUs that its task asked for, one for itself and each worker, and one for each thread."""
    here, asked, machine = len(case.cpus), whole(os.environ, "SLURM_CPUS_PER_TASK", 1), os.cpu_count() or 1
    if here < asked:
        cure = f"ask for at most --cpus-per-task={machine}: the machine has no more" if machine < asked else ""
        raise Red(f"{plural(here, 'CPU')}, but --cpus-per-task={asked}", *([cure] if cure else []))
    shares = [1 / case.count(f"cpu {case.place} {cpu}") for cpu in case.cpus]
    own, workers = asked if case.me.launcher == "slurm" else int(sum(shares) + 1e-9), case.args.num_workers
    if own <= workers:
        more = f"--num-workers {own - 1}" if own else "fewer ranks on a node"
        seen = f"{plural(own, 'CPU')} of its own for itself and --num-workers {workers}"
        raise Red(seen, f"{more}, or more --cpus-per-task")
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal() and own < int(threads):
        raise Red(f"{plural(own, 'CPU')} of its own for OMP_NUM_THREADS={threads}", f"export OMP_NUM_THREADS={own}")
    return f"each rank has {plural(own, 'CPU')} of its own"


def check_network(case: Case) -> str:
    """Where gloo listens on this host, ranks on another one can reach it."""
    names, named = [name for _, name in socket.if_nameindex()], os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        if unknown := set(named.split(",")) - set(names):
            raise Red(f"GLOO_SOCKET_IFNAME={named}: {', '.join(sorted(unknown))} is not among {', '.join(names)}")
        place, loopback = f"GLOO_SOCKET_IFNAME={named}", "lo" in named.split(",")
    else:
        address = "127.0.0.1"  # which gloo takes where nobody knows the host's name
        with suppress(OSError):
            address = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]
        place = f"{address} ({socket.gethostname()})"
        loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if loopback and case.count("hosts") > 1:
        raise Red(f"gloo listens on {place}, which does not leave {case.host}")
    return f"gloo listens on {place}"


def check_dataset(case: Case) -> str:
    """All ranks have the same data, and it is whole; two generated sets can differ, and are told by their digests."""
    root = case.args.data
    name, trouble = overhear(lambda: check_data(root))
    with suppress(OSError):
        name = f"{name} {hashlib.md5((root / 'MNIST/raw/MD5SUMS').read_bytes()).hexdigest()[:8]}"
    first = case.first("data", "" if trouble else name)
    if trouble:
        raise Red("no whole data", trouble[0])
    if first not in ("", name):
        raise Red(f"{name}, where rank 0 has {first}")
    return f"{name}, whole on each rank"


def free(path: Path) -> int:
    """Bytes free where this path is, or would be."""
    for place in (path, *path.parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


def check_space(case: Case) -> str:
    """There is room for records and checkpoints."""
    room = free(case.args.run_dir.absolute())
    if room < 1e9:
        raise Red(f"{room / 1e9:.2f} GB free for {case.args.run_dir}")
    return f"{room / 1e9:.0f} GB free for the run folder"


def check_shm(case: Case) -> str:
    """There is room for the batches of DataLoader workers, and for NCCL on one host: more than Docker's default."""
    room, workers = free(Path("/dev/shm")), case.args.num_workers
    if room <= SHARED and Path("/dev/shm").exists() and (workers or (case.gpu and case.me.world_size > 1)):
        raise Red(f"{room / 2**20:.0f} MB for {plural(workers, 'worker') if workers else 'NCCL'}")
    return f"{room / 2**20:,.0f} MB free"
