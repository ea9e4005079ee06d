"""Check what a job needs, on all its ranks, before it burns an hour; rank 0 prints a table.

torchrun --standalone --nproc-per-node 2 -- doctor.py --data data
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python doctor.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python doctor.py --data data
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from torch import Tensor
from typing import Any, NoReturn
import hashlib
import json
import os
import platform
import shutil
import socket
import sys
import time
import torch
import torch.distributed as dist
import torchvision


VERDICTS = "ok", "RED"


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Look at the job; every rank calls it.

    Leaves with 0 if all is green, 1 if a row is red, 2 if what was given cannot be used.
    """
    args = parse_flags(argv, prog)
    case = Case(*who_am_i(), args)
    try:
        status = examine(case)
    except (CheckFailed, dist.DistError) as error:
        print(f"rank {case.rank} gets no answer from rank 0: {one_line(error)}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    if case.blocked:  # a thread that waits inside NCCL could hold the interpreter's end
        os._exit(status)
    sys.exit(status)


def parse_flags(argv: list[str] | None = None, prog: str | None = None) -> Namespace:
    """Read the doctor's flags; every rank calls it."""
    purpose = "Check what a job needs before it burns an hour."
    layout = RawDescriptionHelpFormatter
    usage = "%(prog)s [flags]; --help lists them"
    parser = ArgumentParser(prog, usage, purpose, formatter_class=layout, allow_abbrev=False)
    program = f"--no-python -- {parser.prog}" if prog else f"-- {parser.prog}"
    parser.epilog = f"""example:
  torchrun --standalone --nproc-per-node 2 {program} --data none

exit status: 0: all is green; 1: a row is red; 2: what was given cannot be used"""
    data, runs = os.environ.get("DDP_MNIST_ROOT", "data"), os.environ.get("DDP_RUNS") or "runs"
    run_dir_help = "folder for run records, which all nodes share"
    workers_help = "DataLoader workers that each rank will start"
    add = parser.add_argument
    add("--data", type=Path, default=data, help="holds MNIST/raw; none: not asked")
    add("--run-dir", type=Path, default=runs, help=run_dir_help)
    add("--num-workers", type=int, default=0, help=workers_help)
    add("--timeout", type=int, default=30, help="seconds to wait for other ranks")
    add("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    add("--json", type=Path, metavar="FILE", help="rank 0 also writes the rows there")
    return parser.parse_args(argv)


def examine(case: Case) -> int:
    """Have each rank look, and rank 0 judge; every rank calls it, and returns the exit status.

    Raises CheckFailed or DistError on a rank that rank 0 does not answer.
    """
    seconds = case.args.timeout
    _, trouble = capture(case.meet)
    if trouble and case.rank:
        raise CheckFailed(trouble)
    case.tell("found", look(case, [name for name in CHECKS if name not in TOGETHER]))
    if case.rank == 0:
        found = case.gather("found", 1 if trouble else seconds)
        lost = missing(case, found)
        if lost and not trouble:
            trouble = f"{lost} missing after {seconds} s"
        case.store.set("plan", json.dumps({} if trouble else make_plan(case, found)))
    case.plan = case.hear("plan")
    if case.plan:
        case.tell("found together", look(case, TOGETHER))
    if case.rank == 0:
        names = [name for name in CHECKS if case.plan or name not in TOGETHER]
        if case.plan:
            together = case.gather("found together", seconds + 10)
            if case.plan["file"]:
                Path(case.plan["file"]).unlink()
            if lost := missing(case, together):
                trouble = f"{lost} is lost on the way"
            found = {rank: found[rank] | told for rank, told in together.items()}
        rows = [judge(name, found) for name in names]
        if trouble:
            rows[0] = ("ranks", trouble, CHECKS["ranks"][-1])
        case.store.set("status", json.dumps(print_table(rows)))
        if case.args.json:
            table = [
                {"name": n, "verdict": VERDICTS[bool(c)], "seen": s, "cure": c} for n, s, c in rows
            ]
            case.args.json.write_text(json.dumps({"rows": table}, indent=1) + "\n")
    status = case.hear("status")
    case.tell("end", status)
    if case.rank == 0:
        case.gather("end", 2)  # rank 0, which may keep the store, goes last
    return status


def missing(case: Case, told: dict) -> str:
    """Name the ranks that have not told; "" if all have."""
    ranks = [str(rank) for rank in range(case.size) if rank not in told]
    return f"rank {', '.join(ranks)} of {case.size}" if ranks else ""


def print_table(rows: list[tuple[str, str, str]]) -> int:
    """Print the rows, a cure below each red one, and give the exit status; rank 0 calls it."""
    lines = [f"{'check':<11} {'':<3} what was seen"]
    for name, seen, cure in rows:
        lines.append(f"{name:<11} {VERDICTS[bool(cure)]:<3} {seen}")
        if cure:
            lines.append(f"{'':<15} cure: {cure}")
    red = sum(bool(cure) for _, _, cure in rows)
    lines.append(f"{red} of {len(rows)} checks RED" if red else f"all {len(rows)} checks green")
    text = "\n".join(lines)
    sys.stdout.write(f"{text}\n")  # at once: print() would send the last line's end by itself
    sys.stdout.flush()
    return min(red, 1)


# What launchers export. The last three words are rank, local rank and world size; before them
# stands what names this start. The first row whose words are all set counts, as a whole: inside a
# Slurm job mpirun's ranks have SLURM_PROCID=0, too.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": (
        "PMIX_NAMESPACE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # Intel MPI, too
    "slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PALS_APID", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


def who_am_i() -> tuple[str, int, int, int]:
    """Read launcher, rank, local rank and world size from the environment; every rank calls it."""
    for launcher, names in LAUNCHERS.items():
        if all(name in os.environ for name in names):
            rank, local_rank, world_size = (int(os.environ[name]) for name in names[-3:])
            return launcher, rank, local_rank, world_size
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        if os.environ.get(name, "1") != "1":
            cure = "start it with srun, mpirun or torchrun"
            sys.exit(f"{name}={os.environ[name]}, but no launcher started this process: {cure}")
    return "single", 0, 0, 1


def cpus_of_rank() -> int:
    """Count the CPUs that this process has to itself; any process calls it.

    They are those of its Slurm task, or its share of torchrun's.
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        cpus = len(os.sched_getaffinity(0))
    sharing = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's ranks on this node
    task_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if task_cpus.isdecimal() and int(task_cpus):
        cpus = min(cpus, int(task_cpus))  # of the task, which is torchrun with all its ranks
    return max(1, cpus // max(1, int(sharing) if sharing.isdecimal() else 1))


class CheckFailed(Exception):
    """A check has failed: what was seen."""


def capture(call: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function; return its value and "", or None and the line with which it stopped.

    Any rank calls it, which then comes to the next check.
    """
    said = StringIO()
    try:
        with redirect_stderr(said):
            return call(), ""
    except SystemExit as end:  # its line was printed, or is the status
        return None, said.getvalue().strip() or str(end.code)
    except Exception as error:
        return None, one_line(error)


def one_line(error: Exception) -> str:
    """Give an error's text as one line without C++ frames; NCCL's reason is in its last line."""
    text = str(error).partition("\nException raised from")[0]
    return " ".join(text.split()) or repr(error)


@dataclass
class Case:
    """One rank of the job under examination."""

    launcher: str
    rank: int
    local_rank: int
    size: int
    args: Any  # the doctor's flags
    store: dist.Store = field(default_factory=dist.HashStore)
    host: str = field(default_factory=platform.node)
    device: str = "cpu"
    gpu: str = ""  # the card's own name: cuda:0 is another one where a process is shown one GPU
    plan: dict = field(default_factory=dict)  # for what all ranks do together
    blocked: bool = False  # a call never came back: its thread would hold this process at its end

    def tell(self, name: str, value: object) -> None:
        """Leave what rank 0 gathers; every rank calls it."""
        self.store.set(f"{name} of {self.rank}", json.dumps(value))

    def gather(self, name: str, seconds: float) -> dict[int, Any]:
        """Wait for what the ranks tell, and return it for those that have; rank 0 calls it."""
        keys = [f"{name} of {rank}" for rank in range(self.size)]
        end = monotonic() + seconds
        while not self.store.check(keys) and monotonic() < end:  # wait() would warn in C++
            sleep(0.02)
        there = {rank: key for rank, key in enumerate(keys) if self.store.check([key])}
        return {rank: json.loads(self.store.get(key)) for rank, key in there.items()}

    def hear(self, name: str) -> Any:
        """Wait for what rank 0 has announced; every rank calls it."""
        self.store.wait([name], timedelta(seconds=2 * self.args.timeout + 20))
        return json.loads(self.store.get(name))

    def within(self, seconds: float, call: Callable[[], Any]) -> Any:
        """Call a function in a thread, and return its value, or raise what it raises.

        Raises TimeoutError after so many seconds; it runs on then.
        """
        values: list[Any] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                values.append(call())
            except Exception as error:
                errors.append(error)

        thread = Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if not values:
            self.blocked = True
            raise TimeoutError(f"no answer after {seconds} s")
        return values[0]

    def meet(self) -> None:
        """Find the store that rank 0, or torchrun, keeps; every rank calls it."""
        if self.size == 1:
            return
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        variables = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if not (address and port):
            raise CheckFailed(f"{variables}: no meeting point")
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        seconds = self.args.timeout
        try:
            check_address(address, int(port), seconds, is_host)
            limit = timedelta(seconds=seconds)
            args = address, int(port), None, is_host, limit, False  # and waits for nobody
            # A stranger at the port may never answer.
            store = self.within(seconds, lambda: dist.TCPStore(*args))
        except Exception as error:
            state = "cannot listen" if is_host else "is not there, or the port is a stranger's"
            raise CheckFailed(f"{variables}: rank 0 {state} ({one_line(error)})") from error
        # No other job, and no attempt before this, has these keys.
        names = [*LAUNCHERS.get(self.launcher, ())[:-3], "TORCHELASTIC_RESTART_COUNT"]
        start = " ".join(os.environ.get(name, "") for name in names)
        self.store = dist.PrefixStore(f"doctor {start}", store)


def check_address(address: str, port: int, seconds: float, is_host: bool) -> None:
    """Wait until the address is known, and somebody listens there; every rank calls it.

    TCPStore would tell of its attempts in pages of C++. A new name may come late.
    """
    end = monotonic() + seconds
    while True:
        try:
            if is_host:
                socket.getaddrinfo(address, port)
            else:
                socket.create_connection((address, port), 1).close()
            return
        except OSError:
            if monotonic() > end:
                raise
        sleep(0.1)


# MNIST's own digests: they find damage, not forgery. A generated set brings its own in MD5SUMS.
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def has_files(root: Path) -> bool:
    """Tell whether any of the four files is there; `check_data` tells whether they are whole."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in MNIST_MD5)


def check_data(root: Path) -> str:
    """Name the dataset under root, MNIST or digits; every rank calls it.

    Stops unless all four files are whole, by their MD5.
    """
    raw = Path(root) / "MNIST" / "raw"
    try:
        digests = _read_digests(raw / "MD5SUMS") or MNIST_MD5
        for name in MNIST_MD5:
            path = raw / name
            if not path.is_file():
                refuse(
                    root,
                    f": {path} is missing; get it once, before any rank: ddp-course data {root}, "
                    f"or without the course download_data.py --data {root}",
                )
            if hashlib.md5(path.read_bytes()).hexdigest() != digests.get(name):
                problem = f": {path} is cut short or damaged (wrong MD5)"
                refuse(root, f"{problem}; remove {raw} and get it again")
    except OSError as error:
        problem = f": {error.filename} cannot be read ({error.strerror})"
        refuse(root, f"{problem}: choose another folder")
    return "MNIST" if digests == MNIST_MD5 else "digits"


def refuse(root: Path, problem: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(f"--data {root}{problem}".replace("\n", " "), file=sys.stderr, flush=True)
    sys.exit(2)


def _read_digests(path: Path) -> dict[str, str]:
    """Read the digest of each file from MD5SUMS; {} if there is none. Raises OSError."""
    if not path.is_file():
        return {}
    lines = path.read_text(errors="replace").splitlines()
    entries = [line.split() for line in lines if line.strip()]
    return {entry[-1]: entry[0] for entry in entries}


def pick_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim the GPU of this local rank, or the only one that it sees; the CPU if none can be used.

    Every rank calls it. Stops where there are fewer GPUs than ranks, or those given are of no use.
    """
    count = 0 if no_cuda else torch.cuda.device_count()  # also of those that CUDA cannot use
    given = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("SLURM_JOB_GPUS", ""))
    # The only one may be this rank's own, as with --gpus-per-task=1; torchrun's ranks all see it.
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    may_take_it = count == 1 and (may_share or "TORCHELASTIC_RUN_ID" not in os.environ)
    if count and local_rank >= count and not may_take_it:
        cure = f"start {count} on a node, or give --no-cuda"
        sys.exit(f"local rank {local_rank} has no GPU ({count} here): {cure}")
    device = torch.device("cuda", min(local_rank, count - 1)) if count else torch.device("cpu")
    why = f"torch {torch.__version__} sees none"
    try:
        if count:
            # Of torch's two classes for NCCL the older: it lets messages overlap with computing.
            os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
            torch.cuda.set_device(device)
            torch.zeros(1, device=device).add_(1)  # a driver too old, or a GPU, says so here
            return device
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    if given not in ("", "-1", "NoDevFiles") and not no_cuda:
        sys.exit(f"GPU {given} is given, but {why}: see nvidia-smi, or give --no-cuda")
    if count:
        print(f"the CPU is used, and not the GPU: {why}", file=sys.stderr, flush=True)
    return torch.device("cpu")


def is_real_gpu(device: torch.device) -> bool:
    """Tell whether the device is a GPU, and none that `ddp-course gpus` simulates on the CPU."""
    return device.type == "cuda" and "SIMULATED_GPUS" not in os.environ


def has_bf16(device: torch.device) -> bool:
    """Tell whether the device has units for bfloat16.

    A processor without them emulates it, and is slower than with float32.
    """
    if is_real_gpu(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = torch.cpu.get_capabilities()
    return any(units.get(name) for name in ("amx_bf16", "avx512_bf16", "arm_bf16"))


_SIZES = {"4 B": 1, "64 kB": 2**14, "1 MB": 2**18, "16 MB": 2**22, "256 MB": 2**26}  # in floats


def find_sum(case: Case) -> str:
    """Check that an all-reduce gives the right sum on this rank, and measure how fast it is."""
    device = torch.device(case.device if case.plan["on GPUs"] else "cpu")
    try:
        # NCCL can block inside a call that torch's limit does not end; where that ends one, it
        # says more.
        return case.within(case.args.timeout + 5, lambda: _form_and_reduce(case, device))
    except Exception as error:
        variable = f"{'NCCL' if device.type == 'cuda' else 'GLOO'}_SOCKET_IFNAME"
        interfaces = ", ".join(name for _, name in socket.if_nameindex())
        setting = os.environ.get(variable) or "not set"
        line = f"{one_line(error)}; {variable} is {setting}, and there are {interfaces}"
        raise CheckFailed(line) from error


def _form_and_reduce(case: Case, device: torch.device) -> str:
    """Form the group of all ranks, and all-reduce tensors of all sizes; every rank calls it."""
    on_gpu = device.type == "cuda"
    is_simulated = on_gpu and not is_real_gpu(device)  # which has no speed
    if on_gpu:
        torch.cuda.set_device(device)  # each thread has a current GPU
    # An error, in place of an abort; torchrun has set it to 1 for its ranks.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", case.store),
        rank=case.rank,
        world_size=case.size,
        timeout=timedelta(seconds=case.args.timeout),
        device_id=device if on_gpu else None,
    )
    try:
        most = 2**26 if on_gpu and not is_simulated else 2**22
        large = torch.full((most,), case.rank + 1.0, device=device)
        dist.all_reduce(large)
        right = case.size * (case.size + 1) / 2
        wrong = large[large != right][:1].tolist()  # also what is not a number
        large.zero_()  # sums of sums would overflow below
        sizes = {name: large[:floats] for name, floats in _SIZES.items() if floats <= len(large)}
        seconds = {name: _seconds_of(part) for name, part in sizes.items() if not is_simulated}
        name = type(dist.distributed_c10d._get_default_group()._get_backend(device)).__name__
    finally:
        capture(dist.destroy_process_group)  # what was wrong before counts
    if wrong:
        raise CheckFailed(f"the sum of {case.size} ranks is {wrong[0]:g}, not {right:g}")
    if case.rank:
        return ""
    if is_simulated:
        return f"right sums over {name}; simulated GPUs, so no speed"
    speeds = ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in seconds.items())
    busbw = large.nbytes / [*seconds.values()][-1] * 2 * (case.size - 1) / case.size / 1e9
    return f"right sums over {name}; {speeds}; busbw {busbw:.2f} GB/s"


