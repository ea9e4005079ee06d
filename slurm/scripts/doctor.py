"""Check what a job needs, on all its ranks, before it burns an hour; rank 0 prints a table.

torchrun --standalone --nproc-per-node 2 -- doctor.py --data data
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python doctor.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python doctor.py --data data
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextlib import redirect_stderr
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from socket import create_connection
from tempfile import NamedTemporaryFile
from threading import Thread
from time import monotonic, sleep
from torch import Generator, Tensor
from torch import Tensor
from torchvision.datasets import MNIST
from typing import NoReturn
from typing import TypeVar
from urllib.parse import urlparse
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import struct
import sys
import tempfile
import time
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision



def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Look at the job; every rank calls it.

    Leaves with 0 if all is green, 1 if a row is red, 2 if the arguments are wrong.
    """
    args = parse_flags(argv, prog)
    os.environ.setdefault(*OLDER_NCCL)
    case = Case(*who_am_i(), args)
    status, trouble = examine(case)
    try:
        if trouble:
            stop(f"rank {case.rank} gets no answer from rank 0: {trouble[0]}")
        sys.exit(status)
    finally:
        if case.blocked:  # a thread that waits inside NCCL could hold the interpreter's end
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(2 if trouble else status or 0)


def examine(case: Case) -> tuple[int | None, list[str]]:
    """Meet the other ranks, and make all checks; every rank calls it.

    Returns the exit status, or why there is none.
    """
    trouble: list[str] = []
    if case.size > 1:
        _, trouble = capture_trouble(case.meet)
    if trouble and case.rank:
        return None, trouble
    return capture_trouble(lambda: consult(case, trouble))


