"""The checks of the doctor: each gives what was seen, or raises Red."""

import hashlib
import os
import platform
import re
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
import torchvision

from ddp_helpers.rank.doctor.case import Case, Red, overhear
from ddp_helpers.rank.doctor.reduce import check_reduce
from ddp_helpers.rank.group import claim_device
from ddp_helpers.rank.staging import check_data


def whole(name: str, default: int = 1) -> int:
    """A variable that holds a whole number. Raises Red where it holds something else."""
    value = os.environ.get(name) or str(default)
    if not value.isdecimal() or len(value) > 18:
        raise Red(f"{name} is {value!r}, not a whole number", "let the launcher set it")
    return int(value)


def arrive(case: Case) -> None:
    """Claim a device, and leave notes of all that the ranks must not share; every rank calls it."""
    _, case.trouble = overhear(lambda: claim(case))
    case.cpus = list(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    # Several nodes may be pretended on one host.
    case.node = f"{case.host} {os.environ.get('SLURM_NODEID') or os.environ.get('GROUP_RANK')}"
    notes = [f"local rank {case.node} {case.local_rank}", *(f"cpu {case.node} {cpu}" for cpu in case.cpus)]
    notes += ["hosts"] if case.store.add(f"host {case.host}", 1) == 1 else []
    notes += ["gpus"] if case.gpu and (case.store.add(case.gpu, 1) == 1 or may_share()) else []
    for note in notes:
        case.store.add(note, 1)


def claim(case: Case) -> None:
    """Claim this rank's device, as the scripts do. Raises Red where there is none, or one that torch cannot use."""
    case.device = str(claim_device(case.local_rank, case.args.no_cuda))
    if case.device != "cpu":
        its, built = torch.cuda.get_device_properties(case.device), torch.cuda.get_arch_list()
        if not runs_on((its.major, its.minor), built):
            raise Red(f"{its.name} is sm_{its.major}{its.minor}, and this torch is built for {' '.join(built)}")
        case.gpu = f"GPU {its.uuid}{own_slice(case.device)} on {case.host}"


def may_share() -> bool:
    """Whether NCCL, from 2.30 on, was told that ranks may share a GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.nccl.version() >= (2, 30)


def own_slice(device: str) -> str:
    """The MIG slice behind cuda:N, by the name in CUDA_VISIBLE_DEVICES, or "" where there is none."""
    # The driver's call gives a slice's own number (cuda.h); of the property that torch reads nothing is promised.
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = next(iter(names[int(device.partition(":")[2]) :]), "").strip()
    return f" {name}" * name.startswith("MIG-")


def runs_on(its: tuple[int, int], built: list[str]) -> bool:
    """Whether code that was built for these runs there: sm_ on the same major number, compute_ on any later one."""
    known = [match.groups() for name in built if (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)", name))]
    fits = [kind == "compute" or int(a) == its[0] for kind, a, b in known if (int(a), int(b)) <= its]
    return any(fits) or not known  # not NVIDIA's


def check_ranks(case: Case) -> str:
    """Ranks from one launcher, each with a local rank of its own; who did not answer is added by rank 0."""
    if case.size == 1 < (tasks := whole("SLURM_NTASKS")) and case.launcher in ("single", "slurm"):
        raise Red(f"alone, but the job has SLURM_NTASKS={tasks}", "start it with srun, torchrun or mpirun")
    hosts, by = case.count("hosts"), case.launcher.replace("single", "no launcher")
    said = f"{case.size} rank{'s' * (case.size > 1)} on {hosts} host{'s' * (hosts > 1)}, started by {by}"
    if (first := case.first("ranks", said)) != said:
        raise Red(f"{said}, where rank 0 says {first}")
    if case.count(f"local rank {case.node} {case.local_rank}") > 1:
        raise Red(f"local rank {case.local_rank} on {case.host} twice")
    return said


def nccl_class() -> str:
    """The class that the name "nccl" will make: the older one, or the newer, ProcessGroupNCCL2."""
    getattr(dist.Backend, "_ensure_backend_registered", str)("nccl")  # torch reads the variable here
    maker = dist.Backend._plugins.get("NCCL")  # before torch 2.14 there is one class, and no maker
    return "ProcessGroupNCCL2" if maker and "nccl2" in maker.creator_fn.__name__ else "ProcessGroupNCCL"


def check_versions(case: Case) -> str:
    """Python, torch, torchvision, CUDA, NCCL and the class behind "nccl" are the same on all ranks."""
    said = f"python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}"
    if torch.cuda.is_available():
        asked = os.environ.get("TORCH_DIST_USE_NCCL2", "not set")
        said += f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        said += f" by {nccl_class()} (TORCH_DIST_USE_NCCL2: {asked})"
    if (first := case.first("versions", said)) != said:
        raise Red(said, f"use one environment on all nodes; rank 0 has {first}")
    return said


def check_devices(case: Case) -> str:
    """Every rank has a GPU of its own that this torch can use, or none has one."""
    if case.trouble:
        raise Red(*case.trouble)
    if not case.gpu and case.count("gpus"):
        raise Red("no GPU, where others have one")
    if case.gpu and case.count(case.gpu) > 1 and not may_share():
        raise Red(f"{case.gpu} is shared")
    return case.device


def check_cpus(case: Case) -> str:
    """Each rank has the CPUs that its task asked for, one for itself and each worker, and one for each thread."""
    asked, machine, workers = whole("SLURM_CPUS_PER_TASK"), os.cpu_count() or 1, case.args.num_workers
    if len(case.cpus) < asked:
        cure = [f"ask for at most --cpus-per-task={machine}: the machine has no more"] if machine < asked else []
        raise Red(f"CPUs: {len(case.cpus)}, but --cpus-per-task={asked}", *cure)
    shares = [1 / case.count(f"cpu {case.node} {cpu}") for cpu in case.cpus]
    own = asked if case.launcher == "slurm" else int(sum(shares) + 1e-9)
    if own <= workers:
        more = f"--num-workers {own - 1}" if own else "fewer ranks on a node"
        raise Red(f"CPUs of its own: {own}, for itself and --num-workers {workers}", f"{more}, or more --cpus-per-task")
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal() and own < int(threads):
        raise Red(f"CPUs of its own: {own}, for OMP_NUM_THREADS={threads}", f"export OMP_NUM_THREADS={own}")
    return f"each rank's own: {own}"


def check_network(case: Case) -> str:
    """Check that ranks on another host can reach the address on which gloo listens here."""
    address, name = os.environ.get("GLOO_SOCKET_IFNAME", ""), socket.gethostname()
    if unknown := {*address.split(",")} - {"", *(known for _, known in socket.if_nameindex())}:
        raise Red(f"GLOO_SOCKET_IFNAME={address}: there is no {', '.join(sorted(unknown))}")
    loopback = "lo" in address.split(",")
    if not address:
        address = "127.0.0.1"  # which gloo takes where nobody knows the host's name
        try:
            address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
        except OSError:
            if case.count("hosts") == 1:
                cure = f"127.0.1.1 {name} as a line of /etc/hosts; or torchrun --standalone --local-addr=localhost"
                raise Red(f"{name}, this machine's name, has no address: torchrun waits minutes for it", cure) from None
        loopback = address == "::1" or address.startswith("127.")
    if loopback and case.count("hosts") > 1:
        raise Red(f"gloo listens on {address} ({name}), which does not leave {case.host}")
    return f"gloo listens on {address} ({name})"


def check_dataset(case: Case) -> str:
    """All ranks have the same data, and it is whole; two generated sets can differ, and are told by their digests."""
    if case.args.data == Path("none"):
        return "not looked at"
    name, trouble = overhear(lambda: check_data(case.args.data))
    with suppress(OSError):
        name = f"{name} {hashlib.md5((case.args.data / 'MNIST/raw/MD5SUMS').read_bytes()).hexdigest()[:8]}"
    first = case.first("data", "" if trouble else name)
    if trouble:
        raise Red("no whole data", trouble[0])
    if first not in ("", name):
        raise Red(f"{name}, where rank 0 has {first}")
    return f"{name}, whole on each rank"


def check_space(case: Case) -> str:
    """There is room for records and checkpoints."""
    if (room := shutil.disk_usage(there(case.args.run_dir)).free) < 1e9:
        raise Red(f"{room / 1e9:.2f} GB free for {case.args.run_dir}")
    return f"{room / 1e9:.0f} GB free for the run folder"


def there(path: Path) -> Path:
    """This folder, or the one in which it would be made."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def check_shm(case: Case) -> str:
    """There is room for the batches of DataLoader workers, and for NCCL on one host: more than Docker's default."""
    room, workers = shutil.disk_usage(there(Path("/dev/shm"))).free, case.args.num_workers
    if room <= 64 * 2**20 and (workers or (case.gpu and case.size > 1)):
        raise Red(f"{room / 2**20:.0f} MB for {f'--num-workers {workers}' if workers else 'NCCL'}")
    return f"{room / 2**20:,.0f} MB free"


# ---- what all ranks do together


def check_clocks(case: Case) -> str:
    """The hosts' clocks agree, when all ranks look at them: a busy host that looks late is not red."""
    case.together("clocks")
    before = time.time()
    case.together("clocks are looked at")
    first = float(case.first("clock", str(time.time())))  # of a moment between `before` and now
    skew = max(before - first, 0) or min(time.time() - first, 0)
    if abs(skew) > 1:
        raise Red(f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} rank 0")
    return "within a second of rank 0's"


def check_folder(case: Case) -> str:
    """All ranks see what rank 0 writes into the run folder; it is removed at the end."""
    folder, file, why, seen = case.args.run_dir.absolute(), "", "", False
    with ExitStack() as cleaning:
        try:
            if case.rank == 0:
                file = cleaning.enter_context(NamedTemporaryFile(dir=there(folder), prefix=".doctor-")).name
        except OSError as error:
            why = f"{folder} cannot be written ({error.strerror})"
        place, file = case.first("folder", str(folder)), case.first("file", file)
        for _ in range(20):  # a file system may take its time
            with suppress(OSError):
                seen = bool(str(folder) == place and (not file or Path(file).stat()))
            time.sleep(0 if seen else 0.1)
        case.together("file")
    if why:
        raise Red(why)
    if not seen:
        raise Red(f"not in {folder}: the file that rank 0 wrote")
    return "" if case.rank else f"all ranks see what rank 0 wrote for {folder}"


CHECKS = {  # each row of the table: its check, and the usual cure
    "ranks": (check_ranks, "let one launcher start all ranks, export none; read the missing one's own output"),
    "versions": (check_versions, "use one environment on all nodes"),
    "devices": (check_devices, "as many GPUs as tasks on each node, and a torch built for them; or --no-cuda"),
    "cpus": (check_cpus, 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'),
    "network": (check_network, "export GLOO_SOCKET_IFNAME= the interface between the nodes: ip -brief address"),
    "clocks": (check_clocks, "have the clocks of the nodes set (chronyc makestep, as root)"),
    "all-reduce": (check_reduce, "the same code on all nodes, and no red row above; --no-cuda, NCCL_DEBUG=INFO"),
    "run folder": (check_folder, "a --run-dir on a file system that all nodes share, and that you may write to"),
    "data": (check_dataset, "one --data for all ranks, on a shared file system"),
    "space": (check_space, "make room for 1 GB, or another --run-dir"),
    "/dev/shm": (check_shm, "docker run --shm-size=1g, or --ipc=host; or --num-workers 0"),
}
TOGETHER = ("clocks", "all-reduce", "run folder")  # what needs all ranks
