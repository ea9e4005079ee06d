"""Train a network on MNIST on many GPUs; stopped or killed, the same command resumes it.

torchrun --standalone --nproc-per-node 4 --max-restarts 3 -- mnist_ddp_resumable.py --run-dir runs/1
# On several nodes export MASTER_ADDR (the first node) and MASTER_PORT; then a task for each GPU:
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python mnist_ddp_resumable.py --run-dir runs/1
mpirun -n 8 -x MASTER_ADDR -x MASTER_PORT python mnist_ddp_resumable.py --run-dir runs/1

It is mnist_ddp.py with checkpoints. SIGUSR2, which Slurm sends before the time limit (#SBATCH
--signal=USR2@120), or SIGTERM to any rank makes all save after the same step and exit with 75. On
CPUs the result is bit-identical to an uninterrupted run. MIT licence.
"""

import fcntl
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import zipfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: imported later, it keeps the group alive
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

SIGNALS = (signal.SIGUSR2, signal.SIGTERM)  # Slurm's warning; a preemption, or scancel
heard = [0]  # signals of this rank: they come at any moment, and wait for a vote
held = []  # on rank 0 attempts.jsonl, open and locked: closing it unlocks it


def main() -> None:
    """Find rank and world size, form the process group, and train; every rank calls it."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: heard.append(number))
    launcher, rank, local_rank, world_size = who_am_i()
    args = read_flags(world_size)
    train_set, test_set = datasets(args.data)
    device = pick_device(local_rank, args.no_cuda)
    form_group(rank, world_size, device, args.timeout)
    ranks = gather_ranks(args, launcher, local_rank, device)
    args.run_dir = args.run_dir if rank == 0 else None  # rank 0 alone writes
    claim(args.run_dir)
    newest = find_checkpoint(args)  # before the record is written: its flags may differ
    begin_record(args, ranks, train_set)
    try:
        told = train(args, device, train_set, test_set, newest)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        write(args.run_dir, "status.json", {"state": "failed", "why": why})
        note("failed")
        raise
    state = "preempted" if told else "done"
    why = f"stopped by {signal.Signals(told).name}, and saved" if told else ""
    write(args.run_dir, "status.json", {"state": state, "why": why})
    note(state)
    if told and args.run_dir and "REQUEUE_FILE" in os.environ:  # the job file looks for it
        Path(os.environ["REQUEUE_FILE"]).write_text(why)
    dist.barrier()  # rank 0 may still save: once others exit, srun --wait would end it
    dist.destroy_process_group()
    ignore_signals()  # a late one would kill a run that is done, while Python ends
    while held:
        held.pop().close()
    if told:
        print(f"rank {rank} is {why}", flush=True)
        sys.exit(75)


def train(
    args: Namespace, device: torch.device, train_set: Dataset, test_set: Dataset, newest: dict
) -> int:
    """Train, test after each epoch, and return 0; or, told to stop, save and return the signal.

    Every rank calls it. newest: the checkpoint to resume from, or {}.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(train_set, seed=args.seed)  # one shard per rank
    test_share = Subset(test_set, range(rank, len(test_set), world_size))  # each sample once
    loading = {"num_workers": args.num_workers, "pin_memory": device.type == "cuda"}
    # A loader draws its workers' seeds; without its own generator, from the dropout's.
    generator = torch.Generator()
    loading |= {"worker_init_fn": ignore_signals, "generator": generator}
    share = args.batch_size // world_size
    test_batches = DataLoader(test_share, args.test_batch_size, **loading)
    torch.backends.cudnn.deterministic = True  # on a GPU: the same sums in the same order
    torch.manual_seed(args.seed)  # the same first weights each time
    model = Net().to(device)
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    warm_up(ddp_model, DataLoader(Subset(train_set, range(share)), share), args)
    optimizer, schedule = make_optimizer(model, args)
    # What a checkpoint contains. Also add a GradScaler or an EMA.
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    progress = restore(args, parts, newest)
    told = 0

    def so_far(sums: dict) -> dict[str, float]:
        """Add up the epoch's sums of all ranks and attempts."""
        totals = reduce_over_ranks(sums) if sums else {}  # none: this attempt only has to test
        before = progress["sums"]
        return {name: totals.get(name, 0) + before.get(name, 0) for name in before | totals}

    def after_step(step: int, sums: dict) -> int:
        """Vote and save after the same steps on all ranks."""
        nonlocal told
        progress["step"] += 1
        reseed(args, progress["step"])
        is_due = progress["step"] % args.checkpoint_every == 0
        is_last = step == len(train_batches)  # then the epoch's end saves
        if not is_last and (is_due or progress["step"] % args.vote_every == 0):
            told = vote(sums["loss"], model)
            if told or is_due:
                now = {"done": progress["done"] + step, "sums": so_far(sums)}
                save(args, parts, {**progress, **now, "seconds": time.perf_counter() - begin})
            if told:
                end_workers()
        return told

    def after_test(*_: object) -> int:
        """End the test on a rank that was told to stop: it may be longer than the warning time."""
        if heard[-1]:
            end_workers()
        return heard[-1]

    for epoch in range(progress["epoch"], args.epochs + 1):
        begin = time.perf_counter() - progress["seconds"]
        sampler.set_epoch(epoch)  # a new order
        rest = list(sampler)[progress["done"] * share :]  # the samples that this rank has left
        train_batches = DataLoader(train_set, share, sampler=rest, **loading)
        generator.manual_seed((args.seed + epoch) * world_size + rank)
        reseed(args, progress["step"])
        model.train()
        sums = one_pass(ddp_model, train_batches, args, optimizer, after_step)
        if told:
            return told
        trained = so_far(sums)
        middle = time.perf_counter()
        model.eval()
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's averages differ: all test rank 0's
        with torch.no_grad():  # the model inside DDP: no rank waits for another
            tested = one_pass(model, test_batches, args, after_step=after_test)
        told = vote(torch.tensor(trained["loss"]), model)  # one vote, for any number of batches
        if told:  # some have not tested their whole shard: the next attempt tests again
            now = {"done": progress["done"] + len(train_batches), "sums": trained}
            save(args, parts, {**progress, **now, "seconds": middle - begin})
            return told
        tested = reduce_over_ranks(tested)
        schedule.step()
        seconds = {"seconds": middle - begin, "test_seconds": time.perf_counter() - middle}
        seconds["data_seconds"] = trained.pop("data_seconds") / world_size  # waiting for batches
        if rank == 0:
            report(args.run_dir, epoch, trained, tested, seconds)
        progress |= {"epoch": epoch + 1, "done": 0, "sums": {}, "seconds": 0.0}
        save(args, parts, progress)
    if rank == 0 and args.save_model:
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        torch.save(weights, content := BytesIO())  # in memory first: it does not report a full disk
        (args.run_dir / "mnist_cnn.pt").write_bytes(content.getbuffer())
    return 0


