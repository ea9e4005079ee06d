"""Train a network on MNIST with one process for each GPU, on any number of nodes.

Written out from ddp_helpers 0.1.0, MIT licence. Needs torch 2.10 or newer, and torchvision. Launch:
torchrun --standalone --nproc-per-node 2 mnist_ddp.py --data data --epochs 1
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python mnist_ddp.py --data data   # after: export MASTER_ADDR MASTER_PORT
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python mnist_ddp.py --data data     # likewise
--batch-size counts the samples of all ranks together: the same flags mean the same training on any number of ranks.
"""

import json
import os
import re
import socket
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import BytesIO
from math import prod
from pathlib import Path

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
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)  # repeats samples where shares differ
    test_share = Subset(test_set, range(rank, len(test_set), world_size))  # each sample on one rank, once
    loading = {"num_workers": args.num_workers, "persistent_workers": args.num_workers > 0}
    loading |= {"pin_memory": device.type == "cuda", "generator": torch.Generator().manual_seed(args.seed + rank)}
    train_batches = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, **loading)
    test_batches = DataLoader(test_share, args.test_batch_size, **loading)
    torch.manual_seed(args.seed)  # the same first weights each time
    model = Net().to(device)
    torch.manual_seed(args.seed + rank)  # but each rank its own dropout
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    # YOUR OPTIMIZER and schedule: a step of it is an epoch. --lr 1.0 is for Adadelta: with AdamW --lr 0.001 --gamma 1
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order each epoch
        model.train()
        trained = one_pass(ddp_model, train_batches, args, optimizer, title=f"epoch {epoch}" if rank == 0 else "")
        trained = over_ranks(trained)  # sums: averages over unequal shares would not add up
        middle = time.perf_counter()
        model.eval()
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's averages differ between ranks: test those that are saved
        with torch.no_grad():
            tested = one_pass(model, test_batches, args)  # not through the wrapper: no rank waits for another
        tested = over_ranks(tested)
        scheduler.step()
        if rank == 0:
            report(args, epoch, trained, tested, middle - begin, time.perf_counter() - middle)
    if args.save_model and rank == 0:
        torch.save(model.state_dict(), content := BytesIO())
        write(args.run_dir or Path(), {"mnist_cnn.pt": content.getvalue()})
        print(f"saved {args.run_dir or Path()}/mnist_cnn.pt", flush=True)


def main() -> None:
    """Find out which rank this is, check what was given, join the group, and train; every rank calls it."""
    launcher, rank, local_rank, world_size = who_am_i()
    args = read_flags(DDP_FLAGS)
    share_batch(args, world_size)
    sets = datasets(args.data)
    device = claim_device(local_rank, args.no_cuda)
    join(launcher, rank, world_size, device, args.timeout)
    group = gather_ranks(args, launcher, local_rank, device)
    set_precision(args, device)
    args.run_dir = args.run_dir if rank == 0 else None  # rank 0 alone writes the record
    with recorded(args, device, sets[0], **group):
        train(args, device, *sets)
    dist.barrier()  # no rank leaves before rank 0 has saved: some launchers end all ranks when one has left
    dist.destroy_process_group()


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


if __name__ == "__main__":
    main()
# As it was written out, the SHA-256 of the lines above begins with 90d44912fae51bb2
