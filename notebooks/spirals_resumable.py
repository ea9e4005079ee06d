"""Classify points by their spiral, one of three. Killed, it resumes.

torchrun --standalone --nproc-per-node 2 -- spirals_resumable.py --run-dir runs/spirals
"""

import json
import math
import multiprocessing
import os
import signal
import sys
import time
import zipfile
from argparse import ArgumentParser, Namespace
from copy import deepcopy
from datetime import timedelta
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # keep it before forming the group (docs/scripts-and-jobs.md)
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

# Where launchers set rank, local rank and world size: the last three names of a row. A
# name before them identifies this start. The first row whose names are all set counts:
# in a job, mpirun's ranks have SLURM_PROCID=0.
LAUNCHERS = [
    ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"),  # torchrun
    (  # mpirun of Open MPI
        "PMIX_NAMESPACE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
    ),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # mpirun of MPICH and Intel
    ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),  # srun
    ("PALS_APID", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_SIZE"),  # mpiexec of HPE Cray
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # exported by hand
]
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)  # Slurm's warning; a preemption, or scancel
heard = [0]  # signals of this rank: they come at any moment, and wait for a vote


def spirals(count: int, seed: int) -> TensorDataset:  # YOUR DATA: (input, target)
    """Scatter points [count, 2] around three arms; the targets are their arms [count]."""
    generator = torch.Generator().manual_seed(seed)
    arm, radius = torch.arange(count) % 3, torch.rand(count, generator=generator)
    angle = 5 * radius + 2.1 * arm + 0.2 * torch.randn(count, generator=generator)
    return TensorDataset(torch.view_as_real(torch.polar(radius, angle)), arm)


def batch_loss(model: nn.Module, batch: list, device: torch.device) -> Tensor:
    """Compute the mean loss of a batch."""
    x, y = batch  # or for a dict, batch["x"]: as your data are
    return F.cross_entropy(model(x.to(device)), y.to(device))  # YOUR LOSS


def ignore_signals(*_: object) -> None:
    """Ignore the signals, in a rank that is done and in its loader's workers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_workers() -> None:
    """End the loader's workers, which ignore the signal by which Python ends them.

    A rank calls it before it exits: else it waits until each is done with its sample.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the loader raises an error
    for worker in multiprocessing.active_children():
        worker.kill()


def vote(loss: Tensor, model: nn.Module) -> int:
    """Return, on all ranks, the signal that any rank received, or 0; all call it.

    All stop if a loss or a weight is not finite, so that no such weight is saved.
    """
    norm = torch.nn.utils.get_total_norm(model.parameters())
    is_lost = not math.isfinite(loss.item() + norm.item())
    ballot = torch.tensor([max(heard), is_lost], device=norm.device)
    dist.all_reduce(ballot, dist.ReduceOp.MAX)
    told, is_lost = ballot.tolist()
    if is_lost:
        sys.exit("the loss or a weight is not finite: check the data, or lower --lr")
    return told


def write(path: Path, content: bytes | dict) -> None:
    """Write a file atomically; every rank calls it, rank 0 writes."""
    if dist.get_rank() > 0:
        return
    if isinstance(content, dict):
        content = json.dumps(content, indent=1, default=str).encode()
    with path.with_suffix(".part").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    path.with_suffix(".part").replace(path)


def save(folder: Path, parts: dict, progress: dict) -> None:
    """Write a checkpoint, and keep the last two; every rank calls it, rank 0 writes."""
    if dist.get_rank() > 0:
        return
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(state | {"progress": progress}, buffer := BytesIO())
    write(folder / f"step-{progress['step']:08}.pt", buffer.getvalue())
    for old in sorted(folder.glob("step-*.pt"))[:-2]:
        old.unlink()


def restore(folder: Path, parts: dict, progress: dict) -> None:
    """Restore all state from the newest complete checkpoint; every rank calls it.

    All use what rank 0 reads: another node may not see the newest file yet.
    """
    saved, paths = [None], sorted(folder.glob("step-*.pt"))
    while dist.get_rank() == 0 and paths and not saved[0]:
        path = paths.pop()
        try:
            zipped = zipfile.ZipFile(path)
            damaged = zipped.testzip()  # torch.load verifies no checksum
            # Nor would it read a tensor that a flipped bit has marked as a folder.
            damaged = damaged or any(each.external_attr & 16 for each in zipped.filelist)
            saved = [torch.load(path, map_location="cpu", weights_only=True)]
        except Exception as error:  # of many kinds
            damaged = error
        if damaged:
            print(f"{path} is damaged, and set aside: {damaged}", flush=True)
            path.replace(path.with_suffix(".damaged"))
            saved = [None]
    dist.broadcast_object_list(saved)
    if saved[0]:
        progress.update(saved[0]["progress"])
        for name, part in parts.items():
            part.load_state_dict(saved[0][name])