def datasets(folder: Path) -> tuple[Dataset, Dataset]:  # YOUR DATA
    """Open a training and a test set: the same on every rank, and prepared before the run."""
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    try:
        train_set, test_set = MNIST(folder, True, transform), MNIST(folder, False, transform)
        if any(len(each.data) != len(each.targets) for each in (train_set, test_set)):
            raise ValueError("not as many labels as images")  # torchvision does not compare them
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        sys.exit(f"--data {folder} holds no complete MNIST ({error}): get it once, before the run")
    made_here = (folder / "MNIST/raw/MD5SUMS").exists()  # the course's digits, in MNIST's format
    train_set.name = "digits" if made_here else "MNIST"  # for the record
    return train_set, test_set


class Net(nn.Module):  # YOUR NETWORK
    """Two convolutions, two linear layers: images [n, 1, 28, 28] to scores [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score the ten digits for each image."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return self.fc2(self.dropout2(x))


def loss_and_metrics(model: nn.Module, batch: list, device: torch.device) -> tuple:  # YOUR LOSS
    """Compute a batch's mean loss, its number of samples, and metrics: sums over the samples.

    It must not communicate with other ranks: they may have fewer batches.
    """
    inputs, target = (part.to(device, non_blocking=True) for part in batch)
    scores = model(inputs)
    right = scores.argmax(dim=1) == target
    return F.cross_entropy(scores, target), {"accuracy": right.sum(), "samples": len(target)}


def make_optimizer(model: nn.Module, args: Namespace) -> tuple:  # YOUR OPTIMIZER
    """Make the optimizer, and a schedule that takes a step after each epoch."""
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)  # for AdamW give --lr 0.001
    return optimizer, optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)


def read_flags(world_size: int) -> Namespace:  # YOUR FLAGS
    """Read the command line; stop if it cannot be used."""
    layout, usage = RawDescriptionHelpFormatter, "%(prog)s [flags]; --help lists them"
    parser = ArgumentParser(
        usage=usage, description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    # With a GPU, a rank's other CPUs load the data; without one, all of them train.
    cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", os.cpu_count() or 1))
    spare = cpus // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1  # torchrun's ranks share them
    workers = max(0, min(spare, 8)) if torch.cuda.is_available() else 0
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="folder of the data")
    add("--run-dir", type=Path, required=True, help="folder of the record and the checkpoints")
    add("--checkpoint-every", type=int, default=500, help="steps; and there is one each epoch")
    add("--vote-every", type=int, default=10, help="steps from one vote on stopping to the next")
    add("--epochs", type=int, default=14, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="samples in a step of all ranks together")
    add("--test-batch-size", type=int, default=1000, help="samples that a rank tests at a time")
    add("--lr", type=float, default=1.0, help="learning rate")
    add("--gamma", type=float, default=0.7, help="factor of it after each epoch")
    add("--seed", type=int, default=1, help="of the first weights, the order and the dropout")
    add("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    add("--num-workers", type=int, default=workers, help="processes of a rank that load data")
    add("--timeout", type=float, default=600, help="seconds that ranks wait for each other")
    add("--log-interval", type=int, default=100, help="steps from one line of progress to the next")
    add("--no-cuda", action="store_true", help="use CPUs although there are GPUs")
    add("--dry-run", action="store_true", help="take one step of training and one of testing")
    add("--save-model", action="store_true", help="write the weights to mnist_cnn.pt")
    args = parser.parse_args()
    if args.batch_size % world_size:
        parser.error(f"{world_size} ranks cannot share --batch-size {args.batch_size} evenly")
    record = ("spec.json", "metrics.jsonl")
    taken = any((args.run_dir / name).exists() for name in record)
    if taken and not (args.run_dir / "attempts.jsonl").exists():
        parser.error(f"--run-dir {args.run_dir} holds another run: choose a new folder")
    return args


# The variables that launchers export: the last three are rank, local rank and world size; the ones
# before identify this start. The first row whose variables are all set counts: inside a Slurm job,
# mpirun's ranks also have SLURM_PROCID=0.
LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "openmpi": (
        "PMIX_NAMESPACE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    "mpich": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # also Intel MPI
    "slurm": ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    "pals": ("PALS_APID", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    "env": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
}


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


def pick_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim the GPU of this local rank, or the only one that it sees; the CPU if none can be used.

    Every rank calls it. Stops if there are fewer GPUs than ranks, or the given ones cannot be used.
    """
    count = 0 if no_cuda else torch.cuda.device_count()  # includes GPUs that CUDA cannot use
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
            # The older of torch's two NCCL classes: it overlaps communication with computing.
            os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
            torch.cuda.set_device(device)
            torch.zeros(1, device=device).add_(1)  # too old a driver or GPU raises here
            return device
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    if given not in ("", "-1", "NoDevFiles") and not no_cuda:
        sys.exit(f"GPU {given} is given, but {why}: see nvidia-smi, or give --no-cuda")
    if count:
        print(f"the CPU is used, and not the GPU: {why}", file=sys.stderr, flush=True)
    return torch.device("cpu")


