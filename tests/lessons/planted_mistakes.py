"""Mistakes that a learner may make, as edits of the worked solutions, and what the verdict must say.

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
        "Nobody comes to recv: send returns only when the receiver has taken the",
    ),
    ("tensor_split(size)", "chunk(size)", "torch.chunk(tensor, n) may give fewer than n chunks; torch.tensor_split"),
    ("2 * (size - 1)", "size - 1", "After the first n - 1 steps each rank has one whole sum. In the n - 1"),
    (_ADD_OR_REPLACE, "own + arrived", "A chunk holds the whole sum and this rank's numbers once more. In the"),
    ("(rank - step - 1)", "(rank - step)", "the tensor of 12 numbers:"),
    ("(rank + 1) % size", "rank + 1", "ValueError: isend names rank 2: there are ranks 0 to 1"),
    (
        "= tensor.tensor_split",
        "= tensor.clone().tensor_split",
        "The tensor is as it was. Work on chunks of the tensor itself: they are",
    ),
    (
        f"{_ADD_OR_REPLACE})",
        f"{_ADD_OR_REPLACE})\n    tensor /= size",
        "Every number is 0.5 times what it should be: a mean over the 2 ranks, or",
    ),
    ("    rank, size", "    return dist.all_reduce(tensor)\n    rank, size", "collectives called:"),
    # whole tensors go round
    (
        (
            "    chunks =",
            "chunks[(rank - step) % size]",
            "chunks[(rank - step - 1) % size]",
            "2 * (size - 1)",
            f"copy_({_ADD_OR_REPLACE})",
        ),
        ("    mine = tensor.clone()\n    chunks =", "mine", "tensor", "size - 1", "add_(arrived); mine = arrived"),
        "In a ring each message holds one chunk, and there are 2 (n - 1) messages",
    ),
    # all receive first
    (
        (_RECEIVE, "        sending = dist"),
        ("", f"{_RECEIVE}        sending = dist"),
        "All wait for a message that nobody has begun to send: isend comes before",
    ),
    ("        sending.wait()\n", "", "Keep what isend and irecv return, and call its wait()"),
    ("dist.recv(", "dist.irecv(", "Keep what isend and irecv return, and call its wait()"),
    (
        "    rank, size",
        "    while True:\n        pass\n    rank, size",
        "No rank is in a call of torch.distributed: does a loop end?",
    ),
)
_STATE = "[*model.parameters(), *model.buffers()]"
_TRAINED = "[*[p for p in model.parameters() if p.requires_grad], *model.buffers()]"
_DIVIDE = "parameter.grad /= dist.get_world_size()"
_REDUCE = "dist.all_reduce(parameter.grad)"
_DDP = _planted(
    "ddp_by_hand",
    (_STATE, "model.parameters()", "The tensor is as this rank has made it. Rank 0 sends"),
    (_STATE, "model.buffers()", "The tensor is as this rank has made it. Rank 0 sends"),
    (_STATE, _TRAINED, "The tensor is as this rank has made it. Rank 0 sends"),
    (_DIVIDE, "pass", "Every number is 2 times what it should be: a sum over the 2 ranks, or the"),
    (_DIVIDE, f"{_DIVIDE} ** 2", "Every number is 0.5 times what it should be: a mean over the 2 ranks, or"),
    (_REDUCE, "pass", "the gradient of first.weight:"),
    (
        (_REDUCE, "parameter.grad /="),
        ("dist.all_reduce(parameter.data)", "parameter.data /="),
        "The gradient is as backward left it: the mean over the ranks is not in",
    ),
    (
        "if parameter.grad is not None",
        "if True",
        "A frozen layer has no gradient: its p.grad is None. Leave such parameters",
    ),
    ("return average", "average()", "A function is to be returned, and not called."),
    (_REDUCE, f"{_REDUCE}; dist.barrier()", "messages after backward:"),
    (
        "src=0",
        "src=dist.get_rank()",
        "The ranks disagree at collective 1: rank 0 calls broadcast of 30 numbers from rank 0",
    ),
    (
        "if parameter.grad is not None",
        "if parameter.grad is not None and (dist.get_rank() == 0 or parameter.dim() > 1)",
        "The ranks disagree at collective 2: rank 0 calls all_reduce of 5 numbers, and rank 1 all_r",
    ),
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
    (_LAST, "", "what left when, with buckets of 40:"),
    (_LAST, "        leave()\n", "There may be nothing left for finish() to send."),
    (
        (_FULL, _LAST),
        ("", _ALL_AT_THE_END + _LAST),
        "A full bucket has not left when the next gradient is ready, so nothing",
    ),
    (
        ("async_op=True", "            work.wait()\n"),
        ("async_op=False", ""),
        "Something waits while backward has layers left to compute: start the",
    ),
    (
        "        sent.append(",
        "        work.wait()\n        sent.append(",
        "Something waits while backward has layers left to compute: start the",
    ),
    ("            work.wait()\n", "", "Before wait() has returned, the sums of a bucket are not there: wait in"),
    (
        "            bucket /= dist.get_world_size()\n",
        "",
        "Every number is 2 times what it should be: a sum over the 2 ranks, or the",
    ),
    (
        "        if parameter.requires_grad:",
        "        if True:",
        "A frozen parameter takes no hook: it never has a gradient.",
    ),
    ("        ready.clear()\n", "", "what left when, with buckets of 25:"),
    ("        sent.clear()\n", "", "Empty the list of what has left when finish() is done."),
    (">= bucket_size", ">= 0", "what left when, with buckets of 25:"),
    (">= bucket_size", "> bucket_size", "what left when, with buckets of 28:"),
    ("list(ready)", "ready", "Keep a copy of the list of parameters"),
    (
        "post_accumulate_grad_hook(collect)",
        "hook(lambda _, p=parameter: collect(p))",
        "register_post_accumulate_grad_hook",
    ),
    ("list(ready)", "ready[::-1]", "in step 1, the gradient of 0.weight:"),
    # another order of the buckets' contents on each rank
    (
        "        bucket = torch",
        "        ready.sort(key=lambda p: p.numel() * (-1) ** dist.get_rank())\n        bucket = torch",
        "in step 1, the gradient of 0.weight:",
    ),
    # another size of the buckets on each rank
    (
        ">= bucket_size",
        ">= bucket_size * (1 + dist.get_rank())",
        "The ranks disagree at collective 1: rank 0 calls all_reduce of 28 numbers, and rank 1 all_",
    ),
)

_BROADCAST = "dist.broadcast(parameter.data, src=number % size)"
_STEP = "        if optimizer:\n            optimizer.step()\n"
_ZERO = _planted(
    "zero_1",
    (
        f"            {_BROADCAST}\n",
        "            pass\n",
        "The parameter is as it was before. Its owner steps it, and all others need",
    ),
    ("src=number % size", "src=0", "The parameter is as it was before. Its owner steps it, and all others need"),
    (
        (_STEP, f"{_BROADCAST}\n"),
        ("", f"{_BROADCAST}\n{_STEP}"),
        "The parameter is as it was before. Its owner steps it, and all others need",
    ),
    (
        "parameters[rank::size]",
        "parameters",
        "Give the optimizer this rank's parameters only. That is what ZeRO saves.",
    ),
    (" if own else None", "", "With more ranks than parameters some rank owns none: it makes no"),
    (_BROADCAST, "dist.all_reduce(parameter.data); parameter.data /= size", "after step 1, parameter 0 (of rank 0):"),
    (_BROADCAST, f"{_BROADCAST}; {_BROADCAST}", "numbers sent:"),
    (
        "        if optimizer:\n",
        "        optimizer = make_optimizer(own)\n        if True:\n",
        "Make one, before the first step: a new one has forgotten Adam's running",
    ),
    (
        "if optimizer:",
        "if optimizer and rank:",
        "The parameter is as it was before. Its owner steps it, and all others need",
    ),
    ("return step", "return step()", "A function is to be returned, and not called."),
    ("src=number % size)", "src=number % size, async_op=True)", "on 2 ranks, rank"),  # late, or in time by chance
    (
        _BROADCAST,
        f"rank == number % size and {_BROADCAST}",
        "The ranks disagree at collective 1: rank 0 calls broadcast of 12 numbers from rank 0",
    ),
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
    (
        "    layer.register_forward_pre_hook(gather)\n",
        "",
        "A weight was used while it had no memory: gather it before forward, and",
    ),
    (
        "    layer.register_full_backward_pre_hook(gather)\n",
        "",
        "A weight was used while it had no memory: gather it before forward, and",
    ),
    (
        "    layer.register_forward_hook(free)\n",
        "",
        "Free it with weight.untyped_storage().resize_(0), which keeps the tensor's",
    ),
    (
        "        weight.grad = None\n        free()\n",
        "        weight.grad = None\n",
        "Free it with weight.untyped_storage().resize_(0), which keeps the tensor's",
    ),
    ("        weight.grad = None\n", "", "layer.weight.grad after backward:"),
    (
        "    free()\n    return own",
        "    return own",
        "Free it with weight.untyped_storage().resize_(0), which keeps the tensor's",
    ),
    ("        own.grad /= size\n", "", "Every number is 2 times what it should be: a sum over the 2 ranks, or the"),
    (_SCATTER, f"        {_OWN_ROWS}", "Each rank's gradient is of its own rows of the batch: reduce_scatter adds"),
    (
        _SCATTER,
        f"        dist.all_reduce(weight.grad); {_OWN_ROWS}",
        "An all-reduce gives each rank the whole gradient: reduce_scatter gives",
    ),
    (_GATHER, _COPIED, "Autograd counts the writes into a tensor that it has saved: gather into"),
    ("[rank].clone()", "[rank]", "This rank's part is a view of the whole weight, and stays or goes"),
    ("[rank].clone()", "[0].clone()", "this rank's part:"),
    (
        ("def reduce(_)", "weight.register_post_accumulate_grad_hook(reduce)"),
        ("def reduce(*_)", "layer.register_full_backward_hook(reduce)"),
        "'NoneType' object has no attribute",
    ),
    ("resize_(weight.numel() * weight.element_size())", "resize_(weight.numel())", "resize_ takes bytes"),
    ("return own", "return own.data", "what it returns:"),
    ("chunk(size)[rank].clone()", "clone()", "this rank's part:"),
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
    (_SUM_FORWARD, "        count", "The rows are normalised by this rank's mean and variance, not by those of"),
    (
        ("x.sum(0)", "x.square().sum(0)", "[len(x)]"),
        ("x.mean(0)", "x.square().mean(0)", "[1.0]"),
        "The ranks' means are averaged, though the ranks have unequal numbers of",
    ),
    ("square - mean**2", "(square - mean**2) * count / (count - 1)", "the output:"),
    ("(square - mean**2 + eps).sqrt()", "(square - mean**2).sqrt() + eps", "the output:"),
    # right output, wrong input gradient
    (
        "    return SyncNorm.apply(x, eps)",
        _WITHOUT_FUNCTION,
        "It is as if only this rank's output depended on x. Autograd does not know",
    ),
    (_SUM_BACKWARD, "        mean", "It is as if only this rank's output depended on x. Autograd does not know"),
    ("sums / count\n        return", "sums / len(y)\n        return", "the output is right; the gradient of x:"),
    (
        (_SUM_BACKWARD, "sums / count\n        return"),
        ("        mean", "sums / len(y)\n        return"),
        "Both means are over this rank's rows",
    ),
    ("sums / count\n        return", "sums\n        return", "the output is right; the gradient of x:"),
    ("- mean - y * slope", "- mean", "the output is right; the gradient of x:"),
    ("- mean - y * slope", "- y * slope", "the output is right; the gradient of x:"),
    ("(grad - mean - y * slope)", "grad", "Backward treats mean and variance as constants: x moves both."),
    ("slope) / std, None", "slope), None", "the output is right; the gradient of x:"),
    (" / std, None", " / std", "backward returns one value for each argument of forward, None for those"),
    (
        "SyncNorm.apply(x, eps)",
        "SyncNorm.apply(x.detach(), eps)",
        "The output must come from x by operations that autograd follows.",
    ),
    (
        _SUM_FORWARD,
        "        dist.all_reduce(sums[:4]); dist.all_reduce(sums[4:])\n        count",
        "One message in forward and one in backward are enough.",
    ),
)

_ADDED_UP = "AddUp.apply(hidden @ down.T)"
_PARALLEL = _planted(
    "parallel_mlp",
    (_ADDED_UP, "hidden @ down.T", "The output is this rank's product only: the whole one is the sum over the"),
    (
        _ADDED_UP,
        f"{_ADDED_UP} / dist.get_world_size()",
        "Every number is 0.5 times what it should be: a mean over the 2 ranks, or",
    ),
    # right output, wrong input gradient
    ("Enter.apply(x)", "x", "The gradient of x is only the part that comes through this rank's rows of"),
    (
        ("Enter.apply(x)", f"    return {_ADDED_UP}"),
        ("x", "    y = hidden @ down.T\n    dist.all_reduce(y)\n    return y"),
        "The gradient of x is only the part that comes through this rank's rows of",
    ),
    (
        "        return grad\n",
        "        dist.all_reduce(grad := grad.clone())\n        return grad\n",
        "Every number is 2 times what it should be: a sum over the 2 ranks, or the",
    ),
    (
        "        return grad\n",
        "        return grad / dist.get_world_size()\n",
        "Every number is 0.5 times what it should be: a mean over the 2 ranks, or",
    ),
    (
        "return total\n\n\nclass",
        "return total / dist.get_world_size()\n\n\nclass",
        "Every number is 0.5 times what it should be: a mean over the 2 ranks, or",
    ),
    (
        "return x.view_as(x)",
        "dist.all_reduce(y := x.clone())\n        return y / dist.get_world_size()",
        "One message in forward and one in backward are enough.",
    ),
    ("Enter.apply(x)", "Enter.apply(x.detach())", "the output is right; the gradient of x:"),
    (
        f"return {_ADDED_UP}",
        "dist.all_reduce(y := (hidden @ down.T).detach())\n    return y",
        "The output must come from x by operations that autograd follows.",
    ),
)

_SEND_FORWARD, _SEND_BACK = "isend(y.detach(), rank + 1)", "isend(x.grad, rank - 1)"
_FIRST = "min(size - 1 - rank, count) if one_by_one else count"
_PIPELINE = _planted(
    "pipeline_step",
    (
        _FIRST,
        "min(size - 1 - rank, count)",
        "The gradients are right, but the order is another: all go forward first.",
    ),
    (_FIRST, "count", "The gradients are right, but the order is another: a stage goes forward n"),
    (
        "size - 1 - rank, count",
        "size - rank, count",
        "The gradients are right, but the order is another: a stage goes forward n",
    ),
    # one by one with blocking sends
    (
        (f"sends.append(dist.{_SEND_FORWARD})", f"sends.append(dist.{_SEND_BACK})"),
        (f"dist.{_SEND_FORWARD[1:]}", f"dist.{_SEND_BACK[1:]}"),
        "Nobody comes to recv: send returns only when the receiver has taken the",
    ),
    (" / count", "", "The loss is the mean over the micro-batches, so the last stage divides"),
    (
        "            x.requires_grad_()\n",
        "",
        "What arrives from the stage before needs requires_grad_(): else backward",
    ),
    ("held.pop(0)", "held.pop(0 if rank else -1)", "one_by_one=False, 4 micro-batches: the gradient of 0.weight:"),
    (
        "y.backward(gradient)",
        "y.backward()",
        "Only the last stage has a loss. The others give backward the gradient that",
    ),
    (
        "y.backward(gradient)",
        "y.detach().backward(gradient)",
        "The graph is cut: send y.detach(), and call backward on y itself.",
    ),
    (_SEND_FORWARD, "isend(y.detach(), rank + 2)", "ValueError: isend names rank 2: there are ranks 0 to 1"),
    (
        "size - 1 - rank, count",
        "rank, count",
        "Sends have begun: does each rank receive from the rank that sends to it?",
    ),
    ("    for sending in sends:\n        sending.wait()", "", "Keep what isend and irecv return, and call its wait()"),
    (
        f"            sends.append(dist.{_SEND_BACK})",
        "            pass",
        "Keep what isend and irecv return, and call its wait()",
    ),
    (
        "            dist.recv(gradient, rank + 1)\n",
        "            pass\n",
        "Keep what isend and irecv return, and call its wait()",
    ),
)

_MEAN = _planted(
    "mean_over_ranks",
    (" / dist.get_world_size()", "", "The default of all_reduce is the sum: divide it by the world size."),
    ("dist.get_world_size()", "2", "The group may have any size: ask for it with dist.get_world_size()."),
    (
        "    dist.all_reduce(total)\n",
        "    dist.broadcast(total, 0); total *= dist.get_world_size()\n",
        "That is rank 0's number on every rank: all ranks' numbers count.",
    ),
    (
        "    return total.item()",
        "    return mine; total.item()",
        "That is this rank's own number: all_reduce leaves the sum in the tensor.",
    ),
    (
        "    dist.all_reduce(total)\n",
        "    dist.get_rank() and dist.all_reduce(total)\n",
        "The ranks disagree at collective 1: rank 0 calls nothing more, and rank 1 all_reduce of 1 number",
    ),
)
_PAIRED = "dict(zip(names, totals.tolist(), strict=True))"
_EACH = """    return {name: _total(sums[name]) for name in sorted(sums)}