def parse_flags(argv: list[str] | None = None, prog: str | None = None) -> Namespace:
    """Read the doctor's flags; every rank calls it. Stops at a value that cannot work."""
    purpose = "Check what a job needs before it burns an hour."
    layout = RawDescriptionHelpFormatter
    usage = "%(prog)s [flags]; --help lists them"
    parser = ArgumentParser(prog, usage, purpose, formatter_class=layout, allow_abbrev=False)
    program = f"--no-python -- {parser.prog}" if prog else f"-- {parser.prog}"
    parser.epilog = f"""example:
  torchrun --standalone --nproc-per-node 2 {program} --data none

exit status: 0: all is green; 1: a row is red; 2: what was given cannot be used"""
    data = os.environ.get("DDP_MNIST_ROOT", "data")
    run_dir_help = "folder for run records, which all nodes share"
    workers_help = "DataLoader workers that each rank will start"
    add = parser.add_argument
    add("--data", type=Path, default=data, help="holds MNIST/raw; none: not asked")
    add("--run-dir", type=Path, default=Path("runs"), help=run_dir_help)
    add("--num-workers", type=int, default=0, help=workers_help)
    add("--timeout", type=int, default=30, help="seconds to wait for other ranks")
    add("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    add("--json", type=Path, metavar="FILE", help="rank 0 also writes the rows there")
    args = parser.parse_args(argv)
    if not (0 <= args.num_workers < 2**20 and 1 <= args.timeout < 2**20):
        numbers = f"--num-workers {args.num_workers} or --timeout {args.timeout}"
        parser.error(f"{numbers} is out of range")
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: give a file in a folder that is there")
    return args


def consult(case: Case, trouble: list[str]) -> int:
    """Make all checks that can be made, and have rank 0 print them; every rank calls it.

    trouble: why the ranks could not meet, if they could not. Returns the exit status, before which
    no rank leaves.
    """
    arrive(case)
    trouble = trouble or capture_trouble(lambda: case.together("arrive"))[1]
    names = [name for name in CHECKS if not (trouble and name in TOGETHER)]
    answers = {name: run_check(case, name) for name in names}
    lost = case.come("told", patience(case, trouble), json.dumps(answers))
    if case.rank == 0:
        rows = judge_all(case, names, lost)
        if lost or trouble:
            seen = trouble or [f"rank {', '.join(map(str, lost))} of {case.size} is lost"]
            _, usual_cure = CHECKS["ranks"]
            rows[0] = ("ranks", seen[0], seen[1] if len(seen) > 1 else usual_cure)
        if case.args.json:
            write_json(rows, case.args.json)
        case.store.set("status", str(print_table(rows)))
    case.store.set_timeout(timedelta(seconds=2 * case.args.timeout + 10))
    status = int(case.store.get("status"))
    if case.rank:
        case.store.add("end came", 1)
    else:
        case.come("end", 2)  # rank 0, which may keep the store, goes last
    return status


def patience(case: Case, trouble: list[str]) -> int:
    """Choose the seconds to wait for the other ranks' answers.

    Who was not waiting for the one that is lost notices only after --timeout.
    """
    if case.rank:
        return 0
    if trouble:
        return 1
    return 3 if case.lost else case.args.timeout + 5


def run_check(case: Case, name: str) -> list[str]:
    """Run a check on this rank; return what was seen, and the cure, or "" if all is well."""
    check, usual_cure = CHECKS[name]
    seen, trouble = capture_trouble(lambda: check(case))
    if trouble:
        return [*trouble, usual_cure][:2]
    return [seen or "", ""]


def judge_all(case: Case, names: list[str], lost: list[int]) -> list[tuple[str, str, str]]:
    """Read the answers of all ranks that are not lost, and judge them; rank 0 calls it."""
    ranks = [rank for rank in range(case.size) if rank not in lost]
    notes = {rank: json.loads(case.store.get(f"told of {rank}")) for rank in ranks}
    rows = []
    for name in names:
        answers = {rank: note[name] for rank, note in notes.items() if name in note}
        rows.append(judge_check(name, answers))
    return rows


def judge_check(name: str, answers: dict[int, list[str]]) -> tuple[str, str, str]:
    """Make the row of a check from each rank's answer: its name, what was seen, and the cure.

    A red row says which ranks are at fault, another what is fine. Any process calls it.
    """
    at_fault: dict[str, list[str]] = {}  # ranks, by what was seen
    for rank, (seen, cure) in answers.items():
        at_fault.setdefault(seen, []).extend([str(rank)] if cure else [])
    faults = []
    for seen, ranks in at_fault.items():
        if len(ranks) == len(answers) > 1:
            faults.append(f"all ranks: {seen}")
        elif ranks:
            faults.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {seen}")
    fine = [seen for seen in at_fault if seen][:4]
    cures = dict.fromkeys(cure for _, cure in answers.values() if cure)
    return name, "; ".join(faults or fine), "; ".join(cures)


def print_table(rows: list[tuple[str, str, str]]) -> int:
    """Print the rows, a cure below each red one, and give the exit status; rank 0 calls it."""
    lines = [f"{'check':<11} {'':<3} what was seen"]
    red = 0
    for name, seen, cure in rows:
        lines.append(f"{name:<11} {'RED' if cure else 'ok':<3} {seen}")
        if cure:
            lines.append(f"{'':<15} cure: {cure}")
            red += 1
    lines.append(f"{red} of {len(rows)} checks RED" if red else f"all {len(rows)} checks green")
    text = "\n".join(printable(line) for line in lines)
    sys.stdout.write(f"{text}\n")  # at once: print() would send the last line's end by itself
    sys.stdout.flush()
    return min(red, 1)


def write_json(rows: list[tuple[str, str, str]], path: Path) -> None:
    """Write the rows to a file, each with its verdict; rank 0 calls it."""
    names = ("name", "verdict", "seen", "cure")
    table = [
        dict(zip(names, (name, "RED" if cure else "ok", seen, cure), strict=True))
        for name, seen, cure in rows
    ]
    write_whole(path, f"{json.dumps({'rows': table}, indent=1)}\n".encode())


def printable(line: str) -> str:
    """Replace what a terminal would obey by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in line)




def pick_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim the GPU of this local rank, or the only one that it sees; the CPU if none can be used.

    Every rank calls it. Stops where there are fewer GPUs than ranks, or those given are of no use.
    """
    count = 0 if no_cuda else torch.cuda.device_count()  # also of those that CUDA cannot use
    given = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("SLURM_JOB_GPUS", ""))
    # The only GPU may be this rank's own, as with --gpus-per-task=1; but torchrun's see the same.
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    may_be_own = may_share or "TORCHELASTIC_RUN_ID" not in os.environ
    if local_rank >= count > int(may_be_own):
        cure = f"start {count} on a node, or give --no-cuda"
        sys.exit(f"local rank {local_rank} has no GPU ({count} here): {cure}")
    device = torch.device("cuda", min(local_rank, count - 1)) if count else torch.device("cpu")
    why = f"torch {torch.__version__} sees none"
    try:
        if count:
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


