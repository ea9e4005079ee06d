"""The exercises of notebook 05: find what has drifted, average in one, accumulate pieces.

`lessons.check` asks them for verdicts in a `%%ranks` cell: every rank of the group calls the answer
and the judge, which looks at what the ranks did. All judges say the same on every rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Optimizer

from ddp_helpers.lessons.exercise import Answer, Project

Piece = tuple[Tensor, Tensor]  # images and labels of a micro-batch
_CaseJudge = Callable[[Answer], Iterator[str]]  # for each case, what is wrong, or an empty text


def _on_live_ranks(judge_cases: _CaseJudge) -> Callable[[Answer], list[str]]:
    """Make a Project's judge of one that yields a text for each case.

    After each case the ranks compare their texts, so that all stop at the same one.
    """

    def judge(answer: Answer) -> list[str]:
        if not dist.is_initialized():
            return ["run this cell on ranks, with `%%ranks 2` as its first line"]
        for mistake in judge_cases(answer):
            if mistakes := list(filter(None, _gather(mistake))):
                return mistakes[:1]
        return []

    return judge


def _gather(result: object) -> list:
    """Collect the results of all ranks, in their order; every rank calls it with its own."""
    results: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    return results


def _device() -> torch.device:
    """Return the device of this rank."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _small_model() -> nn.Sequential:
    """Make a model with the same weights on every rank."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    return model.double().to(_device())


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Copy all numbers of some tensors into one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _gradients(model: nn.Module) -> list[Tensor]:
    """List the gradients that a model has, in the order of its parameters."""
    return [p.grad for p in model.parameters() if p.grad is not None]


# ---- 1: find what has drifted


def drifted(
    model: nn.Module,
    to_compare: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> list[str]:
    """List the names of the parameters that are not the same on all ranks; every rank calls it.

    to_compare: makes of each parameter what is compared; another function is a mistake.
    """
    names = []
    for name, parameter in model.named_parameters():
        local = to_compare(parameter.detach())
        replicas = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(replicas, local)
        if not all(torch.equal(replica, replicas[0]) for replica in replicas):
            names.append(name)
    return names


def _drifted_by_rank(model: nn.Module) -> list[str]:
    """A mistake: only rank 0 gives no names."""
    return drifted(model)[: 9 * dist.get_rank()]


def _drifted_and_overwritten(model: nn.Module) -> list[str]:
    """A mistake: afterwards all ranks have rank 0's parameters."""
    names = drifted(model)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return names


@_on_live_ranks
def _judge_drifted(answer: Answer) -> Iterator[str]:
    """Try equal replicas, and some of which the last rank has numbers in another order."""
    for swapped in ([], ["1.weight"], ["0.weight", "1.bias"]):
        model = _small_model()
        if dist.get_rank() == dist.get_world_size() - 1:
            for name in swapped:
                parameter = model.get_parameter(name)
                parameter.data = parameter.data.flip(0)
        before = _flat(model.parameters())
        answers = _gather(answer(model))
        unchanged = torch.equal(before, _flat(model.parameters()))
        yield _drifted_mistake(answers, swapped, unchanged)


def _drifted_mistake(answers: list, expected: list[str], unchanged: bool) -> str:
    """Say what is wrong with the ranks' answers; an empty text if nothing is."""
    if not unchanged:
        return "it has changed the model, and should only look."
    if any(names != answers[0] for names in answers):
        by_rank = " and ".join(f"rank {rank} {names}" for rank, names in enumerate(answers))
        return f"the ranks should give the same answer, but they give: {by_rank}."
    if answers[0] != expected:
        reason = " Numbers were swapped: their sum is the same." if answers[0] == [] else ""
        return f"it gives {answers[0]}, and should give {expected}.{reason}"
    return ""


_DRIFTED_TRAPS: dict[str, Answer] = {
    "the ranks should give the same answer": _drifted_by_rank,
    "Numbers were swapped: their sum is the same.": (
        partial(drifted, to_compare=lambda parameter: parameter.sum().float())
    ),
    "it has changed the model, and should only look.": _drifted_and_overwritten,
}

# ---- 2: average in one


