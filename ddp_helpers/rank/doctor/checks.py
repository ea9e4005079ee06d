"""The checks of the doctor: each rank finds a value, and rank 0 compares the values of all ranks.

Both raise CheckFailed, or stop, if something is wrong. They need torch and torchvision.
"""

import hashlib
import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path

import torch
import torchvision

from ddp_helpers.data.mnist_files import check_data
from ddp_helpers.rank.device import is_real_gpu, pick_device
from ddp_helpers.rank.doctor.case import Case, CheckFailed, capture
from ddp_helpers.rank.doctor.reduce import find_sum


def find_place(case: Case) -> list:
    """Find which launcher started this rank, and on which host."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if case.launcher == "slurm" and case.size == 1 and tasks != "1":  # in a shell of salloc
        raise CheckFailed(f"alone, but the job has SLURM_NTASKS={tasks}")
    return [case.launcher.replace("single", "no launcher"), case.host]


def compare_places(rank: int, places: dict) -> str:
    """Count ranks and hosts."""
    hosts = len({host for _, host in places.values()})
    ranks = f"{len(places)} rank{'s' * (len(places) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    return f"{ranks}, started by {places[rank][0]}"


def find_versions(_: Case) -> str:
    """Find the versions that must be equal on all ranks."""
    versions = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    versions.append(f"torchvision {torchvision.__version__}")
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
    return ", ".join(versions)


def alike(rank: int, values: dict) -> str:
    """Check that a value is equal on all ranks."""
    first = values[min(values)]
    if values[rank] != first:
        raise CheckFailed(f"{values[rank]}, but rank {min(values)} has {first}")
    return first


def find_device(case: Case) -> list[str]:
    """Claim a device as the scripts do."""
    with redirect_stderr(StringIO()) as said:
        device = pick_device(case.local_rank, case.args.no_cuda)
    if device.type == "cpu":
        if line := said.getvalue().strip():  # a script prints it and continues
            raise CheckFailed(line)
        return ["", "cpu"]
    case.device, card = str(device), torch.cuda.get_device_properties(device)
    # The driver's name of a MIG slice is in CUDA_VISIBLE_DEVICES.
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[device.index :][:1]
    part = "".join(f" {name}" for name in given if name.startswith("MIG-"))
    case.gpu = f"GPU {card.uuid}{part} on {case.host}"
    return [case.gpu, case.device + ("" if is_real_gpu(device) else " (simulated)")]


def compare_devices(rank: int, devices: dict) -> str:
    """Check that each rank has its own GPU, or no rank has one."""
    gpu, device = devices[rank]
    gpus = [each for each, _ in devices.values()]
    if not gpu and any(gpus):
        raise CheckFailed("no GPU, but other ranks have one")
    if gpu and gpus.count(gpu) > 1 and not may_share():
        raise CheckFailed(f"{gpu} is shared")
    return device


def may_share() -> bool:
    """Return whether NCCL lets ranks share a GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def find_cpus(case: Case) -> list:
    """Find the CPUs on which this process may run, and how many it will use."""
    cpus = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):  # Linux
        cpus = list(os.sched_getaffinity(0))
    asked = int(os.environ.get("SLURM_CPUS_PER_TASK") or 1)
    if len(cpus) < asked:
        raise CheckFailed(f"CPUs: {len(cpus)}, but --cpus-per-task={asked}")
    threads = int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0] or 1)
    workers = case.args.num_workers
    used = f"--num-workers {workers}, and OMP_NUM_THREADS={threads}"
    # Tasks that are not bound to CPUs see all of them, but may use only one task's.
    own = asked if case.launcher == "slurm" else 0
    node = os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK")  # one host may be two
    return [own, [f"{case.host} {node} {cpu}" for cpu in cpus], max(workers + 1, threads), used]


def compare_cpus(rank: int, found: dict) -> str:
    """Check that each rank has a CPU for itself and each worker, or for each thread."""
    ranks_on = Counter(cpu for _, cpus, _, _ in found.values() for cpu in cpus)
    own, cpus, needed, used = found[rank]
    own = own or int(sum(1 / ranks_on[cpu] for cpu in cpus) + 1e-9)
    if own < needed:
        raise CheckFailed(f"CPUs of its own: {own}, too few with {used}")
    return f"each rank's own: {own}"


def find_address(_: Case) -> str:
    """Look up this machine's own name."""
    name = socket.gethostname()
    try:
        return f"{name} is {socket.getaddrinfo(name, None)[0][4][0]}"
    except OSError:
        line = f"{name}, this machine's name, has no address: torchrun waits minutes for it"
        raise CheckFailed(line) from None


def find_data(case: Case) -> str:
    """Check that the data is complete; two generated sets differ in their digests."""
    data = case.args.data
    if data == Path("none"):
        return "not looked at"
    name, labels = check_data(data), data / "MNIST/raw/train-labels-idx1-ubyte"
    digest = hashlib.md5(labels.read_bytes()).hexdigest()
    return f"{name} {digest[:8]}, complete on each rank"