def form_group(rank: int, world_size: int, device: torch.device, timeout: float) -> None:
    """Form the group of all ranks: NCCL on GPUs, gloo on CPUs; stops after timeout seconds."""
    # A rank that never started prints no line.
    print(f"rank {rank} of {world_size} on {os.uname().nodename}, {device}", flush=True)
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout)}
    if device.type == "cuda":
        group["device_id"] = device
    store = dist.HashStore()  # alone: no other rank
    try:
        if world_size > 1:
            meeting = dist.rendezvous("env://", rank, world_size, timeout=group["timeout"])
            store, *_ = next(meeting)
            # After a restart, torchrun's store has the old keys. An NCCL timeout leaves one that
            # ends processes; all other keys have the attempt's number as a prefix.
            getattr(store, "_underlying_non_prefix_store", store).delete_key("exception_dump")
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        group["store"] = dist.PrefixStore(attempt, store)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **group)
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).partition("\nException raised from")[0].split())
        cure = "export MASTER_ADDR and MASTER_PORT, the same for all ranks and for no other job"
        sys.exit(f"rank {rank} of {world_size}: {why}: {cure}")


def gather_ranks(args: Namespace, launcher: str, local_rank: int, device: torch.device) -> list:
    """List where each rank runs; every rank calls it. Stops all ranks if flags differ."""
    chip = torch.cpu.get_capabilities().get("cpu_name")
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    here = {"local_rank": local_rank, "host": os.uname().nodename, "device": str(device)}
    here |= {"launcher": launcher, "chip": chip}
    start = [os.environ[name] for name in LAUNCHERS.get(launcher, ())[:-3]]
    # Two flags may differ between nodes.
    flags = {**vars(args), "data": None, "num_workers": None, "start": start}
    told = [(here, flags)] * dist.get_world_size()
    dist.all_gather_object(told, (here, flags))
    dist.barrier()  # all have them before one exits
    if strangers := [rank for rank, (_, theirs) in enumerate(told) if theirs != told[0][1]]:
        sys.exit(f"rank {strangers} differs from rank 0 in its flags or its job")
    return [where for where, _ in told]


