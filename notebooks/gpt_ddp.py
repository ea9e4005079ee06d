"""Train the GPT of gpt.py with one process for each GPU. Stopped, it resumes.

torchrun --standalone --nproc-per-node 2 -- gpt_ddp.py --steps 200
Needs gpt.py and ranks.py next to it: ddp-course script simple_ddp ranks.py
"""

import math
import os
import signal
import sys
from argparse import ArgumentParser
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, NO_LETTER, loss_sum, read_lines, targets_of
from ranks import form_group, pick_device, who_am_i
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

WARNINGS = signal.SIGUSR2, signal.SIGTERM  # from Slurm: the time limit, a preemption
heard = [0]  # numbers of the signals that this rank got: they wait for a vote


def validate(model: nn.Module, lines: Tensor, device: torch.device) -> float:
    """Return the mean loss of a letter, over all letters; all ranks call it."""
    model.eval()
    sums = torch.zeros(2, device=device)
    with torch.no_grad():
        for part in lines[dist.get_rank() :: dist.get_world_size()].split(100):
            sums[0] += loss_sum(model, part, device)
            sums[1] += (targets_of(part) != NO_LETTER).sum()
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def save(file: Path, state: dict) -> None:
    """Write a file atomically; all ranks call it, and rank 0 writes."""
    if dist.get_rank() == 0:
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
    dist.barrier()  # the file exists before any other rank continues


def is_told(device: torch.device) -> bool:
    """Return whether any rank was told to stop; all ranks call it, with one result."""
    ballot = torch.tensor(max(heard), device=device)
    dist.all_reduce(ballot, dist.ReduceOp.MAX)
    return ballot.item() > 0


def main() -> None:
    """Train for --steps steps; keep the best weights, and a checkpoint to resume from."""
    parser = ArgumentParser()
    add = parser.add_argument
    add("--text", type=Path, help="a file of lines; else sums in words")
    add("--steps", type=int, default=200)
    add("--micro-batches", type=int, default=4, help="in a step, of all ranks")
    add("--batch-size", type=int, default=16, help="lines in a micro-batch")
    add("--lr", type=float, default=0.003)
    add("--dropout", type=float, default=0.1)
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--float64", action="store_true", help="compute in float64, for a proof")
    add("--validate-every", type=int, default=50, help="steps")
    add("--out", type=Path, default=Path("runs/gpt"))
    args = parser.parse_args()
    for number in WARNINGS:
        signal.signal(number, lambda number, frame: heard.append(number))

    _, rank, local_rank, world_size = who_am_i()
    if args.micro_batches % world_size:
        sys.exit(f"--micro-batches {args.micro_batches}: give a multiple of {world_size}")
    device = pick_device(local_rank)
    form_group(rank, world_size, device, timeout=600)
    if args.float64:
        torch.set_default_dtype(torch.float64)
    lines = read_lines(args.text)
    train_lines, test_lines = lines[: -len(lines) // 10], lines[-len(lines) // 10 :]
    torch.manual_seed(1)
    model = GPT(dropout=args.dropout).to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
    draws = torch.Generator().manual_seed(1)  # the same on all ranks
    step, best = 0, math.inf
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
    saved = [None]
    if rank == 0 and (args.out / "last.pt").exists():  # its answer counts for all ranks
        saved = [torch.load(args.out / "last.pt", map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(saved)
    if saved[0]:
        model.load_state_dict(saved[0]["model"])
        optimizer.load_state_dict(saved[0]["optimizer"])
        schedule.load_state_dict(saved[0]["schedule"])
        draws.set_state(saved[0]["draws"])
        step, best = saved[0]["step"], saved[0]["best"]
        if rank == 0:
            print(f"goes on after step {step}", flush=True)
    told = False
    while step < args.steps and not told:
        torch.manual_seed(step * world_size + rank)  # different dropout on each rank
        shape = args.micro_batches, args.batch_size
        places = torch.randint(len(train_lines), shape, generator=draws)[rank::world_size]
        letters = (targets_of(train_lines[places.flatten()]) != NO_LETTER).sum()
        letters = letters.to(device)
        dist.all_reduce(letters)  # of all ranks in this step
        for number, micro_batch in enumerate(train_lines[places], 1):
            is_last = number == len(places)
            with (
                nullcontext() if is_last else ddp_model.no_sync(),  # all-reduce per step
                torch.autocast(device.type, torch.bfloat16, enabled=args.bf16),
            ):
                # DDP divides by world_size, and the sum is over all ranks.
                loss = loss_sum(ddp_model, micro_batch, device) * world_size / letters
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        told = is_told(device)
        if step % args.validate_every == 0 or step == args.steps:
            value = validate(model, test_lines, device)
            if rank == 0:
                print(f"step {step}: a letter's loss {value:.4f}", flush=True)
            if value < best:  # the same number on all ranks
                best = value
                save(args.out / "best.pt", model.state_dict())
        if told or step % args.validate_every == 0 or step == args.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"schedule": schedule.state_dict(), "draws": draws.get_state()}
            save(args.out / "last.pt", state | {"step": step, "best": best})
    unfinished = step < args.steps  # told to stop in its last step, it is done
    if unfinished and rank == 0 and "REQUEUE_FILE" in os.environ:
        Path(os.environ["REQUEUE_FILE"]).touch()  # the job file checks for it
    dist.barrier()
    del ddp_model  # it refers to the group, which ends here
    dist.destroy_process_group()
    for number in WARNINGS:  # a late signal must not kill a completed run
        signal.signal(number, signal.SIG_IGN)
    if unfinished:
        sys.exit(75)


if __name__ == "__main__":
    main()