def find_shm(case: Case) -> str:
    """Check that /dev/shm has room for loaders' batches, and for NCCL on one host.

    They need more than Docker's default.
    """
    free, workers = shutil.disk_usage(existing(Path("/dev/shm"))).free, case.args.num_workers
    if free <= 64 * 2**20 and (workers or (case.gpu and case.size > 1)):
        user = f"--num-workers {workers}" if workers else "NCCL"
        raise CheckFailed(f"{free / 2**20:.0f} MB for {user}")
    return f"{free / 2**20:,.0f} MB free"


def existing(path: Path) -> Path:
    """Return this folder, or the existing folder in which it would be made."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


# ---- the checks that all ranks make together, by rank 0's plan


def make_plan(case: Case, found: dict[int, dict]) -> dict:
    """Plan on GPUs or CPUs, and write a file that all ranks must see; rank 0 calls it."""
    gpus = [value[0] for value, _ in (told["devices"] for told in found.values()) if value]
    # NCCL hangs if two ranks have one GPU, or one has none: gloo can still report what is wrong.
    on_gpus = len(gpus) == case.size and all(gpus) and (len({*gpus}) == case.size or may_share())
    file, trouble = capture(partial(_write_into, case.args.run_dir))
    return {"on GPUs": on_gpus, "file": file, "trouble": trouble}


def _write_into(folder: Path) -> str:
    file = existing(folder) / f".doctor-{os.urandom(8).hex()}"
    file.touch(exist_ok=False)
    return str(file)


def find_folder(case: Case) -> str:
    """Check that this rank sees rank 0's file in the run folder, and that there is room."""
    file, folder = case.plan["file"], case.args.run_dir
    if case.plan["trouble"] and case.rank == 0:
        raise CheckFailed(f"{folder} cannot be written: {case.plan['trouble']}")
    end = time.monotonic() + 2  # a file system may be slow
    while file and not Path(file).exists():
        if time.monotonic() > end:
            raise CheckFailed(f"cannot see the file that rank 0 wrote: {file}")
        time.sleep(0.1)
    free = shutil.disk_usage(existing(folder)).free / 1e9
    if free < 1:
        raise CheckFailed(f"{free:.2f} GB free for {folder}")
    return f"each rank sees what rank 0 wrote for {folder}; {free:.0f} GB free"


CHECKS = {  # each row of the table: what a rank finds, how rank 0 compares it, and the usual cure
    "ranks": (
        find_place,
        compare_places,
        "start all ranks with one launcher (srun, mpirun, torchrun); export MASTER_ADDR and "
        "MASTER_PORT, the same for all ranks and for no other job; read a missing rank's output",
    ),
    "versions": (find_versions, alike, "use one environment on all nodes"),
    "devices": (
        find_device,
        compare_devices,
        "request a GPU for each task of a node (with MIG one slice per rank, --gpus-per-task=1), "
        "with a torch built for it; or --no-cuda",
    ),
    "cpus": (
        find_cpus,
        compare_cpus,
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"; or fewer --num-workers, a smaller '
        "OMP_NUM_THREADS, fewer ranks per node, more --cpus-per-task",
    ),
    "network": (
        find_address,
        None,
        "add a line to /etc/hosts: 127.0.1.1 and the name; "
        "or torchrun --standalone --local-addr=localhost",
    ),
    "data": (find_data, alike, "use one --data for all ranks, on a shared file system"),
    "/dev/shm": (
        find_shm,
        None,
        "docker run --shm-size=1g, or --ipc=host; or --num-workers 0",
    ),
    "all-reduce": (
        find_sum,
        None,
        "fix the failed checks above; set that variable to the interface between the nodes, with "
        "all ports open (ip -brief address); NCCL_DEBUG=INFO prints more, NCCL_P2P_DISABLE=1 "
        "avoids direct copies on one host, --no-cuda avoids NCCL",
    ),
    "run folder": (
        find_folder,
        None,
        "choose a --run-dir on a file system that all nodes share, with 1 GB free, that you may "
        "write to",
    ),
}
TOGETHER = ("all-reduce", "run folder")  # the checks that need all ranks


def look(case: Case, names: Iterable[str]) -> dict:
    """Make these checks on this rank; return the value and the fault of each."""
    return {name: capture(partial(CHECKS[name][0], case)) for name in names}


def judge(name: str, found: dict[int, dict]) -> tuple[str, str, str]:
    """Make the row of a check from the findings of all ranks: its name, the finding and the fix.

    A failed check names the ranks at fault. Rank 0 calls it.
    """
    _, compare, cure = CHECKS[name]
    values = {rank: told[name][0] for rank, told in found.items() if not told[name][1]}
    fine: dict[str, list[str]] = {}  # ranks, by finding
    at_fault: dict[str, list[str]] = {}
    for rank, told in found.items():
        seen, trouble = told[name]
        if compare and not trouble:
            seen, trouble = capture(partial(compare, rank, values))
        (at_fault if trouble else fine).setdefault(trouble or seen, []).append(str(rank))
    faults = []
    for seen, ranks in at_fault.items():
        everyone = len(ranks) == len(found) > 1
        who = "all ranks" if everyone else f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        faults.append(f"{who}: {seen}")
    return name, "; ".join(faults or [seen for seen in fine if seen][:4]), cure if faults else ""
