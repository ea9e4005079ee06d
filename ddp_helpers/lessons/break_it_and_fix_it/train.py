"""Train a small network on 3 ranks: torchrun --standalone --nproc-per-node 3 -- train.py"""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import huber_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH, LIMIT, TIMEOUT = 3, 4, 50.0, timedelta(seconds=8)
LOCK = threading.Lock()


def note(line: str) -> None:
    """Write a line to this rank's log; any thread may call it."""
    with LOCK:
        print(line, flush=True)


class Rows(Dataset):
    """The rows of a part; a row may lack a value."""

    def __init__(self, part: int) -> None:
        path = Path("parts", f"part{part}.pt")
        while not path.exists():  # it may still be copied
            time.sleep(0.1)
        self.rows, self.targets = torch.load(path, weights_only=True)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.rows[index]
        if row.isnan().any():
            note(f"row {index} lacks a value")
        return row, self.targets[index]


class Net(nn.Module):
    """A linear layer in parallel with a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 2)
        self.deep = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers for each row."""
        return self.wide(x) + self.deep(x)


def mean(value: Tensor) -> Tensor:
    """Return the mean over the ranks; every rank calls it."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


def train(ddp: DDP, batches: DataLoader, optimizer: torch.optim.Optimizer, steps: Tensor) -> Tensor:
    """Train for one epoch; every rank calls it, and gets its own mean loss."""
    losses = []
    for _, (x, y) in zip(range(steps), batches, strict=False):
        lacks = x.isnan().any().float()
        dist.all_reduce(lacks, dist.ReduceOp.MAX)
        if lacks:  # on any rank: all leave this step out
            continue
        loss = huber_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@torch.no_grad()
def evaluate(model: nn.Module, rows: Rows) -> Tensor:
    """Compute the mean error over the rows of all ranks; every rank calls it."""
    misses = model(rows.rows.nan_to_num()) - rows.targets
    totals = {"rows": torch.tensor([float(len(rows))]), "error": misses.abs().sum(0)}
    for name in sorted(totals):
        dist.all_reduce(totals[name])
    return totals["error"] / totals["rows"].sum()


def save(model: nn.Module, rank: int, copies: dist.ProcessGroup) -> None:
    """Save the weights twice; every rank calls it."""
    if rank in (0, 1):
        torch.save(model.state_dict(), f"model{rank}.pt")
        dist.barrier(group=copies)
    dist.barrier()  # no rank continues before both are complete


def main() -> None:
    """Train; every rank calls it."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    note(f"rank {rank} of {size} is process {os.getpid()}")
    copies = dist.new_group([0, 1], timeout=TIMEOUT)
    seed = torch.tensor([rank])
    dist.broadcast(seed, src=0)
    torch.manual_seed(seed.item())
    ddp = DDP(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        rows = Rows((rank + epoch) % size)
        steps = torch.tensor(-(-len(rows) // BATCH))
        dist.all_reduce(steps, dist.ReduceOp.MIN)
        batches = DataLoader(rows, BATCH, num_workers=1, multiprocessing_context="fork")
        loss = train(ddp, batches, optimizer, steps)
        loss = mean(loss)
        if loss > LIMIT:
            note("the loss is too high")
            break
        error = evaluate(ddp.module, rows)
        note(f"epoch {epoch}: loss {loss:.2f}, error {error.mean():.2f}")
        save(ddp.module, rank, copies)  # type: ignore[arg-type]  # rank 2 is no member
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
