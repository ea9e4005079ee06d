"""Time and record steps of six wide layers: alone, averaged after backward, and with DDP. overlap.py WIDTH."""

import itertools
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parents[2] / "ddp_helpers" / "rank" / "scripts"))
import mnist_ddp


def measure(width, rank, device):
    """What was seen on rank 0: milliseconds a step, the group's class, and when it computed and sent."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6))).to(device)
    wrapped = DDP(model, gradient_as_bucket_view=True)
    batch = torch.randn(width // 4, width, device=device)

    def take_step(kind):
        for weight in model.parameters():
            weight.grad = None
        (wrapped if kind == "ddp" else model)(batch).square().mean().backward()
        for weight in model.parameters() if kind == "after" else ():
            dist.all_reduce(weight.grad)

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    milliseconds = {}
    for kind in ("alone", "after", "ddp"):
        for turn in range(25):
            if turn == 5:
                dist.barrier()
                wait()
                begin = time.perf_counter()
            take_step(kind)
        wait()
        milliseconds[kind] = 1000 * (time.perf_counter() - begin) / 20
    with torch.profiler.profile() as profile:
        take_step("ddp")
        wait()
    if rank:
        return {}
    group = dist.distributed_c10d._get_default_group()._get_backend(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        lanes = read_lanes(json.loads(Path(file.name).read_text())["traceEvents"], on_gpu=device.type == "cuda")
    return {"milliseconds": milliseconds, "class": type(group).__name__, **lanes}


def read_lanes(events, on_gpu):
    """Find in a trace when this rank computed and when it sent, and for how many ms did both."""
    lanes = {"compute": [], "all-reduce": []}
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == ("kernel" if on_gpu else "user_annotation") and re.match("nccl|gloo:", name):
            lane = "all-reduce"
        elif kind == ("kernel" if on_gpu else "cpu_op") and not name.startswith("c10d::"):
            lane = "compute"
        else:
            continue
        lanes[lane].append((event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000))
    start = min(span[0] for spans in lanes.values() for span in spans)
    merged = {lane: [] for lane in lanes}
    for lane, spans in lanes.items():
        for begin, end in sorted((begin - start, end - start) for begin, end in spans):
            if merged[lane] and begin <= merged[lane][-1][1] + 0.001:
                merged[lane][-1][1] = max(merged[lane][-1][1], round(end, 3))
            else:
                merged[lane].append([round(begin, 3), round(end, 3)])
    pairs = itertools.product(merged["compute"], merged["all-reduce"])
    hidden = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)
    sent = sum(end - begin for begin, end in merged["all-reduce"])
    return {"lanes": merged, "hidden": hidden, "sent": sent}


if __name__ == "__main__":
    _, rank, local_rank, size = mnist_ddp.who_am_i()
    device = mnist_ddp.pick_device(local_rank)
    mnist_ddp.form_group(rank, size, device, 60)
    seen = measure(int(sys.argv[1]), rank, device)
    if rank == 0:
        print(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