def main() -> None:
    """Train, test after each epoch, and save the weights to --save."""
    parser = ArgumentParser()
    add = parser.add_argument
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=48, help="samples in a step of all ranks")
    add("--lr", type=float, default=0.1)
    add("--save", type=Path, help="a new file, for the weights")
    add("--run-dir", type=Path, default=Path("runs/spirals"), help="record, checkpoints")
    add("--vote-every", type=int, default=10, help="steps between votes on stopping")
    add("--save-every", type=int, default=100, help="steps; and there is one each epoch")
    args = parser.parse_args()
    spec = args.run_dir / "spec.json"
    was = json.loads(spec.read_text()) if spec.exists() else vars(args)
    # Also your own flags that change the result.
    if any(was.get(name) != vars(args)[name] for name in ("epochs", "batch_size", "lr")):
        cure = f"has different flags in {spec.name}: give those, or a new folder"
        parser.exit(2, f"--run-dir {args.run_dir} {cure}\n")
    is_taken = args.save and args.save.exists() and not spec.exists()
    if args.save and (is_taken or not args.save.parent.is_dir()):
        parser.exit(2, f"--save {args.save}: give a new file in a folder that exists\n")
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: heard.append(number))

    rank, local_rank, world_size = 0, 0, 1  # alone, without a launcher
    for row in LAUNCHERS:
        if all(name in os.environ for name in row):
            rank, local_rank, world_size = [int(os.environ[name]) for name in row[-3:]]
            break
    else:
        for name in ("WORLD_SIZE", "SLURM_NTASKS"):  # one, but several requested
            if os.environ.get(name, "1") != "1":
                why = f"{name}={os.environ[name]}, but no launcher started this process"
                parser.exit(2, f"{why}: start it with srun, mpirun or torchrun\n")
    if args.batch_size % world_size:
        evenly = f"evenly by {world_size} ranks: give a multiple of {world_size}"
        parser.exit(2, f"--batch-size {args.batch_size} cannot be shared {evenly}\n")
    if world_size > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        parser.exit(2, "export MASTER_ADDR and MASTER_PORT, the same for all ranks\n")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # A single GPU may be this rank's own; but torchrun's ranks all see the same ones.
    own_gpu = gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    if gpus and local_rank >= gpus and not own_gpu:
        missing = f"local rank {local_rank} has no GPU ({gpus} here)"
        parser.exit(2, f"{missing}: start fewer ranks, or export CUDA_VISIBLE_DEVICES=\n")
    device = torch.device(f"cuda:{local_rank if gpus > 1 else 0}" if gpus else "cpu")
    print(f"rank {rank} of {world_size} on {os.uname().nodename}, {device}", flush=True)
    if gpus:
        torch.cuda.set_device(device)
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(minutes=10)}
    store = dist.HashStore()  # alone: no other rank
    if world_size > 1:
        meeting = dist.rendezvous("env://", rank, world_size, timeout=group["timeout"])
        store, *_ = next(meeting)
        # torchrun keeps its store for a restart. An NCCL timeout leaves a key that ends
        # processes; all other keys have the number of the attempt as a prefix.
        getattr(store, "_underlying_non_prefix_store", store).delete_key("exception_dump")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    group["store"] = dist.PrefixStore(attempt, store)
    group["device_id"] = device if gpus else None
    dist.init_process_group("nccl" if gpus else "gloo", **group)
    # The record: the settings, where it runs, and how it ended.
    here = {"local_rank": local_rank, "host": os.uname().nodename, "device": str(device)}
    if gpus:
        here["chip"] = torch.cuda.get_device_name()
    ranks = [here] * world_size
    dist.all_gather_object(ranks, here)
    env = {"world_size": world_size, "job_id": os.environ.get("SLURM_JOB_ID")}
    env |= {"ranks": ranks, "dataset": "spirals"}
    (args.run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    write(args.run_dir / "spec.json", vars(args))
    write(args.run_dir / "env.json", env)
    write(args.run_dir / "status.json", {"state": "running"})
    try:
        told = train(args, device, rank, world_size)
    except BaseException as error:
        write(args.run_dir / "status.json", {"state": "failed", "why": repr(error)})
        raise
    why = f"stopped by {signal.Signals(told).name}, and saved" if told else ""
    state = "preempted" if told else "done"
    write(args.run_dir / "status.json", {"state": state, "why": why})
    if told and "REQUEUE_FILE" in os.environ:  # the job file checks for it
        write(Path(os.environ["REQUEUE_FILE"]), why.encode())
    dist.barrier()  # srun --wait ends a rank 0 that still saves after the others exit
    dist.destroy_process_group()
    ignore_signals()  # a late one would kill a run that is done, while Python ends
    if told:
        sys.exit(75)


def train(args: Namespace, device: torch.device, rank: int, world_size: int) -> int:
    """Train, and return 0; or, told to stop, save and return the signal's number."""
    train_set, test_set = spirals(960, seed=1), spirals(250, seed=2)
    sampler = DistributedSampler(train_set)  # YOUR SAMPLER, with set_epoch and len
    share = args.batch_size // world_size
    steps = math.ceil(len(sampler) / share)  # in an epoch
    test_indices = range(rank, len(test_set), world_size)  # each sample on one rank, once
    test_batches = DataLoader(Subset(test_set, test_indices), 100)
    torch.manual_seed(1)  # the same first weights each time
    hidden = nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    model = nn.Sequential(*hidden, nn.Linear(64, 3)).to(device)  # YOUR NETWORK
    ddp_model = DDP(model)
    # DDP reorders its buckets after its first backward pass, and three ranks or more
    # round differently from then on. So each start discards that pass.
    first = deepcopy(model.state_dict())
    batch = next(iter(DataLoader(train_set, share)))
    batch_loss(ddp_model, batch, device).backward()
    model.load_state_dict(first)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)  # YOUR OPTIMIZER
    # YOUR SCHEDULE, with one step per batch: args.epochs * steps in all.
    schedule = optim.lr_scheduler.ConstantLR(optimizer, factor=1)
    # YOUR EMA: average = AveragedModel(model, ...) on every rank, and "average" in parts.
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    # metrics: a line for each tested epoch. Also your best value so far.
    progress = {"step": 0, "metrics": "", "speed": {}}
    checkpoints = args.run_dir / "checkpoints"
    restore(checkpoints, parts, progress)
    step, loss = progress["step"], torch.zeros((), device=device)
    if rank == 0:
        print(f"begins after step {step}", flush=True)
    for epoch in range(progress["metrics"].count("\n") + 1, args.epochs + 1):
        begin = time.perf_counter()
        sampler.set_epoch(epoch)  # a new order
        done = step - (epoch - 1) * steps  # all, if it was told to stop in the test
        rest = list(sampler)[done * share :]  # the samples that this rank has left
        # A loader draws its workers' seeds; without a generator, from the global one.
        generator = torch.Generator().manual_seed(epoch * world_size + rank)
        loading = {"generator": generator, "worker_init_fn": ignore_signals}
        train_batches = DataLoader(train_set, share, sampler=rest, **loading)
        torch.manual_seed(1 + step * world_size + rank)  # different dropout on each rank
        model.train()
        for batch in train_batches:
            loss = batch_loss(ddp_model, batch, device)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            # YOUR EMA: average.update_parameters(model)
            step = progress["step"] = step + 1
            torch.manual_seed(1 + step * world_size + rank)  # no state to save
            is_due = step % args.save_every == 0
            if step % steps and (is_due or step % args.vote_every == 0):
                told = vote(loss, model)
                if told or is_due:
                    save(checkpoints, parts, progress)
                if told:
                    end_workers()
                    return told
        if rest:
            seconds = time.perf_counter() - begin
            rate = len(rest) * world_size / seconds
            progress["speed"] = {"seconds": seconds, "images_per_second": rate}
        model.eval()
        for buffer in model.buffers():  # BatchNorm's differ: test what rank 0 saves
            dist.broadcast(buffer, 0)  # YOUR EMA also has buffers
        right = torch.tensor(0, device=device)
        with torch.no_grad():
            for x, y in test_batches:
                right += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
                if heard[-1]:  # a test may be longer than the warning time: end it
                    end_workers()
                    break
        dist.all_reduce(right)
        # One vote after the test, in which shards differ in length; and after the count:
        # at an NCCL timeout, no count without a peer's shard is written.
        told = vote(loss, model)
        if told:  # the next attempt tests again
            save(checkpoints, parts, progress)
            return told
        if rank == 0:
            print(f"epoch {epoch}: {right}/{len(test_set)} right", flush=True)
        line = {"epoch": epoch, "test_accuracy": right.item() / len(test_set)}
        progress["metrics"] += json.dumps(line | progress["speed"]) + "\n"
        write(args.run_dir / "metrics.jsonl", progress["metrics"].encode())
        save(checkpoints, parts, progress)
    if args.save:
        torch.save(model.cpu().state_dict(), weights := BytesIO())
        write(args.save, weights.getvalue())
    return 0


if __name__ == "__main__":
    main()
