"""What is run as one rank on GPUs that are pretended: on_gpus.py FUNCTION [ARGUMENTS], in a process of its own.

Ranks see what is put in the place of torch's classes only in modules that they import themselves. And a first backward
on tensors without memory starts threads of autograd's, after which no ranks could be forked.
"""

import re
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
import torch
import torch.distributed as dist
from gpu_rank import one_rank, run

from ddp_helpers import ROOT

RANKS = re.compile(r"%%ranks (\d+).*\n")
REFUSED = "No backend type associated with device type cpu"
# The cells that stop on tensors without memory: what stands in them, and the error. Nothing else may stop a cell.
STOPS = {
    'torch.save({"model": model_state': AttributeError,  # saves weights
    "checkpoint = torch.load(path, map_location=device": RuntimeError,  # onto the GPU
    'ddp_model.module.load_state_dict(checkpoint["model"])': NameError,  # what was to be loaded
}


def raised(path):
    """Run a notebook's cells for ranks in order, as rank 0: yields each one's source, and what it raised."""
    size, cells = None, nbformat.read(path, as_version=4).cells
    with TemporaryDirectory() as folder, ExitStack() as group:
        start = {"path": f"{folder}/net.pt"}  # what the kernel hands to ranks, and the numbers of the cell `parameters`
        torch.save({"model": torch.zeros(1)}, start["path"])
        for cell in cells:
            if "parameters" in cell.metadata.get("tags", []):
                exec(cell.source, start)
            if not (ranks := RANKS.match(cell.source)):
                continue
            if ranks[1] != size:  # other ranks, without the variables of these
                group.close()
                size, variables = ranks[1], dict(start)
                group.enter_context(one_rank(0, int(size)))
            try:
                run(cell.source[ranks.end() :], variables)
                yield cell.source, None
            except Exception as error:
                yield cell.source, error


def cells(path):
    """Each cell for ranks comes to its end, or to what STOPS says."""
    sys.path.insert(0, str(ROOT / "notebooks"))
    seen = list(raised(path))
    for source, error in seen:
        expected = next((error for text, error in STOPS.items() if text in source), type(None))
        assert isinstance(error, expected) and REFUSED not in str(error), f"{error!r} in\n{source}"
    assert seen, "a notebook with cells for ranks"


def a_tensor_of_the_cpu():
    """It is refused: in a cell of notebook 02 that is right, and with `device=device` taken out."""
    [path] = (ROOT / "notebooks").glob("02_*.ipynb")
    line = "numbers = (rank + 1) * torch.arange(1.0, 5.0, device=device)"
    [cell] = [cell.source for cell in nbformat.read(path, as_version=4).cells if line in cell.source]
    _, _, cell = cell.partition("\n")
    with one_rank(0, 4):
        run(cell, {})
        with pytest.raises(RuntimeError, match=REFUSED):
            run(cell.replace(line, line.replace(", device=device", "")), {})


def a_script():
    """Loss and metrics stay on the GPU until they are read, and so does the ballot."""
    from ddp_helpers.rank.scripts.mnist_ddp import Net, one_pass
    from ddp_helpers.rank.scripts.mnist_ddp_resumable import vote

    args = Namespace(bf16=False, dry_run=False, log_interval=1)
    with one_rank(0, 2):
        device = torch.device("cuda", 0)
        model = torch.nn.parallel.DistributedDataParallel(Net().to(device))
        batches = [(torch.rand(4, 1, 28, 28), torch.zeros(4, dtype=torch.long))] * 2
        sums = one_pass(model, batches, args, torch.optim.Adadelta(model.parameters()))
        assert {"loss", "accuracy", "samples"} < sums.keys() and sums["loss"].is_cuda
        with pytest.raises(SystemExit, match="not finite"):  # the ballot comes back, and is read as ones
            vote(sums["loss"], model)
        with pytest.raises(RuntimeError, match=REFUSED):
            dist.all_reduce(torch.ones(4))


if __name__ == "__main__":
    for name in [*sys.modules]:
        if name.startswith("ddp_helpers."):  # imported before anything was replaced
            del sys.modules[name]
    globals()[sys.argv[1]](*map(Path, sys.argv[2:]))
