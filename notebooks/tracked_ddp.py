"""Train on many ranks under one tracker: a resumed run continues as the same run.

torchrun --standalone --nproc-per-node 2 -- tracked_ddp.py --epochs 4
"""

import uuid
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # keep it before forming the group (docs/scripts-and-jobs.md)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    """Fit a line, note the loss of all ranks, and save what a resume needs."""
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4, help="in all, with those before")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--checkpoint", type=Path, default=Path("last.pt"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    ddp_model, optimizer = DDP(model), optim.SGD(model.parameters(), lr=0.1)
    state = {
        "epoch": 0,
        "run_id": f"run-{uuid.uuid4().hex[:8]}",
    }  # of rank 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"] + 1

    writer = None
    if rank == 0:  # the others have no tracker, and do not import it
        from torch.utils.tensorboard import SummaryWriter

        # Values that a killed run logged after its last checkpoint are logged again.
        writer = SummaryWriter(str(args.logs / state["run_id"]), purge_step=first)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank))
    for epoch in range(first, args.epochs + 1):
        loss = (ddp_model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)  # on all ranks: the logged number is the mean over all
        if writer:
            writer.add_scalar("loss", mean.item(), epoch)
            state |= {"epoch": epoch, "model": model.state_dict()}
            state |= {"optimizer": optimizer.state_dict()}
            part = args.checkpoint.with_suffix(".part")
            torch.save(state, part)
            part.replace(args.checkpoint)
    if writer:
        writer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
