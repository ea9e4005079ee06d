"""Exercises of notebook 05: functions that every rank of a group calls; the checker looks at what the ranks did."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from ddp_helpers.lessons.exercise import Project

Piece = tuple[Tensor, Tensor]  # images and labels of a micro-batch


def on_live_ranks(judge: Callable[[Callable], Iterator[str]]) -> Callable[[Callable], list[str]]:
    """Turn a judge that yields a line a case, what is wrong or nothing, into a Project's; all ranks stop together."""

    def judged(answer: Callable) -> list[str]:
        if not dist.is_initialized():
            return ["run this cell on ranks, with `%%ranks 2` as its first line"]
        for line in judge(answer):
            lines = [None] * dist.get_world_size()
            dist.all_gather_object(lines, line)
            if wrong := next(filter(None, lines), ""):
                return [wrong]
        return []

    return judged


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def small_model() -> nn.Module:
    """A model with the same weights on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.LogSoftmax(dim=1)).double().to(device())


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers of the tensors in one new tensor."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# ---- 1: find what has drifted


def drifted(model: nn.Module, of: Callable[[Tensor], Tensor] = Tensor.contiguous) -> list[str]:
    """The names of the parameters that are not the same on all ranks; `of` is what is compared of each."""
    found = []
    for name, parameter in model.named_parameters():
        mine = of(parameter.detach())
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        if not all(torch.equal(one, everyone[0]) for one in everyone):
            found.append(name)
    return found


def overwrite(model: nn.Module) -> list[str]:
    """A mistake: afterwards all ranks have rank 0's parameters."""
    found = drifted(model)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return found


@on_live_ranks
def judge_drifted(answer: Callable) -> Iterator[str]:
    """Ask about replicas that are the same, and about some where the last rank has swapped numbers."""
    for names in ([], ["1.weight"], ["0.weight", "1.bias"]):
        model = small_model()
        for name, parameter in model.named_parameters():
            if name in names and dist.get_rank() == dist.get_world_size() - 1:
                parameter.data = parameter.data.flip(0)
        before, found = flat(model.parameters()), [None] * dist.get_world_size()
        dist.all_gather_object(found, answer(model))
        if not torch.equal(before, flat(model.parameters())):
            yield "it has changed the model, and should only look."
        elif any(one != found[0] for one in found):
            said = " and ".join(f"rank {rank} {one}" for rank, one in enumerate(found))
            yield f"the ranks should give the same answer, but they give: {said}."
        elif found[0] != names:
            two = " Numbers were swapped: their sum is the same." if found[0] == [] else ""
            yield f"it gives {found[0]}, and should give {names}.{two}"
        else:
            yield ""


# ---- 2: average in one