def has_bf16(device: torch.device) -> bool:
    """Tell whether the device has units for bfloat16.

    A processor without them emulates it, and is slower than with float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = torch.cpu.get_capabilities()
    return any(units.get(name) for name in ("amx_bf16", "avx512_bf16", "arm_bf16"))


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

# Two classes stand behind the backend "nccl". Read in torch 2.15, where the newer became the
# default: its getFuture, which DDP calls for each bucket, makes the computing stream wait, so
# that nothing overlaps. This takes the older one, in 2.14 as in 2.15; before, no torch reads it.
OLDER_NCCL = "TORCH_DIST_USE_NCCL2", "0"


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


_LONGEST = 600  # characters of an error that a row can hold
Value = TypeVar("Value")


class CheckFailed(Exception):
    """A check has failed: what was seen, and the cure if it is not the check's usual one."""


def _shorten(text: str) -> str:
    """Leave out the middle of a text that is too long for a row."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def capture_trouble(call: Callable[[], Value]) -> tuple[Value | None, list[str]]:
    """Call a function, and catch the line with which it stops or fails; any rank calls it.

    Returns its value, or None, and the line, perhaps with a cure behind it.
    """
    stderr = StringIO()
    try:
        with redirect_stderr(stderr):
            return call(), []
    except CheckFailed as red:
        return None, list(red.args)
    except SystemExit:  # stop has printed its line
        return None, [stderr.getvalue().strip()]
    except Exception as error:  # whatever it is, this rank must come to the next check
        return None, [_shorten(reason(error) or type(error).__name__)]


def check_address(seconds: float) -> None:
    """Stop with one line where nobody knows the name in MASTER_ADDR; every rank calls it.

    PyTorch would tell of it in pages of C++. A new name may come late: it is asked for so many
    seconds, at most 30.
    """
    address = os.environ.get("MASTER_ADDR")
    end = monotonic() + min(seconds, 30)
    while address:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if monotonic() > end:
                stop(
                    f"MASTER_ADDR={address} has no address ({error}): "
                    "export the name or address of rank 0's node"
                )
        sleep(0.5)


def reason(error: Exception) -> str:
    """Give an error's text as one line without C++ frames; NCCL's reason is in its last line."""
    text = re.split(r"\n(?:Exception raised from|frame #)", str(error))[0]
    return " ".join(text.split())


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
    gpu: str = ""  # the card's own name: cuda:0 is another one where a process is shown one GPU
    trouble: list[str] = field(default_factory=list)  # with the device
    node: str = ""
    cpus: list[int] = field(default_factory=list)  # on which this process may run
    lost: list[int] = field(default_factory=list)  # ranks that were waited for already
    blocked: bool = False  # a call never came back: its thread would hold this process at its end

    def count(self, note: str) -> int:
        """Count the ranks that left this note."""
        return self.store.add(note, 0)

    def first(self, name: str, value: str = "") -> str:
        """Broadcast rank 0's value; every rank calls it, with the value that it would give."""
        if self.rank == 0:
            self.store.set(name, value)
        return self.store.get(name).decode()

    def come(self, name: str, seconds: float, value: str = "") -> list[int]:
        """Leave a value and wait until all ranks have; every rank calls it.

        Returns the ranks that have not after so many seconds.
        """
        self.store.set(f"{name} of {self.rank}", value)
        self.store.add(f"{name} came", 1)
        end = monotonic() + seconds
        while self.count(f"{name} came") < self.size and monotonic() < end:
            sleep(0.01 + self.size / 50_000)  # one store answers all ranks
        return [rank for rank in range(self.size) if not self.store.check([f"{name} of {rank}"])]

    def together(self, name: str) -> None:
        """Wait until all ranks are here; every rank calls it. Raises Red where one is lost."""
        timeout = self.args.timeout
        # Who has itself waited in vain for so long comes a little later.
        self.lost = self.lost or self.come(name, timeout + 2)
        if self.lost:
            ranks = ", ".join(map(str, self.lost))
            raise CheckFailed(f"rank {ranks} of {self.size} missing after {timeout} s")

    def within(self, seconds: float, call: Callable[[], Value]) -> Value:
        """Call a function in a thread, and return its value.

        Raises what it raises, or TimeoutError after so many seconds; it runs on then.
        """
        values: list[Value] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                values.append(call())
            except BaseException as error:  # SystemExit, too: it is not a time-out
                errors.append(error)

        thread = Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if not (values or errors):
            self.blocked = True
            raise TimeoutError
        if errors:
            raise errors[0]
        return values[0]

    def meet(self) -> None:
        """Find the store that rank 0, or torchrun, keeps; every rank calls it.

        Raises Red if nobody answers, and SystemExit where the address is not known.
        """
        address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        variables = f"MASTER_ADDR={address} MASTER_PORT={port}"
        if not (address and port.isdecimal() and 0 < int(port[:9]) < 2**16):
            cure = "export both, the same for all ranks, before srun or mpirun"
            raise CheckFailed(f"{variables}: no meeting point", cure)
        timeout = self.args.timeout
        check_address(timeout)
        is_host = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

        def answers() -> bool:
            _, trouble = capture_trouble(lambda: create_connection((address, int(port)), 1).close())
            return not trouble

        def connect() -> dist.Store:
            while not is_host and not answers():
                sleep(0.1)  # TCPStore would tell of its attempts in a page of C++
            limit = timedelta(seconds=timeout)
            return dist.TCPStore(address, int(port), None, is_host, limit, wait_for_workers=False)

        try:  # a stranger that holds the port and never answers would hold TCPStore for ever
            store, trouble = self.within(timeout, lambda: capture_trouble(connect))
        except TimeoutError:
            store, trouble = None, ["no answer: is it running, and is the port no stranger's?"]
        if store is None:
            state = "cannot listen" if is_host else "is not there"
            cure = "export another MASTER_PORT, the same for all ranks"
            raise CheckFailed(f"{variables}: rank 0 {state} ({trouble[0]})", cure)
        # No other job has these keys.
        start = " ".join(os.environ[name] for name in LAUNCHERS.get(self.launcher, ())[:-3])
        self.store = dist.PrefixStore(f"doctor {start}", store)
        self.store.set_timeout(timedelta(seconds=timeout))