def one_pass(
    model: nn.Module,
    batches: DataLoader,
    args: Namespace,
    optimizer: optim.Optimizer | None = None,
    after_step: Callable[[int, dict], int | None] | None = None,
) -> dict[str, float | Tensor]:
    """Train if there is an optimizer, else test; sum up loss and metrics of this rank's samples.

    after_step: gets the step's number and the sums; a result other than 0 ends the pass.
    """
    device = next(model.parameters()).device
    sums, begin = {}, time.perf_counter()
    for step, batch in enumerate(batches, 1):
        waited = time.perf_counter() - begin
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss, metrics = loss_and_metrics(model, batch, device)
        metrics["loss"] = loss.detach().double() * metrics["samples"]
        if optimizer:
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over the ranks in here
            optimizer.step()
            metrics["data_seconds"] = waited
        for name, value in metrics.items():
            value = value.detach() if isinstance(value, Tensor) else value
            sums[name] = sums.get(name, 0) + value
        if optimizer and step % args.log_interval == 0 and dist.get_rank() == 0:
            bar, mean = "#" * (20 * step // len(batches)), sums["loss"] / sums["samples"]
            print(f"[{bar:.<20}] {step}/{len(batches)} loss {mean:.4f}", flush=True)
        if (after_step and after_step(step, sums)) or args.dry_run:
            break
        begin = time.perf_counter()
    return sums


def reduce_over_ranks(sums: dict[str, float | Tensor]) -> dict[str, float]:
    """Add up the ranks' sums by name; every rank calls it, and gets the same result."""
    sums = {name: float(value) for name, value in sums.items()}  # waits for the GPU
    parts = [sums] * dist.get_world_size()
    dist.all_gather_object(parts, sums)
    # By name: a rank without test samples has no metrics.
    totals = {name: sum(part.get(name, 0) for part in parts) for name in parts[0]}
    if not math.isfinite(totals["loss"]):
        sys.exit(f"the loss is {totals['loss']}: check the data, or lower --lr")
    return totals


def begin_record(args: Namespace, ranks: list[dict], train_set: Dataset) -> None:
    """Record in args.run_dir, if there is one, the settings and where the ranks run."""
    env = {"launcher": ranks[0]["launcher"], "world_size": len(ranks), "ranks": ranks}
    env |= {"job_id": os.environ.get("SLURM_JOB_ID"), "global_batch_size": args.batch_size}
    env |= {"dataset": getattr(train_set, "name", type(train_set).__name__)}
    env |= {"train_set": len(train_set), "torch": torch.__version__}
    write(args.run_dir, "spec.json", vars(args))
    write(args.run_dir, "env.json", env)
    write(args.run_dir, "status.json", {"state": "running"})


def write(folder: Path | None, name: str, content: dict) -> None:
    """Write a file of the record, if there is one: only rank 0 has its folder."""
    if folder:
        (folder / name).write_text(json.dumps(content, indent=1, default=str))


def report(folder: Path | None, epoch: int, trained: dict, tested: dict, seconds: dict) -> None:
    """Print an epoch's means over all samples, and add them to metrics.jsonl; rank 0 calls it."""
    line = {"epoch": epoch, **seconds}
    line["images_per_second"] = trained["samples"] / seconds["seconds"]
    for part, sums in {"train": trained, "test": tested}.items():
        line[f"{part}_samples"] = samples = sums["samples"]
        means = {name: total / samples for name, total in sums.items() if name != "samples"}
        line |= {f"{part}_{name}": mean for name, mean in means.items()}
    scores = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
    print(f"epoch {epoch}: test {scores}; {line['images_per_second']:,.0f} images/s", flush=True)
    if folder:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


# What mnist_ddp.py does not have: signals, the vote (an all-reduce of a stop flag), checkpoints.


def ignore_signals(*_: object) -> None:
    """Ignore the signals, in a rank that is done and in its loader's workers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_workers() -> None:
    """End the workers of this rank's loaders, which ignore the signal by which Python ends them.

    A rank calls it before it exits: else it would wait until each is done with its sample.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the loader raises an error
    for worker in multiprocessing.active_children():
        worker.kill()


def vote(loss: Tensor, model: nn.Module) -> int:
    """Return, on all ranks, the signal that any rank received, or 0; every rank calls it.

    All stop if the loss or a weight is not finite, so that no such weight is saved.
    """
    norm = torch.nn.utils.get_total_norm(model.parameters())
    is_lost = not math.isfinite(loss.item() + norm.item())
    ballot = torch.tensor([max(heard), is_lost], device=norm.device)
    dist.all_reduce(ballot, dist.ReduceOp.MAX)
    told, is_lost = ballot.tolist()
    if is_lost:
        sys.exit("the loss or a weight is not finite: check the data, or lower --lr")
    return told


def reseed(args: Namespace, step: int) -> None:
    """Make the dropout depend only on step and rank, so that its state need not be saved."""
    torch.manual_seed(args.seed + step * dist.get_world_size() + dist.get_rank())


def warm_up(ddp_model: DDP, batches: DataLoader, args: Namespace) -> None:
    """Take a step that changes nothing, in which DDP finds the order of its buckets.

    Three ranks or more round differently from then on, so every attempt must start with it.
    """
    reseed(args, 0)
    weights = deepcopy(ddp_model.module.state_dict())
    one_pass(ddp_model, batches, args, optim.SGD(ddp_model.parameters(), lr=0))
    ddp_model.module.load_state_dict(weights)


def claim(folder: Path | None) -> None:
    """Lock the folder while this process lives, so that two attempts never share it.

    Every rank calls it, and rank 0 has the folder. Stops all ranks if another attempt runs there.
    """
    problem = [""]
    if folder:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        held.append((folder / "attempts.jsonl").open("a"))
        try:
            fcntl.lockf(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = [f"--run-dir {folder}: another attempt runs there"]
        except OSError as error:  # some file systems have no locks
            print(f"{folder} cannot be locked ({error}): start no second attempt meanwhile")
    dist.broadcast_object_list(problem)
    if problem[0]:
        sys.exit(problem[0])


def note(event: str, **facts: object) -> None:
    """Add a line to attempts.jsonl, which rank 0 has open."""
    for file in held:
        line = {"time": round(time.time(), 3), "event": event, **facts}
        print(json.dumps(line), file=file, flush=True)


def save(args: Namespace, parts: dict, progress: dict) -> None:
    """Write a checkpoint atomically, and keep the last two; rank 0 calls it."""
    if not args.run_dir:
        return
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "progress": progress, "setting": setting(args)}, content := BytesIO())
    path = args.run_dir / "checkpoints" / f"step-{progress['step']:08}.pt"
    part = path.with_name("new.part")  # always this name: a killed attempt's file is overwritten
    with part.open("wb") as file:
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    part.replace(path)
    note("saved", step=progress["step"])
    for old in sorted(path.parent.glob("step-*.pt"))[:-2]:
        old.unlink()