def _total(value):
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def _unused(sums):
    names = sorted(sums)
"""
_GATHERED = """    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    return {name: sum(one[name] for one in everyone) for name in sums}
    names = sorted(sums)
"""
_TOTALS = _planted(
    "total_by_name",
    ("sorted(sums)", "list(sums)", "Another rank may have the names in another order: sort them, so that"),
    (
        _PAIRED,
        _PAIRED.replace("names", "sums"),
        "You sort the names for the tensor; take the totals out of it in the sorted",
    ),
    ("    names = sorted(sums)\n", _EACH, "One collective for each name: put all values into one tensor."),
    ("    names = sorted(sums)\n", _GATHERED, "A collective of objects makes two, for the sizes and for the pickled"),
    (
        "totals.tolist()",
        "(totals / dist.get_world_size()).tolist()",
        "Those are means: totals are not divided by the number of ranks.",
    ),
    (f"return {_PAIRED}", "return sums", "Each rank gives its own sums back: take the totals out of the tensor."),
)
_HOSTS = "return hosts[: dist.get_rank()].count(host)"
_LOCAL = _planted(
    "local_rank_on",
    (_HOSTS, "return dist.get_rank()", "The local rank starts again at 0 on every host."),
    (
        _HOSTS,
        "return dist.get_rank() % hosts.count(host)",
        "Hosts may differ, and take turns: count those before this rank that are on",
    ),
    (_HOSTS, "return hosts.count(host) - 1", "Only the ranks before this one count."),
    (_HOSTS, "return dist.get_rank() - hosts.index(host)", "The local rank starts again at 0 on every host."),
    (_HOSTS, "return hosts.index(host)", "The local rank starts again at 0 on every host."),
)
_PER_RANK = "per_rank = global_batch // dist.get_world_size()"
_BATCHES = _planted(
    "batches_seen",
    (
        "batch_size=per_rank, sampler=sampler",
        "batch_size=per_rank, shuffle=True",
        "Each rank goes through all samples: the loader needs a DistributedSampler.",
    ),
    ("        sampler.set_epoch(epoch)\n", "", "Every epoch has the same order: call set_epoch before each pass."),
    (
        ("        sampler.set_epoch(epoch)\n", "[batch.tolist() for batch in loader]"),
        ("", "list(loader)"),
        "Every epoch has the same order",
    ),
    ("    return seen", "    pass", "what it returns:"),
    (_PER_RANK, "per_rank = global_batch", "A rank takes its part of the global batch, not all of it."),
)
_LOSS_CELL = "return losses[counted].sum() * dist.get_world_size() / words"
_TOKENS = _planted(
    "token_loss",
    (_LOSS_CELL, "return losses[counted].mean()", "A mean of means: divide by the number of terms of all ranks."),
    (" * dist.get_world_size()", "", "DDP divides by the number of ranks: multiply by it."),
    ("    dist.all_reduce(words)\n", "", "These are the terms of one rank: add up their number over all ranks."),
    (
        ("counted.sum()", "losses[counted]"),
        ("torch.tensor(len(losses))", "losses"),
        "The padding counts: leave out the terms where counted is False.",
    ),
    (
        _LOSS_CELL,
        "return (losses * counted).sum() / counted.sum()",
        "A mean of means: divide by the number of terms of all ranks.",
    ),
    (
        "    dist.all_reduce(words)\n",
        "    if words:\n        dist.all_reduce(words)\n",
        "The ranks disagree at collective 1: rank 0 calls all_reduce of 1 number, and rank 1 nothing more",
    ),
)
_DRIFTED = _planted(
    "drifted",
    (
        "    return differing",
        "    return differing[: 9 * dist.get_rank()]",
        "Numbers were swapped on the last rank: their sum is the same. And every",
    ),
    (
        ("torch.empty_like(parameter)", "parameter.data)\n"),
        ("torch.zeros(1).double()", "parameter.data.sum().float().double().view(1))\n"),
        "Numbers were swapped on the last rank: their sum is the same. And every",
    ),
    (
        "    return differing",
        "    [dist.broadcast(p.data, 0) for p in model.parameters()]\n    return differing",
        "the parameters, at which it should only look:",
    ),
)
_ONE_BUCKET = _planted(
    "average_in_one",
    (
        "    dist.all_reduce(bucket)\n",
        "    [dist.all_reduce(part) for part in bucket.split(10)]\n",
        "collectives called:",
    ),
    (
        "    bucket /= dist.get_world_size()\n",
        "",
        "Every number is 2 times what it should be: a sum over the 2 ranks, or the",
    ),
    (
        "        gradient.copy_(piece",
        "        gradient.clone().copy_(piece",
        "The gradient is as it was: the mean is not in p.grad.",
    ),
    (" if p.grad is not None", "", "A frozen layer has no gradient: its p.grad is None."),
    ("pieces = bucket", "pieces = bucket.flip(0)", "the gradient of 0.weight:"),
)
_SHARE = " * len(y) / total"
_ACCUMULATE = _planted(
    "accumulate",
    (
        (_SHARE, " * len(labels) / total"),
        (" / len(pieces)", " / len(pieces)"),
        "The pieces have 8, 8 and 4 images: what is each one's share of the mean?",
    ),
    (
        (_SHARE, " * len(labels) / total"),
        ("", ""),
        "The pieces have 8, 8 and 4 images: what is each one's share of the mean?",
    ),
    (
        "with ddp_model.no_sync():",
        "if True:",
        "Forward and backward of every piece but the last belong inside no_sync().",
    ),
    (
        "    (F.cross_entropy(ddp_model(images)",
        "    with ddp_model.no_sync(): (F.cross_entropy(ddp_model(images)",
        "The last piece, forward and backward, belongs outside no_sync(): it sends",
    ),
    ("    optimizer.zero_grad()\n", "", "The first step was right: are its gradients still there?"),
)
_FORWARD = _planted(
    "sharded_forward",
    ("torch.cat(parts)", "shard", "Each rank has some rows only: all must come together before you multiply."),
    ("torch.cat(parts)", "torch.cat(parts[::-1])", "The parts belong one below the other, in the order of the ranks."),
)
_OWN_GRADIENT = _planted(
    "own_gradient",
    (" / dist.get_world_size()", "", "Every number is 2 times what it should be: a sum over the 2 ranks, or the"),
    (
        "    return rows / dist.get_world_size()",
        "    return parts[dist.get_rank()]",
        "The other ranks' gradients belong in it, too: these are rows of your own.",
    ),
)
_PRODUCT = _planted(
    "parallel_product",
    ("    dist.all_reduce(output)\n", "    output = dist.all_reduce(output) / 1\n", "A collective returns None"),
    ("    dist.all_reduce(output)\n", "", "Each rank's product is a part of the sum only: add them up over the ranks."),
    (
        "return output",
        "return output / dist.get_world_size()",
        "Every number is 0.5 times what it should be: a mean over the 2 ranks, or",
    ),
)
_SAME_WEIGHTS = _planted(
    "same_weights",
    (
        "    dist.all_reduce(same, dist.ReduceOp.MIN)\n",
        "",
        "A rank that is like rank 0 must hear of those that are not",
    ),
    ("torch.equal(vector, first)", "vector.sum() == first.sum()", "Different weights can have the same sum"),
    ("torch.equal(vector, first)", "torch.allclose(vector, first)", "[1.0, 2.0, 3.0000002]] are the same:"),
    ("dist.ReduceOp.MIN", "dist.ReduceOp.MAX", "whether [[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]] are the same:"),
)
_STOP_STEP = _planted(
    "stop_step",
    ("            dist.all_reduce(stop, dist.ReduceOp.MAX)\n", "", "The ranks leave at different steps"),
    ("step % every == 0", "True", "They vote only in the steps 0"),
    ("dist.ReduceOp.MAX", "dist.ReduceOp.MIN", "the step, of ranks told at [3, 4], a vote every 1:"),
)

_RATE = _planted(
    "job_rate",
    (
        "    dist.all_reduce(total)\n    dist.all_reduce(longest, op=dist.ReduceOp.MAX)\n",
        "",
        "That is this rank's own speed",
    ),
    (", op=dist.ReduceOp.MAX", "", "MAX, not a sum"),
    (
        ("(float(images))", "(total / longest)"),
        ("(images / seconds)", "total"),
        "A rank that is done early waits",
    ),
)
_LATE = _planted(
    "late_rank",
    ("argmin", "argmax", "That rank waited longest"),
    ("argmin", "min", "That is the least wait"),
    ("torch.cat(waits).argmin().item()", "dist.get_rank()", "Each rank names itself"),
)
_SAVED = "    dist.broadcast(saved, src=0)\n    return bool(saved)"
_SAVE = _planted(
    "save",
    ('Path(f"{path}.part")', "Path(path)", "The one before is lost"),
    (_SAVED, "    return bool(saved)", "Only rank 0 knows how it went"),
    (
        ("if dist.get_rank() == 0", "path}.part", _SAVED),
        ("if True", "path}{dist.get_rank()}", "    return bool(saved)"),
        "A rank tells how it went itself",
    ),
    ("except OSError", "except ValueError", "A rank leaves with an error"),
    ("saved = torch.tensor(0)", "return False", "The ranks disagree at collective 1"),
)
_REST = _planted(
    "rest",
    (" // sampler.num_replicas", "", "`done` counts the samples of all ranks"),
    ("    sampler.set_epoch(epoch)\n", "", "the order of another epoch"),
    ("[done // sampler.num_replicas :]", "[: done // sampler.num_replicas]", "done already"),
)
_READER, _ROW = "dist.get_rank() * num_workers + worker_id", "n, readers)"
_CHUNK = f"list(range(n))[({_READER}) * (n // readers) :][: n // readers]"
_SAMPLES = _planted(
    "my_samples",
    ((_READER, _ROW), ("worker_id", "n, num_workers)"), "The ranks take the same samples"),
    ((_READER, _ROW), ("dist.get_rank()", "n, dist.get_world_size())"), "The workers of a rank take the same"),
    (f"list(range({_READER}, {_ROW})", _CHUNK, "Equal chunks lose the rest"),
    (
        f"list(range({_READER}, {_ROW})",
        f"{_CHUNK} + list(range(n - n % readers, n)) * ({_READER} == readers - 1)",
        "One worker has all of the rest",
    ),
)

PLANTED = [
    *(*_RATE, *_LATE, *_SAVE, *_REST, *_SAMPLES),
    *(*_MEAN, *_TOTALS, *_LOCAL, *_BATCHES, *_TOKENS, *_DRIFTED, *_ONE_BUCKET, *_ACCUMULATE),
    *(*_FORWARD, *_OWN_GRADIENT, *_PRODUCT, *_SAME_WEIGHTS, *_STOP_STEP),
    *(*_RING, *_DDP, *_BUCKETS, *_ZERO, *_LAYER, *_NORM, *_PARALLEL, *_PIPELINE),
]

# ---- in the learner's process: what few people make has no sentence, and is refused with the wrong result

_PASS, _CLEAR = "    model.train()\n", "        optimizer.zero_grad()\n"
_ZEROS = "        gradients = [[x if math.isfinite(x) else 0.0 for x in one] for one in gradients]\n"
_BY_CODE = "in sorted(log, key=lambda line: -int(line.split()[-1]) if line[-1:].isdigit() else 0)"
PLANTED_HERE = [
    *_planted(
        "accuracy",
        ("    model.eval()\n", "    model.train()\n", "Dropout must be off in a test"),
        ((".sum().item()", "len(labels)"), (".float().mean().item()", "1"), "The last batch is smaller"),
    ),
    *_planted(
        "train_pass",
        ((_PASS, _CLEAR, "len(labels)"), ("", "", "1"), "in which mode is the model?"),
        ((_CLEAR, "len(labels)"), ("", "1"), "Do gradients add up"),
        ("len(labels)", "1", "The last batch is smaller"),
    ),
    *_planted("epoch_line", ("zip(*totals", "zip(*totals[:1]", "epoch_line(")),
    *_planted(
        "first_to_fail",
        ("in log", "in reversed(log)", "The last one that complains"),
        ("in log", _BY_CODE, "first_to_fail("),
    ),
    *_planted("sweep_gpu_hours", ("repeats * ", "", "sweep_gpu_hours(")),
    *_planted(
        "steps_between_saves",
        ("2 * cost", "cost", "steps_between_saves("),
        ("round(", "-int(-1 * ", "steps_between_saves("),
    ),
    *_planted(
        "gpus_to_ask_for",
        ("median(seconds) for", "min(seconds) for", "gpus_to_ask_for("),
        ("efficiency[gpus] >= least", "True", "gpus_to_ask_for("),
    ),
    *_planted("ready_gradients", ("        return None\n", _ZEROS, "ready_gradients(")),
    *_planted(
        "where_they_part",
        ("zip_longest(*calls)", "zip_longest(*calls[:2])", "where_they_part("),
        ("zip_longest(*calls)", "zip(*calls)", "A rank that has ended enters nothing"),
    ),
]
