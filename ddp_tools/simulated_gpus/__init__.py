"""Simulated GPUs: a CUDA runtime and an NCCL beneath the real PyTorch, for machines without a GPU.

`ddp-course gpus 2 -- COMMAND` gives them to COMMAND and to all that it starts. torch's own C++ for
CUDA runs unchanged: allocator, streams, events, generators, ProcessGroupNCCL with its watchdog and
flight recorder. Each operator computes on the CPU, on the memory of the simulated GPU's tensors.

`source` has the C++ code, `build` compiles it at first use, `command` starts COMMAND.
"""
