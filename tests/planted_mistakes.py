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
    ("    rank, size", "    while True:\n        pass\n    rank, size", "Does a loop end?"),
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

# Right answers that differ from the worked ones: the exercise, what is replaced, and by what.
_SEND_AND_RECEIVE = """        sending = dist.isend(chunks[(rank - step) % size], (rank + 1) % size)
        dist.recv(arrived, (rank - 1) % size)
        sending.wait()
"""
_BATCHED = """        send = dist.P2POp(dist.isend, chunks[(rank - step) % size], (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, arrived, (rank - 1) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
"""
_BOTH_ASYNCHRONOUS = """        sending = dist.isend(tensor=chunks[(rank - step) % size], dst=(rank + 1) % size)
        receiving = dist.irecv(arrived, src=(rank - 1) % size)
        receiving.wait()
        sending.wait()
"""
_ASYNCHRONOUS = """        works = []
        for number, parameter in enumerate(parameters):
            works.append(dist.broadcast(parameter.data, src=number % size, async_op=True))
        for work in works:
            work.wait()
"""
ALSO_RIGHT = [
    ("ring_sum", _SEND_AND_RECEIVE, _BATCHED),
    ("ring_sum", _SEND_AND_RECEIVE, _BOTH_ASYNCHRONOUS),
    ("ddp_by_hand", "[*model.parameters(), *model.buffers()]", "model.state_dict().values()"),
    ("overlap", "bucket /= dist.get_world_size()", "bucket.div_(dist.get_world_size())"),
    (
        "zero_1",
        "        for number, parameter in enumerate(parameters):\n"
        "            dist.broadcast(parameter.data, src=number % size)\n",
        _ASYNCHRONOUS,
    ),
    (
        "shard_layer",
        "dist.all_gather(list(weight.data.view(-1).chunk(size)),",
        "dist.all_gather_into_tensor(weight.data.view(-1),",
    ),
    (
        "shard_layer",
        "dist.reduce_scatter(own.grad, list(weight.grad.flatten().chunk(size)))",
        "dist.reduce_scatter_tensor(own.grad, weight.grad.flatten())",
    ),
    ("parallel_mlp", "return x.view_as(x)", "return x.clone()"),
    ("pipeline_step", "dist.recv(gradient, rank + 1)", "dist.irecv(gradient, rank + 1).wait()"),
]

_SUM_FORWARD = "        dist.all_reduce(sums)\n        count"
_SUM_BACKWARD = "        dist.all_reduce(sums)\n        mean"
_WITHOUT_FUNCTION = """    sums = torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])])
    dist.all_reduce(sums)
    mean, square = (sums[:-1] / sums[-1]).chunk(2)
    return (x - mean) / (square - mean**2 + eps).sqrt()"""
_NORM = _planted(
    "sync_batch_norm",
    (_SUM_FORWARD, "        count", "normalised by this rank's mean and variance"),
    (
        ("x.sum(0)", "x.square().sum(0)", "[len(x)]"),
        ("x.mean(0)", "x.square().mean(0)", "[1.0]"),
        "add up sums and counts",
    ),
    ("square - mean**2", "(square - mean**2) * count / (count - 1)", "the variance is divided by the count - 1"),
    ("(square - mean**2 + eps).sqrt()", "(square - mean**2).sqrt() + eps", "eps is added to the root"),
    # right output, wrong input gradient
    ("    return SyncNorm.apply(x, eps)", _WITHOUT_FUNCTION, "Autograd does not know of the all-reduce"),
    (_SUM_BACKWARD, "        mean", "as if only this rank's output depended on x"),
    ("sums / count\n        return", "sums / len(y)\n        return", "are divided by this rank's rows only"),
    ("sums / count\n        return", "sums\n        return", "the two sums are not divided by the count of all rows"),
    ("- mean - y * slope", "- mean", "the term with the normalised x is missing"),
    ("- mean - y * slope", "- y * slope", "the mean of the gradient is missing"),
    ("(grad - mean - y * slope)", "grad", "treats mean and variance as constants"),
    ("slope) / std, None", "slope), None", "divide by the root, too"),
    (" / std, None", " / std", "None for those that need none"),
    ("SyncNorm.apply(x, eps)", "SyncNorm.apply(x.detach(), eps)", "autograd does not know that it came from x"),
    (
        _SUM_FORWARD,
        "        dist.all_reduce(sums[:4]); dist.all_reduce(sums[4:])\n        count",
        "all sums fit into one tensor",
    ),
)

