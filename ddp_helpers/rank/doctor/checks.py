"""The checks of the doctor: each gives what was seen, or raises Red.

The doctor calls them on every rank, in the order of CHECKS. They need torch and torchvision.
"""

import hashlib
import os
import platform
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
import torchvision

from ddp_helpers.rank.doctor.arrival import MAY_SHARE
from ddp_helpers.rank.doctor.case import Case, CheckFailed, capture_trouble
from ddp_helpers.rank.doctor.reduce import check_reduce
from ddp_helpers.rank.staging import check_data


def _whole_number(variable: str) -> int:
    """Read a whole number from the environment, 1 if it is not set. Raises Red at anything else."""
    value = os.environ.get(variable) or "1"
    if not value.isdecimal() or len(value) > 18:
        raise CheckFailed(f"{variable} is {value!r}, not a whole number", "let the launcher set it")
    return int(value)


def check_ranks(case: Case) -> str:
    """Check that one launcher started all ranks, each with a local rank of its own.

    Rank 0 adds who did not answer.
    """
    tasks = _whole_number("SLURM_NTASKS") if case.size == 1 else 1
    if tasks > 1 and case.launcher in ("single", "slurm"):
        cure = "start it with srun, torchrun or mpirun"
        raise CheckFailed(f"alone, but the job has SLURM_NTASKS={tasks}", cure)
    hosts, launcher = case.count("hosts"), case.launcher.replace("single", "no launcher")
    ranks = f"{case.size} rank{'s' * (case.size > 1)} on {hosts} host{'s' * (hosts > 1)}"
    seen = f"{ranks}, started by {launcher}"
    if (first := case.first("ranks", seen)) != seen:
        raise CheckFailed(f"{seen}, where rank 0 says {first}")
    if case.count(f"local rank {case.node} {case.local_rank}") > 1:
        raise CheckFailed(f"local rank {case.local_rank} on {case.host} twice")
    return seen


def nccl_class() -> str:
    """Name the class that "nccl" will make: the older ProcessGroupNCCL, or ProcessGroupNCCL2."""
    # torch reads the variable here; before 2.14 there is one class, and nothing to register.
    getattr(dist.Backend, "_ensure_backend_registered", str)("nccl")
    plugin = dist.Backend._plugins.get("NCCL")
    is_newer = plugin and "nccl2" in plugin.creator_fn.__name__
    return "ProcessGroupNCCL2" if is_newer else "ProcessGroupNCCL"


def check_versions(case: Case) -> str:
    """Check that Python, torch, torchvision, CUDA, NCCL and its class are the same on all ranks."""
    versions = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    versions.append(f"torchvision {torchvision.__version__}")
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        setting = os.environ.get("TORCH_DIST_USE_NCCL2", "not set")
        by_class = f"{nccl_class()} (TORCH_DIST_USE_NCCL2: {setting})"
        versions += [f"CUDA {torch.version.cuda}", f"NCCL {nccl} by {by_class}"]
    seen = ", ".join(versions)
    if (first := case.first("versions", seen)) != seen:
        raise CheckFailed(seen, f"use one environment on all nodes; rank 0 has {first}")
    return seen


def check_devices(case: Case) -> str:
    """Check that every rank has a GPU of its own that this torch can use, or none has one."""
    if case.trouble:
        raise CheckFailed(*case.trouble)
    if not case.gpu and case.count("gpus"):
        raise CheckFailed("no GPU, where others have one")
    if case.gpu and case.count(case.gpu) > 1 and not MAY_SHARE:
        raise CheckFailed(f"{case.gpu} is shared")
    return case.device


def check_cpus(case: Case) -> str:
    """Check that each rank has the CPUs that its task asked for, one for each worker and thread."""
    task_cpus, machine = _whole_number("SLURM_CPUS_PER_TASK"), os.cpu_count() or 1
    if len(case.cpus) < task_cpus:
        seen = f"CPUs: {len(case.cpus)}, but --cpus-per-task={task_cpus}"
        if machine < task_cpus:
            cure = f"ask for at most --cpus-per-task={machine}: the machine has no more"
            raise CheckFailed(seen, cure)
        raise CheckFailed(seen)
    shares = [1 / case.count(f"cpu {case.node} {cpu}") for cpu in case.cpus]
    cpus = task_cpus if case.launcher == "slurm" else int(sum(shares) + 1e-9)
    seen = f"CPUs of its own: {cpus}"
    workers = case.args.num_workers
    if cpus <= workers:
        remedy = f"--num-workers {cpus - 1}" if cpus else "fewer ranks on a node"
        cure = f"{remedy}, or more --cpus-per-task"
        raise CheckFailed(f"{seen}, for itself and --num-workers {workers}", cure)
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal() and cpus < int(threads):
        raise CheckFailed(
            f"{seen}, for OMP_NUM_THREADS={threads}", f"export OMP_NUM_THREADS={cpus}"
        )
    return f"each rank's own: {cpus}"


def check_network(case: Case) -> str:
    """Check that ranks on another host can reach the address on which gloo listens here."""
    address, name = os.environ.get("GLOO_SOCKET_IFNAME", ""), socket.gethostname()
    chosen, known = set(address.split(",")), {known for _, known in socket.if_nameindex()}
    if unknown := chosen - known - {""}:
        missing = ", ".join(sorted(unknown))
        raise CheckFailed(f"GLOO_SOCKET_IFNAME={address}: there is no {missing}")
    stays_here = "lo" in chosen
    if not address:
        address = _address_of(name, alone=case.count("hosts") == 1)
        stays_here = address == "::1" or address.startswith("127.")
    seen = f"gloo listens on {address} ({name})"
    if stays_here and case.count("hosts") > 1:
        raise CheckFailed(f"{seen}, which does not leave {case.host}")
    return seen


