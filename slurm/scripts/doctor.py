"""Check what a job needs, on all its ranks, before it burns an hour; rank 0 prints a table.

Written out from ddp_helpers 0.1.0, MIT licence. Needs torch 2.10 or newer, and torchvision. Launch:
torchrun --standalone --nproc-per-node 2 doctor.py --data data
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python doctor.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python doctor.py --data data
"""

from __future__ import annotations  # they name classes that come later

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from io import StringIO
from pathlib import Path
from socket import create_connection
from tempfile import NamedTemporaryFile
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Look at the job, and leave with 0 if all is green, 1 if a row is red, 2 if the arguments are wrong. Any rank."""
    args = parse_flags(argv, prog)
    os.environ.setdefault(*OLDER_NCCL)
    case = Case(*who_am_i(), args)
    _, trouble = overhear(case.meet) if case.size > 1 else (None, [])
    status, lost = overhear(lambda: consult(case, trouble)) if not (trouble and case.rank) else (2, trouble)
    try:
        if lost:
            stop(f"rank {case.rank} gets no answer from rank 0: {lost[0]}")
        sys.exit(status)
    finally:
        if case.blocked:  # a thread that waits inside NCCL could hold the interpreter's end
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(2 if lost else status)


def parse_flags(argv: list[str] | None = None, prog: str | None = None) -> Namespace:
    """Read the doctor's flags; every rank calls it. Stops at a value that cannot work."""
    parser = ArgumentParser(prog, description="Check what a job needs before it burns an hour.", allow_abbrev=False)
    parser.error = lambda message: stop(f"{parser.prog}: {message}; --help lists the flags")  # one line, not a page
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("DDP_MNIST_ROOT", "data"), help="holds MNIST/raw; none: not asked")
    add("--run-dir", type=Path, default=Path("runs"), help="folder for run records, which all nodes share")
    add("--num-workers", type=int, default=0, help="DataLoader workers that each rank will start")
    add("--timeout", type=int, default=30, help="seconds to wait for other ranks")
    add("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    args = parser.parse_args(argv)
    if not (0 <= args.num_workers < 2**20 and 1 <= args.timeout < 2**20):
        parser.error(f"--num-workers {args.num_workers} or --timeout {args.timeout} is out of range")
    return args


def visit(case: Case, name: str) -> list[str]:
    """Run a check on this rank; return what was seen, and the cure, or '' if all is well."""
    check, cure = CHECKS[name]
    seen, trouble = overhear(lambda: check(case))
    return [*trouble, cure][:2] if trouble else [seen, ""]


def judge(name: str, told: dict[int, list[str]]) -> tuple[str, str, str]:
    """The row of a check, from what it said of each rank: red with the ranks at fault, or what is fine. Any process."""
    reds: dict[str, list[str]] = {}
    for rank, (seen, cure) in told.items():
        reds.setdefault(seen, []).extend([str(rank)] if cure else [])
    who = {seen: f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for seen, ranks in reds.items() if ranks}
    who |= {seen: "all ranks" for seen, ranks in reds.items() if len(ranks) == len(told) > 1}
    what = [f"{ranks}: {seen}" for seen, ranks in who.items()] or [seen for seen in reds if seen][:4]
    return name, "; ".join(what), "; ".join(dict.fromkeys(cure for _, cure in told.values() if cure))


def show(rows: list[tuple[str, str, str]]) -> int:
    """Print the rows below each other, a cure below each red one, and give the exit status; rank 0 calls it."""
    lines = [f"{'check':<11} {'':<3} what was seen"]
    for name, seen, cure in rows:
        lines.append(f"{name:<11} {'RED' if cure else 'ok':<3} {seen}")
        lines += [f"{'':<15} cure: {cure}"] if cure else []
    red = sum(bool(cure) for *_, cure in rows)
    lines.append(f"{red} of {len(rows)} checks RED" if red else f"all {len(rows)} checks green")
    lines = ["".join(letter if letter.isprintable() else " " for letter in line) for line in lines]  # no terminal obeys
    sys.stdout.write("\n".join([*lines, ""]))  # at once: print() would send the last line's end by itself
    sys.stdout.flush()
    return min(red, 1)


def consult(case: Case, trouble: list[str]) -> int:
    """Make all checks that can be made, and have rank 0 print them before any rank leaves; every rank calls it."""
    arrive(case)
    trouble = trouble or overhear(lambda: case.together("arrive"))[1]
    told = {name: visit(case, name) for name in CHECKS if not (trouble and name in TOGETHER)}
    # Who was not waiting for the one that is lost notices only after --timeout.
    patience = 0 if case.rank else 1 if trouble else 3 if case.lost else case.args.timeout + 5
    lost = case.come("told", patience, json.dumps(told))
    if case.rank == 0:
        every = {r: json.loads(case.store.get(f"told of {r}")) for r in range(case.size) if r not in lost}
        rows = [judge(name, {r: said[name] for r, said in every.items() if name in said}) for name in told]
        if lost or trouble:
            trouble = trouble or [f"rank {', '.join(map(str, lost))} of {case.size} is lost"]
            rows[0] = ("ranks", *[*trouble, CHECKS["ranks"][1]][:2])
        case.store.set("status", str(show(rows)))
    case.store.set_timeout(timedelta(seconds=2 * case.args.timeout + 10))
    status = int(case.store.get("status"))
    case.store.add("end came", 1) if case.rank else case.come("end", 2)  # rank 0, which may keep the store, goes last
    return status


# A variable that only this launcher sets, then its rank, local rank and world size. The first row that fits counts, as
# a whole: mpirun's ranks inherit SLURM_PROCID=0 from a batch script, and SLURM_NTASKS is the job's size, not a step's.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ("MPI_LOCALRANKID", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # Intel MPI, too
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PMI_LOCAL_RANK", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}

# What names one start by this launcher: the same on all its ranks, on every node, and another at each start. MPICH and
# whoever exports RANK by hand set no such name.
STARTS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    "openmpi": ("PMIX_NAMESPACE",),
    "mpich": ("I_MPI_HYDRA_UUID",),  # of Intel MPI alone
    "slurm": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "pals": ("PALS_APID",),
    "env": (),
}