def average_in_one(model: nn.Module, divide: bool = True, skip_frozen: bool = True) -> None:
    """Replace each gradient by its mean over the ranks, with one all-reduce. A switch that is off is a mistake."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None or not skip_frozen]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size() if divide else 1
    for gradient, piece in zip(gradients, bucket.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))


@on_live_ranks
def judge_average(answer: Callable) -> Iterator[str]:
    """Ask for the mean of gradients that differ by rank; the second time a layer is frozen."""
    for frozen in (False, True):
        model = small_model()
        model[0].requires_grad_(not frozen)
        torch.manual_seed(dist.get_rank())
        model(torch.randn(8, 6, device=device()).double()).square().sum().backward()
        trained = [p for p in model.parameters() if p.grad is not None]
        before = flat(p.grad for p in trained)
        mean = before.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
            try:
                answer(model)
            except (AttributeError, TypeError) as error:
                raise RuntimeError(
                    f"{error}.{' A frozen layer has no gradient: its p.grad is None.' * frozen}"
                ) from error
        after = flat(p.grad for p in trained)
        if sent.call_count != 1:
            yield f"all-reduces: {sent.call_count}, and there should be 1."
        elif torch.equal(after, before):
            yield "the gradients are as they were: the mean is not in p.grad."
        elif torch.allclose(after, mean * dist.get_world_size()):
            yield "the gradients are sums over the ranks, and should be means."
        elif not torch.allclose(after, mean):
            yield "the gradients are not the means over the ranks: does each piece go back to its own parameter?"
        else:
            yield ""


# ---- 3: accumulate pieces


def accumulate(
    ddp_model: DDP,
    optimizer: Optimizer,
    pieces: list[Piece],
    share: float | None = None,
    sending: Sequence[int] = (-1,),
    clear: bool = True,
) -> None:
    """Take one optimizer step over all pieces, with one exchange of gradients.

    The mistakes give each piece the same share of the loss, send with other pieces (-1 is the last), or keep gradients.
    """
    total = sum(len(labels) for _, labels in pieces)
    if clear:
        optimizer.zero_grad()
    for number, (x, y) in enumerate(pieces, -len(pieces)):
        with nullcontext() if number in sending else ddp_model.no_sync():
            (F.nll_loss(ddp_model(x), y) * (share or len(y) / total)).backward()
    optimizer.step()


@on_live_ranks
def judge_accumulate(answer: Callable) -> Iterator[str]:
    """Compare two steps over pieces of 8, 8 and 4 images with two steps over whole batches."""
    model, whole, calls = small_model(), small_model(), []

    def counted(calls: list, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(1)
        return allreduce_hook(None, bucket)

    ddp_model, ddp_whole = DDP(model), DDP(whole)
    ddp_model.register_comm_hook(calls, counted)
    optimizer, optimizer_whole = (SGD(one.parameters(), lr=0.5) for one in (model, whole))
    torch.manual_seed(dist.get_rank())
    for step in (1, 2):
        images = torch.randn(20, 6, device=device()).double()
        labels = torch.randint(4, (20,), device=device())
        answer(ddp_model, optimizer, list(zip(images.split(8), labels.split(8), strict=True)))
        optimizer_whole.zero_grad()
        F.nll_loss(ddp_whole(images), labels).backward()
        optimizer_whole.step()
        found, expected = flat(model.parameters()), flat(whole.parameters())
        if len(calls) != step:
            yield f"all-reduces in {step} steps: {len(calls)}. {TOO_MANY if len(calls) > step else TOO_FEW}"
        elif not torch.allclose(found, expected):
            yield f"after step {step} the weights are not those of a step with the whole batch. {WHY_OTHER[step]}"
        else:
            yield ""


TOO_MANY = "Forward and backward of every piece but the last belong inside no_sync()."
TOO_FEW = "The last piece, forward and backward, belongs outside no_sync(): it sends the sum."
WHY_OTHER = {
    1: "The pieces have 8, 8 and 4 images: what is each one's share of the mean?",
    2: "The first step was right: are its gradients still there?",
}

EXERCISES = [
    Project(
        drifted,
        [],
        {
            "the ranks should give the same answer": lambda model: drifted(model)[: 9 * dist.get_rank()],
            "Numbers were swapped: their sum is the same.": partial(drifted, of=lambda p: p.sum().float()),
            "it has changed the model, and should only look.": overwrite,
        },
        judge_drifted,
    ),
    Project(
        average_in_one,
        [],
        {
            "all-reduces: 4, and there should be 1.": lambda model: [
                dist.all_reduce(p.grad) for p in model.parameters()
            ],
            "the gradients are sums over the ranks, and should be means.": partial(average_in_one, divide=False),
            "the mean is not in p.grad.": lambda model: dist.all_reduce(flat(p.grad for p in model[1].parameters())),
            "A frozen layer has no gradient: its p.grad is None.": partial(average_in_one, skip_frozen=False),
        },
        judge_average,
    ),
    Project(
        accumulate,
        [],
        {
            "what is each one's share of the mean?": partial(accumulate, share=1 / 3),
            "8, 8 and 4 images": partial(accumulate, share=1.0),
            "every piece but the last belong inside no_sync()": partial(accumulate, sending=range(-3, 0)),
            "belongs outside no_sync(): it sends the sum.": partial(accumulate, sending=()),
            "are its gradients still there?": partial(accumulate, clear=False),
        },
        judge_accumulate,
    ),
]
