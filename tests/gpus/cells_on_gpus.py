"""Run a notebook's cells for ranks as one of them, on its GPU: cells_on_gpus.py NOTEBOOK [TEXT OTHER], in each cell."""

import os
import re
import sys

import nbformat
import torch
import torch.distributed as dist

from ddp_helpers import ROOT
from ddp_helpers.rank.cells import _run
from ddp_helpers.rank.device import pick_device

# A cell that fails on purpose ends its ranks' group, and an exercise is not solved.
NOT_RUN = re.compile(r"%%ranks .* fails\n|raise NotImplementedError")

if __name__ == "__main__":
    path, text, other = [*sys.argv[1:], "", ""][:3]
    sys.path.insert(0, str(ROOT / "notebooks"))
    device = pick_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=device)
    variables, ran = {"path": "net.pt"}, 0  # what the kernel hands to ranks, and the numbers of the cell `parameters`
    for cell in nbformat.read(path, as_version=4).cells:
        if "parameters" in cell.metadata.get("tags", []):
            exec(cell.source, variables)
        if cell.source.startswith("%%ranks ") and not NOT_RUN.search(cell.source):
            source = cell.source.partition("\n")[2]
            if failure := _run(source.replace(text, other) if text else source, "cell", variables):
                sys.exit(f"{failure}in\n{source}")
            ran += 1
    torch.cuda.synchronize()
    print(f"{ran} cells on {device}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
