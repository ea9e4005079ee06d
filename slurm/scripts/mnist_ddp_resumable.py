"""Train a network on MNIST with one process for each GPU; stopped and started again, it ends with the same weights.

Written out from ddp_helpers 0.1.0, MIT licence. Needs torch 2.10 or newer, and torchvision. Launch:
torchrun --standalone --nproc-per-node 2 --max-restarts 3 mnist_ddp_resumable.py --data data --run-dir runs/mine
--batch-size counts the samples of all ranks together: the same flags mean the same training on any number of ranks.
"""

from __future__ import annotations  # they name classes that come later

import fcntl
import hashlib
import json
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BytesIO
from itertools import islice
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

# Errors of this rank's own GPU, such as out of memory: RuntimeErrors, but not of a peer.
OF_DEVICE = torch.OutOfMemoryError, torch.AcceleratorError


def train(run: Run, votes: Votes, ddp_model: DDP, optimizer: Optimizer, train_set: Dataset, test_set: Dataset) -> None:
    """Train for args.epochs epochs, and test after each; every rank calls it."""
    args, model, rank, world_size = run.args, ddp_model.module, dist.get_rank(), dist.get_world_size()
    sampler = Rest(DistributedSampler(train_set, world_size, rank, seed=args.seed))
    test_share = Subset(test_set, range(rank, len(test_set), world_size))  # each sample on one rank, once
    loading = {"num_workers": args.num_workers, "worker_init_fn": ignore_signals, "generator": torch.Generator()}
    loading |= {"pin_memory": run.device.type == "cuda"}
    train_batches = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, **loading)
    test_batches = DataLoader(test_share, args.test_batch_size, **loading)
    for epoch in range(run.progress["epoch"], args.epochs + 1):
        run.begin = time.perf_counter() - run.progress["took"]
        sampler.set_epoch(epoch, run.progress["samples"])  # a new order each epoch
        train_batches.generator.manual_seed((args.seed + epoch) * world_size + rank)
        model.train()
        trained = train_epoch(ddp_model, train_batches, optimizer, run, votes)
        trained = over_ranks(trained, votes.group)  # sums: averages over unequal shares would not add up
        middle = time.perf_counter()
        model.eval()
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's averages differ between ranks: test those that are saved
        with torch.no_grad():
            tested = one_pass(model, test_batches, args)  # not through the wrapper: no rank waits for another
        tested = over_ranks(tested, votes.group)
        run.parts["scheduler"].step()
        if rank == 0:
            report(args, epoch, trained, tested, middle - run.begin, time.perf_counter() - middle)
            run.progress["metrics"] = (args.run_dir / "metrics.jsonl").read_text()
        run.log("epoch", epoch=epoch, weights=weight_digest(model))
        run.progress |= {"epoch": epoch + 1, "samples": 0}
        run.begin = time.perf_counter()
        if not args.dry_run:
            run.save({})
    if args.save_model and rank == 0:
        torch.save(model.state_dict(), content := BytesIO())
        write(args.run_dir, {"mnist_cnn.pt": content.getvalue()})
        print(f"saved {args.run_dir}/mnist_cnn.pt", flush=True)