# NCCL was told that ranks may share a GPU.
MAY_SHARE = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def arrive(case: Case) -> None:
    """Claim a device, and leave a note of each thing that is this rank's; every rank calls it."""
    _, case.trouble = capture_trouble(lambda: _claim(case))
    case.cpus = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):  # Linux
        case.cpus = list(os.sched_getaffinity(0))
    # Several nodes may be pretended on one host.
    node = os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK")
    case.node = f"{case.host} {node}"
    notes = [f"local rank {case.node} {case.local_rank}"]
    notes += [f"cpu {case.node} {cpu}" for cpu in case.cpus]
    if case.store.add(f"host {case.host}", 1) == 1:
        notes.append("hosts")
    if case.gpu and (case.store.add(case.gpu, 1) == 1 or MAY_SHARE):
        notes.append("gpus")
    for note in notes:
        case.store.add(note, 1)


def _claim(case: Case) -> None:
    """Claim this rank's device. Raises Red where torch cannot use it; stops where there is none."""
    with redirect_stderr(StringIO()) as why:
        case.device = str(pick_device(case.local_rank, case.args.no_cuda))
    if why.getvalue():  # a script says it, and goes on
        raise CheckFailed(why.getvalue().strip())
    if case.device == "cpu":
        return
    card = torch.cuda.get_device_properties(case.device)
    case.gpu = f"GPU {card.uuid}{_mig_slice(case.device)} on {case.host}"


