"""Plants wrong-device faults on two simulated GPUs; writes what PyTorch says of each into the file that it is given."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
x, x_other, x_cpu = (torch.ones(4, 3, device=device) for device in (GPU, OTHER, "cpu"))
targets = torch.zeros(4, dtype=torch.long)
linear = nn.Linear(3, 3, device=GPU)


def accumulate():
    right = torch.tensor(0)
    right += (linear(x).argmax(1) == 0).sum()


FAULTS = {
    "the batch stays on the CPU": lambda: linear(x_cpu),
    "the targets stay on the CPU": lambda: cross_entropy(linear(x), targets),
    "class weights stay on the CPU": lambda: cross_entropy(linear(x), targets.to(GPU), torch.ones(3)),
    "the model stays on the CPU": lambda: nn.Conv2d(1, 1, 3)(x[None]),
    "buffers stay on the CPU": lambda: nn.BatchNorm1d(3)(x),
    "batch and weights on two GPUs": lambda: linear(x_other),
    "a sum of both": lambda: x + x_cpu,
    "a loss of both": lambda: mse_loss(x, x_cpu),
    "a mask of the CPU": lambda: torch.where(x_cpu > 0, x, x),
    "an argmax compared on the CPU": lambda: (x.argmax(1) == targets).sum(),
    "a counter on the CPU": accumulate,
    "a list of both": lambda: torch.cat([x, x_cpu]),
    "words stay on the CPU": lambda: nn.Embedding(5, 2, device=GPU)(targets),
    "numpy": lambda: x.numpy(),
    "pinned": lambda: x.pin_memory(),
    "a GPU that is not there": lambda: torch.ones(1, device="cuda:2"),
    "a generator of the CPU": lambda: torch.randperm(4, device=GPU, generator=torch.Generator()),
    "a generator of the GPU": lambda: torch.randperm(4, generator=torch.Generator(GPU)),
    "too much memory": lambda: torch.empty(65 << 20, dtype=torch.uint8, device=GPU),
}


def write_at():
    y = x.clone()
    y[targets] = torch.tensor(5.0)
    return y.sum().item()


def draws():
    """Each draw goes on in the GPU's generator, whose state can be had back; the CPU's is left alone."""
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    kept = nn.functional.dropout(torch.ones(1000, device=GPU)).bool().sum().item()
    state = torch.cuda.get_rng_state()
    first, second = torch.rand(3, device=GPU), torch.rand(3, device=GPU)
    torch.cuda.set_rng_state(state)
    again = torch.rand(3, device=GPU)
    alone = torch.rand(3).tolist() == expected
    return [400 < kept < 600, torch.equal(first, second), torch.equal(first, again), alone]


FINE = {  # what a GPU takes, and what comes out
    "an index of the CPU": (lambda: x[targets].sum().item(), 12),
    "written at an index of the CPU": (write_at, 24),
    "a number": (lambda: (x * 2).sum().item(), 24),
    "a number of the CPU, without a dimension": (lambda: (x * torch.tensor(2.0)).sum().item(), 24),
    "copied from GPU to GPU": (lambda: (x_other.to(GPU) + x).sum().item(), 24),
    "pinned, and copied at once": (lambda: x_cpu.pin_memory().to(GPU, non_blocking=True).sum().item(), 12),
    "as much memory as there is": (lambda: torch.empty(60 << 20, dtype=torch.uint8, device=OTHER).numel(), 60 << 20),
    "the numbers of the GPU's own generator": (draws, [True, False, True, True]),
}


def message(fault):
    try:
        fault()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing"


def losses(device, dtype):
    """Of a few steps of a net with all that the course's have."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 3)
    )
    net, batch = net.to(device), torch.rand(6, 1, 12, 12).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    values = []
    for _ in range(3):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = cross_entropy(net(batch), torch.arange(6, device=device) % 3)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        values.append(loss.item())
    return values


def trained(as_graph):
    """Eight losses, from the fourth on of a CUDA graph if asked, and whether recording it changed a weight."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 2)).to(GPU)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01, device=GPU), capturable=True)
    batches = torch.rand(8, 6, 4, device=GPU)
    batch, labels = batches[0].clone(), torch.arange(6, device=GPU) % 2

    def step():
        optimizer.zero_grad()
        loss = cross_entropy(net(batch), labels)
        loss.backward()
        optimizer.step()
        return loss

    graph, warm_up, losses, changed = torch.cuda.CUDAGraph(), torch.cuda.Stream(), [], False
    for number, images in enumerate(batches):
        batch.copy_(images)
        if not as_graph or number < 3:
            with torch.cuda.stream(warm_up):  # not the default stream, or the recording would refuse its leftovers
                losses.append(step().item())
            continue
        if number == 3:
            before = [p.detach().clone() for p in net.parameters()]
            with torch.cuda.graph(graph):
                loss = step()
            changed = not all(map(torch.equal, before, net.parameters()))
        graph.replay()
        losses.append(loss.item())
    return losses, changed


def ask_while_recording(question):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        question(x.sum())


if __name__ == "__main__":
    answer = {
        "faults": {name: message(fault) for name, fault in FAULTS.items()},
        "fine": {name: [call(), wanted] for name, (call, wanted) in FINE.items()},
        "names": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "graph": {"eager": trained(as_graph=False), "graph": trained(as_graph=True)},
        "asked": [
            message(lambda: ask_while_recording(lambda total: total.item())),
            message(lambda: ask_while_recording(lambda total: total.cpu())),
            message(lambda: ask_while_recording(lambda total: total * 2)),
        ],
        "losses": {
            f"{device} {dtype}": losses(device, dtype)
            for device in ("cpu", "cuda")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        },
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))
