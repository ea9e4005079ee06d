"""A DDP script that trains, ends well, and is wrong in three ways: `ddp-course audit` says which.

Each of the three was found in a published script (docs/tools.md).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")

torch.manual_seed(1)
points = torch.randn(1161, 2)
dataset = TensorDataset(points, (points.norm(dim=1) > 1.2).long())
train_set, test_set = torch.utils.data.random_split(dataset, [960, 201])
train_loader = DataLoader(train_set, batch_size=24, sampler=DistributedSampler(train_set))
test_loader = DataLoader(test_set, batch_size=100, sampler=DistributedSampler(test_set, shuffle=False))

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(device)
ddp_model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(2):
    ddp_model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(ddp_model(x.to(device)), y.to(device)).backward()
        optimizer.step()

    ddp_model.eval()
    right = torch.tensor(0, device=device)
    with torch.no_grad():
        for x, y in test_loader:
            right += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"epoch {epoch}: {right / len(test_set):.1%} right", flush=True)

dist.destroy_process_group()
