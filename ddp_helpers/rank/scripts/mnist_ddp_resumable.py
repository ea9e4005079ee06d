"""Train a network on MNIST on many GPUs; stopped and started again, it ends with the same weights.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 -- mnist_ddp_resumable.py --run-dir runs/1
--batch-size counts the samples of all ranks together: the same flags mean the same training
on any number of ranks.
"""

import os
import signal
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from ddp_helpers.rank.arguments import RESUME_FLAGS, read_flags, share_batch
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.device import pick_device
from ddp_helpers.rank.group import gather_ranks, join, over_ranks
from ddp_helpers.rank.launchers import stop, who_am_i
from ddp_helpers.rank.model import Net, loss_and_metrics
from ddp_helpers.rank.record import recorded, report, save_model, write_files
from ddp_helpers.rank.resume import RemainingSampler, ResumableRun, weight_digest
from ddp_helpers.rank.training import merge, one_pass, set_precision
from ddp_helpers.rank.votes import StopAllRanks, Votes, ignore_signals

# Errors of this rank's own GPU, such as out of memory: RuntimeErrors, but not of a peer.
GPU_ERRORS = torch.OutOfMemoryError, torch.AcceleratorError


def train(
    run: ResumableRun,
    votes: Votes,
    ddp_model: DDP,
    optimizer: Optimizer,
    train_set: Dataset,
    test_set: Dataset,
) -> None:
    """Train for args.epochs epochs, and test after each; every rank calls it."""
    args, model = run.args, run.model
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = RemainingSampler(DistributedSampler(train_set, world_size, rank, seed=args.seed))
    assert isinstance(test_set, Sized), "a stream cannot be shared out"
    test_indices = range(rank, len(test_set), world_size)  # each sample on one rank, once
    generator = torch.Generator()
    loading = {
        "num_workers": args.num_workers,
        "worker_init_fn": ignore_signals,
        "pin_memory": run.device.type == "cuda",
        "generator": generator,
    }
    share = args.batch_size // world_size
    train_batches = DataLoader(train_set, share, sampler=sampler, **loading)
    test_batches = DataLoader(Subset(test_set, test_indices), args.test_batch_size, **loading)
    for epoch in range(run.progress.epoch, args.epochs + 1):
        run.begin = time.perf_counter() - run.progress.took
        sampler.set_epoch(epoch, run.progress.samples)  # a new order each epoch
        generator.manual_seed((args.seed + epoch) * world_size + rank)
        model.train()
        trained = train_epoch(ddp_model, train_batches, optimizer, run, votes)
        # Sums: averages over unequal shares would not add up.
        trained = over_ranks(trained, votes.group)
        middle = time.perf_counter()
        model.eval()
        for buffer in model.buffers():
            # BatchNorm's averages differ between ranks: test those that are saved.
            dist.broadcast(buffer, 0)
        with torch.no_grad():  # not through the wrapper: no rank waits for another
            tested = one_pass(model, test_batches, args)
        tested = over_ranks(tested, votes.group)
        run.scheduler.step()
        end = time.perf_counter()
        if rank == 0:
            report(args, epoch, trained, tested, middle - run.begin, end - middle)
            run.progress.metrics = (args.run_dir / "metrics.jsonl").read_text()
        run.log("epoch", epoch=epoch, weights=weight_digest(model))
        run.progress.epoch, run.progress.samples = epoch + 1, 0
        run.begin = time.perf_counter()
        if not args.dry_run:
            run.save({})
    if args.save_model and rank == 0:
        save_model(model, args.run_dir)


def train_epoch(
    ddp_model: DDP,
    batches: DataLoader,
    optimizer: Optimizer,
    run: ResumableRun,
    votes: Votes,
) -> dict[str, float]:
    """Train on the rest of an epoch: some steps, then vote, and save; every rank calls it.

    Returns what this rank has measured; on rank 0 with the sums of earlier attempts, of all ranks.
    """
    args, progress, world_size = run.args, run.progress, dist.get_world_size()
    checkpoint_every = args.checkpoint_every or 2**31
    sums = progress.sums if dist.get_rank() == 0 else {}
    remaining, source = len(batches), iter(batches)
    while remaining:
        until_checkpoint = checkpoint_every - progress.step % checkpoint_every
        steps = min(remaining, votes.steps_to_take(), until_checkpoint)
        if args.dry_run:
            steps = remaining = 1
        measured = one_pass(ddp_model, islice(source, steps), args, optimizer, wait=votes.wait)
        signal_number = votes.vote(measured["loss"], steps)
        sums = merge([sums, measured])
        progress.step += steps
        progress.samples += int(measured["samples"]) * world_size
        remaining -= steps
        if not remaining:  # the end of the epoch has a checkpoint of its own
            break
        if signal_number or progress.step % checkpoint_every == 0:
            run.save(sums)
        if signal_number:
            name = signal.Signals(signal_number).name
            raise StopAllRanks(f"stopped by {name} after step {progress.step}, and saved", 75)
    return sums