def _seconds_of(total: Tensor) -> float:
    """Measure the mean seconds of an all-reduce of this tensor; every rank calls it."""
    times = 100 if len(total) < 2**18 else 5
    for round in (1, times):  # the first call of a size sets it up
        begin = time.perf_counter()
        for _ in range(round):
            dist.all_reduce(total)
        total[0].item()  # waits for a GPU, once for all
    return (time.perf_counter() - begin) / times


def find_place(case: Case) -> list:
    """Find out what started this rank, and where."""
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
    """Find the versions of all that ranks must have alike."""
    versions = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    versions.append(f"torchvision {torchvision.__version__}")
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
    return ", ".join(versions)


def alike(rank: int, values: dict) -> str:
    """Compare what all ranks must have alike."""
    first = values[min(values)]
    if values[rank] != first:
        raise CheckFailed(f"{values[rank]}, where rank {min(values)} has {first}")
    return first


def find_device(case: Case) -> list[str]:
    """Claim a device as the scripts do."""
    with redirect_stderr(StringIO()) as said:
        device = pick_device(case.local_rank, case.args.no_cuda)
    if device.type == "cpu":
        if line := said.getvalue().strip():  # a script says it, and goes on
            raise CheckFailed(line)
        return ["", "cpu"]
    case.device, card = str(device), torch.cuda.get_device_properties(device)
    # Of a MIG slice the driver's name is in the list that this process was given.
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[device.index :][:1]
    part = "".join(f" {name}" for name in given if name.startswith("MIG-"))
    case.gpu = f"GPU {card.uuid}{part} on {case.host}"
    return [case.gpu, case.device + ("" if is_real_gpu(device) else " (simulated)")]


