"""What the first GPU run starts on ranks, beside the scripts: each function is `--probe NAME`.

They import the scripts that stand beside the program, and change one thing in them.
"""

import importlib
import itertools
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ddp_helpers.rank.gpu.step import difference, tell


def join(seconds: float, script: str = "mnist_ddp") -> tuple:
    """Form the group as a script does; returns rank, world size and device."""
    module = importlib.import_module(script)
    _, rank, local_rank, size = module.who_am_i()
    device = module.pick_device(local_rank)
    module.join(rank, size, device, seconds)
    return rank, size, device


def probe_graph(data: str, work: str, epochs: str) -> None:
    """Train FastNet without dropout by a graph, without, again, and with one learning rate."""
    import mnist_fast
    import torch

    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    device = mnist_fast.pick_device(0)
    sets = mnist_fast.datasets(Path(data))
    mnist_fast.Dropout = lambda p: torch.nn.Identity()
    flags = {"epochs": int(epochs), "lr": 1.0, "seed": 1, "bf16": False, "dry_run": False}
    flags |= {"batch_size": 60, "save_model": True}  # of 512 images the last batch has 32
    as_graph, off = mnist_fast.as_graph, {}
    for name in ("eager", "again", "graph", "control"):
        folder = Path(work, name)
        folder.mkdir()
        mnist_fast.as_graph = as_graph if name == "graph" else lambda take_step, *_: take_step
        gamma = 1.0 if name == "control" else 0.7
        mnist_fast.train(Namespace(**flags, gamma=gamma, run_dir=folder), device, *sets)
        off[name] = difference(Path(work, "eager", "mnist_cnn.pt"), folder / "mnist_cnn.pt")
    tell(**off)


def probe_killed(at: str, who: str, *flags: str) -> None:
    """Train the resumable script, and kill this rank, or each, after so many steps."""
    import mnist_ddp_resumable as script

    reseed = script.reseed

    def die(args: Namespace, step: int) -> None:
        reseed(args, step)
        if step == int(at) and who in ("all", os.environ.get("RANK", "0")):
            os.kill(os.getpid(), signal.SIGKILL)

    script.reseed = die
    sys.argv = [script.__file__, *flags]
    script.main()


def probe_forget(*flags: str) -> None:
    """Resume without the optimizer's state: the control."""
    import mnist_ddp_resumable as script

    restore = script.restore

    def forget(args: Namespace, parts: dict, newest: dict) -> dict:
        return restore(args, {name: parts[name] for name in parts if name != "optimizer"}, newest)

    script.restore = forget
    sys.argv = [script.__file__, *flags]
    script.main()


def probe_memory(data: str) -> None:
    """Measure the memory in use on this device: with a context, with a group, after two steps."""
    import mnist_ddp
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def used() -> int:
        if device.type == "cpu":
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    _, _, local_rank, size = mnist_ddp.who_am_i()
    device = mnist_ddp.pick_device(local_rank)
    taken = {"context": used()}
    mnist_ddp.join(int(os.environ["RANK"]), size, device, 60)
    dist.all_reduce(torch.ones(1, device=device))
    taken["group"] = used()
    model = DDP(mnist_ddp.Net().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.rand(64, 1, 28, 28, device=device)).sum().backward()
        optimizer.step()
    taken["steps"] = used()
    dist.barrier()
    held = torch.cuda.memory_reserved() if device.type == "cuda" else 0
    ranks_here = size if device.type == "cuda" and torch.cuda.device_count() == 1 else 1
    tell(taken=taken, held=held, beside=taken["steps"] / ranks_here - held)
    dist.destroy_process_group()


def probe_overlap(small: str) -> None:
    """Time and record steps of six wide layers: alone, averaged after backward, and with DDP."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    rank, _, device = join(60)
    width = 512 if int(small) else 4096
    layers = [nn.Linear(width, width, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    wrapped = DDP(model, gradient_as_bucket_view=True)
    batch = torch.randn(width // 4, width, device=device)

    def take_step(kind: str) -> None:
        ways = wrapped if kind == "ddp" else model
        for weight in model.parameters():
            weight.grad = None
        ways(batch).square().mean().backward()
        for weight in model.parameters() if kind == "after" else ():
            dist.all_reduce(weight.grad)

    def wait() -> None:
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
    group = dist.distributed_c10d._get_default_group()._get_backend(device)
    lanes = {}
    if rank == 0:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
            lanes = read_lanes(events, on_gpu=device.type == "cuda")
        tell(milliseconds=milliseconds, class_name=type(group).__name__, **lanes)
    dist.barrier()
    dist.destroy_process_group()


def read_lanes(events: list[dict[str, Any]], on_gpu: bool) -> dict[str, Any]:
    """Find in a trace when this rank computed and when it sent, and for how many ms did both."""
    lanes: dict[str, list] = {"compute": [], "all-reduce": []}
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
    merged: dict[str, list] = {}
    for lane, spans in lanes.items():
        merged[lane] = []
        for begin, end in sorted((begin - start, end - start) for begin, end in spans):
            if merged[lane] and begin <= merged[lane][-1][1] + 0.001:
                merged[lane][-1][1] = max(merged[lane][-1][1], round(end, 3))
            else:
                merged[lane].append([round(begin, 3), round(end, 3)])
    pairs = itertools.product(merged["compute"], merged["all-reduce"])
    hidden = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)
    sent = sum(end - begin for begin, end in merged["all-reduce"])
    return {"lanes": merged, "hidden": hidden, "sent": sent}


def probe_late(seconds: str, script: str = "mnist_ddp") -> None:
    """Have the last rank come too late to an all-reduce, in a group with this timeout."""
    import torch
    import torch.distributed as dist

    rank, size, device = join(60, script)
    group = dist.new_group(timeout=timedelta(seconds=float(seconds)))
    total = torch.ones(1000, device=device)
    dist.all_reduce(total, group=group)
    if rank == size - 1:
        time.sleep(20 * float(seconds))
    tell(waits_since=time.time())
    dist.all_reduce(total, group=group)
    print(total.sum().item())


def probe_again(script: str, seconds: str, lives: str) -> None:
    """Run into a time-out at the first attempt, and live for so many seconds at the second."""
    import torch.distributed as dist

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        probe_late(seconds, script)
        # NCCL: under torchrun the watchdog aborts the all-reduce, and the rank goes on until it
        # has ended the process.
        time.sleep(600)
    rank, _, _ = join(60, script)
    time.sleep(float(lives))
    dist.barrier()
    print(f"rank {rank} lived")
    dist.destroy_process_group()


def probe_full(who: str, *flags: str) -> None:
    """Train mnist_ddp, and ask on one rank for more memory than there is."""
    import mnist_ddp
    import torch

    loss_and_metrics = mnist_ddp.loss_and_metrics

    def greedy(model: Any, batch: list, device: Any) -> tuple:
        if os.environ["RANK"] == who:
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        return loss_and_metrics(model, batch, device)

    mnist_ddp.loss_and_metrics = greedy
    sys.argv = [mnist_ddp.__file__, *flags]
    mnist_ddp.main()


PROBES = {
    "graph": probe_graph,
    "killed": probe_killed,
    "forget": probe_forget,
    "memory": probe_memory,
    "overlap": probe_overlap,
    "late": probe_late,
    "again": probe_again,
    "full": probe_full,
}
