"""Time an all-reduce within a node and between two; each of four ranks runs it, the first two on the first node."""

import json
import time

import torch
import torch.distributed as dist

BYTES = 4_000_000
GROUPS = {"one node, 2 ranks": [0, 1], "two nodes, 1 rank each": [0, 2], "two nodes, 2 ranks each": [0, 1, 2, 3]}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, ranks in GROUPS.items():
        group, numbers, seconds = dist.new_group(ranks), torch.ones(BYTES // 4), []
        for _ in range(6 if dist.get_rank() in ranks else 0):
            dist.barrier(group)
            began = time.perf_counter()
            dist.all_reduce(numbers, group=group)
            seconds.append(time.perf_counter() - began)
        found[name] = min(seconds[1:], default=0)  # what else the machine does only ever adds
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