_ADDED_UP = "AddUp.apply(hidden @ down.T)"
_PARALLEL = _planted(
    "parallel_mlp",
    (_ADDED_UP, "hidden @ down.T", "the output is this rank's product only"),
    (_ADDED_UP, f"{_ADDED_UP} / dist.get_world_size()", "the output is the mean of the ranks' products"),
    # right output, wrong input gradient
    ("Enter.apply(x)", "x", "the gradient of x is only the part that comes through this rank's rows of up"),
    (
        ("Enter.apply(x)", f"    return {_ADDED_UP}"),
        ("x", "    y = hidden @ down.T\n    dist.all_reduce(y)\n    return y"),
        "where x enters, backward adds up over the ranks",
    ),
    (
        "        return grad\n",
        "        dist.all_reduce(grad := grad.clone())\n        return grad\n",
        "2 times too large",
    ),
    ("        return grad\n", "        return grad / dist.get_world_size()\n", "2 times too small"),
    ("return total\n\n\nclass", "return total / dist.get_world_size()\n\n\nclass", "the gradient of x is a mean"),
    (
        "return x.view_as(x)",
        "dist.all_reduce(y := x.clone())\n        return y / dist.get_world_size()",
        "One each is enough",
    ),
    ("Enter.apply(x)", "Enter.apply(x.detach())", "but x gets no gradient: something cuts the graph"),
    (
        f"return {_ADDED_UP}",
        "dist.all_reduce(y := (hidden @ down.T).detach())\n    return y",
        "does not know that it came from x",
    ),
)

_SEND_FORWARD, _SEND_BACK = "isend(y.detach(), rank + 1)", "isend(x.grad, rank - 1)"
_FIRST = "min(size - 1 - rank, count) if one_by_one else count"
_PIPELINE = _planted(
    "pipeline_step",
    (
        _FIRST,
        "min(size - 1 - rank, count)",
        "this stage held 2 at once, between forward and backward: all 4 go forward first",
    ),
    (_FIRST, "count", "held 4 at once, between forward and backward, and 2 would do"),
    ("size - 1 - rank, count", "size - rank, count", "held 3 at once, between forward and backward, and 2 would do"),
    (
        "size - 1 - rank, count",
        "rank, count",
        "rank 0 is in recv of 8 numbers from rank 1; rank 1 is in recv of 8 numbers from rank 0",
    ),
    # one by one with blocking sends
    (
        (f"sends.append(dist.{_SEND_FORWARD})", f"sends.append(dist.{_SEND_BACK})"),
        (f"dist.{_SEND_FORWARD[1:]}", f"dist.{_SEND_BACK[1:]}"),
        "rank 0 is in send of 8 numbers to rank 1; rank 1 is in send of 8 numbers to rank 0",
    ),
    (" / count", "", "4 times too large: the loss is the mean over the micro-batches"),
    ("            x.requires_grad_()\n", "", "What arrives from the stage before needs requires_grad_()"),
    ("    for sending in sends:\n        sending.wait()", "", "othing waits for"),
    ("held.pop(0)", "held.pop(0 if rank else -1)", "The first that went forward is the first to go back"),
    ("y.backward(gradient)", "y.backward()", "Only the last stage has a loss"),
    ("y.backward(gradient)", "y.detach().backward(gradient)", "send y.detach(), and call backward on y itself"),
    (f"            sends.append(dist.{_SEND_BACK})", "            pass", "rank 1 has returned"),
    (
        "            dist.recv(gradient, rank + 1)\n",
        "            pass\n",
        "is in wait() for isend of 8 numbers to rank 0",
    ),
    (_SEND_FORWARD, "isend(y.detach(), rank + 2)", "isend names rank 2, which does not exist"),
)

PLANTED = [*_RING, *_DDP, *_BUCKETS, *_ZERO, *_LAYER, *_NORM, *_PARALLEL, *_PIPELINE]
