"""Train a network on MNIST with one process for each GPU, on any number of nodes.

Written out from ddp_helpers 0.1.0, MIT licence. Needs torch 2.10 or newer, and torchvision. Launch:
torchrun --standalone --nproc-per-node 2 -- mnist_ddp.py --data data --epochs 1
# after: export MASTER_ADDR MASTER_PORT
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python mnist_ddp.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python mnist_ddp.py --data data
--batch-size counts the samples of all ranks together: the same flags mean the same training
on any number of ranks.
"""

from __future__ import annotations  # they name classes that come later

import atexit
import json
import os
import re
import socket
import sys
import threading
import time
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BytesIO
from math import prod
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor


def train(args: Namespace, device: torch.device, train_set: Dataset, test_set: Dataset) -> None:
    """Train for args.epochs epochs, and test after each; every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Where shares would differ, it repeats samples.
    sampler: DistributedSampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    assert isinstance(test_set, Sized), "a stream cannot be shared out"
    test_indices = range(rank, len(test_set), world_size)  # each sample on one rank, once
    loading = {
        "num_workers": args.num_workers,
        "pin_memory": device.type == "cuda",
        "generator": torch.Generator().manual_seed(args.seed + rank),
    }
    share = args.batch_size // world_size
    train_batches = DataLoader(
        train_set,
        share,
        sampler=sampler,
        persistent_workers=args.num_workers > 0,
        **loading,
    )
    test_batches = DataLoader(Subset(test_set, test_indices), args.test_batch_size, **loading)
    torch.manual_seed(args.seed)  # the same first weights each time
    model = Net().to(device)
    torch.manual_seed(args.seed + rank)  # but each rank its own dropout
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    # YOUR OPTIMIZER and schedule: a step of it is an epoch.
    # --lr 1.0 is for Adadelta: with AdamW --lr 0.001 --gamma 1
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        title = f"epoch {epoch}" if rank == 0 else ""
        sampler.set_epoch(epoch)  # a new order each epoch
        model.train()
        trained = one_pass(ddp_model, train_batches, args, optimizer, title)
        trained = over_ranks(trained)  # sums: averages over unequal shares would not add up
        middle = time.perf_counter()
        model.eval()
        for buffer in model.buffers():
            # BatchNorm's averages differ between ranks: test those that are saved.
            dist.broadcast(buffer, 0)
        with torch.no_grad():  # not through the wrapper: no rank waits for another
            tested = one_pass(model, test_batches, args)
        tested = over_ranks(tested)
        scheduler.step()
        end = time.perf_counter()
        if rank == 0:
            report(args, epoch, trained, tested, middle - begin, end - middle)
    if args.save_model and rank == 0:
        save_model(model, args.run_dir)


def main() -> None:
    """Find out which rank this is, check what was given, join the group, and train.

    Every rank calls it.
    """
    launcher, rank, local_rank, world_size = who_am_i()
    args = read_flags(DDP_FLAGS)
    share_batch(args, world_size)
    sets = datasets(args.data)
    device = pick_device(local_rank, args.no_cuda)
    join(launcher, rank, world_size, device, args.timeout)
    facts = gather_ranks(args, launcher, local_rank, device)
    set_precision(args, device)
    args.run_dir = args.run_dir if rank == 0 else None  # rank 0 alone writes the record
    with recorded(args, device, sets[0], **facts):
        train(args, device, *sets)
    # No rank leaves before rank 0 has saved: some launchers end all ranks when one has left.
    dist.barrier()
    dist.destroy_process_group()


# YOUR DATA goes here: a training and a test set of (input, target), there before the run.
# train_set.name, if there is one, is recorded.
def datasets(folder: Path) -> tuple[Dataset, Dataset]:
    """Open both datasets; every rank calls it. Stops where a file is missing or cut short."""
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    try:
        if defect := describe_damage(folder):
            raise ValueError(defect)
        train_set = MNIST(folder, train=True, transform=transform)
        test_set = MNIST(folder, train=False, transform=transform)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        defect = str(error) or "damaged"
        stop(f"--data {folder} holds no whole MNIST ({defect}): get it once, before the run")
    generated = (folder / "MNIST/raw/MD5SUMS").exists()  # digits, in MNIST's format
    train_set.name = "digits" if generated else "MNIST"
    return train_set, test_set


# YOUR NETWORK goes here: any nn.Module that returns log-probabilities, as log_softmax gives them;
# for plain scores put F.cross_entropy into the loss below. nll_loss would train, and learn nothing.
# BatchNorm1d fails on a batch of one sample: give train_batches drop_last=True.
class Net(nn.Module):
    """Two convolutions, two linear layers: images [n, 1, 28, 28] to log-probabilities [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score the ten digits for each image."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


# YOUR LOSS goes here, and metrics of any name, each a tensor of one number. A metric is added up
# over the batches and the ranks, and in the end divided by the number of samples; one called
# max_NAME is the largest that any batch had. For a regression: squeeze the output to the target's
# shape first; the dict may be empty.
def loss_and_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean loss of a batch, and its metrics: accuracy counts the right answers."""
    right = output.argmax(dim=1) == target
    return F.nll_loss(output, target), {"accuracy": right.sum()}


# A variable that only this launcher sets, then its rank, local rank and world size. The first
# row that fits counts, as a whole: mpirun's ranks inherit SLURM_PROCID=0 from a batch script,
# and SLURM_NTASKS is the job's size, not a step's.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    "mpich": ("MPI_LOCALRANKID", "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # Intel MPI, too
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PMI_LOCAL_RANK", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}

# What names one start by this launcher: the same on all its ranks, on every node, and another
# at each start. MPICH and whoever exports RANK by hand set no such name. On several nodes give
# the torchruns a fixed --master-addr: with --rdzv-backend=c10d they may count restarts unlike.
STARTS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    "openmpi": ("PMIX_NAMESPACE",),
    "mpich": ("I_MPI_HYDRA_UUID",),  # of Intel MPI alone
    "slurm": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "pals": ("PALS_APID",),
    "env": (),
}

# Two classes stand behind the backend "nccl". Read in torch 2.15, where the newer became the
# default: its getFuture, which DDP calls for each bucket, makes the computing stream wait, so
# that nothing overlaps. This takes the older one, in 2.14 as in 2.15; before, no torch reads it.
OLDER_NCCL = "TORCH_DIST_USE_NCCL2", "0"


def stop(line: str) -> NoReturn:
    """End this process with one line on stderr and exit status 2."""
    print(" ".join(line.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


def who_am_i(env: Mapping[str, str] = os.environ) -> tuple[str, int, int, int]:
    """Read launcher, rank, local rank and world size from the environment; every rank calls it.

    Stops where the variables contradict each other.
    """
    launcher = next((name for name, (sign, *_) in LAUNCHERS.items() if sign in env), "single")
    names = LAUNCHERS.get(launcher, ())[1:]
    values = [env.get(name, "") for name in names] or ["0", "0", "1"]
    numbers = [int(value) if re.fullmatch("[0-9]{1,18}", value) else -1 for value in values]
    rank, local_rank, world_size = numbers
    exported = [env.get("RANK", values[0]), values[1], env.get("WORLD_SIZE", values[2])]
    if values != exported or not 0 <= local_rank <= rank < world_size:
        stop(
            f"{launcher}: rank, local rank, world size {values}; "
            f"RANK, WORLD_SIZE {exported}: export neither, or all"
        )
    return launcher, rank, local_rank, world_size


def name_of_start(launcher: str) -> str:
    """Name this start of the ranks, the same on all of them; every rank calls it.

    It stands before each key in the store where they meet: another job may come there, too.
    """
    names = ("USER", *STARTS.get(launcher, ()))
    return " ".join(os.environ.get(name, "") for name in names)


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


def describe_damage(folder: Path) -> str:
    """Describe what is wrong with the MNIST files in a folder; "" if nothing is.

    It looks at their first bytes and their lengths; any process calls it.
    """
    for part in ("train", "t10k"):
        counts = []
        for kind in ("images-idx3", "labels-idx1"):
            name = f"{part}-{kind}-ubyte"
            try:
                counts.append(_count_items(folder / "MNIST" / "raw" / name))
            except ValueError as error:
                return f"{name}: {error}"
            except OSError as error:
                return f"{name}: {error.strerror}"
        images, labels = counts
        if images != labels:
            return f"{part}: {images} images, but {labels} labels"
    return ""


def _count_items(path: Path) -> int:
    """Count the images or labels in an IDX file. Raises ValueError if it is empty or cut short."""
    with path.open("rb") as file:
        header = file.read(16)
    if len(header) < 4:
        raise ValueError("empty")
    dimensions = header[3]  # the size of each follows, in four bytes
    starts = range(4, 4 + 4 * dimensions, 4)
    sizes = [int.from_bytes(header[start : start + 4], "big") for start in starts]
    if path.stat().st_size != 4 + 4 * dimensions + prod(sizes):
        raise ValueError("cut short")
    if not sizes:
        raise ValueError("empty")
    return sizes[0]


def holds_run(folder: Path) -> bool:
    """Tell whether a run has written into the folder: its settings, or an epoch's measurements."""
    names = ("spec.json", "metrics.jsonl")
    return any(os.path.exists(folder / name) for name in names)  # noqa: PTH110 raises nothing


class Flag(NamedTuple):
    """A flag's default, and what it is for; one without a default takes a whole number."""

    default: float | str | None
    purpose: str


# Flags that only these scripts have.
DDP_FLAGS = {
    "batch_size_per_rank": Flag(
        None,
        "in place of --batch-size: the samples in a step of each rank",
    ),
    "timeout": Flag(600, "seconds that ranks wait for each other"),
}
_USUAL_FLAGS = {
    "batch_size": Flag(64, "samples in a step, of all ranks together"),
    "test_batch_size": Flag(1000, "samples that a rank tests at a time"),
    "epochs": Flag(14, "passes over the training set"),
    "lr": Flag(1.0, "learning rate"),
    "gamma": Flag(0.7, "factor of the learning rate after each epoch"),
    "seed": Flag(1, "of the first weights, the order of the samples and the dropout"),
    "log_interval": Flag(100, "steps from one line of progress to the next"),
    # Each holds about eight files open, and many systems allow a process 1,024.
    "num_workers": Flag(min(cpus_of_rank() - 1, 8), "processes of each rank that load data"),
}


class OneLineParser(ArgumentParser):
    """An ArgumentParser that reports a mistake in one line, which `label` begins."""

    label = ""

    def error(self, message: str) -> NoReturn:
        """Stop the process with the message."""
        stop(f"{self.label}{message}; --help lists the flags")


def read_flags(more: Mapping[str, Flag], argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags from argv, or the command line; stops at one that cannot be used.

    more: the flags that only this script has.
    """
    layout = RawDescriptionHelpFormatter
    parser = OneLineParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add = parser.add_argument
    data = os.environ.get("DDP_MNIST_ROOT", "data")
    precision_help = "else bf16 where the device has units for it"
    add("--data", type=Path, default=data, help="the data's folder")
    add("--run-dir", type=Path, help="new folder for the record of the run")
    add("--precision", choices=("bf16", "float32"), help=precision_help)
    for name, (default, purpose) in {**_USUAL_FLAGS, **more}.items():
        kind = int if default is None else type(default)
        purpose = purpose if default is None else f"{purpose} ({default})"
        add(f"--{name.replace('_', '-')}", type=kind, default=default, help=purpose)
    for flag in ("--no-cuda", "--dry-run", "--save-model"):
        add(flag, action="store_true")
    args = parser.parse_args(argv)
    _check_ranges(parser, args)
    if args.run_dir and "resume" not in args and holds_run(args.run_dir):
        stop(f"--run-dir {args.run_dir} holds a run: choose a new folder")
    return args


def _check_ranges(parser: OneLineParser, args: Namespace) -> None:
    """Stop at a number that no run can use."""
    for name, value in vars(args).items():
        least = 0 if name in ("num_workers", "seed") else 1e-9
        if type(value) in (int, float) and not least <= value < 2**31:
            parser.error(f"--{name.replace('_', '-')} {value} is out of range")
    cpus = cpus_of_rank()
    most = max(64, 16 * cpus)  # each worker is a process
    if args.num_workers > most:
        parser.error(
            f"--num-workers {args.num_workers} is out of range: "
            f"at most {most}, 16 for each CPU, or 64"
        )


def share_batch(args: Namespace, world_size: int) -> None:
    """Set args.batch_size to the samples in a step of all ranks together; every rank calls it.

    Stops where the ranks cannot share them evenly.
    """
    if args.batch_size_per_rank:
        args.batch_size = args.batch_size_per_rank * world_size
    share, remainder = divmod(args.batch_size, world_size)
    if remainder:
        shares = [size for size in (share, share + 1) if size]
        sizes = " or ".join(str(size * world_size) for size in shares)
        problem = f"--batch-size {args.batch_size} cannot be shared evenly by {world_size} ranks"
        stop(f"{problem}: give {sizes}, or --batch-size-per-rank")


def pick_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim cuda:local_rank, or the CPU where CUDA can use no GPU; every rank calls it.

    Stops where the node has fewer GPUs than ranks, and where no GPU of those given can be used.
    """
    if no_cuda:
        return torch.device("cpu")
    names, why = usable_gpus()
    if not names:
        # The first counts before what Slurm says: empty, it hides all. Who trains on CPUs though
        # there are GPUs says --no-cuda; so do the jobs of the course's own Slurm, whose GPU slots
        # are no GPUs.
        variables = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE")
        named = (f"{name}={os.environ[name]}" for name in variables if name in os.environ)
        given = next(named, "=")
        if not given.endswith(("=", "=-1", "=NoDevFiles", "ON_NODE=0")):
            if why:
                stop(f"{given}, but {why}, or give --no-cuda")
            stop(
                f"{given}, but torch {torch.__version__} sees no GPU: "
                "install a torch for this driver's CUDA (nvidia-smi), "
                "give the container --nv, or give --no-cuda"
            )
        if why:
            print(f"{why}; until then the CPU is used", file=sys.stderr, flush=True)
        return torch.device("cpu")
    # The only GPU that is seen may be this rank's own, which is cuda:0 to all, as with Slurm's
    # --gpus-per-task=1. Ranks of torchrun all see the same ones.
    may_be_own = "TORCHELASTIC_RUN_ID" not in os.environ or may_share()
    if local_rank >= len(names) > int(may_be_own):
        stop(
            f"local rank {local_rank} has no GPU ({len(names)} here): start a rank for each GPU "
            f"(--nproc-per-node {len(names)}, --ntasks-per-node), or give --no-cuda"
        )
    device = torch.device("cuda", min(local_rank, len(names) - 1))
    torch.cuda.set_device(device)
    return device


def usable_gpus() -> tuple[list[str], str]:
    """Name the GPUs that CUDA can use, by their index, and tell why there are no more, if any are.

    It starts CUDA, which no process that is forked later could use then.
    """
    found = torch.cuda.device_count()  # NVML's count, also of GPUs that CUDA cannot use
    names: list[str] = []
    if not found:
        return names, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own of an old GPU, in several lines
        try:
            torch.cuda.init()
        except RuntimeError as error:  # its first sentence says why
            return names, (
                f"there are {found} GPU(s), and torch {torch.__version__} can use none "
                f"({str(error).partition('. ')[0]}): update the driver, or install a torch for the "
                "CUDA that nvidia-smi names"
            )
    built = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        if not runs_on((card.major, card.minor), built):
            return names, (
                f"{card.name} is sm_{card.major}{card.minor}, and this torch is built for "
                f"{' '.join(built)}: install a torch for this GPU"
            )
        names.append(card.name)
    return names, ""


def runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Tell whether code built for these architectures runs on a GPU of this capability.

    sm_ runs on the same major number, compute_ on any later one.
    """
    codes = re.findall(r"\b(sm|compute)_(\d+)\b", " ".join(built))
    own = 10 * capability[0] + capability[1]
    for kind, code in codes:
        if int(code) <= own and (kind == "compute" or int(code) // 10 == capability[0]):
            return True
    return not codes  # not NVIDIA's


def may_share() -> bool:
    """Tell whether NCCL, from 2.30 on, was told that ranks may share a GPU."""
    was_told = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return was_told and torch.cuda.nccl.version() >= (2, 30)


def has_bf16(device: torch.device) -> bool:
    """Tell whether the device has units for bfloat16.

    A processor without them emulates it, and is slower than with float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    units = torch.cpu.get_capabilities()
    return any(units.get(name) for name in ("amx_bf16", "avx512_bf16", "arm_bf16"))


def set_precision(args: Namespace, device: torch.device) -> None:
    """Set args.precision where no flag has; every rank calls it.

    float32 computes with 24 bits then, and not with TF32's 11.
    """
    if not args.precision:
        args.precision = "bf16" if has_bf16(device) else "float32"
    if args.precision == "float32":
        torch.backends.cudnn.allow_tf32 = False


Number = TypeVar("Number", float, Tensor)


def merge(parts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    """Merge what was measured in parts, batches or ranks, by name.

    The parts are added up; but of max_NAME the largest counts.
    """
    totals: dict[str, Number] = {}
    for part in parts:
        for name, value in part.items():
            if name.startswith("max_"):
                totals[name] = max(totals.get(name, value), value)
            else:  # a new tensor, also of the first: a CUDA graph fills its own anew
                totals[name] = totals.get(name, 0) + value
    return totals


def one_pass(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    args: Namespace,
    optimizer: Optimizer | None = None,
    title: str = "",
    wait: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Train if there is an optimizer, else test; every rank calls it.

    title: begins the lines of progress; without it there are none.
    wait: is called before the sums are read, which waits for the GPU.

    Returns by name what this process has measured: loss, samples and each metric are added up;
    max_NAME is the largest; mean_data_seconds is how long it waited for data.
    """
    device = next(model.parameters()).device
    measured: dict[str, Tensor] = {}
    data_seconds, wait_begin = 0.0, time.perf_counter()
    for step, (inputs, target) in enumerate(batches, 1):
        data_seconds += time.perf_counter() - wait_begin
        inputs = inputs.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss, metrics = loss_and_metrics(model(inputs), target)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10)  # against a rare huge step
            optimizer.step()
        sums = {"loss": loss.double() * len(target), **metrics}
        sums["samples"] = torch.tensor(len(target))
        sums = {name: value.detach().double() for name, value in sums.items()}
        measured = merge([measured, sums])
        if title and step % args.log_interval == 0 and isinstance(batches, Sized):
            _print_progress(title, step, len(batches), loss)
        if args.dry_run:
            break
        wait_begin = time.perf_counter()
    if wait:
        wait()
    totals = {name: float(value) for name, value in measured.items()}  # waits for the GPU
    return {**totals, "mean_data_seconds": data_seconds}


def _print_progress(title: str, step: int, steps: int, loss: Tensor) -> None:
    """Print how many of an epoch's steps are done, with a bar, and the last loss."""
    bar = "#" * (20 * step // steps)
    print(f"{title} [{bar:.<20}] {step}/{steps} loss {loss:.4f}")


_EXPORT_ADDRESS = (
    "export MASTER_ADDR and MASTER_PORT, the same for all ranks and for no other job; do all run?"
)
_REST = 1.0  # seconds for which a fork, and the end, wait for the other threads


def check_address(seconds: float) -> None:
    """Stop with one line where nobody knows the name in MASTER_ADDR; every rank calls it.

    PyTorch would tell of it in pages of C++. A new name may come late: it is asked for so many
    seconds, at most 30.
    """
    address = os.environ.get("MASTER_ADDR")
    end = time.monotonic() + min(seconds, 30)
    while address:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                stop(
                    f"MASTER_ADDR={address} has no address ({error}): "
                    "export the name or address of rank 0's node"
                )
        time.sleep(0.5)


def backend_class(device: torch.device) -> str:
    """Name the class that moves tensors of this device between ranks, such as ProcessGroupNCCL."""
    group = dist.distributed_c10d._get_default_group()
    return type(group._get_backend(device)).__name__


def reason(error: Exception) -> str:
    """Give an error's text as one line without C++ frames; NCCL's reason is in its last line."""
    text = re.split(r"\n(?:Exception raised from|frame #)", str(error))[0]
    return " ".join(text.split())


def wait_before_fork_and_exit() -> None:
    """Have this process wait until no other thread runs, before it forks a worker or ends.

    On Linux, for _REST seconds at most. A thread of gloo takes the GIL to free a tensor. A worker
    forked in that moment hangs before 3.12: https://github.com/python/cpython/issues/112275
    A process that ends in that moment is aborted (SIGABRT) before 3.14, although all is done:
    https://github.com/pytorch/pytorch/issues/38228
    """
    if sys.platform == "linux" and sys.version_info < (3, 12):
        os.register_at_fork(before=_wait_for_threads)
    if sys.platform == "linux" and sys.version_info < (3, 14):
        atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    """Wait until no other thread of this process runs, for _REST seconds at most."""
    me, end = str(threading.get_native_id()), time.monotonic() + _REST
    tasks = Path("/proc/self/task")
    while any(_is_running(task) for task in tasks.iterdir() if task.name != me):
        if time.monotonic() > end:
            break
        time.sleep(0.001)


def _is_running(task: Path) -> bool:
    """Tell whether a thread, by its folder in /proc, has work to do: state R of proc(5)."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2].startswith("R")
    except OSError:  # it has ended since
        return False


def join(
    launcher: str,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: float,
) -> None:
    """Form the group of all ranks; every rank calls it. Stops after timeout seconds."""
    # Who never came prints nothing.
    print(f"rank {rank} of {world_size} on {os.uname().nodename}, {device}", flush=True)
    wait_before_fork_and_exit()
    limit = timedelta(seconds=timeout)
    on_gpu = device.type == "cuda"
    os.environ.setdefault(*OLDER_NCCL)
    store: dist.Store = dist.HashStore()
    try:
        if world_size > 1:
            check_address(timeout)
            meeting = dist.rendezvous("env://", rank, world_size, timeout=limit)
            store, *_ = next(meeting)
        # No other job has these keys.
        prefix = f"{name_of_start(launcher)} {world_size}"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(prefix, store),
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:  # it says how many came
        text = reason(error)
        stop(f"rank {rank} of {world_size}: {text}; {_cure_of(text)}")


def _cure_of(text: str) -> str:
    """Choose what to do about an error of the group, from its text."""
    if "CUDA error" in text:
        return "nvidia-smi shows this node's GPUs, and who uses them"
    # Gloo's ranks write their addresses into the store, each under its own rank.
    missing = re.search(r"wait timeout .*//cpu//\d+/(\d+)$", text)
    if missing:
        late = f"rank {missing[1]} has not joined: read its own lines in the log of its node"
        return f"{late}; if it runs, it has another MASTER_ADDR or MASTER_PORT, or another job's"
    if "NCCL" not in text:
        return _EXPORT_ADDRESS
    debug = "export NCCL_DEBUG=INFO, which tells more"
    # Who waits, for ncclUniqueId or at all, may wait for a rank.
    waits = re.search("ncclUniqueId|timeout|[Tt]imed out", text)
    return f"{_EXPORT_ADDRESS} Else {debug}" if waits else debug


def gather_ranks(
    args: Namespace,
    launcher: str,
    local_rank: int,
    device: torch.device,
) -> dict[str, object]:
    """Gather where each rank runs, for the record; every rank calls it.

    Stops all ranks where one was given other flags than rank 0.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    placement = {
        "rank": rank,
        "local_rank": local_rank,
        "host": os.uname().nodename,
        "device": str(device),
    }
    settings = _shared_settings(args)
    gathered = [(placement, settings)] * world_size
    dist.all_gather_object(gathered, (placement, settings))
    _stop_strangers(gathered)
    if rank == 0:
        share = args.batch_size // world_size
        step = f"a step takes {args.batch_size} samples"
        print(f"{step}, {share} on each of {world_size} ranks", flush=True)
    return {
        "launcher": launcher,
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "world_size": world_size,
        "backend": backend_class(device),
        "global_batch_size": args.batch_size,
        "ranks": [placement for placement, _ in gathered],
    }


def _shared_settings(args: Namespace) -> dict[str, str]:
    """Pick the flags that all ranks of a job share: two may differ from node to node."""
    shared = vars(args).keys() - {"num_workers", "data"}
    return {name.replace("_", "-"): str(vars(args)[name]) for name in shared}


def _stop_strangers(gathered: list[tuple[dict[str, object], dict[str, str]]]) -> None:
    """Stop all ranks where one has other settings than rank 0, as one of another job has.

    gathered: the placement and the settings of each rank. Every rank calls it.
    """
    _, first = gathered[0]
    for placement, settings in gathered:
        if settings == first:
            continue
        dist.barrier()  # no rank leaves while another still needs it
        dist.destroy_process_group()
        stranger = f"rank {placement['rank']} on {placement['host']}"
        theirs = _as_flags(settings.items() - first.items())
        expected = _as_flags(first.items() - settings.items())
        stop(
            f"{stranger} has {theirs}, rank 0 has {expected}: give all the same flags; "
            "if it is of another job, export another MASTER_PORT for that one"
        )


def _as_flags(settings: set[tuple[str, str]]) -> str:
    """Write settings as flags with their values; "nothing" if there are none."""
    return " ".join(f"--{name} {value}" for name, value in sorted(settings)) or "nothing"


def over_ranks(
    measured: dict[str, float],
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Merge what each rank measured by name; every rank calls it, and gets the same.

    The sums are added up, of max_NAME the largest counts, and mean_NAME is averaged over the ranks.
    """
    world_size = dist.get_world_size()
    parts = [measured] * world_size
    # Names, too: a rank without a sample to test has none.
    dist.all_gather_object(parts, measured, group=group)
    totals = merge(parts)
    for name in totals:
        if name.startswith("mean_"):
            totals[name] /= world_size
    return totals


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


class RecordError(OSError):
    """A file of the record cannot be written: a line says so, and no traceback.

    Other OSErrors, such as a dataset's, keep theirs.
    """


def write_files(folder: Path | None, files: Mapping[str, bytes | Mapping[str, object]]) -> None:
    """Write files, by their names, whole or not at all; without a folder, none.

    A dict is written as JSON. Raises RecordError.
    """
    if not folder:
        return
    for name, content in files.items():
        if not isinstance(content, bytes):
            content = json.dumps(content, indent=1, default=str).encode()
        try:
            write_whole(folder / name, content)
        except OSError as error:
            raise RecordError(str(error)) from error


def claim_folder(folder: Path) -> None:
    """Make the run folder's spec.json, which nobody else can make; stops where another run has."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not holds_run(folder):
            with suppress(FileExistsError):
                # O_EXCL: of two runs that start together one succeeds.
                (folder / "spec.json").touch(exist_ok=False)
                return
    except OSError as error:
        stop(f"--run-dir {folder}: {error}: choose a folder with room that you may write to")
    stop(f"--run-dir {folder} holds a run: choose a new folder")


@contextmanager
def recorded(
    args: Namespace,
    device: torch.device,
    train_set: Dataset,
    **facts: object,
) -> Iterator[None]:
    """Record in args.run_dir what was asked, where it ran, and how what runs inside has ended.

    facts: more of where it runs, by any name. Without args.run_dir nothing is written.
    """
    if device.type == "cuda":
        chip: object = torch.cuda.get_device_name(device)
    else:
        chip = torch.cpu.get_capabilities().get("cpu_name")
    env: dict[str, object] = {"device": str(device), "chip": chip, "cpus": cpus_of_rank()}
    env |= {"torch": torch.__version__, **facts}
    env["dataset"] = getattr(train_set, "name", type(train_set).__name__)
    env["train_set"] = len(train_set) if hasattr(train_set, "__len__") else None  # a stream
    env["made_from"] = "ddp_helpers 0.1.0"
    if args.run_dir and "resume" not in args:  # what can go on claims its folder by a lock
        claim_folder(args.run_dir)
    try:
        write_files(args.run_dir, {"spec.json": vars(args), "env.json": env})
        write_files(args.run_dir, {"status.json": {"state": "running"}})
        yield
        write_files(args.run_dir, {"status.json": {"state": "done"}})
    except BaseException as error:
        state, why = getattr(error, "state", "failed"), f"{type(error).__name__}: {error}"
        request = os.environ.get("REQUEUE_FILE")
        with suppress(OSError):
            write_files(args.run_dir, {"status.json": {"state": state, "why": why}})
            if args.run_dir and state == "preempted" and request:
                write_whole(Path(request), why.encode())  # the batch script puts the job back
        if isinstance(error, RecordError):
            folder = args.run_dir or Path()
            stop(f"--run-dir {folder}: {error}: choose a folder with room that you may write to")
        raise


def _per_sample(part: str, measured: Mapping[str, float]) -> dict[str, float]:
    """Divide the sums of a pass by its samples, and name each PART_NAME; max_ and mean_ stay."""
    samples = max(measured["samples"], 1)
    line = {}
    for name, value in measured.items():
        is_sum = name != "samples" and not name.startswith(("max_", "mean_"))
        line[f"{part}_{name}"] = value / samples if is_sum else value
    return line


def report(
    args: Namespace,
    epoch: int,
    trained: Mapping[str, float],
    tested: Mapping[str, float],
    seconds: float,
    test_seconds: float,
) -> None:
    """Print an epoch's score, and add its line to metrics.jsonl.

    trained, tested: what the two passes measured, over all samples. Raises RecordError.
    """
    line = {"epoch": epoch, **_per_sample("train", trained), **_per_sample("test", tested)}
    rate = trained["samples"] / seconds
    line |= {"seconds": seconds, "images_per_second": rate}
    line |= {"data_seconds": line.pop("train_mean_data_seconds"), "test_seconds": test_seconds}
    del line["test_mean_data_seconds"]
    score = f"test loss {line['test_loss']:.4f}"
    if "accuracy" in tested:
        score = f"{tested['accuracy']:.0f}/{tested['samples']:.0f} right"
    print(f"epoch {epoch}: {score}, {rate:,.0f} images/s", flush=True)
    if args.run_dir:
        path = args.run_dir / "metrics.jsonl"
        lines = path.read_bytes() if path.exists() else b""
        write_files(args.run_dir, {path.name: lines + json.dumps(line).encode() + b"\n"})


def save_model(model: nn.Module, folder: Path | None) -> None:
    """Write the weights to mnist_cnn.pt in the run folder, or else here. Raises RecordError."""
    folder = folder or Path()
    content = BytesIO()
    torch.save(model.state_dict(), content)
    write_files(folder, {"mnist_cnn.pt": content.getvalue()})
    print(f"saved {folder}/mnist_cnn.pt", flush=True)


if __name__ == "__main__":
    main()
# As it was written out, the SHA-256 of the lines above begins with 296c830f97895b9d
