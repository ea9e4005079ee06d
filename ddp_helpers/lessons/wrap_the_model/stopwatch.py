"""Note when gradients are ready and when buckets leave, on a GPU by the GPU's own clock.

Notebook 05 uses it in a `%%ranks` cell, on every rank.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

Note = tuple[str, list[int], float]  # an event, the layers that it was about, and when, in ms
_Mark = float | torch.cuda.Event  # a time in seconds, or a mark in the GPU's queue


class Stopwatch:
    """A rank's notes on one training step of a DDP model that is a row of layers.

    The layers have one parameter each, and their numbers begin with 1.
    """

    def __init__(self, ddp_model: DDP) -> None:
        self._ddp_model = ddp_model
        self._layer_of: dict[Tensor, int] = {}
        for layer, weight in enumerate(ddp_model.parameters(), start=1):
            self._layer_of[weight] = layer
        self._on_gpu = all(parameter.is_cuda for parameter in self._layer_of)
        self._marks: list[tuple[str, list[int], _Mark]] = []
        for parameter in self._layer_of:
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)
        ddp_model.register_comm_hook(None, self._bucket_leaves)

    def time_a_step(self, batch: Tensor) -> list[Note]:
        """Take four steps on a batch, and list the events of the last; every rank calls it.

        DDP sorts its buckets anew after the first. Times are ms since the step began.
        """
        optimizer = torch.optim.SGD(self._ddp_model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            self._marks.clear()
            dist.barrier()
            self._note("forward starts")
            loss = self._ddp_model(batch).square().mean()
            self._note("backward starts")
            loss.backward()
            self._note("step starts")
            optimizer.step()
            self._note("step ends")
        if self._on_gpu:
            torch.cuda.synchronize()
        began = self._marks[0][2]
        return [(event, layers, _ms(began, mark)) for event, layers, mark in self._marks]

    def _gradient_ready(self, parameter: Tensor) -> None:
        """Note it: PyTorch calls this as soon as backward has added to the gradient."""
        self._note("gradient ready", [self._layer_of[parameter]])

    def _bucket_leaves(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start the usual all-reduce of a full bucket, and note when it starts and ends."""

        def arrived(done: Future[Tensor]) -> Tensor:
            self._note("all-reduce ends", layers)
            return done.value()

        layers = [self._layer_of[parameter] for parameter in bucket.parameters()]
        self._note("all-reduce starts", layers)
        result = allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group
        return result.then(arrived)

    def _note(self, event: str, layers: Sequence[int] = ()) -> None:
        """Write down that an event happens now."""
        self._marks.append((event, sorted(layers), self._now()))

    def _now(self) -> _Mark:
        """Return the time; on a GPU, which is behind the CPU, a mark in its queue."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _ms(began: _Mark, mark: _Mark) -> float:
    """Return the ms between two marks of the same kind."""
    if isinstance(began, torch.cuda.Event) and isinstance(mark, torch.cuda.Event):
        return began.elapsed_time(mark)
    if isinstance(began, float) and isinstance(mark, float):
        return 1000 * (mark - began)
    raise TypeError("one mark is a time, and the other is in a GPU's queue")
