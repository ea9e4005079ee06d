"""Note on each rank what a learner's whole script does: samples, saved objects, final weights.

`run_script` has each rank do so. It needs torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset


class ShownSamples(NamedTuple):
    """What one whole pass over a loader gave: numbers of samples, in a dataset of so many."""

    dataset_size: int
    indices: list[int]


@dataclass
class RankNotes:
    """What a script did on a rank."""

    passes: list[ShownSamples]  # that it made to their end
    saved: list[Any]  # objects that it gave to torch.save
    weights: dict[str, torch.Tensor]  # of the model that it wrapped last, at the end


class _NotedSampler:
    """Gives a loader what its sampler gives, and notes each pass that came to the end."""

    def __init__(self, sampler: Any, dataset: Dataset, passes: list[ShownSamples]) -> None:
        self._sampler, self._dataset, self._passes = sampler, dataset, passes

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        given = []
        try:
            for batch in self._sampler:
                given.append(batch)
                yield batch
        finally:  # a loop over range(len(loader)) asks for no batch after the last
            if len(given) == len(self._sampler):
                self._passes.append(_in_undivided(self._dataset, given))


def _in_undivided(dataset: Any, batches: list[Any]) -> ShownSamples:
    """Number the samples of some batches as in the dataset of which this one is a part."""
    indices: list[Any] = []
    for batch in batches:
        indices += batch if isinstance(batch, list | tuple) else [batch]
    while isinstance(dataset, Subset):
        indices = [dataset.indices[int(index)] for index in indices]
        dataset = dataset.dataset
    return ShownSamples(len(dataset), [int(index) for index in indices])


@contextmanager
def noted(path: Path) -> Iterator[None]:
    """Note what the script in the block does, and write it to a file at its end.

    Each rank calls it. Of a script that fails nothing is written.
    """
    notes = RankNotes([], [], {})
    models: list[DDP] = []
    index_sampler = vars(DataLoader)["_index_sampler"].fget
    wrap, save = DDP.__init__, torch.save

    def noted_sampler(loader: DataLoader) -> Any:
        sampler = index_sampler(loader)
        if isinstance(loader.dataset, IterableDataset):
            return sampler
        return _NotedSampler(sampler, loader.dataset, notes.passes)

    def noted_wrap(model: DDP, *arguments: Any, **options: Any) -> None:
        wrap(model, *arguments, **options)
        models.append(model)

    def noted_save(obj: object, *arguments: Any, **options: Any) -> None:
        notes.saved.append(obj)
        save(obj, *arguments, **options)

    with (
        patch.object(DataLoader, "_index_sampler", property(noted_sampler)),
        patch.object(DDP, "__init__", noted_wrap),
        patch.object(torch, "save", noted_save),
    ):
        yield
    weights = models[-1].module.state_dict() if models else {}
    torch.save(
        {"passes": [*map(tuple, notes.passes)], "saved": notes.saved, "weights": weights}, path
    )


def read_notes(path: Path) -> RankNotes:
    """Read what a rank has noted; any process."""
    contents = torch.load(path, weights_only=True)
    passes = [ShownSamples(size, indices) for size, indices in contents["passes"]]
    return RankNotes(passes, contents["saved"], contents["weights"])
