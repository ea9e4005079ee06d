"""Runs on a simulated GPU and on the CPU; writes by how much each result, or gradient, is off, to the file it is given.

Here stands what has an operator of its own for CUDA, or is chosen by what is there: not every operator.
"""

import json
import sys
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn import functional

LENGTHS = torch.tensor([5, 3])


def after_backward(device, net, *inputs, call=None):
    """What a net gives, and the gradients of the first input and of its weights."""
    net = net.to(device)
    first, *rest = [value.detach().to(device) for value in inputs]
    first.requires_grad_()
    out = (call or net)(first, *rest)
    out = out[0] if isinstance(out, tuple) else out
    out.abs().square().sum().backward()
    return [out, first.grad, *(p.grad for p in net.parameters())]


def seeded(make):
    """A case: a net, and its inputs."""

    def case(device):
        torch.manual_seed(0)
        net, *inputs = make()
        return after_backward(device, net, *inputs)

    return case


def computed(call, *inputs):
    """A case without weights."""
    return lambda device: after_backward(device, nn.Identity(), *inputs, call=call)


def trained(kind, **options):
    """A case: weights after three steps; the CPU takes them with the plain optimizer."""

    def case(device):
        torch.manual_seed(0)
        net, batch = nn.Linear(3, 2).to(device), torch.rand(4, 3).to(device)
        optimizer = kind(net.parameters(), lr=0.1, **options if device == "cuda" else {})
        for _ in range(3):
            optimizer.zero_grad()
            net(batch).square().sum().backward()
            optimizer.step()
        return [*net.parameters()]

    return case


def packed(device):
    torch.manual_seed(0)
    net = nn.LSTM(3, 4, 2, bidirectional=True)

    def call(words):
        out, _ = net(nn.utils.rnn.pack_padded_sequence(words, LENGTHS))
        return nn.utils.rnn.pad_packed_sequence(out)[0]

    return after_backward(device, net, torch.rand(5, 2, 3), call=call)


def inferred(device):
    torch.manual_seed(0)
    nets = [nn.LSTM(3, 4).to(device), nn.GRU(3, 4).to(device)]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).to(device).eval()
    words, mask = torch.rand(2, 3, 8), torch.tensor([[False, False, True], [False] * 3])
    with torch.inference_mode():
        outs = [net(torch.ones(5, 2, 3, device=device))[0] for net in nets]
        return [*outs, encoder(words.to(device), src_key_padding_mask=mask.to(device))[~mask.to(device)]]


def with_cudnn(device):
    torch.backends.cudnn.enabled = True  # as scripts say it
    return seeded(lambda: (nn.BatchNorm2d(3), torch.rand(2, 3, 4, 4)))(device)


def in_parallel(device):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    return after_backward(device, nn.DataParallel(net.to(device)) if device == "cuda" else net, torch.rand(4, 3))


def boxes(device):
    corners = torch.tensor([[0, 0, 4, 4.0], [0, 0, 4, 3.9], [3, 3, 6, 6]]).to(device)
    kept = torchvision.ops.nms(corners, torch.tensor([0.5, 0.9, 0.1]).to(device), 0.5)
    regions = torch.cat([torch.zeros(3, 1, device=device), corners], 1)
    aligned = after_backward(
        device, nn.Identity(), torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        call=lambda image: torchvision.ops.roi_align(image, regions, 2),
    )  # fmt: skip
    return [kept, *aligned]


numbers = torch.rand(2, 4, 8, generator=torch.Generator().manual_seed(0))
CASES = {
    "LSTM": packed,
    "GRU": seeded(lambda: (nn.GRU(3, 4), torch.rand(5, 2, 3))),
    "RMSNorm": seeded(lambda: (nn.RMSNorm(8), torch.rand(4, 8))),
    "inference": inferred,
    "attention": computed(lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True), numbers),
    "multi-head attention": seeded(lambda: (nn.MultiheadAttention(8, 2), *[torch.rand(3, 1, 8) for _ in range(3)])),
    "CTC loss": computed(
        lambda x: functional.ctc_loss(x.log_softmax(2), torch.ones(4, 2).long().to(x.device), (2,) * 4, (1,) * 4),
        numbers,
    ),
    "complex numbers": computed(lambda x: torch.fft.ifft(x), numbers),
    "a gradient of zeros": computed(torch.sgn, numbers),
    "cuDNN": with_cudnn,
    "DataParallel": in_parallel,
    "boxes": boxes,
    "fused Adam": trained(torch.optim.Adam, fused=True),
    "fused AdamW": trained(torch.optim.AdamW, fused=True),
    "fused SGD": trained(torch.optim.SGD, fused=True),
    "capturable Adam": trained(torch.optim.Adam, capturable=True),
    "control": trained(torch.optim.SGD, momentum=0.1),
}


def off_by(case):
    mine, its = case("cuda"), case("cpu")
    assert len(mine) == len(its) and all(x.is_cuda for x in mine)
    return max((x.detach().cpu() - y.detach()).abs().max().item() for x, y in zip(mine, its, strict=True))


def refusal():
    """What flash attention says of numbers that it does not take."""
    x = numbers[None].to("cuda")  # with four dimensions, as older versions want it
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        half = functional.scaled_dot_product_attention(x.half(), x.half(), x.half())
        try:
            functional.scaled_dot_product_attention(x, x, x)
        except RuntimeError as error:
            return str(half.dtype), str(error)
    return str(half.dtype), "nothing"


if __name__ == "__main__":
    answer = {"off": {name: off_by(case) for name, case in CASES.items()}, "flash": refusal()}
    Path(sys.argv[1]).write_text(json.dumps(answer))