# Two classes stand behind the backend "nccl". Read in torch 2.15, where the newer became the default: its getFuture,
# which DDP calls for each bucket, makes the computing stream wait, so that nothing overlaps. This takes the older one,
# in 2.14 as in 2.15; before, no torch reads it.
OLDER_NCCL = "TORCH_DIST_USE_NCCL2", "0"


def stop(line: str) -> None:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


def who_am_i(env: dict[str, str] = os.environ) -> tuple[str, int, int, int]:
    """Read launcher, rank, local rank and world size; stops where the variables contradict each other. Any rank."""
    launcher = next((name for name, (sign, *_) in LAUNCHERS.items() if sign in env), "single")
    values = [env.get(name, "") for name in LAUNCHERS.get(launcher, ())[1:]] or ["0", "0", "1"]
    rank, local_rank, world_size = (int(w) if w.isascii() and w.isdecimal() and len(w) < 19 else -1 for w in values)
    exported = [env.get("RANK", values[0]), values[1], env.get("WORLD_SIZE", values[2])]
    if values != exported or not 0 <= local_rank <= rank < world_size:
        stop(f"{launcher}: rank, local rank, world size {values}; RANK, WORLD_SIZE {exported}: export neither, or all")
    return launcher, rank, local_rank, world_size


def name_of_start(launcher: str) -> str:
    """Name this start of the ranks, to stand before each key where they meet: another job may come there, too."""
    return " ".join(os.environ.get(name, "") for name in ("USER", *STARTS.get(launcher, ())))