def _mig_slice(device: str) -> str:
    """Name the MIG slice behind cuda:N, as CUDA_VISIBLE_DEVICES does; "" where there is none.

    The driver's call gives a slice's own number (cuda.h); of the property that torch reads nothing
    is promised.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    _, _, index = device.partition(":")
    name = next(iter(names[int(index) :]), "").strip()
    return f" {name}" if name.startswith("MIG-") else ""


_SIZES = {"4 B": 1, "64 kB": 2**14, "1 MB": 2**18, "16 MB": 2**22, "256 MB": 2**26}  # in floats


def check_reduce(case: Case) -> str:
    """Check that an all-reduce gives the right sum on every rank, and measure how fast it is.

    Raises Red where a part of it blocks.
    """
    case.together("all-reduce")
    # NCCL hangs or aborts where two ranks hold one GPU, or one holds none: gloo can still say what
    # is wrong.
    on_gpus = case.count("gpus") == case.size
    device = torch.device(case.device if on_gpus else "cpu")
    large = torch.full((2**26 if on_gpus else 2**22,), case.rank + 1.0, device=device)
    sizes = {name: floats for name, floats in _SIZES.items() if floats <= len(large)}
    seconds = []
    try:
        in_time(case, device, "init", partial(_form, case, device))
        name, wrong = in_time(case, device, "first all-reduce", partial(_sum_up, case, large))
        for size, floats in sizes.items():
            times = 100 if floats < 2**18 else 5
            measure = partial(_seconds_of, large[:floats], times)
            seconds.append(in_time(case, device, f"all-reduce of {size}", measure))
        case.together("sums")  # nobody leaves while a peer still needs an answer
    finally:
        if dist.is_initialized() and not case.blocked:
            with suppress(Exception):  # what was wrong before counts
                in_time(case, device, "end", dist.destroy_process_group)
    if wrong:
        right = case.size * (case.size + 1) / 2
        raise CheckFailed(f"the sum of {case.size} ranks is {wrong[0]:g}, not {right:g}")
    if case.rank:
        return ""
    pairs = zip(sizes, seconds, strict=True)
    speeds = ", ".join(f"{size} {1e3 * each:.3g} ms" for size, each in pairs)
    busbw = large.nbytes / seconds[-1] * 2 * (case.size - 1) / case.size / 1e9
    return f"right sums over {name}; {speeds}; busbw {busbw:.2f} GB/s"


def backend_class(device: torch.device) -> str:
    """Name the class that moves tensors of this device between ranks, such as ProcessGroupNCCL."""
    group = dist.distributed_c10d._get_default_group()
    return type(group._get_backend(device)).__name__


def in_time(case: Case, device: torch.device, action: str, call: Callable[[], Value]) -> Value:
    """Call a function with this GPU as the current one, and return its value.

    Raises Red, with the interface, where it blocks. action: what it does, for that line.
    """

    def work() -> Value:
        with torch.accelerator.device_index(device.index):  # each thread has a current GPU
            return call()

    try:
        # NCCL can block inside a call that torch's limit does not end; where that ends one, it
        # says more.
        return case.within(case.args.timeout + 1, work)
    except TimeoutError:
        pass
    library = "NCCL" if device.type == "cuda" else "gloo"
    variable = f"{library.upper()}_SOCKET_IFNAME"
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    setting = os.environ.get(variable) or f"not set, and there are {interfaces}"
    seen = f"{library}'s {action} is not over after {case.args.timeout} s; {variable} is {setting}"
    cure = f"export {variable}= the interface between the nodes, open for all ports"
    cure = f"{cure}: ip -brief address"
    if library == "gloo":
        raise CheckFailed(seen, cure)
    debug = "NCCL_DEBUG=INFO says where it waits"
    if case.count("hosts") == 1:
        raise CheckFailed(
            seen, f"{debug}; on one host NCCL_P2P_DISABLE=1 does without direct copies"
        )
    raise CheckFailed(seen, f"{cure}; {debug}")


def _form(case: Case, device: torch.device) -> None:
    """Form the group of all ranks: NCCL's for a GPU, else gloo's; every rank calls it."""
    # An error, in place of an abort; torchrun has set it to 1 for its ranks.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", case.store),
        rank=case.rank,
        world_size=case.size,
        timeout=timedelta(seconds=case.args.timeout),
        device_id=device if on_gpu else None,
    )


def _sum_up(case: Case, large: Tensor) -> tuple[str, list[float]]:
    """All-reduce a tensor of rank + 1, and set it to zero; every rank calls it.

    Returns the backend's class, and a wrong sum if there is one.
    """
    limit = timedelta(seconds=case.args.timeout)
    # With a limit NCCL waits here, too, and raises.
    dist.all_reduce(large, async_op=True).wait(limit)
    right = case.size * (case.size + 1) / 2
    wrong = large[large != right][:1].tolist()  # also what is not a number
    large.zero_()  # sums of sums would overflow below
    return backend_class(large.device), wrong


def _seconds_of(total: Tensor, times: int) -> float:
    """Measure the mean seconds of so many all-reduces of this tensor; every rank calls it."""
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(total)
    total[0].item()  # waits for a GPU, once for all
    return (time.perf_counter() - begin) / times


__all__ = ["FILES", "write_digits"]

_SIDE = 28  # pixels along each side of an image, as in MNIST
_DOTS = 64  # ink dots along the strokes of one digit: about a pixel apart or less
_CHUNK = 500  # images drawn at once: few enough to stay in the processor's cache
_KINDS = ("images-idx3", "labels-idx1")
FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in _KINDS]

# Two or three ways to draw each digit. "10 70 39" is one stroke from x=1 y=0 through x=7 y=0 to
# x=3 y=9, with y pointing down; a comma lifts the pen, and a point given twice makes a sharper
# corner.
_STYLES = {
    0: ["50 30 11 17 39 59 77 71 50", "61 50 30 12 17 39 59 77 72 50 30"],
    1: ["50 49", "32 50 50 59", "32 50 50 59,29 89"],
    2: ["12 11 30 60 72 64 19 19 89", "12 30 60 72 55 28 17 26 48 88", "12 30 60 83 64 28 29 89"],
    3: ["11 30 60 72 63 44 44 65 77 59 29 17", "10 70 70 44 44 75 77 59 29 17"],
    4: ["30 15 15 85,60 69", "60 16 16 86,60 59", "20 13 35 75,71 74 69"],
    5: ["80 20 20 14 44 75 77 59 29 18", "20 24 54 75 77 59 29 18,20 80"],
    6: ["60 31 13 17 39 59 77 75 54 34 16", "50 23 16 28 59 78 65 45 17"],
    7: ["10 70 70 39", "10 80 80 49,24 74", "12 10 10 80 80 55 49"],
    8: ["71 50 20 12 34 64 77 69 39 17 35 54 73 71", "40 12 14 54 73 60 40,44 15 18 49 78 75 44"],
    9: [
        "72 50 20 12 15 45 74 72 69",
        "72 50 20 12 15 45 74 72 77 59 29",
        "71 30 12 15 45 72 71 71 59",
    ],
}
_SLOTS = 6  # styles of each digit to draw from: two styles and three styles both fill six evenly


def _round_corners(line: Tensor) -> Tensor:
    """Cut a line's corners twice, after Chaikin: a hand does not draw sharp ones; [n, 2]."""
    for _ in range(2):
        starts, ends = line[:-1], line[1:]
        quarters = [0.75 * starts + 0.25 * ends, 0.25 * starts + 0.75 * ends]
        inner = torch.stack(quarters, dim=1).flatten(0, 1)
        line = torch.cat([line[:1], inner, line[-1:]])
    return line


