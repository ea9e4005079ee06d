"""Simulated GPUs: a CUDA runtime and an NCCL beneath the real PyTorch, for machines without a GPU.

`ddp-course gpus 2 -- COMMAND` gives them to COMMAND and to all that it starts. torch's own C++ for
CUDA runs as it is: allocator, streams, events, generators, ProcessGroupNCCL with its watchdog and
flight recorder. Each operator computes on the CPU, over the very bytes of the GPU's tensors.

`source` is what is compiled, `build` compiles it at first use, `command` starts COMMAND.
"""
