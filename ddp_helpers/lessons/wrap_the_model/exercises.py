"""Exercises of notebook 05: functions that every rank of a group calls; the checker looks at what the ranks did."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT, Exercise

Piece = tuple[Tensor, Tensor]  # images and labels of a micro-batch


@dataclass(frozen=True)
class OnRanks(Exercise):
    """An exercise that runs on live ranks: on each, `judge` yields a line a case, what is wrong or nothing."""

    judge: Callable[[Callable], Iterator[str]]

    def verdict(self, answer: Callable) -> str:
        """Return the verdict on a learner's function; every rank of the group calls it."""
        if not dist.is_initialized():
            return "not yet: run this cell on ranks, with `%%ranks 2` as its first line"
        try:
            told = next(filter(None, map(agreed, self.judge(answer))), "")
        except NotImplementedError:
            return NOT_ATTEMPTED
        except Exception as error:
            told = f"{self.oracle.__name__} ends with {type(error).__name__}: {error}"
        return f"not yet: {told}" if told else RIGHT


def agreed(line: str) -> str:
    """What the first rank says that has something to say; every rank calls it, so that all stop at the same case."""
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    return next(filter(None, lines), "")


def device() -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def small_model() -> nn.Module:
    """A model with the same weights on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.LogSoftmax(dim=1)).double().to(device())


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of the tensors in one new tensor."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def drifted(model: nn.Module) -> list[str]:
    """The names of the parameters that are not the same on all ranks."""
    found = []
    for name, parameter in model.named_parameters():
        everyone = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameter.data)
        if not all(torch.equal(one, everyone[0]) for one in everyone):
            found.append(name)
    return found


def _compares_with_rank_0(model: nn.Module) -> list[str]:
    return drifted(model)[: 9 * dist.get_rank()]


def _compares_sums(model: nn.Module) -> list[str]:
    found = []
    for name, parameter in model.named_parameters():
        mean = parameter.detach().sum()
        dist.all_reduce(mean)
        if not torch.isclose(mean / dist.get_world_size(), parameter.detach().sum()):
            found.append(name)
    return found


def _overwrites(model: nn.Module) -> list[str]:
    found = drifted(model)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return found


def judge_drifted(answer: Callable) -> Iterator[str]:
    """Ask about replicas that are the same, and about some where the last rank has swapped numbers."""
    for names in ([], ["1.weight"], ["0.weight", "1.bias"]):
        model = small_model()
        for name, parameter in model.named_parameters():
            if name in names and dist.get_rank() == dist.get_world_size() - 1:
                parameter.data = parameter.data.flip(0)
        before, found = flat(list(model.parameters())), [None] * dist.get_world_size()
        dist.all_gather_object(found, answer(model))
        if not torch.equal(before, flat(list(model.parameters()))):
            yield "it has changed the model, and should only look."
        elif any(one != found[0] for one in found):
            said = " and ".join(f"rank {rank} {one}" for rank, one in enumerate(found))
            yield f"the ranks should give the same answer, but they give: {said}."
        elif found[0] != names:
            two = " Numbers were swapped: their sum is the same." if found[0] == [] else ""
            yield f"it gives {found[0]}, and should give {names}.{two}"
        else:
            yield ""


def average_in_one(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks, with one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    for gradient, piece in zip(gradients, bucket.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))


def _one_by_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _sums(model: nn.Module) -> None:
    average_in_one(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= dist.get_world_size()


def _all_have_gradients(model: nn.Module) -> None:
    if any(parameter.grad is None for parameter in model.parameters()):
        raise AttributeError("'NoneType' object has no attribute 'flatten'")
    average_in_one(model)


def judge_average(answer: Callable) -> Iterator[str]:
    """Ask for the mean of gradients that differ by rank; the second time a layer is frozen."""
    for frozen in (False, True):
        model = small_model()
        model[0].requires_grad_(not frozen)
        torch.manual_seed(dist.get_rank())
        model(torch.randn(8, 6, device=device()).double()).square().sum().backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        before = flat([parameter.grad for parameter in trained])
        mean = before.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        sent, after = _count_all_reduces(answer, model, frozen), flat([parameter.grad for parameter in trained])
        if sent != 1:
            yield f"all-reduces: {sent}, and there should be 1."
        elif torch.equal(after, before):
            yield "the gradients are as they were: the mean is not in p.grad."
        elif torch.allclose(after, mean * dist.get_world_size()):
            yield "the gradients are sums over the ranks, and should be means."
        elif not torch.allclose(after, mean):
            yield "the gradients are not the means over the ranks: does each piece go back to its own parameter?"
        else:
            yield ""


def _count_all_reduces(answer: Callable, model: nn.Module, frozen: bool) -> int:
    """Let the answer average, and count how often it calls dist.all_reduce."""
    calls, original = [], dist.all_reduce

    def counting(*arguments: object, **options: object) -> object:
        calls.append(1)
        return original(*arguments, **options)

    dist.all_reduce = counting
    try:
        answer(model)
    except (AttributeError, TypeError) as error:
        hint = " A frozen layer has no gradient: its p.grad is None." if frozen else ""
        raise RuntimeError(f"{error}.{hint}") from error
    finally:
        dist.all_reduce = original
    return len(calls)


def accumulate(ddp_model: DDP, optimizer: Optimizer, pieces: list[Piece]) -> None:
    """Take one optimizer step over all pieces, with one exchange of gradients."""
    total = sum(len(labels) for _, labels in pieces)
    optimizer.zero_grad()
    *first, (images, labels) = pieces
    with ddp_model.no_sync():
        for x, y in first:
            (F.nll_loss(ddp_model(x), y) * len(y) / total).backward()
    (F.nll_loss(ddp_model(images), labels) * len(labels) / total).backward()
    optimizer.step()


def _accumulating(
    shares: Callable, all_inside: bool = False, none_inside: bool = False, clear: bool = True
) -> Callable:
    """A variant of the answer that weighs the losses in another way, or sends at other times."""

    def answer(ddp_model: DDP, optimizer: Optimizer, pieces: list[Piece]) -> None:
        if clear:
            optimizer.zero_grad()
        for number, (x, y) in enumerate(pieces, 1):
            ddp_model.require_backward_grad_sync = none_inside or (number == len(pieces) and not all_inside)
            (F.nll_loss(ddp_model(x), y) * shares(y, pieces)).backward()
        ddp_model.require_backward_grad_sync = True
        optimizer.step()

    return answer


def _share(labels: Tensor, pieces: list[Piece]) -> float:
    return len(labels) / sum(len(one) for _, one in pieces)


def judge_accumulate(answer: Callable) -> Iterator[str]:
    """Compare two steps over pieces of 8, 8 and 4 images with two steps over whole batches."""
    model, whole, calls = small_model(), small_model(), []

    def counted(calls: list, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(1)
        return allreduce_hook(None, bucket)

    ddp_model, ddp_whole = DDP(model), DDP(whole)
    ddp_model.register_comm_hook(calls, counted)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, whole)]
    torch.manual_seed(dist.get_rank())
    for step in (1, 2):
        images = torch.randn(20, 6, device=device()).double()
        labels = torch.randint(4, (20,), device=device())
        answer(ddp_model, optimizers[0], list(zip(images.split(8), labels.split(8), strict=True)))
        optimizers[1].zero_grad()
        F.nll_loss(ddp_whole(images), labels).backward()
        optimizers[1].step()
        found, expected = flat(list(model.parameters())), flat(list(whole.parameters()))
        if len(calls) != step:
            yield f"all-reduces in {step} steps: {len(calls)}. {WHY_NOT_ONE[len(calls) > step]}"
        elif not torch.allclose(found, expected):
            yield f"after step {step} the weights are not those of a step with the whole batch. {WHY_OTHER[step]}"
        else:
            yield ""


WHY_NOT_ONE = {
    True: "Forward and backward of every piece but the last belong inside no_sync().",
    False: "The last piece, forward and backward, belongs outside no_sync(): it sends the sum.",
}
WHY_OTHER = {
    1: "The pieces have 8, 8 and 4 images: what is each one's share of the mean?",
    2: "The first step was right: are its gradients still there?",
}

EXERCISES = [
    OnRanks(
        drifted,
        [],
        {
            "the ranks should give the same answer": _compares_with_rank_0,
            "Numbers were swapped: their sum is the same.": _compares_sums,
            "it has changed the model, and should only look.": _overwrites,
        },
        judge_drifted,
    ),
    OnRanks(
        average_in_one,
        [],
        {
            "all-reduces: 4, and there should be 1.": _one_by_one,
            "the gradients are sums over the ranks, and should be means.": _sums,
            "the mean is not in p.grad.": lambda model: dist.all_reduce(flat([p.grad for p in model[1].parameters()])),
            "A frozen layer has no gradient: its p.grad is None.": _all_have_gradients,
        },
        judge_average,
    ),
    OnRanks(
        accumulate,
        [],
        {
            "what is each one's share of the mean?": _accumulating(lambda y, pieces: 1 / len(pieces)),
            "8, 8 and 4 images": _accumulating(lambda y, pieces: 1.0),
            "every piece but the last belong inside no_sync()": _accumulating(_share, none_inside=True),
            "belongs outside no_sync(): it sends the sum.": _accumulating(_share, all_inside=True),
            "are its gradients still there?": _accumulating(_share, clear=False),
        },
        judge_accumulate,
    ),
]