def compare_devices(rank: int, devices: dict) -> str:
    """Check that each rank has a GPU of its own, or none has one."""
    gpu, device = devices[rank]
    gpus = [each for each, _ in devices.values()]
    if not gpu and any(gpus):
        raise CheckFailed("no GPU, where others have one")
    if gpu and gpus.count(gpu) > 1 and not may_share():
        raise CheckFailed(f"{gpu} is shared")
    return device


def may_share() -> bool:
    """Tell whether NCCL was told that ranks may share a GPU."""
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
    # Where tasks are not bound to CPUs each sees all of them, and may use those of one task.
    own = asked if case.launcher == "slurm" else 0
    node = os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK")  # two may be on one host
    return [own, [f"{case.host} {node} {cpu}" for cpu in cpus], max(workers + 1, threads), used]


def compare_cpus(rank: int, found: dict) -> str:
    """Check that each rank has a CPU for itself and each worker, or for each thread."""
    ranks_on = Counter(cpu for _, cpus, _, _ in found.values() for cpu in cpus)
    own, cpus, needed, used = found[rank]
    own = own or int(sum(1 / ranks_on[cpu] for cpu in cpus) + 1e-9)
    if own < needed:
        raise CheckFailed(f"CPUs of its own: {own}, for itself with {used}")
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
    """Check that the data is whole; two generated sets differ in their digests."""
    data = case.args.data
    if data == Path("none"):
        return "not looked at"
    name, labels = check_data(data), data / "MNIST/raw/train-labels-idx1-ubyte"
    digest = hashlib.md5(labels.read_bytes()).hexdigest()
    return f"{name} {digest[:8]}, whole on each rank"