def count_gpus(no_cuda: bool) -> int:
    """Count the GPUs that torch sees, or none with --no-cuda; stops where it sees none of those that were given."""
    gpus = 0 if no_cuda else torch.cuda.device_count()
    # CUDA_VISIBLE_DEVICES counts before what Slurm says: empty, it hides all. Who trains on CPUs though there are GPUs
    # says --no-cuda; so do the jobs of the course's own Slurm, whose GPU slots are no GPUs.
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
    name = next((name for name in names if name in os.environ), "")
    given = f"{name}={os.environ.get(name, '')}"
    if not (gpus or no_cuda or given.endswith(("=", "=-1", "=NoDevFiles", "ON_NODE=0"))):
        cure = "install a torch for this driver's CUDA (nvidia-smi), give the container --nv, or give --no-cuda"
        stop(f"{given}, but torch {torch.__version__} sees no GPU: {cure}")
    return gpus


def claim_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim this rank's GPU, cuda:local_rank, or the CPU where there is none; every rank calls it."""
    gpus = count_gpus(no_cuda)
    if local_rank >= gpus > 1:
        stop(f"local rank {local_rank} finds {gpus} GPUs: start at most {gpus} ranks on a node, or give --no-cuda")
    device = torch.device("cuda", min(local_rank, gpus - 1)) if gpus else torch.device("cpu")  # one seen is cuda:0
    if gpus:
        torch.cuda.set_device(device)
    return device


def check_address(seconds: float) -> None:
    """Stop with one line where nobody knows the name in MASTER_ADDR; PyTorch would tell of it in pages of C++."""
    address, end = os.environ.get("MASTER_ADDR"), time.monotonic() + min(seconds, 30)  # a new name may come late
    while address:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                stop(f"MASTER_ADDR={address} has no address ({error}): export the name or address of rank 0's node")
        time.sleep(0.5)


def backend_class(device: torch.device) -> str:
    """Name the class that moves tensors of this device between ranks, as ProcessGroupGloo or ProcessGroupNCCL."""
    return type(dist.group.WORLD._get_backend(device)).__name__


def reason(error: Exception) -> str:
    """Read an error's whole text as one line, without C++ frames: the reason that NCCL gives is in its last line."""
    return " ".join(re.split(r"\n(?:Exception raised from|frame #)", str(error))[0].split())


WORDS = 600  # characters of an error that a row can hold


class Red(Exception):
    """A check has failed: what was seen, and the cure if it is not the check's usual one."""


def short(words: str) -> str:
    """The beginning and the end of words that are too long for a row."""
    return words if len(words) <= WORDS else f"{words[: WORDS // 2]} … {words[-WORDS // 2 :]}"


