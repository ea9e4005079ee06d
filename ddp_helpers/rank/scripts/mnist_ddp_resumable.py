"""Train a network on MNIST with one process for each GPU; stopped and started again, it ends with the same weights.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 mnist_ddp_resumable.py --data data --run-dir runs/mine
--batch-size counts the samples of all ranks together: the same flags mean the same training on any number of ranks.
"""

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from io import BytesIO
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from ddp_helpers.rank.arguments import RESUME_FLAGS, read_flags, share_batch
from ddp_helpers.rank.data import datasets
from ddp_helpers.rank.group import claim_device, gather_ranks, join, over_ranks
from ddp_helpers.rank.launchers import stop, who_am_i
from ddp_helpers.rank.model import Net, loss_and_metrics
from ddp_helpers.rank.record import recorded, report, write
from ddp_helpers.rank.resume import Rest, Run, weight_digest
from ddp_helpers.rank.training import merged, one_pass, set_precision
from ddp_helpers.rank.votes import Leave, Votes, ignore_signals

# Errors of this rank's own GPU, such as out of memory: RuntimeErrors, but not of a peer.
OF_DEVICE = torch.OutOfMemoryError, torch.AcceleratorError


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


if __name__ == "__main__":
    main()