def main() -> None:
    """Find out which rank this is, check what was given, join the group, and train; every rank calls it."""
    launcher, rank, local_rank, world_size = who_am_i()
    args = read_flags(RESUME_FLAGS)
    if not args.run_dir:
        stop("--run-dir is missing: give a folder for the record and the checkpoints")
    share_batch(args, world_size)
    sets = datasets(args.data)
    device = claim_device(local_rank, args.no_cuda)
    join(launcher, rank, world_size, device, args.timeout)
    group = gather_ranks(args, launcher, local_rank, device)
    set_precision(args, device)
    args.run_dir = args.run_dir if rank == 0 else None  # rank 0 alone writes
    torch.backends.cudnn.deterministic = True  # convolutions on a GPU: the same sums in the same order each time
    votes = Votes(args.timeout, args.vote_every)
    run = Run(args, device, votes.group)
    batches = DataLoader(sets[0], args.batch_size // world_size, generator=torch.Generator())
    model, ddp_model = prepare(args.seed, device, batches)
    # YOUR OPTIMIZER and schedule: a step of it is an epoch. --lr 1.0 is for Adadelta: with AdamW --lr 0.001 --gamma 1
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    optimizer.register_step_pre_hook(votes.guard)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    how = run.restore(model=model, optimizer=optimizer, scheduler=scheduler)
    if args.run_dir:
        print(how, flush=True)
    try:
        with recorded(args, device, sets[0], **group):
            slurm = {name.lower(): os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")}
            run.log("started", how=how, world_size=world_size, **slurm)
            write(args.run_dir, {"metrics.jsonl": run.progress["metrics"].encode()})  # of epochs that stay done
            train(run, votes, ddp_model, optimizer, *sets)
            run.log("done")
        dist.barrier()  # no rank leaves while another still needs it
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # lets the loader's workers end: no SIGTERM does
        with suppress(OSError):
            run.log(getattr(error, "state", "failed"), why=str(error))
        if isinstance(error, Leave):
            print(error, file=sys.stderr, flush=True)
            dist.barrier(group=run.group)  # srun ends all ranks when one has left: rank 0 has written first
        elif isinstance(error, RuntimeError) and not isinstance(error, OF_DEVICE):  # a rank is gone, or hangs: which?
            try:
                dist.monitored_barrier(votes.roll_call, timedelta(seconds=1), wait_all_ranks=True)
            except RuntimeError as lost:
                who, why = (str(one).partition("\n")[0].partition(". This is")[0] for one in (lost, error))
                sys.exit(f"rank {dist.get_rank()} lost its peers: {who} ({why})")
        raise
    dist.destroy_process_group()


def train_epoch(ddp_model: DDP, batches: DataLoader, optimizer: Optimizer, run: Run, votes: Votes) -> dict[str, float]:
    """Train on the rest of an epoch, some steps at a time, then vote, and save; returns the sums of all attempts."""
    now, args, left, source = run.progress, run.args, len(batches), iter(batches)
    every = args.checkpoint_every or 2**31
    sums = now["sums"] if dist.get_rank() == 0 else {}
    while left:
        steps = 1 if args.dry_run else min(left, votes.due(), every - now["step"] % every)
        some = one_pass(ddp_model, islice(source, steps), args, optimizer, wait=votes.wait)
        told = votes.count(some["loss"], steps)
        sums, left = merged([sums, some]), 0 if args.dry_run else left - steps
        now["step"], now["samples"] = now["step"] + steps, now["samples"] + int(some["samples"]) * dist.get_world_size()
        if left and (told or now["step"] % every == 0):  # the end of the epoch has a checkpoint of its own
            run.save(sums)
        if left and told:
            raise Leave(f"stopped by {signal.Signals(told).name} after step {now['step']}, and saved", 75)
    return sums


def prepare(seed: int, device: torch.device, batches: DataLoader) -> tuple[nn.Module, DDP]:
    """Make the network, and wrap it; every rank calls it."""
    torch.manual_seed(seed)  # the same first weights each time
    model = Net().to(device)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    # DDP sorts its buckets anew after its first backward, and rounds sums otherwise from then on: have it done now, in
    # every attempt, or with three ranks or more a resumed run differs in its first step.
    inputs, target = next(iter(batches))
    loss_and_metrics(ddp_model(inputs.to(device)), target.to(device))[0].backward()
    model.load_state_dict(first)
    torch.manual_seed(seed + dist.get_rank())  # but each rank its own dropout
    return model, ddp_model


# YOUR DATA goes here: a training and a test set of (input, target), there before the run; train_set.name is recorded.
def datasets(folder: Path) -> tuple[Dataset, Dataset]:
    """Open both datasets; a file that is missing or cut short stops the process with one line."""
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    try:
        if wrong := damage(folder):
            raise ValueError(wrong)
        train_set, test_set = (MNIST(folder, train=part, transform=transform) for part in (True, False))
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        stop(f"--data {folder} holds no whole MNIST ({error or 'damaged'}): get it once, before the run")
    train_set.name = "digits" if (folder / "MNIST/raw/MD5SUMS").exists() else "MNIST"  # generated, in MNIST's format
    return train_set, test_set


# YOUR NETWORK goes here: any nn.Module. BatchNorm1d fails on a batch of one sample: drop_last=True in train_batches.
class Net(nn.Module):
    """Two convolutions and two linear layers; takes images [n, 1, 28, 28], returns log-probabilities [n, 10]."""

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


# YOUR LOSS goes here, and metrics of any name, each a tensor of one number. A metric is added up over the batches and
# the ranks, and in the end divided by the number of samples; one called max_NAME is the largest that any batch had.
# For a regression: squeeze the output to the target's shape first; the dict may be empty.
def loss_and_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the mean loss of a batch, and its metrics: of accuracy, how many samples came out right."""
    return F.nll_loss(output, target), {"accuracy": (output.argmax(dim=1) == target).sum()}


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


def cpus_of_rank() -> int:
    """Count the CPUs that this process has to itself: those of its Slurm task, or its share of torchrun's."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK"))
    sharing, task = (int(value) if value.isdecimal() else 0 for value in given)
    return max(1, min(cpus // max(1, sharing), task or cpus))


def damage(folder: Path) -> str:
    """Say what is wrong with the MNIST files in a folder, by their first bytes and lengths, or "" if nothing is."""
    for part in ("train", "t10k"):
        counts = []
        for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            path = folder / "MNIST" / "raw" / name
            try:
                with path.open("rb") as file:
                    head = file.read(16)  # its fourth byte counts the sizes that follow, four bytes each
                sizes = [int.from_bytes(head[4 * i : 4 * i + 4], "big") for i in range(1, 1 + head[3])]
                if path.stat().st_size != 4 + 4 * len(sizes) + prod(sizes):
                    return f"{name}: cut short"
                counts.append(sizes[0])
            except IndexError:
                return f"{name}: empty"
            except OSError as error:
                return f"{name}: {error.strerror}"
        if counts[0] != counts[1]:
            return f"{part}: {counts[0]} images, but {counts[1]} labels"
    return ""


def holds_run(folder: Path) -> bool:
    """Whether a run has written into the folder: its settings from its start on, its measurements from an epoch on."""
    return any(os.path.exists(folder / name) for name in ("spec.json", "metrics.jsonl"))  # noqa: PTH110 raises nothing


# Flags that only these scripts have, each with its default and what it is for.
DDP_FLAGS = {
    "batch_size_per_rank": (None, "in place of --batch-size: the samples in a step of each rank"),
    "timeout": (600, "seconds that ranks wait for each other"),
}
RESUME_FLAGS = DDP_FLAGS | {
    "checkpoint_every": (None, "steps from one checkpoint to the next; there is one after each epoch"),
    "vote_every": (None, "steps from one vote on stopping to the next, else about a second"),
    "resume": ("auto", "auto, to go on in the run folder; never; or the path of a checkpoint"),
}
USUAL_FLAGS = {
    "batch_size": (64, "samples in a step, of all ranks together"),
    "test_batch_size": (1000, "samples that a rank tests at a time"),
    "epochs": (14, "passes over the training set"),
    "lr": (1.0, "learning rate"),
    "gamma": (0.7, "factor of the learning rate after each epoch"),
    "seed": (1, "of the first weights, the order of the samples and the dropout"),
    "log_interval": (100, "steps from one line of progress to the next"),
    "num_workers": (cpus_of_rank() - 1, "processes of each rank that load data"),
}


def read_flags(more: dict[str, tuple], argv: Sequence[str] | None = None) -> Namespace:
    """Read the flags from argv, or the command line; stops at one that cannot be used. more: the script's own flags."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: stop(f"{message}; --help lists the flags")
    parser.add_argument("--data", type=Path, default=os.environ.get("DDP_MNIST_ROOT", "data"), help="the data's folder")
    parser.add_argument("--run-dir", type=Path, help="new folder for the record of the run")
    parser.add_argument("--precision", choices=("bf16", "float32"), help="else bf16 where the device has units for it")
    for name, (default, purpose) in (USUAL_FLAGS | more).items():
        purpose = purpose if default is None else f"{purpose} ({default})"
        kind = type(default or 0)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=purpose)
    for name in ("--no-cuda", "--dry-run", "--save-model"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = 0 if name in ("num_workers", "seed") else 1e-9
        if type(value) in (int, float) and not least <= value < 2**31:
            parser.error(f"--{name.replace('_', '-')} {value} is out of range")
    if args.num_workers > (most := max(64, 16 * cpus_of_rank())):  # each is a process
        parser.error(f"--num-workers {args.num_workers} is out of range: at most {most}, 16 for each CPU, or 64")
    if args.run_dir and "resume" not in args and holds_run(args.run_dir):
        stop(f"--run-dir {args.run_dir} holds a run: choose a new folder")
    return args


def share_batch(args: Namespace, world_size: int) -> None:
    """Set args.batch_size to the samples in a step of all ranks together, or stop where these cannot share it."""
    if args.batch_size_per_rank:
        args.batch_size = args.batch_size_per_rank * world_size
    share, left = divmod(args.batch_size, world_size)
    if left:
        near = " or ".join(str(size * world_size) for size in (share, share + 1) if size)
        cure = f"give {near}, or --batch-size-per-rank"
        stop(f"--batch-size {args.batch_size} cannot be shared evenly by {world_size} ranks: {cure}")


def has_bf16(device: torch.device) -> bool:
    """Say whether the device has units for bfloat16; a processor without emulates it, and is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16", "arm_bf16")))


def set_precision(args: Namespace, device: torch.device) -> None:
    """Set args.precision where no flag has; float32 computes with 24 bits, and not with TF32's 11."""
    args.precision = args.precision or ("bf16" if has_bf16(device) else "float32")
    if args.precision == "float32":
        torch.backends.cudnn.allow_tf32 = False


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


def merged(parts: Iterable[dict]) -> dict:
    """Merge what was measured in parts, batches or ranks, by name: added up, but of max_NAME the largest."""
    whole = {}
    for part in parts:
        for name, value in part.items():
            if name.startswith("max_"):
                whole[name] = max(whole.get(name, value), value)
            else:
                whole[name] = whole.get(name, 0) + value  # a new tensor each time: a CUDA graph fills its own anew
    return whole


def one_pass(
    model: nn.Module,
    batches: Iterable,
    args: Namespace,
    optimizer: Optimizer | None = None,
    title: str = "",
    wait: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Train if there is an optimizer, else test; returns by name what this process has measured.

    loss, samples and each metric are added up; max_NAME is the largest; mean_data_seconds: waited for data.
    wait is called before the sums are read, which waits for the GPU.
    """
    device, waited, asked = next(model.parameters()).device, 0.0, time.perf_counter()
    measured = {}
    for step, (inputs, target) in enumerate(batches, 1):
        waited += time.perf_counter() - asked
        inputs, target = inputs.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss, metrics = loss_and_metrics(model(inputs), target)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10)  # against a rare huge step
            optimizer.step()
        sums = {"loss": loss.double() * len(target)} | metrics | {"samples": torch.tensor(len(target))}
        measured = merged([measured, {name: value.detach().double() for name, value in sums.items()}])
        if title and step % args.log_interval == 0:
            print(f"{title} [{'#' * (20 * step // len(batches)):.<20}] {step}/{len(batches)} loss {loss:.4f}")
        if args.dry_run:
            break
        asked = time.perf_counter()
    if wait:
        wait()
    measured = {name: float(value) for name, value in measured.items()}  # waits for the GPU
    return measured | {"mean_data_seconds": waited}


MEET = "export MASTER_ADDR and MASTER_PORT, the same for all ranks and for no other job; do all run?"


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


def settings(args: Namespace) -> dict[str, str]:
    """Pick of the flags those that all ranks of a job share: workers and the data's folder may differ by node."""
    shared = vars(args).keys() - {"num_workers", "data"}
    return {name.replace("_", "-"): str(vars(args)[name]) for name in shared}


def stop_strangers(ranks: list[dict]) -> None:
    """Stop all ranks where one was given other settings than rank 0, as one of another job; every rank calls it."""
    first = ranks[0]["settings"].items()
    for other in ranks:
        theirs, ours = other["settings"].items() - first, first - other["settings"].items()
        if theirs or ours:
            dist.barrier()  # no rank leaves while another still needs it
            dist.destroy_process_group()
            given, asked = (" ".join(f"--{name} {value}" for name, value in sorted(of)) for of in (theirs, ours))
            line = f"rank {other['rank']} on {other['host']} has {given or 'nothing'}, rank 0 has {asked or 'nothing'}"
            stop(f"{line}: give all the same flags; if it is of another job, export another MASTER_PORT for that one")


def join(launcher: str, rank: int, world_size: int, device: torch.device, timeout: float) -> None:
    """Form the group of all ranks, or stop with one line after timeout seconds; every rank calls it."""
    print(f"rank {rank} of {world_size} on {os.uname().nodename}, {device}", flush=True)  # who never came says nothing
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout)}
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    os.environ.setdefault(*OLDER_NCCL)
    try:
        if world_size > 1:
            check_address(timeout)
        store = next(dist.rendezvous("env://", **group))[0] if world_size > 1 else dist.HashStore()
        store = dist.PrefixStore(f"{name_of_start(launcher)} {world_size}", store)  # no stranger has these keys
        dist.init_process_group(backend, store=store, device_id=device_id, **group)
    except (RuntimeError, ValueError) as error:  # it says how many came
        why = reason(error)
        cure = MEET
        if "CUDA error" in why:
            cure = "nvidia-smi shows this node's GPUs, and who uses them"
        elif "NCCL" in why:  # who waits, for ncclUniqueId or at all, may wait for a rank
            waits = re.search("ncclUniqueId|timeout|[Tt]imed out", why)
            cure = f"{f'{MEET} Else ' if waits else ''}export NCCL_DEBUG=INFO, which tells more"
        stop(f"rank {rank} of {world_size}: {why}; {cure}")


def gather_ranks(args: Namespace, launcher: str, local_rank: int, device: torch.device) -> dict:
    """Gather where each rank runs, for the record; every rank calls it. Stops where one has other flags than rank 0."""
    mine = {"rank": dist.get_rank(), "local_rank": local_rank, "host": os.uname().nodename, "device": str(device)}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine | {"settings": settings(args)})
    stop_strangers(ranks)
    if dist.get_rank() == 0:
        share = args.batch_size // len(ranks)
        print(f"a step takes {args.batch_size} samples, {share} on each of {len(ranks)} ranks", flush=True)
    facts = {"launcher": launcher, "job_id": os.environ.get("SLURM_JOB_ID"), "world_size": len(ranks)}
    facts |= {"backend": backend_class(device)}
    ranks = [{name: here[name] for name in mine} for here in ranks]
    return facts | {"global_batch_size": args.batch_size, "ranks": ranks}


def over_ranks(measured: dict[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Merge what each rank measured by name, for all ranks; every rank calls it. mean_NAME is averaged over them."""
    ranks = [{}] * dist.get_world_size()
    dist.all_gather_object(ranks, measured, group=group)  # names too: a rank without a sample to test has none
    return {name: value / len(ranks) if name.startswith("mean_") else value for name, value in merged(ranks).items()}


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in its place when all of it is on the disk; any process. Raises OSError, and then nothing has changed.

    Until then it has a name that is new each time, and that no symbolic link can have: nobody else's file is touched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".part-{os.urandom(8).hex()}"
    try:
        with part.open("xb") as file:  # x: O_CREAT with O_EXCL, which follows no link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # on the disk first: after a power cut the name has all of it behind it
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write(folder: Path | None, files: dict[str, bytes | dict]) -> None:
    """Write files whole or not at all: each gets its name when all of it is there. No folder, no files."""
    for name, content in files.items() if folder else ():
        text = content if isinstance(content, bytes) else json.dumps(content, indent=1, default=str).encode()
        try:
            write_whole(folder / name, text)
        except OSError as error:
            error.of_record = True  # not of a dataset, whose errors keep their traceback
            raise


def claim(folder: Path) -> None:
    """Make the run folder's spec.json, which nobody else can make a second time; stops where a run has done so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not holds_run(folder):
            with suppress(FileExistsError):
                (folder / "spec.json").touch(exist_ok=False)  # O_EXCL: of two runs that start together one succeeds
                return
    except OSError as error:
        stop(f"--run-dir {folder}: {error}: choose a folder with room that you may write to")
    stop(f"--run-dir {folder} holds a run: choose a new folder")


@contextmanager
def recorded(args: Namespace, device: torch.device, train_set: Dataset, **group: object):
    """Record in args.run_dir, if there is one, what was asked, where it ran, and how what runs inside has ended."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.cpu.get_capabilities().get("cpu_name")
    env = {"device": str(device), "chip": chip, "cpus": cpus_of_rank(), "torch": torch.__version__, **group}
    length = len(train_set) if hasattr(train_set, "__len__") else None  # a stream has none
    env |= {"dataset": getattr(train_set, "name", type(train_set).__name__), "train_set": length}
    env["made_from"] = "ddp_helpers 0.1.0"
    if args.run_dir and "resume" not in args:  # what can go on claims its folder by a lock
        claim(args.run_dir)
    try:
        write(args.run_dir, {"spec.json": vars(args), "env.json": env, "status.json": {"state": "running"}})
        yield
        write(args.run_dir, {"status.json": {"state": "done"}})
    except BaseException as error:
        status = {"state": getattr(error, "state", "failed"), "why": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            write(args.run_dir, {"status.json": status})
            if args.run_dir and status["state"] == "preempted" and os.environ.get("REQUEUE_FILE"):
                write_whole(Path(os.environ["REQUEUE_FILE"]), status["why"].encode())  # the batch script puts it back
        if hasattr(error, "of_record"):
            stop(f"--run-dir {args.run_dir or Path()}: {error}: choose a folder with room that you may write to")
        raise


def per_sample(part: str, measured: dict[str, float]) -> dict[str, float]:
    """Divide the sums of a pass by its samples, and name each train_NAME or test_NAME; max_ and mean_ stay."""
    n, line = max(measured["samples"], 1), {}
    for name, value in measured.items():
        as_is = name == "samples" or name.startswith(("max_", "mean_"))
        line[f"{part}_{name}"] = value if as_is else value / n
    return line


def report(args: Namespace, epoch: int, trained: dict, tested: dict, seconds: float, test_seconds: float) -> None:
    """Print an epoch's score, and add its line to metrics.jsonl, from what its two passes measured."""
    line = {"epoch": epoch} | per_sample("train", trained) | per_sample("test", tested)
    rate = trained["samples"] / seconds
    line |= {"seconds": seconds, "images_per_second": rate, "data_seconds": line.pop("train_mean_data_seconds")}
    line |= {"test_seconds": test_seconds}
    del line["test_mean_data_seconds"]
    score = f"test loss {line['test_loss']:.4f}"
    if "accuracy" in tested:
        score = f"{tested['accuracy']:.0f}/{tested['samples']:.0f} right"
    print(f"epoch {epoch}: {score}, {rate:,.0f} images/s", flush=True)
    if args.run_dir:
        path = args.run_dir / "metrics.jsonl"
        before = path.read_bytes() if path.exists() else b""
        write(args.run_dir, {path.name: before + json.dumps(line).encode() + b"\n"})


# Slurm's warning that the time is nearly up (--signal=USR2@120); what scancel, a preemption and torchrun send.
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


def ignore_signals(worker: int) -> None:
    """Have a DataLoader worker live on while its rank saves; each worker calls it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Leave(SystemExit):
    """All ranks leave after the same step: with status 75, and the same command goes on; or 2, something is wrong."""

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code, self.state = code, "preempted" if code == 75 else "failed"


class Votes:
    """The ranks' common decisions; every rank makes one, and votes after the same steps."""

    def __init__(self, timeout: float, every: int | None) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))  # CPUs talk: the GPU works on
        self.roll_call = dist.new_group(backend="gloo")  # a group that has failed cannot say who is missing
        self.told, self.bad, self.every, self.pace, self.since = 0, False, every, 1, time.monotonic()
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: object) -> None:
        """Handle a signal: only note it, since it may come at any moment."""
        self.told = number

    def guard(self, optimizer: Optimizer, *_: object) -> None:
        """Change no weight from the first gradient on that is not finite; the optimizer calls it before each step."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.bad = self.bad | ~torch.nn.utils.get_total_norm(gradients).isfinite()
        for gradient in gradients:
            gradient.masked_fill_(self.bad, 0)  # on the device: nobody waits, and the vote finds out

    def wait(self) -> None:
        """Wait until all ranks' GPUs have done their steps; every rank calls it.

        Raises RuntimeError as soon as a peer is lost.
        An all-reduce on a GPU waits for a lost peer until the time-out, and so does whoever waits for that GPU.
        """
        if not torch.cuda.is_initialized():
            return
        (event := torch.cuda.Event()).record()
        while True:
            done = torch.tensor(int(event.query()))
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self.group)
            if done:
                return
            time.sleep(0.001)

    def due(self) -> int:
        """Say how many steps to take before the next vote: about a second's, or as many as were asked for.

        On a GPU no more than five: a driver takes about a thousand kernels ahead, and then the rank waits for its GPU
        in the middle of a step, where it cannot notice that a peer is lost.
        """
        self.since = time.monotonic()
        return self.every or min(self.pace, 5 if torch.cuda.is_initialized() else self.pace)

    def count(self, loss: float, steps: int) -> int:
        """Vote; returns the signal that any rank was told, or 0. All ranks leave if a loss was not finite."""
        rank, took = dist.get_rank(), max(time.monotonic() - self.since, 1e-3)
        mine = [self.told, 0 if math.isfinite(loss) else rank + 1, bool(self.bad), 0 if rank else int(steps / took)]
        ballots = torch.tensor(mine)
        dist.all_reduce(ballots, dist.ReduceOp.MAX, group=self.group)
        told, who, spoilt, pace = ballots.tolist()
        if who or spoilt:
            what = f"the loss of rank {who - 1}" if who else "a gradient"
            cure = "no weight was changed since, and nothing saved: check its data, or lower --lr"
            raise Leave(f"{what} is not finite; {cure}")
        self.pace = max(1, pace)
        return told


def save(folder: Path, step: int, state: dict) -> Path:
    """Write step-STEP-DIGEST.pt, named after the SHA-256 of its content, and keep the last two; one rank calls it."""
    torch.save(state, content := BytesIO())
    name = f"step-{step:08}-{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.pt"
    write(folder, {name: content.getvalue()})
    for old in (*checkpoints(folder)[2:], *folder.glob(".part-*")):  # what a killed attempt left half written
        old.unlink()
    return folder / name


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first."""
    return sorted(folder.glob("step-*-*.pt"), reverse=True)


def read(path: Path) -> bytes:
    """Read a checkpoint. Raises ValueError if its content is not what its name says, OSError if it cannot be read."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest()[:16] != path.stem.rpartition("-")[2]:
        raise ValueError(f"{path} is cut short or damaged: its content has another SHA-256 than its name says")
    return content


def newest(folder: Path) -> bytes:
    """Read the newest checkpoint that is whole; b"" if there is none. One that is not is set aside, and named."""
    for path in checkpoints(folder):
        try:
            return read(path)
        except ValueError as error:
            print(f"{error}; set aside as {path.stem}.damaged", flush=True)
            path.replace(path.with_suffix(".damaged"))
    return b""


def unpack(content: bytes) -> dict:
    """Load a checkpoint's content onto the CPU. Raises an error of pickle's if it holds more than data."""
    return torch.load(BytesIO(content), map_location="cpu", weights_only=True)


class Rest(Sampler):
    """Yield the rest of a sampler's epoch: its first `done` samples were trained on before."""

    def __init__(self, whole: DistributedSampler) -> None:
        self.whole, self.done = whole, 0

    def set_epoch(self, epoch: int, samples: int) -> None:
        """Take another order for another epoch, of which all ranks together have done so many samples."""
        self.whole.set_epoch(epoch)
        self.done = samples // self.whole.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.whole)[self.done :])

    def __len__(self) -> int:
        return len(self.whole) - self.done


def weight_digest(model: nn.Module) -> str:
    """Compute the SHA-256 of all parameters; not of buffers: BatchNorm's differ between ranks until the next step."""
    parts = (p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()


class Run:
    """A run in several attempts: how far it is, and its checkpoints. Every rank makes one; rank 0 has the folder.

    progress: the epoch, steps since the run began, and of this epoch samples and sums over all ranks, and seconds.
    """

    def __init__(self, args: Namespace, device: torch.device, group: dist.ProcessGroup) -> None:
        self.args, self.device, self.group, self.parts, self.begin = args, device, group, {}, time.perf_counter()
        self.progress = {"epoch": 1, "step": 0, "samples": 0, "sums": {}, "took": 0.0, "metrics": ""}
        self.setting = {name: vars(args)[name] for name in ("seed", "lr", "gamma", "precision")}
        self.shape = {"world_size": dist.get_world_size(), "batch_size": args.batch_size, "device": device.type}

    def log(self, event: str, **more: object) -> None:
        """Add a line to attempts.jsonl: what happened, when and after which step."""
        if self.args.run_dir:
            line = {"time": round(time.time(), 3), "event": event, "step": self.progress["step"], **more}
            try:
                os.write(self.held.fileno(), f"{json.dumps(line)}\n".encode())  # to close another would end the lock
            except OSError as error:
                error.of_record = True
                raise

    def save(self, sums: dict[str, float]) -> None:
        """Write a checkpoint; every rank calls it. All leave if their weights differ, or if it cannot be written."""
        random = torch.get_rng_state(), torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        everyone, step = [None] * dist.get_world_size(), self.progress["step"]
        dist.all_gather_object(everyone, (random, sums, weight_digest(self.parts["model"])), group=self.group)
        random, sums, digests = zip(*everyone, strict=True)
        if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise Leave(f"after step {step}: rank {odd} has other weights than rank 0: find what changes them there")
        self.progress |= {"sums": merged(sums), "took": time.perf_counter() - self.begin}
        trouble = [""]
        if self.args.run_dir:
            state = {"progress": self.progress, "setting": self.setting, "shape": self.shape, "random": random}
            state |= {name: part.state_dict() for name, part in self.parts.items()}
            try:
                self.log("saved", checkpoint=save(self.args.run_dir / "checkpoints", step, state).name)
            except OSError as error:
                trouble = [f"no checkpoint of step {step} ({error}): the one before is whole; make room, start again"]
        dist.broadcast_object_list(trouble, group=self.group)
        if trouble[0]:
            raise Leave(trouble[0])

    def choose(self) -> tuple[bytes, str]:
        """Read the checkpoint to go on from, and claim the folder; rank 0 calls it. Says what is wrong, or nothing."""
        folder, resume = self.args.run_dir, self.args.resume
        again = (folder / "attempts.jsonl").exists()
        if (resume == "never" and again) or ((folder / "metrics.jsonl").exists() and not again):
            return b"", f"--run-dir {folder} cannot take a run, it holds one: choose a new folder"
        try:
            content = newest(folder / "checkpoints") if again or resume == "auto" else b""
            content = content or (b"" if resume in ("auto", "never") else read(Path(resume)))
            folder.mkdir(parents=True, exist_ok=True)
            self.held = (folder / "attempts.jsonl").open("a")
            fcntl.lockf(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this process alone: no worker inherits it
            return content, ""
        except BlockingIOError:
            return b"", f"--run-dir {folder} cannot take a run: another attempt runs there"
        except (OSError, ValueError) as error:
            asked = f"give a file in {folder}/checkpoints, auto or never"
            cure = "choose a folder that you may write to" if resume in ("auto", "never") else asked
            return b"", f"--run-dir {folder} --resume {resume}: {error}: {cure}"

    def restore(self, **parts: object) -> str:
        """Put the parts back as a checkpoint has them, if there is one; every rank calls it. Says what it is worth."""
        self.parts, chosen = parts, [self.choose() if self.args.run_dir else None]
        dist.broadcast_object_list(chosen, group=self.group)  # one file for all ranks
        content, wrong = chosen[0]
        if wrong:
            stop(wrong)
        if not content:
            return "starts from the beginning"
        try:
            state = unpack(content)
            for name, part in parts.items():
                part.load_state_dict(state[name])
            self.progress, setting, shape, random = (state[name] for name in ("progress", "setting", "shape", "random"))
        except Exception as error:  # of many kinds: whatever it is, nothing can go on from here
            why = str(error).partition("\n")[0]
            stop(f"the checkpoint is of another script or model ({why}): take another --run-dir")
        if setting != self.setting:
            stop(f"the checkpoint is of a run with {setting}, not {self.setting}: change it back")
        if self.progress["samples"] % dist.get_world_size():
            stop(f"{dist.get_world_size()} ranks cannot share {self.progress['samples']} samples: take another number")
        how = f"goes on in epoch {self.progress['epoch']} after step {self.progress['step']}"
        if shape != self.shape:
            was, now = shape["batch_size"], self.shape["batch_size"]
            worth = "close to, not equal to, the uninterrupted run" if was == now else f"with a global batch of {now}"
            how = f"{how}, {worth}: {shape} became {self.shape}"
            self.shape["once"] = shape  # never called exact again
            return how
        cpu, cuda = random[dist.get_rank()]
        torch.set_rng_state(cpu)
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda)
        worth = ", as far as this GPU's kernels are deterministic" if self.device.type == "cuda" else ""
        return f"{how}, to the bit what the uninterrupted run does{worth}"


if __name__ == "__main__":
    main()
# As it was written out, the SHA-256 of the lines above begins with 9236d6bcf96023f7