def _read_stroke(stroke: str) -> Tensor:
    """Read a stroke's points, such as "10 70 39", as [n, 2], in -1 to 1."""
    points = [[float(point[0]), float(point[1])] for point in stroke.split()]
    return torch.tensor(points) / 4.5 - 1


def _trace(style: str) -> Tensor:
    """Place _DOTS points evenly along a style's strokes: [_DOTS, 2], in -1 to 1."""
    strokes = [_round_corners(_read_stroke(stroke)) for stroke in style.split(",")]
    starts = torch.cat([stroke[:-1] for stroke in strokes])
    ends = torch.cat([stroke[1:] for stroke in strokes])
    lengths = (ends - starts).norm(dim=1)
    distances = lengths.cumsum(0)  # along the pen's way, at the end of each segment
    wanted = torch.linspace(0, distances[-1].item(), _DOTS)
    segment = torch.searchsorted(distances, wanted).clamp(max=len(lengths) - 1)
    fraction = (wanted - distances[segment] + lengths[segment]) / lengths[segment]
    return torch.lerp(starts[segment], ends[segment], fraction[:, None])


def _pen_paths(styles: Tensor, generator: Generator) -> Tensor:
    """Draw each style by another hand: [n, _DOTS, 2] in -1 to 1 become [n, _DOTS, 2] in pixels."""

    def vary(*shape: int) -> Tensor:
        return 2 * torch.rand(len(styles), *shape, generator=generator) - 1

    # Most writers are neat, a few are careless: without those few, a small network would make
    # no mistake.
    mess = 0.4 + 1.4 * torch.rand(len(styles), 1, 1, generator=generator) ** 6
    # A long stroke has room to wobble.
    length = styles.diff(dim=1).norm(dim=2).sum(dim=1)[:, None, None]
    wobble = F.interpolate(vary(2, 7), size=_DOTS, mode="linear", align_corners=True)
    wobble = F.avg_pool1d(wobble, 9, stride=1, padding=4, count_include_pad=False)
    path = styles + 0.06 * mess * length * wobble.transpose(1, 2)
    # A smooth bend.
    path = path + 0.17 * mess * torch.sin(2 * vary(1, 2) * path.flip(2) + 3 * vary(1, 2))
    x, y = path.unbind(2)
    angle, slant = 0.25 * vary(1), 0.15 + 0.3 * vary(1)
    x, y = (8.8 + 1.8 * vary(1)) * (x - slant * y), (9 + vary(1)) * y
    turned = [angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y]
    path = torch.stack(turned, dim=2)
    # Centred by mass, as in MNIST; the shift makes up for these writers being more alike than
    # real ones.
    centred = path - path.mean(dim=1, keepdim=True) + (_SIDE - 1) / 2
    return centred + 1.8 * vary(1, 2)


