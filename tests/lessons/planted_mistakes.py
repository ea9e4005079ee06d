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
_NUMBERED = "for step in range(2 * (size - 1)):"
_SQUARED = """for number in range(2 * (size - 1)):
        half, place = divmod(number, size - 1)
        step = half * (size - 1) + place**2"""
_RING = _planted(
    "ring_sum",
    # the square of the step is the step on two ranks and on three, and not on four
    ((_NUMBERED, "if step < size - 1"), (_SQUARED, "if half == 0"), "on 4 ranks, rank 0: the tensor of 12"),
    # in the second half, into the chunk before
    ("chunks[(rank - step - 1)", "chunks[(rank - step - 1 - (step >= size - 1))", "The first half is right"),
    # send blocks until the other receives
    (("sending = dist.isend(", "        sending.wait()\n"), ("dist.send(", ""), "No rank reaches recv"),
    ("(rank + 1) % size", "rank + 1", "ValueError: isend names rank 2"),
    ("tensor_split(size)", "chunk(size)", "may give fewer than n chunks"),
    ("2 * (size - 1)", "size - 1", "After the first n - 1 steps"),
    (_ADD_OR_REPLACE, "own + arrived", "A chunk holds the complete sum"),
    ("(rank - step - 1)", "(rank - step)", "The first half is wrong already"),
    ("= tensor.tensor_split", "= tensor.clone().tensor_split", "Work on chunks of the tensor itself"),
    (f"{_ADD_OR_REPLACE})", f"{_ADD_OR_REPLACE})\n    tensor /= size", "is 0.5 times what it should be: a mean over"),
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
        "In a ring each message holds one chunk",
    ),
    # all receive first
    ((_RECEIVE, "        sending = dist"), ("", f"{_RECEIVE}        sending = dist"), "All wait for a message"),
    ("arrived, (rank - 1)", "arrived, (rank + 1)", "Sends have started"),
    ("    rank, size", "    while True:\n        pass\n    rank, size", "does a loop end?"),
    ("        sending.wait()\n", "", "Keep what isend and irecv return"),
    ("dist.recv(", "dist.irecv(", "Keep what isend and irecv return"),
)
_STATE = "[*model.parameters(), *model.buffers()]"
_TRAINED = "[*[p for p in model.parameters() if p.requires_grad], *model.buffers()]"
_DIVIDE = "parameter.grad /= dist.get_world_size()"
_REDUCE = "dist.all_reduce(parameter.grad)"
_DDP = _planted(
    "ddp_by_hand",
    (
        "if parameter.grad is not None",
        "if parameter.grad is not None and (dist.get_rank() == 0 or parameter.dim() > 1)",
        "disagree at collective 2: rank 0 calls all_reduce of 5",
    ),
    (_STATE, "model.parameters()", "The tensor is as this rank made it"),
    (_STATE, "model.buffers()", "The tensor is as this rank made it"),
    (_STATE, _TRAINED, "The tensor is as this rank made it"),
    (_DIVIDE, "pass", "is 2 times what it should be: a sum over"),
    (_DIVIDE, f"{_DIVIDE} ** 2", "is 0.5 times what it should be: a mean over"),
    (_REDUCE, "pass", "the gradient of first.weight:"),
    (
        (_REDUCE, "parameter.grad /="),
        ("dist.all_reduce(parameter.data)", "parameter.data /="),
        "The gradient is as backward left it",
    ),
    ("if parameter.grad is not None", "if True", "A frozen layer has no gradient"),
    ("return average", "average()", "Return the function itself"),
    (_REDUCE, f"{_REDUCE}; dist.barrier()", "messages after backward:"),
    ("src=0", "src=dist.get_rank()", "disagree at collective 1: rank 0 calls broadcast of 30"),
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
    (_LAST, "        leave()\n", "nothing left for finish() to send"),
    ((_FULL, _LAST), ("", _ALL_AT_THE_END + _LAST), "A full bucket has not left"),
    (("async_op=True", "            work.wait()\n"), ("async_op=False", ""), "Something waits while backward"),
    ("        sent.append(", "        work.wait()\n        sent.append(", "Something waits while backward"),
    ("            work.wait()\n", "", "A bucket has its sums only after wait()"),
    ("            bucket /= dist.get_world_size()\n", "", "is 2 times what it should be: a sum over"),
    ("        if parameter.requires_grad:", "        if True:", "A frozen parameter takes no hook"),
    ("        ready.clear()\n", "", "what left when, with buckets of 25:"),
    ("        sent.clear()\n", "", "Empty the list of what has left"),
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
        "disagree at collective 1: rank 0 calls all_reduce of 28",
    ),
)

