"""Note on each rank what a learner's script does: samples, saved objects, final weights.

`run_script` calls it on each rank. It needs torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_tools.audit.watch import LoaderPass, LoaderWatch, hear


@dataclass
class RankNotes:
    """What a script did on a rank."""

    # Complete passes over loaders: the size of the dataset, numbers of samples.
    passes: list[tuple[int, list[int]]]
    saved: list[Any]  # objects that it gave to torch.save
    weights: dict[str, torch.Tensor]  # of the model that it wrapped last, at the end


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """Note what the script in the block does, and write it to a file at its end.

    Each rank calls it once, since its torch stays watched. If the script fails, nothing is written.
    """
    passes: list[tuple[int, list[Any]]] = []
    saved: list[object] = []
    models: list[DDP] = []

    def ended(one: LoaderPass) -> None:
        # A loop over range(len(loader)) asks for no batch after the last.
        if not one.iterable and (one.complete or one.batches == len(one.index_sampler)):
            dataset, _ = one.undivided()
            passes.append((len(dataset), one.indices()))

    loaders = LoaderWatch(ended)
    hear(DDP, "__init__", after=lambda model, *_, **__: models.append(model))
    hear(torch, "save", before=lambda obj, *_, **__: saved.append(obj))
    yield
    loaders.close()
    weights = models[-1].module.state_dict() if models else {}
    torch.save({"passes": passes, "saved": [*saved], "weights": weights}, path)


def read_notes(path: Path) -> RankNotes:
    """Read what a rank has noted; any process."""
    return RankNotes(**torch.load(path, weights_only=True))