def average_in_one(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks, in one all-reduce; every rank calls it."""
    _reduce_and_divide(_gradients(model), dist.get_world_size())


def _reduce_and_divide(gradients: list[Tensor], divisor: int) -> None:
    """Replace gradients by their sums over the ranks, divided; every rank calls it."""
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= divisor
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, bucket.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def _sum_in_one(model: nn.Module) -> None:
    """A mistake: the gradients become sums, and no means."""
    _reduce_and_divide(_gradients(model), 1)


def _reduce_each(model: nn.Module) -> None:
    """A mistake: an all-reduce for each gradient."""
    for gradient in _gradients(model):
        dist.all_reduce(gradient)


def _reduce_a_copy(model: nn.Sequential) -> None:
    """A mistake: the sums are in a new tensor, and nothing comes back."""
    dist.all_reduce(_flat(_gradients(model[1])))


def _average_frozen_too(model: nn.Module) -> None:
    """A mistake: it takes the gradient of a frozen parameter, which has none."""
    gradients = [p.grad for p in model.parameters()]
    _reduce_and_divide(gradients, dist.get_world_size())  # type: ignore[arg-type]  # the mistake


@_on_live_ranks
def _judge_average(answer: Answer) -> Iterator[str]:
    """Try gradients that differ by rank; the second time a layer is frozen."""
    for frozen in (False, True):
        model = _small_model()
        model[0].requires_grad_(not frozen)
        torch.manual_seed(dist.get_rank())
        images = torch.randn(8, 6, device=_device()).double()
        model(images).square().sum().backward()
        before = _flat(_gradients(model))
        mean = before.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            try:
                answer(model)
            except (AttributeError, TypeError) as error:
                reason = " A frozen layer has no gradient: its p.grad is None." if frozen else ""
                raise RuntimeError(f"{error}.{reason}") from error
        yield _average_mistake(before, _flat(_gradients(model)), mean, all_reduce.call_count)


def _average_mistake(before: Tensor, after: Tensor, mean: Tensor, all_reduces: int) -> str:
    """Say what is wrong with a rank's gradients; an empty text if nothing is.

    before and after the answer's call, and the mean that they should be: flat vectors.
    """
    if all_reduces != 1:
        return f"all-reduces: {all_reduces}, and there should be 1."
    if torch.equal(after, before):
        return "the gradients are as they were: the mean is not in p.grad."
    if torch.allclose(after, mean * dist.get_world_size()):
        return "the gradients are sums over the ranks, and should be means."
    if not torch.allclose(after, mean):
        question = "does each piece go back to its own parameter?"
        return f"the gradients are not the means over the ranks: {question}"
    return ""


_AVERAGE_TRAPS = {
    "all-reduces: 4, and there should be 1.": _reduce_each,
    "the gradients are sums over the ranks, and should be means.": _sum_in_one,
    "the mean is not in p.grad.": _reduce_a_copy,
    "A frozen layer has no gradient: its p.grad is None.": _average_frozen_too,
}

# ---- 3: accumulate pieces


def accumulate(
    ddp_model: DDP,
    optimizer: Optimizer,
    pieces: list[Piece],
    weight: float | None = None,
    synchronized: Sequence[int] = (-1,),
    clear_gradients: bool = True,
) -> None:
    """Take one optimizer step over all pieces, with one exchange of gradients; every rank calls it.

    What differs from the defaults is a mistake. weight: of each piece's loss, if not its share of
    the images; synchronized: the pieces after which gradients are exchanged, -1 for the last.
    """
    images_in_all = sum(len(labels) for _, labels in pieces)
    if clear_gradients:
        optimizer.zero_grad()
    for number, (images, labels) in enumerate(pieces, -len(pieces)):
        share = weight or len(labels) / images_in_all
        with nullcontext() if number in synchronized else ddp_model.no_sync():
            loss = F.cross_entropy(ddp_model(images), labels)
            (loss * share).backward()
    optimizer.step()


@_on_live_ranks
def _judge_accumulate(answer: Answer) -> Iterator[str]:
    """Compare two steps over pieces of 8, 8 and 4 images with two steps over whole batches."""
    model, reference = _small_model(), _small_model()
    ddp_model, ddp_reference = DDP(model), DDP(reference)
    all_reduces = _count_all_reduces(ddp_model)
    optimizer = SGD(model.parameters(), lr=0.5)
    reference_optimizer = SGD(reference.parameters(), lr=0.5)
    torch.manual_seed(dist.get_rank())
    for step in (1, 2):
        images = torch.randn(20, 6, device=_device()).double()
        labels = torch.randint(4, (20,), device=_device())
        pieces = list(zip(images.split(8), labels.split(8), strict=True))
        answer(ddp_model, optimizer, pieces)
        reference_optimizer.zero_grad()
        F.cross_entropy(ddp_reference(images), labels).backward()
        reference_optimizer.step()
        equal = torch.allclose(_flat(model.parameters()), _flat(reference.parameters()))
        yield _accumulate_mistake(step, len(all_reduces), equal)


def _count_all_reduces(ddp_model: DDP) -> list[int]:
    """Make a list to which every all-reduce of this model's gradients appends a number."""

    def count(calls: list[int], bucket: dist.GradBucket) -> Future[Tensor]:
        calls.append(bucket.index())
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group

    calls: list[int] = []
    ddp_model.register_comm_hook(calls, count)
    return calls


def _accumulate_mistake(step: int, all_reduces: int, equal: bool) -> str:
    """Say what is wrong after a step, 1 or 2; an empty text if nothing is.

    equal: whether the weights are those of a step with the whole batch.
    """
    if all_reduces != step:
        cure = _TOO_MANY if all_reduces > step else _TOO_FEW
        return f"all-reduces in {step} steps: {all_reduces}. {cure}"
    if not equal:
        mistake = f"after step {step} the weights are not those of a step with the whole batch."
        return f"{mistake} {_QUESTION_BY_STEP[step]}"
    return ""


_TOO_MANY = "Forward and backward of every piece but the last belong inside no_sync()."
_TOO_FEW = "The last piece, forward and backward, belongs outside no_sync(): it sends the sum."
_QUESTION_BY_STEP = {
    1: "The pieces have 8, 8 and 4 images: what is each one's share of the mean?",
    2: "The first step was right: are its gradients still there?",
}
_exchange_every_piece = partial(accumulate, synchronized=range(-3, 0))
_ACCUMULATE_TRAPS = {
    "what is each one's share of the mean?": partial(accumulate, weight=1 / 3),
    "8, 8 and 4 images": partial(accumulate, weight=1.0),
    "every piece but the last belong inside no_sync()": _exchange_every_piece,
    "belongs outside no_sync(): it sends the sum.": partial(accumulate, synchronized=()),
    "are its gradients still there?": partial(accumulate, clear_gradients=False),
}

EXERCISES = [
    Project(drifted, [], _DRIFTED_TRAPS, _judge_drifted),
    Project(average_in_one, [], _AVERAGE_TRAPS, _judge_average),
    Project(accumulate, [], _ACCUMULATE_TRAPS, _judge_accumulate),
]
