"""One of two ranks on simulated GPUs, given a mode and a folder for its answer."""

import json
import os
import sys
import threading
import time
from copy import deepcopy
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
GPU = torch.device("cuda", RANK)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def join(device, **options):
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", **options)


def error_of(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def reduced(dtype, op):
    numbers = torch.tensor([1, 2, 3], dtype=dtype, device=GPU) * (RANK + 1)
    dist.all_reduce(numbers, op)
    return numbers.tolist()


def scaled(dtype):
    """Sums of what each rank gives times a half, as FSDP2 asks for in 16 bits: all of it, and this rank's part."""
    half = torch.tensor(0.5, device=GPU) if dtype is torch.float32 else 0.5  # torch reads a tensor in 32 bits alone
    given, part = torch.tensor([2, 4], dtype=dtype, device=GPU) * (RANK + 1), torch.zeros(1, dtype=dtype, device=GPU)
    dist.reduce_scatter_tensor(part, given, dist._make_nccl_premul_sum(half))
    dist.all_reduce(given, dist._make_nccl_premul_sum(half))
    return given.tolist() + part.tolist()


def moved():
    """What each collective that only moves numbers brings here, where rank r gives 10 r, 10 r + 1."""
    mine = torch.arange(2.0, device=GPU) + 10 * RANK
    whole, part, sent = torch.zeros(4, device=GPU), torch.zeros(1, device=GPU), mine.clone()
    dist.all_gather_into_tensor(whole, mine)
    dist.reduce_scatter_tensor(part, mine)
    dist.broadcast(sent, src=1)
    swapped = torch.zeros_like(mine)
    dist.all_to_all_single(swapped, mine)
    gathered = [torch.zeros(2, device=GPU) for _ in range(2)] if RANK == 0 else None
    dist.gather(mine, gathered)
    scattered = torch.zeros(2, device=GPU)
    dist.scatter(scattered, [mine, mine + 5] if RANK == 0 else None)
    received = torch.zeros(2, device=GPU)
    calls = [dist.P2POp(dist.isend, mine, 1 - RANK), dist.P2POp(dist.irecv, received, 1 - RANK)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": RANK})
    alone = torch.ones(1, device=GPU)
    groups = [dist.new_group([r]) for r in range(2)]
    dist.all_reduce(alone, group=groups[RANK])
    tensors = {"whole": whole, "part": part, "sent": sent, "swapped": swapped, "scattered": scattered}
    tensors |= {"received": received, "alone": alone}
    answer = {name: tensor.tolist() for name, tensor in tensors.items()}
    return answer | {"gathered": gathered and [t.tolist() for t in gathered], "objects": objects}


def waits(collective, *tensors):
    """Whether a collective is not over a second after it began, and its work."""
    work = collective(*tensors, async_op=True)
    time.sleep(1)
    return not work.is_completed(), work


def graph():
    """An all-reduce between two products, as a CUDA graph that is launched three times."""
    x, graph = torch.ones(2, device=GPU), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x *= RANK + 1
        dist.all_reduce(x)
        x /= 2
    values = [x.tolist()]
    for _ in range(3):
        graph.replay()
        values.append(x.tolist())
    return values


def collectives():
    join(GPU, device_id=GPU, timeout=timedelta(minutes=5))
    store = dist.distributed_c10d._get_default_store()
    answer = {"class": type(dist.group.WORLD._get_backend(GPU)).__name__, "moved": moved(), "graph": graph()}
    answer["sums"] = {str(dtype): reduced(dtype, dist.ReduceOp.SUM) for dtype in DTYPES}
    operations = ("AVG", "MAX", "MIN", "PRODUCT")
    answer["reduced"] = {op: reduced(torch.float32, getattr(dist.ReduceOp, op)) for op in operations}
    answer["scaled"] = {str(dtype): scaled(dtype) for dtype in DTYPES[:4]}
    answer["cpu"] = error_of(lambda: dist.all_reduce(torch.ones(2)))
    # Rank 1 comes late.
    if RANK:
        store.wait(["rank 0 has waited"])
    gathered = [torch.zeros(2, device=GPU) for _ in range(2)]
    calls = {"sum": (dist.all_reduce, torch.ones(4, device=GPU))}
    calls["gather"] = dist.all_gather, gathered, torch.full((2,), RANK + 1.0, device=GPU)
    late = {name: waits(*call) for name, call in calls.items()}
    store.set("rank 0 has waited", "")
    for _, work in late.values():
        work.wait()
    torch.cuda.synchronize()
    answer["late"] = [[waited, work.is_completed()] for waited, work in late.values()]
    answer["gathered late"] = [part.tolist() for part in gathered]
    # Rank 1 asks for something else, and ends.
    answer["other"], work = waits(dist.all_reduce, torch.ones(4 + RANK, device=GPU))
    Path(sys.argv[2], f"rank{RANK}").write_text(json.dumps(answer))
    if RANK:
        store.wait(["rank 0 has seen it"])
        os._exit(0)
    store.set("rank 0 has seen it", "")
    time.sleep(1)
    answer["dead"] = not work.is_completed()
    dist.group.WORLD._get_backend(GPU).abort()
    torch.cuda.synchronize()  # without the abort it would wait for ever
    answer["aborted"] = True
    Path(sys.argv[2], "rank0").write_text(json.dumps(answer))
    os._exit(0)


def future():
    """Whether an operator starts while an all-reduce waits for rank 1, after its future was asked for, as DDP asks."""
    join(GPU, device_id=GPU, timeout=timedelta(minutes=5))
    store = dist.distributed_c10d._get_default_store()
    mine, other = torch.ones(4, device=GPU), torch.ones(4, device=GPU)
    dist.barrier()
    if RANK:
        store.wait(["rank 0 has looked"])
    work = dist.all_reduce(mine, async_op=True)
    done = work.get_future()
    started = threading.Event()
    operator = threading.Thread(target=lambda: (other.mul_(2), started.set()))
    operator.start()
    # It never starts, or as soon as this machine has time.
    seen = started.wait(3 if os.environ["TORCH_DIST_USE_NCCL2"] == "1" else 300)
    store.set("rank 0 has looked", "")
    operator.join()
    done.wait()
    torch.cuda.synchronize()
    answer = {"class": type(dist.group.WORLD._get_backend(GPU)).__name__, "started": seen}
    answer["numbers"] = [mine.tolist(), other.tolist()]
    Path(sys.argv[2], f"rank{RANK}").write_text(json.dumps(answer))
    dist.destroy_process_group()


def off_by(tensors, others):
    return max((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in zip(tensors, others, strict=True))


def normalized(net, x):
    """A net's gradients and running statistics after the backward of one batch."""
    net(x).pow(3).sum().backward()  # of squares the gradient would vanish
    return [*(p.grad for p in net.parameters()), *(b for b in net.buffers() if b.is_floating_point())]


def stepped(net, x, steps=3):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]


def training():
    """Both ranks, with their parts of a batch, against one process with all of it."""
    join(GPU, device_id=GPU, timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    batch = torch.rand(8, 3, 4, 4)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    answer = {}
    for name, convert in (("SyncBatchNorm", nn.SyncBatchNorm.convert_sync_batchnorm), ("BatchNorm", lambda x: x)):
        mine = DistributedDataParallel(convert(deepcopy(net)).to(GPU), device_ids=[RANK])
        part = batch[:3] if RANK == 0 else batch[3:]
        ours, ones = normalized(mine, part.to(GPU)), normalized(deepcopy(net), batch)
        count = len([*net.parameters()])
        answer[name] = off_by([2 * grad for grad in ours[:count]] + ours[count:], ones)  # DDP halves the sum
    net = nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5), nn.Linear(5, 3))
    sharded = deepcopy(net).to(GPU)
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    weights = stepped(sharded, batch[4 * RANK : 4 * RANK + 4].to(GPU))
    answer["fully_shard"] = off_by(weights, stepped(deepcopy(net), batch))
    answer["untrained"] = off_by(weights, net.parameters())
    Path(sys.argv[2], f"rank{RANK}").write_text(json.dumps(answer))
    dist.destroy_process_group()


def sharing():
    """Both ranks on one GPU."""
    both = torch.ones(1, device="cuda:0")

    def reduce_on_one():
        join(both.device, device_id=both.device)
        dist.all_reduce(both)

    answer = {"error": error_of(reduce_on_one), "sum": both.item()}
    Path(sys.argv[2], f"rank{RANK}").write_text(json.dumps(answer))
    os._exit(0)


def hanging():
    """Rank 1 comes to no second all-reduce; the watchdog ends rank 0."""
    join(GPU, device_id=GPU, timeout=timedelta(minutes=5))
    numbers = torch.ones(4, device=GPU)
    dist.all_reduce(numbers)
    # Only now: on a busy machine one rank may come to the join long after the other.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4))
    if RANK:
        time.sleep(600)  # until the test ends it
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    print("it has ended")


if __name__ == "__main__":
    {"collectives": collectives, "future": future, "training": training, "sharing": sharing, "hanging": hanging}[
        sys.argv[1]
    ]()
