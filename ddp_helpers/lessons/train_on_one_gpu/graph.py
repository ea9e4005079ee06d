"""A training step recorded once and played back: the GPU gets one order for all its kernels."""

import torch
from torch import Tensor

from ddp_helpers.rank.step import Step, record_once


class Graph:
    """A step as a CUDA graph, for batches of the first one's size; others are done without. One process makes it.

    It takes the place of step.take. Raises ValueError where there is no GPU.
    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """

    def __init__(self, step: Step) -> None:
        self.step, self.graph = step, None
        if not next(step.model.parameters()).is_cuda:
            raise ValueError("a CUDA graph needs a GPU, and this model is on a CPU")

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """What the step returns."""
        if not self.graph:
            self.record(images, labels)
        if images.shape != self.images.shape:
            return self.step.eager(images, labels)
        self.images.copy_(images)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.counted

    def record(self, images: Tensor, labels: Tensor) -> None:
        """Warm up beside the main stream, put everything back as it was, and record."""
        record_once(self.step.optimizer, images.device)
        self.images, self.labels, self.graph = images.clone(), labels.clone(), torch.cuda.CUDAGraph()
        parameters = list(self.step.model.parameters())
        weights, random = [p.detach().clone() for p in parameters], torch.cuda.get_rng_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step.eager(self.images, self.labels)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            torch._foreach_copy_(parameters, weights)
            for state in self.step.optimizer.state.values():  # made by the first of the three steps, as zeros
                torch._foreach_zero_(list(state.values()))
        torch.cuda.set_rng_state(random)
        self.step.optimizer.zero_grad()
        with torch.cuda.graph(self.graph):
            self.counted = self.step.eager(self.images, self.labels)


def as_graph(step: Step) -> Step:
    """The step, from now on played back."""
    step.take = Graph(step)
    return step