def _draw(paths: Tensor, generator: Generator) -> Tensor:
    """Draw an image for each pen path: [n, _SIDE, _SIDE] of uint8, white ink on black."""
    pixels = torch.arange(_SIDE)
    x, y = ((axis[:, :, None] - pixels) ** 2 for axis in paths.unbind(2))
    nearest = torch.full((len(paths), _SIDE, _SIDE), torch.inf)  # dot, as a squared distance
    for dot in range(_DOTS):
        torch.minimum(nearest, x[:, dot, None, :] + y[:, dot, :, None], out=nearest)
    thickness, strength = torch.rand(2, len(paths), 1, 1, generator=generator)
    depth = 0.8 + 0.9 * thickness - nearest.sqrt()  # pixels inwards from the edge of the ink
    ink = (0.5 + 1.5 * depth).clamp(0, 1) * (0.85 + 0.15 * strength)
    return (255 * ink).to(torch.uint8)


def _idx_file(magic: int, *sizes: int) -> tuple[bytearray, Tensor]:
    """Make an empty file in IDX, MNIST's format, and the uint8 tensor that is its body."""
    header = struct.pack(f">{1 + len(sizes)}I", magic, *sizes)
    content = bytearray(header + bytes(torch.Size(sizes).numel()))
    body = torch.frombuffer(content, dtype=torch.uint8, offset=len(header))
    return content, body.view(sizes)


def _make_set(size: int, generator: Generator) -> tuple[bytearray, bytearray]:
    """Make the image file and the label file of a set of so many digits."""
    slots = [
        torch.stack([_trace(styles[slot % len(styles)]) for slot in range(_SLOTS)])
        for styles in _STYLES.values()
    ]
    traces = torch.stack(slots)  # [10, _SLOTS, _DOTS, 2]
    image_file, images = _idx_file(2051, size, _SIDE, _SIDE)
    label_file, labels = _idx_file(2049, size)
    labels.copy_(torch.randint(10, (size,), generator=generator))
    for image_chunk, label_chunk in zip(images.split(_CHUNK), labels.split(_CHUNK), strict=True):
        slot = torch.randint(_SLOTS, (len(label_chunk),), generator=generator)
        paths = _pen_paths(traces[label_chunk.long(), slot], generator)
        image_chunk.copy_(_draw(paths, generator))
    return image_file, label_file


def _make_both(train: int, test: int, seed: int) -> list[bytearray]:
    """Make the contents of FILES: the training set, then the test set."""
    generator = torch.Generator().manual_seed(seed)  # torch's own stays as the learner set it
    threads = torch.get_num_threads()
    # The work is many short steps: on a busy machine, several threads would mostly wait for one
    # another.
    torch.set_num_threads(1)
    try:
        return [*_make_set(train, generator), *_make_set(test, generator)]
    finally:
        torch.set_num_threads(threads)


def _is_complete(root: Path) -> bool:
    """Tell whether root holds a digits set; it appears all at once, so that its files' names do."""
    raw = root / "MNIST" / "raw"
    return all((raw / name).is_file() for name in [*FILES, "MD5SUMS"])