_SEND = "        dist.broadcast(matrix.data, src=number % size)"
_TO_OWNER = "        dist.reduce(matrix.grad, dst=number % size)\n"
_OWNS = "if number % size == rank:"
_KEPT = "momenta.setdefault(number, torch.zeros_like(matrix))"
_OWNERS = _planted(
    "update_owned",
    (_SEND, "        pass", "The matrix is as it was before"),
    (_OWNS, "if True:", "a rank calls muon_step for the matrices that it owns"),
    ("matrix.grad / size", "matrix.grad", "The momentum is of the sum of the gradients"),
    ("matrix.grad / size", "matrix.grad / size**2", "is 0.5 times what it should be"),
    (_TO_OWNER, "", "The owner's gradient is of its own rows"),
    ((_TO_OWNER, "matrix.grad / size"), ("", "matrix.grad"), "its own rows of the batch only, undivided"),
    (_KEPT, "torch.zeros_like(matrix)", "No momentum is kept"),
    (f"        {_OWNS}", f"        {_KEPT}\n        {_OWNS}", "The owner alone needs it"),
    # the momentum is kept under the wrong number
    (_KEPT, _KEPT.replace("number", "number + 1"), "the keys of momenta on this rank:"),
    ("src=number % size", "src=0", "The matrix is as it was before"),
    (
        (_SEND, _TO_OWNER),
        ("        pass", f"{_SEND}\n{_TO_OWNER}"),
        "The matrix is as it was before",
    ),
    ("dist.reduce(matrix.grad, dst=number % size)", "dist.all_reduce(matrix.grad)", "only the owner needs it"),
    (_SEND, f"{_SEND}\n{_SEND}", "numbers given to broadcast:"),
    ("src=number % size)", "src=number % size, async_op=True)", "on 2 ranks, rank"),  # late, or in time by chance
    ("        dist.broadcast", "        rank == number % size and dist.broadcast", "The ranks disagree at collective"),
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
    ("    layer.register_forward_pre_hook(gather)\n", "", "A weight was used while it had no memory"),
    (
        "        weight.grad = None\n        free()\n",
        "        weight.grad = None\n",
        "Free it with weight.untyped_storage()",
    ),
    ("    layer.register_full_backward_pre_hook(gather)\n", "", "A weight was used while it had no memory"),
    ("    layer.register_forward_hook(free)\n", "", "Free it with weight.untyped_storage()"),
    ("        weight.grad = None\n", "", "layer.weight.grad after backward:"),
    ("    free()\n    return own", "    return own", "Free it with weight.untyped_storage()"),
    ("        own.grad /= size\n", "", "is 2 times what it should be: a sum over"),
    (_SCATTER, f"        {_OWN_ROWS}", "Each rank's gradient is of its own rows"),
    (
        _SCATTER,
        f"        dist.all_reduce(weight.grad); {_OWN_ROWS}",
        "An all-reduce gives each rank the full gradient",
    ),
    (_GATHER, _COPIED, "Autograd counts the writes"),
    ("[rank].clone()", "[rank]", "This rank's part is a view"),
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
_ASYNCHRONOUS = """    works = []
    for number, matrix in enumerate(matrices):
        works.append(dist.broadcast(matrix.data, src=number % size, async_op=True))
    for work in works:
        work.wait()"""
ALSO_RIGHT = [
    ("ring_sum", _SEND_AND_RECEIVE, _BATCHED),
    ("ring_sum", _SEND_AND_RECEIVE, _BOTH_ASYNCHRONOUS),
    ("ddp_by_hand", "[*model.parameters(), *model.buffers()]", "model.state_dict().values()"),
    ("overlap", "bucket /= dist.get_world_size()", "bucket.div_(dist.get_world_size())"),
    ("update_owned", f"    for number, matrix in enumerate(matrices):\n{_SEND}", _ASYNCHRONOUS),
    ("update_owned", _SEND, _SEND.replace("matrix.data", "matrix.detach()")),
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
    (_SUM_FORWARD, "        count", "normalised by this rank's mean"),
    (
        ("x.sum(0)", "x.square().sum(0)", "[len(x)]"),
        ("x.mean(0)", "x.square().mean(0)", "[1.0]"),
        "The ranks' means are averaged",
    ),
    ("square - mean**2", "(square - mean**2) * count / (count - 1)", "the output:"),
    ("(square - mean**2 + eps).sqrt()", "(square - mean**2).sqrt() + eps", "the output:"),
    # right output, wrong input gradient
    ("    return SyncNorm.apply(x, eps)", _WITHOUT_FUNCTION, "Here only this rank's output depends on x"),
    (_SUM_BACKWARD, "        mean", "Here only this rank's output depends on x"),
    ("sums / count\n        return", "sums / len(y)\n        return", "the output is right; the gradient of x:"),
    (
        (_SUM_BACKWARD, "sums / count\n        return"),
        ("        mean", "sums / len(y)\n        return"),
        "Both means are over this rank's rows",
    ),
    ("sums / count\n        return", "sums\n        return", "the output is right; the gradient of x:"),
    ("- mean - y * slope", "- mean", "the output is right; the gradient of x:"),
    ("- mean - y * slope", "- y * slope", "the output is right; the gradient of x:"),
    ("(grad - mean - y * slope)", "grad", "mean and variance as constants"),
    ("slope) / std, None", "slope), None", "the output is right; the gradient of x:"),
    (" / std, None", " / std", "one value for each argument of forward"),
    ("SyncNorm.apply(x, eps)", "SyncNorm.apply(x.detach(), eps)", "operations that autograd follows"),
    (
        _SUM_FORWARD,
        "        dist.all_reduce(sums[:4]); dist.all_reduce(sums[4:])\n        count",
        "One message in forward",
    ),
)

_ADDED_UP = "AddUp.apply(hidden @ down.T)"
_PARALLEL = _planted(
    "parallel_mlp",
    (_ADDED_UP, "hidden @ down.T", "The output is this rank's product only"),
    (_ADDED_UP, f"{_ADDED_UP} / dist.get_world_size()", "is 0.5 times what it should be: a mean over"),
    # right output, wrong input gradient
    ("Enter.apply(x)", "x", "only the part that comes through"),
    (
        ("Enter.apply(x)", f"    return {_ADDED_UP}"),
        ("x", "    y = hidden @ down.T\n    dist.all_reduce(y)\n    return y"),
        "only the part that comes through",
    ),
    (
        "        return grad\n",
        "        dist.all_reduce(grad := grad.clone())\n        return grad\n",
        "is 2 times what it should be: a sum over",
    ),
    (
        "        return grad\n",
        "        return grad / dist.get_world_size()\n",
        "is 0.5 times what it should be: a mean over",
    ),
    (
        "return total\n\n\nclass",
        "return total / dist.get_world_size()\n\n\nclass",
        "is 0.5 times what it should be: a mean over",
    ),
    (
        "return x.view_as(x)",
        "dist.all_reduce(y := x.clone())\n        return y / dist.get_world_size()",
        "One message in forward",
    ),
    ("Enter.apply(x)", "Enter.apply(x.detach())", "the output is right; the gradient of x:"),
    (
        f"return {_ADDED_UP}",
        "dist.all_reduce(y := (hidden @ down.T).detach())\n    return y",
        "operations that autograd follows",
    ),
)

_SEND_FORWARD, _SEND_BACK = "isend(y.detach(), rank + 1)", "isend(x.grad, rank - 1)"
_FIRST = "min(size - 1 - rank, count) if one_by_one else count"
_PIPELINE = _planted(
    "pipeline_step",
    (_FIRST, "min(size - 1 - rank, count)", "all go forward first"),
    (_FIRST, "count", "a stage goes forward"),
    ("size - 1 - rank, count", "size - rank, count", "a stage goes forward"),
    # one by one with blocking sends
    (
        (f"sends.append(dist.{_SEND_FORWARD})", f"sends.append(dist.{_SEND_BACK})"),
        (f"dist.{_SEND_FORWARD[1:]}", f"dist.{_SEND_BACK[1:]}"),
        "No rank reaches recv",
    ),
    (" / count", "", "The loss is the mean over the micro-batches"),
    ("            x.requires_grad_()\n", "", "needs requires_grad_()"),
    ("held.pop(0)", "held.pop(0 if rank else -1)", "4 micro-batches: the gradient of 0.weight"),
    ("y.backward(gradient)", "y.backward()", "Only the last stage has a loss"),
    ("y.backward(gradient)", "y.detach().backward(gradient)", "The graph is detached"),
    (_SEND_FORWARD, "isend(y.detach(), rank + 2)", "ValueError: isend names rank 2"),
    ("size - 1 - rank, count", "rank, count", "does each rank receive"),
    ("    for sending in sends:\n        sending.wait()", "", "Keep what isend and irecv return"),
    (f"            sends.append(dist.{_SEND_BACK})", "            pass", "Keep what isend and irecv return"),
    ("            dist.recv(gradient, rank + 1)\n", "            pass\n", "Keep what isend and irecv return"),
)

_MEAN = _planted(
    "mean_over_ranks",
    (" / dist.get_world_size()", "", "The default of all_reduce is the sum"),
    ("dist.get_world_size()", "2", "The group may have any size"),
    (
        "    dist.all_reduce(total)\n",
        "    dist.broadcast(total, 0); total *= dist.get_world_size()\n",
        "That is rank 0's number",
    ),
    ("    return total.item()", "    return mine; total.item()", "That is this rank's own number"),
    (
        "    dist.all_reduce(total)\n",
        "    dist.get_rank() and dist.all_reduce(total)\n",
        "disagree at collective 1: rank 0 calls nothing more",
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
    ("sorted(sums)", "list(sums)", "A rank may have the names in a different order"),
    (_PAIRED, _PAIRED.replace("names", "sums"), "You sort the names for the tensor"),
    ("    names = sorted(sums)\n", _EACH, "One collective for each name"),
    ("    names = sorted(sums)\n", _GATHERED, "A collective of objects makes two"),
    ("totals.tolist()", "(totals / dist.get_world_size()).tolist()", "totals are not divided"),
    (f"return {_PAIRED}", "return sums", "Each rank returns its own sums"),
)
_HOSTS = "return hosts[: dist.get_rank()].count(host)"
_LOCAL = _planted(
    "local_rank_on",
    (_HOSTS, "return dist.get_rank()", "The local rank starts again at 0"),
    (_HOSTS, "return dist.get_rank() % hosts.count(host)", "Hosts may differ, and take turns"),
    (_HOSTS, "return hosts.count(host) - 1", "Only the ranks before this one count."),
    (_HOSTS, "return dist.get_rank() - hosts.index(host)", "The local rank starts again at 0"),
    (_HOSTS, "return hosts.index(host)", "The local rank starts again at 0"),
)
_PER_RANK = "per_rank = global_batch // dist.get_world_size()"
_BATCHES = _planted(
    "batches_seen",
    ("batch_size=per_rank, sampler=sampler", "batch_size=per_rank, shuffle=True", "Each rank goes through all samples"),
    ("        sampler.set_epoch(epoch)\n", "", "call set_epoch before each pass"),
    (
        ("        sampler.set_epoch(epoch)\n", "[batch.tolist() for batch in loader]"),
        ("", "list(loader)"),
        "Every epoch has the same order",
    ),
    ("    return seen", "    pass", "what it returns:"),
    (_PER_RANK, "per_rank = global_batch", "A rank takes its part of the global batch"),
)
_LOSS_CELL = "return losses[counted].sum() * dist.get_world_size() / words"
_TOKENS = _planted(
    "token_loss",
    (_LOSS_CELL, "return losses[counted].mean()", "A mean of means"),
    (" * dist.get_world_size()", "", "DDP divides by the number of ranks"),
    ("    dist.all_reduce(words)\n", "", "These are one rank's terms"),
    (("counted.sum()", "losses[counted]"), ("torch.tensor(len(losses))", "losses"), "The padding counts"),
    (_LOSS_CELL, "return (losses * counted).sum() / counted.sum()", "A mean of means"),
    (
        "    dist.all_reduce(words)\n",
        "    if words:\n        dist.all_reduce(words)\n",
        "disagree at collective 1: rank 0 calls all_reduce of 1 number",
    ),
)
_DRIFTED = _planted(
    "drifted",
    ("    return differing", "    return differing[: 9 * dist.get_rank()]", "Numbers were swapped on the last rank"),
    (
        ("torch.empty_like(parameter)", "parameter.data)\n"),
        ("torch.zeros(1).double()", "parameter.data.sum().float().double().view(1))\n"),
        "Numbers were swapped on the last rank",
    ),
    (
        "    return differing",
        "    [dist.broadcast(p.data, 0) for p in model.parameters()]\n    return differing",
        "which it should only read",
    ),
)
_ONE_BUCKET = _planted(
    "average_in_one",
    (
        "    dist.all_reduce(bucket)\n",
        "    [dist.all_reduce(part) for part in bucket.split(10)]\n",
        "collectives called:",
    ),
    ("    bucket /= dist.get_world_size()\n", "", "is 2 times what it should be: a sum over"),
    ("        gradient.copy_(piece", "        gradient.clone().copy_(piece", "The gradient is as it was"),
    (" if p.grad is not None", "", "A frozen layer has no gradient"),
    ("pieces = bucket", "pieces = bucket.flip(0)", "the gradient of 0.weight:"),
)
_SHARE = " * len(y) / total"
_ACCUMULATE = _planted(
    "accumulate",
    (
        (_SHARE, " * len(labels) / total"),
        (" / len(pieces)", " / len(pieces)"),
        "The micro-batches have 8, 8 and 4 images",
    ),
    ((_SHARE, " * len(labels) / total"), ("", ""), "The micro-batches have 8, 8 and 4 images"),
    ("with ddp_model.no_sync():", "if True:", "every micro-batch but the last belong inside no_sync()"),
    (
        "    (F.cross_entropy(ddp_model(images)",
        "    with ddp_model.no_sync(): (F.cross_entropy(ddp_model(images)",
        "belongs outside no_sync()",
    ),
    ("    optimizer.zero_grad()\n", "", "are its gradients still there?"),
)
_FORWARD = _planted(
    "sharded_forward",
    ("torch.cat(parts)", "shard", "Each rank has some rows only"),
    ("torch.cat(parts)", "torch.cat(parts[::-1])", "in the order of the ranks"),
)
_OWN_GRADIENT = _planted(
    "own_gradient",
    (" / dist.get_world_size()", "", "is 2 times what it should be: a sum over"),
    (
        "    return rows / dist.get_world_size()",
        "    return parts[dist.get_rank()]",
        "The other ranks' gradients also belong in it",
    ),
)
_OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
_BLOCKS_FIRST = "    for block in model:\n        fully_shard(block)\n"
_GATHERED = "get_model_state_dict(model, options=options)"
_TRAIN_SHARDED = _planted(
    "train_sharded",
    ((_OPTIMIZER, _BLOCKS_FIRST), ("", _OPTIMIZER + _BLOCKS_FIRST), "which tensors does the optimizer hold?"),
    (_GATHERED, "model.state_dict() if rank == 0 else {}", "These are shards"),
    (_BLOCKS_FIRST, "", "Also call fully_shard on each block"),
    (
        f"{_BLOCKS_FIRST}    fully_shard(model)\n",
        f"    fully_shard(model)\n{_BLOCKS_FIRST}",
        "Blocks first, then the root module",
    ),
    (_GATHERED, f"{_GATHERED} if rank == 0 else {{}}", "A rank that has returned sends and receives nothing more"),
    (
        ("range(0, len(held_out), world_size)", "place = first + rank"),
        ("range(rank, len(held_out), world_size)", "place = first"),
        "The ranks disagree at collective",
    ),
    (" * (place < len(held_out))", "", "the mean loss:"),
    (
        (" * (place < len(held_out))", "total / len(held_out)"),
        ("", "total / (len(held_out) + -len(held_out) % world_size)"),
        "A repeated sample is counted",
    ),
    (
        ("    dist.all_reduce(total)\n", "total / len(held_out)"),
        ("", "total / len(held_out[rank::world_size])"),
        "the mean over this rank's samples",
    ),
)
_SAME_WEIGHTS = _planted(
    "same_weights",
    ("    dist.all_reduce(same, dist.ReduceOp.MIN)\n", "", "must learn of those that do not"),
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
    (("(float(images))", "(total / longest)"), ("(images / seconds)", "total"), "A rank that finishes early waits"),
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
    ('Path(f"{path}.part")', "Path(path)", "The previous checkpoint is lost"),
    (_SAVED, "    return bool(saved)", "Only rank 0 knows the result"),
    (
        ("if dist.get_rank() == 0", "path}.part", _SAVED),
        ("if True", "path}{dist.get_rank()}", "    return bool(saved)"),
        "Every rank reports its own save",
    ),
    ("except OSError", "except ValueError", "A rank leaves with an error"),
    ("saved = torch.tensor(0)", "return False", "The ranks disagree at collective 1"),
)
_REST = _planted(
    "rest",
    (" // sampler.num_replicas", "", "`done` counts the samples of all ranks"),
    ("    sampler.set_epoch(epoch)\n", "", "the order of a different epoch"),
    ("[done // sampler.num_replicas :]", "[: done // sampler.num_replicas]", "samples are done"),
)
_READER, _ROW = "rank * num_workers + worker_id", "n, world_size * num_workers)"
_CHUNK = f"list(range(n))[({_READER}) * (n // readers) :][: n // readers]"
_DEALT, _COUNTED = f"    return list(range({_READER}, {_ROW})", "    readers = world_size * num_workers\n    return "
_SAMPLES = _planted(
    "my_samples",
    ((_READER, _ROW), ("worker_id", "n, num_workers)"), "The ranks take the same samples"),
    ((_READER, _ROW), ("rank", "n, world_size)"), "The workers of a rank take the same"),
    (_DEALT, f"{_COUNTED}{_CHUNK}", "Equal chunks lose the rest"),
    (
        _DEALT,
        f"{_COUNTED}{_CHUNK} + list(range(n - n % readers, n)) * ({_READER} == readers - 1)",
        "One worker has all of the rest",
    ),
)

PLANTED = [
    *(*_RATE, *_LATE, *_SAVE, *_REST, *_SAMPLES),
    *(*_MEAN, *_TOTALS, *_LOCAL, *_BATCHES, *_TOKENS, *_DRIFTED, *_ONE_BUCKET, *_ACCUMULATE),
    *(*_FORWARD, *_OWN_GRADIENT, *_TRAIN_SHARDED, *_SAME_WEIGHTS, *_STOP_STEP),
    *(*_RING, *_DDP, *_BUCKETS, *_OWNERS, *_LAYER, *_NORM, *_PARALLEL, *_PIPELINE),
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
