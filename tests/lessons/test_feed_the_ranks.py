"""The streams of 13, written into a file: each sample once, however the workers start; the globals of a rank do not."""

import ast
import re

import pytest
from notebook_texts import cells
from real import LIMIT, THOROUGH

from ddp_helpers import ROOT
from ddp_helpers.launch import launch
from ddp_helpers.launch.engine import LaunchError

CODE = cells(ROOT / "notebooks" / "13_feed_the_ranks.ipynb", "code")
IMPORTS = """
import os, random, tarfile
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info
"""
# What two ranks with two workers each read: images of tar files, 0 to 31, and records, 32 to 63.
PROGRAM = """
import io, sys, tarfile, tempfile
import torch.distributed as dist
from pathlib import Path
from streams import ByShard, Shared
from torch.utils.data import ChainDataset, DataLoader

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        tars, shards = ([f"{folder}/{number}.{ending}" for number in range(4)] for ending in ("tar", "bin"))
        for number in range(4):
            with tarfile.open(tars[number], "w") as tar:
                for image in range(8 * number, 8 * number + 8):
                    tar.addfile(tarfile.TarInfo(f"{image}.png"), io.BytesIO())
            Path(shards[number]).write_bytes(bytes(range(32 + 8 * number, 40 + 8 * number)))
        both = ChainDataset([Shared(tars, rank, world_size), ByShard(shards, rank, world_size, 1)])
        for method in sys.argv[1:]:
            loader = DataLoader(both, None, num_workers=2, multiprocessing_context=method)
            read, everyone = [one[0] if isinstance(one, bytes) else one for one in loader], [None] * world_size
            dist.all_gather_object(everyone, read)
            if rank == 0:
                print(method, sorted(sum(everyone, [])) == [*range(64)])
    dist.destroy_process_group()
"""
METHODS = ("fork", "spawn", "forkserver") if THOROUGH else ("fork", "spawn")


def classes():
    """All classes that the cells of 13 define for ranks, as the text of a module."""
    trees = [ast.parse(re.sub(r"\A%%ranks.*\n", "", cell)) for cell in CODE if cell.startswith("%%ranks")]
    kinds = ("Stream", "Shared", "Shuffled", "ByIndex", "ByShard")
    found = {part.name: part for tree in trees for part in tree.body if isinstance(part, ast.ClassDef)}
    return IMPORTS + "\n".join(ast.unparse(found[kind]) for kind in kinds)


def read(folder, text, *methods):
    """What rank 0 prints of these methods to start workers, with this text as the module of the streams."""
    (folder / "streams.py").write_text(text)
    (folder / "read.py").write_text(PROGRAM)
    done = launch.run(folder / "read.py", *methods, ranks=2, timeout=LIMIT, env={"CUDA_VISIBLE_DEVICES": ""})
    return [line for _, line in done.lines if line.endswith(("True", "False"))]


def test_each_sample_once_however_the_workers_start(tmp_path):
    assert read(tmp_path, classes(), *METHODS) == [f"{method} True" for method in METHODS]


def test_a_stream_that_asks_the_process_group_in_a_worker_is_right_under_fork_alone(tmp_path):
    asks = classes().replace("self.rank::self.world_size", "dist.get_rank()::dist.get_world_size()")
    assert asks != classes()
    assert read(tmp_path, asks, "fork") == ["fork True"]
    with pytest.raises(LaunchError, match="Default process group has not been initialized"):
        read(tmp_path, asks, "spawn")
