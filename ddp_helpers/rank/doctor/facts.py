"""What one rank found out before a job, and a row of the doctor's table."""

from collections.abc import Callable
from dataclasses import dataclass, field

ENOUGH = 10**9  # bytes free for the records and checkpoints of a run
SHARED = 64 * 2**20  # bytes of /dev/shm, which is what a container gives without being asked
ASYNC = 1.0  # seconds by which clocks may differ before logs and file times mislead


@dataclass
class Facts:
    """What one rank found out, alone and together with the others. An `..._error` is one line, or '' if all is well."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    node: int = 0
    launcher: str = "single"
    host: str = ""
    tasks: int = 1  # that the Slurm job has, where no launcher started this process
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    gpu: str = ""  # its own number, the same in whatever order a process sees the GPUs
    device_error: str = ""
    cpus: list[int] = field(default_factory=lambda: [0])  # on which this process may run
    machine: int = 1  # CPUs of the whole machine
    asked: int = 1  # SLURM_CPUS_PER_TASK
    threads: int = 1  # OMP_NUM_THREADS
    workers: int = 0  # --num-workers
    interface: str = ""
    loopback: bool = False
    interface_error: str = ""
    backend: str = "gloo"
    reduce_error: str = ""
    latency: float = 0.0  # seconds of a small all-reduce
    bandwidth: float = 0.0  # bus bandwidth of a large one, bytes per second
    skew: float = 0.0  # seconds by which this clock is ahead of rank 0's
    folder: str = "runs"
    folder_error: str = ""
    data: str = ""
    data_error: str = ""
    free: int = ENOUGH  # bytes
    shm: int = SHARED  # bytes


@dataclass
class Row:
    """A line of the table: what was checked, whether it is green, what was seen, and what to do if it is not."""

    check: str
    ok: bool
    seen: str
    cure: str = ""


Fault = tuple[str, str] | None  # what is wrong with one rank, and its cure


def who(ranks: list[int], world_size: int) -> str:
    """Name some ranks: all of them, or each by its number."""
    if len(ranks) == world_size > 1:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def judge(check: str, everyone: list[Facts], fault: Callable[[Facts], Fault], fine: str) -> Row:
    """The row of a check that asks each rank the same: red with the ranks at fault, or what is fine. Any process."""
    found: dict[tuple[str, str], list[int]] = {}
    for facts in everyone:
        if wrong := fault(facts):
            found.setdefault(wrong, []).append(facts.rank)
    seen = "; ".join(f"{who(ranks, len(everyone))}: {what}" for (what, _), ranks in found.items())
    return Row(check, not found, seen or fine, "; ".join(dict.fromkeys(cure for _, cure in found)))