def overhear(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function; return its value, or the words with which it stops or fails; the process goes on. Any rank."""
    try:
        with redirect_stderr(StringIO()) as said:
            return call(), []
    except Red as red:
        return None, list(red.args)
    except SystemExit:  # stop has printed its line
        return None, [said.getvalue().strip()]
    except Exception as error:  # whatever it is, this rank must come to the next check
        return None, [short(reason(error) or type(error).__name__)]


@dataclass
class Case:
    """One rank of the job under examination."""

    launcher: str
    rank: int
    local_rank: int
    size: int
    args: Namespace
    store: dist.Store = field(default_factory=dist.HashStore)
    host: str = field(default_factory=platform.node)
    device: str = "cpu"
    gpu: str = ""  # its own number: cuda:0 is another one in each process that is shown one GPU only
    trouble: list[str] = field(default_factory=list)  # with the device
    node: str = ""
    cpus: list[int] = field(default_factory=list)  # on which this process may run
    lost: list[int] = field(default_factory=list)  # ranks that were waited for already
    blocked: bool = False  # a call never came back: its thread would hold this process at its end

    def count(self, note: str) -> int:
        """Count the ranks that left this note."""
        return self.store.add(note, 0)

    def first(self, name: str, mine: str = "") -> str:
        """Broadcast what rank 0 says; every rank calls it, with what it would say."""
        if self.rank == 0:
            self.store.set(name, mine)
        return self.store.get(name).decode()

    def come(self, name: str, seconds: float, value: str = "") -> list[int]:
        """Bring a value and wait until all ranks have; who has not after `seconds`. Every rank calls it."""
        self.store.set(f"{name} of {self.rank}", value)
        self.store.add(f"{name} came", 1)
        end = monotonic() + seconds
        while self.count(f"{name} came") < self.size and monotonic() < end:
            sleep(0.01 + self.size / 50_000)  # one store answers all ranks
        return [rank for rank in range(self.size) if not self.store.check([f"{name} of {rank}"])]

    def together(self, name: str) -> None:
        """Wait until all ranks are here; every rank calls it. Raises Red where one is lost."""
        # Who has itself waited in vain for so long comes a little later.
        self.lost = self.lost or self.come(name, self.args.timeout + 2)
        if self.lost:
            raise Red(f"rank {', '.join(map(str, self.lost))} of {self.size} missing after {self.args.timeout} s")

    def within(self, seconds: float, call: Callable[[], Any]) -> Any:
        """Call it in a thread; raises what it raises, or TimeoutError after `seconds`, and leaves it there."""
        came: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                came.append((call(), None))
            except BaseException as error:  # SystemExit, too: it is not a time-out
                came.append((None, error))

        thread = Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if not came:
            self.blocked = True
            raise TimeoutError
        value, error = came[0]
        if error:
            raise error
        return value

    def meet(self) -> None:
        """Find the store that rank 0, or torchrun, keeps; every rank calls it. Raises Red if nobody answers."""
        address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        place = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if not (address and port.isdecimal() and 0 < int(port[:9]) < 2**16):
            raise Red(f"{place}: no meeting point", "export both, the same for all ranks, before srun or mpirun")
        check_address(self.args.timeout)
        hosts = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=self.args.timeout)

        def connect() -> dist.Store:
            while not hosts and overhear(lambda: create_connection((address, int(port)), 1).close())[1]:
                sleep(0.1)  # TCPStore would tell of its attempts in a page of C++
            return dist.TCPStore(address, int(port), None, hosts, limit, wait_for_workers=False)

        try:  # a stranger that holds the port and never answers would hold TCPStore for ever
            store, trouble = self.within(self.args.timeout, lambda: overhear(connect))
        except TimeoutError:
            store, trouble = None, ["no answer: is it running, and is the port no stranger's?"]
        if trouble:
            what = "cannot listen" if hosts else "is not there"
            raise Red(f"{place}: rank 0 {what} ({trouble[0]})", "export another MASTER_PORT, the same for all ranks")
        self.store = dist.PrefixStore(name_of_start(self.launcher), store)
        self.store.set_timeout(limit)


def check_reduce(case: Case) -> str:
    """An all-reduce gives the right sum on every rank; how fast it was. Red where a part of it blocks."""
    case.together("all-reduce")
    # NCCL hangs or aborts where two ranks hold one GPU, or one holds none: gloo can still say what is wrong.
    backend = "nccl" if case.count("gpus") == case.size else "gloo"
    device = torch.device(case.device if backend == "nccl" else "cpu")
    large = torch.full((2**26 if backend == "nccl" else 2**22,), case.rank + 1.0, device=device)  # 256 or 16 MB
    sizes = {"4 B": 1, "64 kB": 2**14, "1 MB": 2**18, "16 MB": 2**22, "256 MB": 2**26}
    sizes = {name: n for name, n in sizes.items() if n <= len(large)}
    try:
        in_time(case, device, "init", partial(form, case, device))
        name, wrong = in_time(case, device, "first all-reduce", partial(sum_up, case, large))
        took = [
            in_time(
                case,
                device,
                f"all-reduce of {size}",
                partial(seconds_of, large[:n], 100 if n < 2**18 else 5),
            )
            for size, n in sizes.items()
        ]
        case.together("sums")  # nobody leaves while a peer still needs an answer
    finally:
        if dist.is_initialized() and not case.blocked:
            with suppress(Exception):  # what was wrong before counts
                in_time(case, device, "end", dist.destroy_process_group)
    if wrong:
        raise Red(f"the sum of {case.size} ranks is {wrong[0]:g}, not {case.size * (case.size + 1) / 2:g}")
    times = ", ".join(f"{size} {1e3 * seconds:.3g} ms" for size, seconds in zip(sizes, took, strict=True))
    busbw = f"{large.nbytes / took[-1] * 2 * (case.size - 1) / case.size / 1e9:.2f} GB/s"
    return "" if case.rank else f"right sums over {name}; {times}; busbw {busbw}"


def in_time(case: Case, device: torch.device, what: str, call: Callable[[], Any]) -> Any:
    """Call it with this GPU as the current one. Raises Red, with the interface, where it blocks."""

    def work() -> Any:
        with torch.accelerator.device_index(device.index):  # each thread has a current GPU
            return call()

    try:
        # NCCL can block inside a call that torch's limit does not end; where that ends one, it says more.
        return case.within(case.args.timeout + 1, work)
    except TimeoutError:
        library = "NCCL" if device.type == "cuda" else "gloo"
        debug = "NCCL_DEBUG=INFO says where it waits"
        variable = f"{library.upper()}_SOCKET_IFNAME"
        known = ", ".join(name for _, name in socket.if_nameindex())
        now = os.environ.get(variable) or f"not set, and there are {known}"
        seen = f"{library}'s {what} is not over after {case.args.timeout} s; {variable} is {now}"
        cure = f"export {variable}= the interface between the nodes, open for all ports: ip -brief address"
        if library == "NCCL":
            alone = f"{debug}; on one host NCCL_P2P_DISABLE=1 does without direct copies"
            cure = alone if case.count("hosts") == 1 else f"{cure}; {debug}"
        raise Red(seen, cure) from None


def form(case: Case, device: torch.device) -> None:
    """Form the group of all ranks: NCCL's for a GPU, else gloo's; every rank calls it."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # an error, in place of an abort
    group = {
        "store": dist.PrefixStore("group", case.store),
        "rank": case.rank,
        "world_size": case.size,
    }
    group["timeout"] = timedelta(seconds=case.args.timeout)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, device_id=device_id, **group)


