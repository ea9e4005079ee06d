"""Every diagram of the course: pictures of how it works, drawn from their parameters."""

from ddp_helpers.notebook.diagrams.communication import collectives, ddp_buckets, memory_of_gradients
from ddp_helpers.notebook.diagrams.data import global_batch, shard_indices, shards
from ddp_helpers.notebook.diagrams.jobs import way_of_a_job
from ddp_helpers.notebook.diagrams.nodes import ranks_on_nodes, signal_path
from ddp_helpers.notebook.diagrams.processes import data_parallel_vs_ddp, spmd

__all__ = [
    "collectives",
    "data_parallel_vs_ddp",
    "ddp_buckets",
    "global_batch",
    "memory_of_gradients",
    "ranks_on_nodes",
    "shard_indices",
    "shards",
    "signal_path",
    "spmd",
    "way_of_a_job",
]
