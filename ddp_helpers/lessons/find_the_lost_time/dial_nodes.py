"""Time an all-reduce within a node and between two.

`two_nodes.sh` starts it on each of four ranks, the first two on the first node.
"""

import json
import time

import torch
import torch.distributed as dist

BYTES = 4_000_000
GROUPS = {
    "one node, 2 ranks": [0, 1],
    "two nodes, 1 rank each": [0, 2],
    "two nodes, 2 ranks each": [0, 1, 2, 3],
}


def seconds(ranks: list[int]) -> float:
    """Return the least seconds of an all-reduce of these ranks, 0 on others.

    Every rank calls it.
    """
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return 0
    assert isinstance(group, dist.ProcessGroup), "the ranks outside get a number"
    numbers = torch.ones(BYTES // 4)
    times = []
    for _ in range(6):
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(numbers, group=group)
        times.append(time.perf_counter() - began)
    return min(times[1:])  # other load on the machine only ever adds time


def main() -> None:
    """Print as JSON the seconds of each group; every rank calls it, rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    by_group = {}
    for name, ranks in GROUPS.items():
        by_group[name] = seconds(ranks)
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(by_group))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