def sum_up(case: Case, large: Tensor) -> tuple[str, list[float]]:
    """All-reduce it; return the backend's class, and a wrong sum if there is one. Every rank calls it."""
    limit = timedelta(seconds=case.args.timeout)
    dist.all_reduce(large, async_op=True).wait(limit)  # with a limit NCCL waits here, too, and raises
    wrong = large[large != case.size * (case.size + 1) / 2][:1].tolist()  # also what is not a number
    large.zero_()  # sums of sums would overflow below
    return backend_class(large.device), wrong


def seconds_of(total: Tensor, times: int) -> float:
    """Measure the mean time of so many all-reduces of this tensor; every rank calls it."""
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(total)
    total[0].item()  # waits for a GPU, once for all
    return (time.perf_counter() - begin) / times


MNIST_MD5 = {  # MNIST's own digests: they find damage, not forgery. A generated set brings its own in MD5SUMS.
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def check_data(root: Path) -> str:
    """Name the dataset under root, MNIST or digits; every rank calls it. Stops unless all four files are whole."""
    raw = Path(root) / "MNIST" / "raw"
    try:
        sums = (raw / "MD5SUMS").read_text(errors="replace").splitlines() if (raw / "MD5SUMS").is_file() else []
        expected = {line.split()[-1]: line.split()[0] for line in sums if line.strip()} or MNIST_MD5
        for name in MNIST_MD5:
            if not (raw / name).is_file():
                cure = f"python -m ddp_helpers data {root}, or without the course download_data.py --data {root}"
                stop(f"--data {root}: {raw / name} is missing; get it once, before any rank: {cure}")
            if hashlib.md5((raw / name).read_bytes()).hexdigest() != expected.get(name):
                stop(f"--data {root}: {raw / name} is cut short or damaged (wrong MD5); remove {raw} and get it again")
    except OSError as error:
        stop(f"--data {root}: {error.filename} cannot be read ({error.strerror}): choose another folder")
    return "MNIST" if expected == MNIST_MD5 else "digits"


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


if __name__ == "__main__":
    main()
# As it was written out, the SHA-256 of the lines above begins with 795b5fd8f89d53a0