def write_digits(root: Path, train: int = 60_000, test: int = 10_000, seed: int = 1) -> Path:
    """Make the digits set under root, and return root; a complete one is kept.

    One process calls it, before any rank starts. train, test: the number of images.
    Raises OSError if it cannot be written.
    """
    if _is_complete(root):
        return root
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".digits-", dir=root) as scratch:
        raw = Path(scratch) / "MNIST" / "raw"
        raw.mkdir(parents=True)
        digests = ""
        for name, content in zip(FILES, _make_both(train, test, seed), strict=True):
            (raw / name).write_bytes(content)
            # MD5 because torchvision and MNIST's published digests use it; it guards against
            # accidents only.
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            digests += f"{digest}  {name}\n"
        (raw / "MD5SUMS").write_text(digests)
        try:
            raw.parent.rename(root / "MNIST")
        except OSError:
            # There is a folder already: fine if another process has just finished the same set.
            if not _is_complete(root):
                raise
    return root


# MNIST's own digests: they find damage, not forgery. A generated set brings its own in MD5SUMS.
_MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def check_data(root: Path) -> str:
    """Name the dataset under root, MNIST or digits; every rank calls it.

    Stops unless all four files are whole, by their MD5.
    """
    raw = Path(root) / "MNIST" / "raw"
    try:
        digests = _read_digests(raw / "MD5SUMS") or _MNIST_MD5
        for name in _MNIST_MD5:
            path = raw / name
            if not path.is_file():
                stop(
                    f"--data {root}: {path} is missing; get it once, before any rank: "
                    f"python -m ddp_helpers data {root}, "
                    f"or without the course download_data.py --data {root}"
                )
            if hashlib.md5(path.read_bytes()).hexdigest() != digests.get(name):
                stop(
                    f"--data {root}: {path} is cut short or damaged (wrong MD5); "
                    f"remove {raw} and get it again"
                )
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror})"
        stop(f"--data {root}: {problem}: choose another folder")
    return "MNIST" if digests == _MNIST_MD5 else "digits"


def _read_digests(path: Path) -> dict[str, str]:
    """Read the digest of each file from MD5SUMS; {} if there is none. Raises OSError."""
    if not path.is_file():
        return {}
    lines = path.read_text(errors="replace").splitlines()
    entries = [line.split() for line in lines if line.strip()]
    return {entry[-1]: entry[0] for entry in entries}


def has_files(root: Path) -> bool:
    """Tell whether any of the four files is there; `check_data` tells whether they are whole."""
    return any((root / "MNIST" / "raw" / name).is_file() for name in _MNIST_MD5)


def _reachable(seconds: float) -> bool:
    """Tell whether one of torchvision's mirrors answers within so many seconds."""
    for mirror in MNIST.mirrors:
        try:
            host = urlparse(mirror).hostname
            socket.create_connection((host, 443), timeout=seconds).close()
            return True
        except OSError:
            continue
    return False


def download(root: Path, seconds: float) -> bool:
    """Have torchvision download MNIST into root; returns whether it did.

    A process of its own does it, which is ended after so many seconds.
    """
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as folder:
        spawn = get_context("spawn").Process
        process = spawn(target=MNIST, args=(folder,), kwargs={"download": True}, daemon=True)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
        if process.exitcode != 0:
            return False
        check_data(Path(folder))
        if not has_files(root):
            (Path(folder) / "MNIST").rename(root / "MNIST")
    return True


def stage(folder: Path = Path("data"), seconds: float = 120) -> Path:
    """Return the folder to give as --data, filled if need be; one process calls it, first.

    DDP_MNIST_ROOT, where it is set, names a folder with real MNIST. Otherwise it is `folder`: with
    MNIST, downloaded if the network allows it within `seconds`, or else with the generated digits,
    in the same files. Stops where there are files that are not whole.
    """
    if root := os.environ.get("DDP_MNIST_ROOT"):
        print(f"{check_data(Path(root))} is staged (DDP_MNIST_ROOT)")
        return Path(root)
    folder = Path(folder)
    if has_files(folder):
        print(f"{check_data(folder)} is staged")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if _reachable(5) and download(folder, seconds):
        print("MNIST is downloaded")
        return folder
    size = "60,000 + 10,000 images in its file format"
    print(f"No network: digits are made here instead of MNIST, {size}")
    return write_digits(folder)



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



def write_whole(path: Path, content: bytes) -> None:
    """Put a file in its place when all of it is on the disk; any process calls it.

    Until then it has a name that is new each time, and that no symbolic link can have: nobody
    else's file is touched. Raises OSError, and then nothing has changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".part-{os.urandom(8).hex()}"
    try:
        with part.open("xb") as file:  # x: O_CREAT with O_EXCL, which follows no link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # first: after a power cut the name has all of it behind it
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    main()