def _address_of(name: str, alone: bool) -> str:
    """Look up this host's address, as gloo does. Raises Red if it has none and is alone."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        if not alone:
            return "127.0.0.1"  # which gloo takes
    line = f"127.0.1.1 {name} as a line of /etc/hosts"
    raise CheckFailed(
        f"{name}, this machine's name, has no address: torchrun waits minutes for it",
        f"{line}; or torchrun --standalone --local-addr=localhost",
    )


def check_dataset(case: Case) -> str:
    """Check that all ranks have the same data, and that it is whole.

    Two generated sets can differ, and are told apart by their digests.
    """
    data = case.args.data
    if data == Path("none"):
        return "not looked at"
    dataset, trouble = capture_trouble(lambda: check_data(data))
    name = dataset or ""
    with suppress(OSError):
        digest = hashlib.md5((data / "MNIST/raw/MD5SUMS").read_bytes()).hexdigest()
        name = f"{dataset} {digest[:8]}"
    first = case.first("data", "" if trouble else name)
    if trouble:
        raise CheckFailed("no whole data", trouble[0])
    if first not in ("", name):
        raise CheckFailed(f"{name}, where rank 0 has {first}")
    return f"{name}, whole on each rank"


def check_space(case: Case) -> str:
    """Check that there is room for records and checkpoints."""
    folder = case.args.run_dir
    free = shutil.disk_usage(_existing(folder)).free
    if free < 1e9:
        raise CheckFailed(f"{free / 1e9:.2f} GB free for {folder}")
    return f"{free / 1e9:.0f} GB free for the run folder"


def _existing(path: Path) -> Path:
    """Give this folder, or the one in which it would be made."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_shm(case: Case) -> str:
    """Check that there is room for loaders' batches, and for NCCL on one host.

    That is more than Docker's default.
    """
    free, workers = shutil.disk_usage(_existing(Path("/dev/shm"))).free, case.args.num_workers
    user = f"--num-workers {workers}" if workers else "NCCL"
    if free <= 64 * 2**20 and (workers or (case.gpu and case.size > 1)):
        raise CheckFailed(f"{free / 2**20:.0f} MB for {user}")
    return f"{free / 2**20:,.0f} MB free"


# ---- what all ranks do together


def check_clocks(case: Case) -> str:
    """Check that the hosts' clocks agree, when all ranks look at them.

    A busy host that looks late is not red.
    """
    case.together("clocks")
    before = time.time()
    case.together("clocks are looked at")
    first = float(case.first("clock", str(time.time())))  # of a moment between `before` and now
    skew = max(before - first, 0) or min(time.time() - first, 0)
    if abs(skew) > 1:
        raise CheckFailed(f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} rank 0")
    return "within a second of rank 0's"


def check_folder(case: Case) -> str:
    """Check that all ranks see what rank 0 writes into the run folder; it is removed at the end."""
    folder, written, problem = case.args.run_dir.absolute(), "", ""
    with ExitStack() as cleaning:
        try:
            if case.rank == 0:
                parent = _existing(folder)
                file = cleaning.enter_context(NamedTemporaryFile(dir=parent, prefix=".doctor-"))
                written = file.name
        except OSError as error:
            problem = f"{folder} cannot be written ({error.strerror})"
        expected = case.first("folder", str(folder)) == str(folder)
        written = case.first("file", written)
        is_seen = expected and _appears(written)
        case.together("file")
    if problem:
        raise CheckFailed(problem)
    if not is_seen:
        raise CheckFailed(f"not in {folder}: the file that rank 0 wrote")
    return "" if case.rank else f"all ranks see what rank 0 wrote for {folder}"


def _appears(path: str) -> bool:
    """Wait until a file is there, for two seconds: a file system may take its time. "" is there."""
    for _ in range(20):
        with suppress(OSError):
            if not path or Path(path).stat():
                return True
        time.sleep(0.1)
    return False


CHECKS = {  # each row of the table: its check, and the usual cure
    "ranks": (
        check_ranks,
        "let one launcher start all ranks, export none; read the missing one's own output",
    ),
    "versions": (check_versions, "use one environment on all nodes"),
    "devices": (
        check_devices,
        "as many GPUs as tasks on each node, and a torch built for them; or --no-cuda",
    ),
    "cpus": (check_cpus, 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'),
    "network": (
        check_network,
        "export GLOO_SOCKET_IFNAME= the interface between the nodes: ip -brief address",
    ),
    "clocks": (check_clocks, "have the clocks of the nodes set (chronyc makestep, as root)"),
    "all-reduce": (
        check_reduce,
        "the same code on all nodes, and no red row above; --no-cuda, NCCL_DEBUG=INFO",
    ),
    "run folder": (
        check_folder,
        "a --run-dir on a file system that all nodes share, and that you may write to",
    ),
    "data": (check_dataset, "one --data for all ranks, on a shared file system"),
    "space": (check_space, "make room for 1 GB, or another --run-dir"),
    "/dev/shm": (check_shm, "docker run --shm-size=1g, or --ipc=host; or --num-workers 0"),
}
TOGETHER = ("clocks", "all-reduce", "run folder")  # what needs all ranks
