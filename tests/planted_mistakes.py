"""Mistakes that a learner of notebook 16 may make, as edits of the worked solutions, and what the judge must say.

A row: the exercise, then one text of the solution or several, what stands there instead, and a part of the verdict.
"""

from typing import NamedTuple


class Planted(NamedTuple):
    """A mistake: in which exercise, which texts are replaced by which, and what the verdict must hold."""

    exercise: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    verdict: str


def _planted(exercise: str, *rows: tuple[str | tuple[str, ...], str | tuple[str, ...], str]) -> list[Planted]:
    """Make the rows of one exercise: a single text may stand for a tuple of one."""
    return [Planted(exercise, _tuple(old), _tuple(new), verdict) for old, new, verdict in rows]


def _tuple(texts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else texts


_RECEIVE = "        dist.recv(arrived, (rank - 1) % size)\n"
_ADD_OR_REPLACE = "own + arrived if step < size - 1 else arrived"
_RING = _planted(
    "ring_sum",
    # send blocks until the other receives
    (
        ("sending = dist.isend(", "        sending.wait()\n"),
        ("dist.send(", ""),
        "rank 0 is in send of 6 numbers to rank 1; rank 1 is in send of 6 numbers to rank 0. Nobody comes to recv",
    ),
    # all receive first
    (
        (_RECEIVE, "        sending = dist"),
        ("", f"{_RECEIVE}        sending = dist"),
        "rank 1 is in recv of 6 numbers from rank 0. All wait for a message that nobody has begun to send",
    ),
    ("        sending.wait()\n", "", "othing waits for"),
    ("dist.recv(", "dist.irecv(", "othing waits for"),
    ("tensor_split(size)", "chunk(size)", "torch.tensor_split gives n"),
    ("2 * (size - 1)", "size - 1", "only number 1 holds the sum over all ranks. After the first n - 1 steps"),
    (_ADD_OR_REPLACE, "own + arrived", "this rank's numbers once more. In the second half whole sums arrive"),
    ("(rank - step - 1)", "(rank - step)", "none holds the sum over all ranks"),
    ("(rank + 1) % size", "rank + 1", "isend names rank 2, which does not exist"),
    ("= tensor.tensor_split", "= tensor.clone().tensor_split", "the tensor is as it was"),
    (f"{_ADD_OR_REPLACE})", f"{_ADD_OR_REPLACE})\n    tensor /= size", "holds the mean, and should hold the sum"),
    ("    rank, size", "    return dist.all_reduce(tensor)\n    rank, size", "should use sends and receives only"),
    # whole tensors go round
    (
        (
            "chunks[(rank - step) % size]",
            "chunks[(rank - step - 1) % size]",
            "2 * (size - 1)",
            f"copy_({_ADD_OR_REPLACE})",
        ),
        ("mine", "tensor", "size - 1", "add_(arrived); mine = arrived"),
        "have you sent whole tensors?",
    ),
)
_RING[-1] = _RING[-1]._replace(
    old=(*_RING[-1].old, "    chunks ="), new=(*_RING[-1].new, "    mine = tensor.clone()\n    chunks =")
)

_STATE = "[*model.parameters(), *model.buffers()]"
_TRAINED = "[*[p for p in model.parameters() if p.requires_grad], *model.buffers()]"
_DIVIDE = "parameter.grad /= dist.get_world_size()"
_REDUCE = "dist.all_reduce(parameter.grad)"
_DDP = _planted(
    "ddp_by_hand",
    (_STATE, "model.parameters()", "the buffer scale is not rank 0's"),
    (_STATE, "model.buffers()", "the parameter first.weight is not rank 0's: nothing has sent it"),
    (_STATE, _TRAINED, "a frozen parameter has no gradient, but takes part in forward"),
    (
        "src=0",
        "src=dist.get_rank()",
        "he ranks disagree at collective 1: rank 0 calls broadcast of 30 numbers from rank 0",
    ),
    (_DIVIDE, "pass", "is the sum over the ranks, and should be the mean"),
    (_DIVIDE, f"{_DIVIDE} ** 2", "is the mean divided by 2 once more: divide once"),
    (_REDUCE, "pass", "is divided, but nothing was added"),
    ((_REDUCE, "parameter.grad /="), ("dist.all_reduce(parameter.data)", "parameter.data /="), "as backward left it"),
    ("if parameter.grad is not None", "if True", "A frozen layer has no gradient: its p.grad is None"),
    (
        "if parameter.grad is not None",
        "if parameter.grad is not None and (dist.get_rank() == 0 or parameter.dim() > 1)",
        "the ranks disagree at collective 2: rank 0 calls all_reduce of 5 numbers, and rank 1 all_reduce of 20 numbers",
    ),
    ("return average", "average()", "it returns no function"),
    (_REDUCE, f"{_REDUCE}; dist.barrier()", "this exercise asks for one all-reduce a gradient"),
)

_LAST = "        if ready:\n            leave()\n"
_FULL = "        if sum(waiting.numel() for waiting in ready) >= bucket_size:\n            leave()\n"
_ALL_AT_THE_END = """        gradients = ready[:]
        ready.clear()
        for parameter in gradients:
            ready.append(parameter)
            if sum(waiting.numel() for waiting in ready) >= bucket_size:
                leave()
"""
_BUCKETS = _planted(
    "overlap",
    (_LAST, "", "The last bucket is not full, and nobody sends it"),
    (_LAST, "        leave()\n", "There may be nothing left for finish() to send"),
    ((_FULL, _LAST), ("", _ALL_AT_THE_END + _LAST), "so nothing overlaps"),
    (
        ("async_op=True", "            work.wait()\n"),
        ("async_op=False", ""),
        "while backward has layers left to compute",
    ),
    ("        sent.append(", "        work.wait()\n        sent.append(", "while backward has layers left to compute"),
    ("            work.wait()\n", "", "nothing waits for a bucket"),
    ("            bucket /= dist.get_world_size()\n", "", "is the sum over the ranks, and should be the mean"),
    ("        if parameter.requires_grad:", "        if True:", "A frozen parameter takes no hook"),
    ("        ready.clear()\n", "", "empty the bucket when it leaves"),
    ("        sent.clear()\n", "", "it waits for buckets of an earlier step"),
    (">= bucket_size", ">= 0", "Each gradient left alone"),
    ("list(ready)", "ready[::-1]", "Does each piece go back to its own parameter"),
    # another order of the buckets' contents on each rank
    (
        "        bucket = torch",
        "        ready.sort(key=lambda p: p.numel() * (-1) ** dist.get_rank())\n        bucket = torch",
        "in the same order on all ranks?",
    ),
    # another size of the buckets on each rank
    (
        ">= bucket_size",
        ">= bucket_size * (1 + dist.get_rank())",
        "he ranks disagree at collective 1",
    ),
)

_BROADCAST = "dist.broadcast(parameter.data, src=number % size)"
_STEP = "        if optimizer:\n            optimizer.step()\n"
_ZERO = _planted(
    "zero_1",
    (f"            {_BROADCAST}\n", "            pass\n", "parameter 1 is as it was before. Rank 1, which owns it"),
    ("src=number % size", "src=0", "parameter 1 is as it was before"),
    ((_STEP, f"{_BROADCAST}\n"), ("", f"{_BROADCAST}\n{_STEP}"), "the others need it from there, after the step"),
    ("parameters[rank::size]", "parameters", "give the optimizer those only. That is what ZeRO saves"),
    (" if own else None", "", "some rank owns none: it makes no optimizer, and still receives"),
    (_BROADCAST, "dist.all_reduce(parameter.data); parameter.data /= size", "there is nothing to add"),
    (_BROADCAST, f"{_BROADCAST}; {_BROADCAST}", "each is sent once, after its owner's step"),
    (
        "        if optimizer:\n",
        "        optimizer = make_optimizer(own)\n        if True:\n",
        "Make one, before the first step",
    ),
    (_BROADCAST, f"rank == number % size and {_BROADCAST}", "he ranks disagree at collective 1"),
    ("if optimizer:", "if optimizer and rank:", "though this rank owns it: it was not stepped"),
    ("return step", "return step()", "Return the function that takes the step"),
)

_GATHER = "        dist.all_gather(list(weight.data.view(-1).chunk(size)), own.data)\n"
_SCATTER = "        dist.reduce_scatter(own.grad, list(weight.grad.flatten().chunk(size)))\n"
_COPIED = """        whole = torch.empty_like(weight.detach()).flatten()
        dist.all_gather(list(whole.chunk(size)), own.data)
        with torch.no_grad():
            weight.copy_(whole.view_as(weight))
"""
_OWN_ROWS = "own.grad = weight.grad.flatten().chunk(size)[rank].clone()\n"
_LAYER = _planted(
    "shard_layer",
    ("    layer.register_forward_pre_hook(gather)\n", "", "used while it had no memory: gather it before forward"),
    ("    layer.register_full_backward_pre_hook(gather)\n", "", "and again before backward"),
    ("    layer.register_forward_hook(free)\n", "", "after its forward the weight of layer 1 is still whole"),
    (
        "        weight.grad = None\n        free()\n",
        "        weight.grad = None\n",
        "after its backward the weight of",
    ),
    ("        weight.grad = None\n", "", "the whole gradient is still there"),
    ("    free()\n    return own", "    return own", "after the cut the weight of layer 1 and 2 is still whole"),
    ("        own.grad /= size\n", "", "the part's gradient is the sum over the ranks"),
    (_SCATTER, f"        {_OWN_ROWS}", "nothing is reduced in backward"),
    (_SCATTER, f"        dist.all_reduce(weight.grad); {_OWN_ROWS}", "it all-reduces the gradient"),
    (_GATHER, _COPIED, "gather into weight.data"),
    ("[rank].clone()", "[rank]", "is a view of the whole weight"),
    ("[rank].clone()", "[0].clone()", "rank r takes chunk r of the flat weight"),
    ("return own", "return own.data", "return this rank's part, an nn.Parameter"),
    ("chunk(size)[rank].clone()", "clone()", "has 36 numbers, and should have 18 of 36"),
)

PLANTED = [*_RING, *_DDP, *_BUCKETS, *_ZERO, *_LAYER]