def wrap_model(args: Namespace, device: torch.device, batches: DataLoader) -> DDP:
    """Make the network, and wrap it; every rank calls it. batches: of any samples to train on."""
    torch.manual_seed(args.seed)  # the same first weights each time
    model = Net().to(device)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ddp_model = DDP(model, gradient_as_bucket_view=True)
    # DDP sorts its buckets anew after its first backward, and rounds sums otherwise from then on:
    # have it done now, in every attempt, or with three ranks or more a resumed run differs in its
    # first step.
    inputs, target = next(iter(batches))
    with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        loss, _ = loss_and_metrics(ddp_model(inputs.to(device)), target.to(device))
    loss.backward()
    model.load_state_dict(first)
    torch.manual_seed(args.seed + dist.get_rank())  # but each rank its own dropout
    return ddp_model


@contextmanager
def explained(run: ResumableRun, votes: Votes) -> Iterator[None]:
    """Note in attempts.jsonl how what runs inside has ended, and say which ranks are lost.

    Every rank calls it.
    """
    try:
        yield
    except BaseException as error:
        # Lets the loader's workers end: no SIGTERM does.
        traceback.clear_frames(error.__traceback__)
        with suppress(OSError):
            run.log(getattr(error, "state", "failed"), why=str(error))
        if isinstance(error, StopAllRanks):
            print(error, file=sys.stderr, flush=True)
            # srun ends all ranks when one has left: rank 0 has written first.
            dist.barrier(group=run.group)
        elif isinstance(error, RuntimeError) and not isinstance(error, GPU_ERRORS):
            name_lost_ranks(votes, error)
        raise


def name_lost_ranks(votes: Votes, error: RuntimeError) -> None:
    """Leave with the ranks that are gone, or hang, if there are any; every rank calls it."""
    try:
        second = timedelta(seconds=1)
        dist.monitored_barrier(votes.roll_call, second, wait_all_ranks=True)
    except RuntimeError as absence:
        ranks, why = first_sentence(absence), first_sentence(error)
        sys.exit(f"rank {dist.get_rank()} lost its peers: {ranks} ({why})")


def first_sentence(error: RuntimeError) -> str:
    """Read what an error of PyTorch's says, without its advice."""
    return str(error).partition("\n")[0].partition(". This is")[0]


def log_start(run: ResumableRun, start: str) -> None:
    """Note in attempts.jsonl that an attempt begins, and as which start of which Slurm job."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    slurm = {name.lower(): os.environ.get(name) for name in names}
    run.log("started", how=start, world_size=dist.get_world_size(), **slurm)


def main() -> None:
    """Find out which rank this is, check what was given, join the group, and train.

    Every rank calls it.
    """
    launcher, rank, local_rank, world_size = who_am_i()
    args = read_flags(RESUME_FLAGS)
    if not args.run_dir:
        stop("--run-dir is missing: give a folder for the record and the checkpoints")
    share_batch(args, world_size)
    sets = datasets(args.data)
    device = pick_device(local_rank, args.no_cuda)
    join(launcher, rank, world_size, device, args.timeout)
    facts = gather_ranks(args, launcher, local_rank, device)
    set_precision(args, device)
    args.run_dir = args.run_dir if rank == 0 else None  # rank 0 alone writes
    # Convolutions on a GPU: the same sums in the same order each time.
    torch.backends.cudnn.deterministic = True
    votes = Votes(args.timeout, args.vote_every)
    share = args.batch_size // world_size
    batches = DataLoader(sets[0], share, generator=torch.Generator())
    ddp_model = wrap_model(args, device, batches)
    # YOUR OPTIMIZER and schedule: a step of it is an epoch.
    # --lr 1.0 is for Adadelta: with AdamW --lr 0.001 --gamma 1
    optimizer = torch.optim.Adadelta(ddp_model.module.parameters(), lr=args.lr)
    optimizer.register_step_pre_hook(votes.guard)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    run = ResumableRun(args, device, votes.group, ddp_model.module, optimizer, scheduler)
    start = run.restore()
    if args.run_dir:
        print(start, flush=True)
    with explained(run, votes):
        with recorded(args, device, sets[0], **facts):
            log_start(run, start)
            # Of the epochs that stay done.
            write_files(args.run_dir, {"metrics.jsonl": run.progress.metrics.encode()})
            train(run, votes, ddp_model, optimizer, *sets)
            run.log("done")
        dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()
    # Python forgets its handlers while it ends: a late warning would kill a run that is done.
    ignore_signals()


if __name__ == "__main__":
    main()