def setting(args: Namespace) -> dict[str, object]:
    """Pick the flags that must not change from one attempt to the next."""
    names = ("seed", "lr", "gamma", "batch_size", "bf16", "dry_run")
    return {name: vars(args)[name] for name in names}


def find_checkpoint(args: Namespace) -> dict:
    """Read the newest complete checkpoint, if there is one; every rank calls it.

    All use what rank 0 reads: another node may not see it yet. Stops all if flags differ.
    """
    newest = [{}]
    paths = sorted(args.run_dir.glob("checkpoints/step-*.pt")) if args.run_dir else []
    while paths and not newest[0]:
        path = paths.pop()
        content = path.read_bytes()  # a disk error stops the run here: it is no damage
        try:
            zipped = zipfile.ZipFile(BytesIO(content))
            damaged = zipped.testzip()  # torch.load verifies no checksum
            # Nor would it read a tensor that a flipped bit has marked as a folder.
            damaged = damaged or any(each.external_attr & 16 for each in zipped.filelist)
            newest = [torch.load(BytesIO(content), map_location="cpu", weights_only=True)]
        except Exception as error:  # of many kinds
            damaged = error
        if damaged:
            print(f"{path} is damaged, and set aside: {damaged}", flush=True)
            path.replace(path.with_suffix(".damaged"))
            newest = [{}]
    dist.broadcast_object_list(newest)
    if newest[0] and newest[0]["setting"] != setting(args):
        sys.exit(f"the checkpoint is of {newest[0]['setting']}: change the flags back")
    return newest[0]


def restore(args: Namespace, parts: dict, newest: dict) -> dict:
    """Restore all state from the checkpoint, and return its progress; every rank calls it."""
    progress = {"epoch": 1, "step": 0, "done": 0, "sums": {}, "seconds": 0.0}
    if newest:
        progress = newest["progress"]
        for name, part in parts.items():
            part.load_state_dict(newest[name])
    if args.run_dir:
        print(f"begins in epoch {progress['epoch']} after step {progress['step']}", flush=True)
        note("started", step=progress["step"])
        metrics = args.run_dir / "metrics.jsonl"
        metrics.touch()
        lines = metrics.read_bytes().splitlines(keepends=True)
        done = lines[: progress["epoch"] - 1]  # the epochs that remain done
        os.truncate(metrics, sum(map(len, done)))  # this needs no room on the disk
    return progress


if __name__ == "__main__":
    main()