def find_shm(case: Case) -> str:
    """Check that there is room for loaders' batches, and for NCCL on one host.

    That is more than Docker's default.
    """
    free, workers = shutil.disk_usage(existing(Path("/dev/shm"))).free, case.args.num_workers
    if free <= 64 * 2**20 and (workers or (case.gpu and case.size > 1)):
        user = f"--num-workers {workers}" if workers else "NCCL"
        raise CheckFailed(f"{free / 2**20:.0f} MB for {user}")
    return f"{free / 2**20:,.0f} MB free"


def existing(path: Path) -> Path:
    """Give this folder, or the one in which it would be made."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


# ---- what all ranks do together, as rank 0 has planned


def make_plan(case: Case, found: dict[int, dict]) -> dict:
    """Say whether all ranks have GPUs, and write a file that all must see; rank 0 calls it."""
    gpus = [value[0] for value, _ in (told["devices"] for told in found.values()) if value]
    # NCCL hangs where two ranks hold one GPU, or one holds none: gloo can still say what is wrong.
    on_gpus = len(gpus) == case.size and all(gpus) and (len({*gpus}) == case.size or may_share())
    file, trouble = capture(partial(_write_into, case.args.run_dir))
    return {"on GPUs": on_gpus, "file": file, "trouble": trouble}


def _write_into(folder: Path) -> str:
    file = existing(folder) / f".doctor-{os.urandom(8).hex()}"
    file.touch(exist_ok=False)
    return str(file)


def find_folder(case: Case) -> str:
    """Check that this rank sees what rank 0 wrote into the run folder, and that there is room."""
    file, folder = case.plan["file"], case.args.run_dir
    if case.plan["trouble"] and case.rank == 0:
        raise CheckFailed(f"{folder} cannot be written: {case.plan['trouble']}")
    end = time.monotonic() + 2  # a file system may take its time
    while file and not Path(file).exists():
        if time.monotonic() > end:
            raise CheckFailed(f"not here: the file that rank 0 wrote, {file}")
        time.sleep(0.1)
    free = shutil.disk_usage(existing(folder)).free / 1e9
    if free < 1:
        raise CheckFailed(f"{free:.2f} GB free for {folder}")
    return f"each rank sees what rank 0 wrote for {folder}; {free:.0f} GB free"


CHECKS = {  # each row of the table: what a rank finds, how rank 0 compares it, and the usual cure
    "ranks": (
        find_place,
        compare_places,
        "one launcher (srun, mpirun, torchrun) starts all ranks; MASTER_ADDR and MASTER_PORT are "
        "exported, the same for all and for no other job; read the missing one's own output",
    ),
    "versions": (find_versions, alike, "use one environment on all nodes"),
    "devices": (
        find_device,
        compare_devices,
        "a GPU for each task of a node (of MIG: one slice, one rank, by --gpus-per-task=1), "
        "and a torch built for it; or --no-cuda",
    ),
    "cpus": (
        find_cpus,
        compare_cpus,
        'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"; or fewer --num-workers, a smaller '
        "OMP_NUM_THREADS, fewer ranks on a node, more --cpus-per-task",
    ),
    "network": (
        find_address,
        None,
        "127.0.1.1 and the name as a line of /etc/hosts; "
        "or torchrun --standalone --local-addr=localhost",
    ),
    "data": (find_data, alike, "one --data for all ranks, on a shared file system"),
    "/dev/shm": (
        find_shm,
        None,
        "docker run --shm-size=1g, or --ipc=host; or --num-workers 0",
    ),
    "all-reduce": (
        find_sum,
        None,
        "no red row above; export that variable = the interface between the nodes, open for all "
        "ports (ip -brief address); NCCL_DEBUG=INFO tells more, NCCL_P2P_DISABLE=1 does without "
        "direct copies on one host, --no-cuda without NCCL",
    ),
    "run folder": (
        find_folder,
        None,
        "a --run-dir on a file system that all nodes share, with 1 GB, that you may write to",
    ),
}
TOGETHER = ("all-reduce", "run folder")  # what needs all ranks


def look(case: Case, names: Iterable[str]) -> dict:
    """Make these checks on this rank; returns the value, and what is wrong, of each."""
    return {name: capture(partial(CHECKS[name][0], case)) for name in names}


def judge(name: str, found: dict[int, dict]) -> tuple[str, str, str]:
    """Make the row of a check from what all ranks found: its name, what was seen, and the cure.

    A red row says which ranks are at fault, another what is fine. Rank 0 calls it.
    """
    _, compare, cure = CHECKS[name]
    values = {rank: told[name][0] for rank, told in found.items() if not told[name][1]}
    fine: dict[str, list[str]] = {}  # ranks, by what was seen
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


if __name__ == "__main__":
    main()
