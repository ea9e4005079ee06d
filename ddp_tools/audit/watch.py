"""Hook a script's calls of torch on this rank, such as passes over loaders.

The hooks are set on each rank before the script starts, and stay until it exits. Needs torch.
"""

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator


class LoaderPass:
    """One pass over a DataLoader, up to the script's current batch."""

    def __init__(self, loader: DataLoader) -> None:
        # A reference to the loader would keep its iterator alive, whose end ends an abandoned pass.
        self.loader_id = id(loader)
        self.dataset = loader.dataset
        self.sampler: Any = loader.sampler  # a Sampler, or anything to iterate over
        self.iterable = isinstance(loader.dataset, IterableDataset)
        self.since = time.time()
        self.batches = 0  # that the script has taken
        self.complete = False  # the loader had no more of them
        self.batch_indices: list[Any] = []  # of the batches, including prefetched ones
        self.index_sampler: Any = loader._index_sampler  # yields the indices of each batch
        plain = type(self.index_sampler) is BatchSampler
        self.drawn_by = self.sampler if plain else self.index_sampler
        self.batch_size = loader.batch_size or 0
        # For the audit's notes.
        self.begun = ""  # the line at which it started
        self.steps = 0  # of optimizers during the pass
        self.digests: list[str] = []
        self.augmented: list[str] = []
        self.state_before = ""  # of the generator before a batch, if it is compared
        self.asked = 0.0  # when the script asked for a batch

    def indices(self) -> list[int | str]:
        """List the samples that the script has taken, by their indices in the undivided dataset."""
        flat: list[Any] = []
        for batch in self.batch_indices[: self.batches]:
            flat += batch if isinstance(batch, list | tuple) else [batch]
        for subset in self._subsets():
            flat = [subset.indices[int(index)] for index in flat]
        return [int(index) if hasattr(index, "__int__") else str(index) for index in flat]

    def undivided(self) -> tuple[Any, bool]:
        """The undivided dataset, and whether the loader's dataset is a Subset of it."""
        subsets = self._subsets()
        return subsets[-1].dataset if subsets else self.dataset, bool(subsets)

    def shuffles(self) -> bool:
        """Whether the sampler should give a different order each time."""
        # A sampler with set_epoch is meant to give each epoch a different order.
        promises = hasattr(self.drawn_by, "set_epoch") or isinstance(self.drawn_by, RandomSampler)
        return bool(getattr(self.drawn_by, "shuffle", promises))

    def _subsets(self) -> list[Subset]:
        """The subsets around the undivided dataset, from the outermost on."""
        subsets = []
        dataset = self.dataset
        while isinstance(dataset, Subset):
            subsets.append(dataset)
            dataset = dataset.dataset
        return subsets


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing."""


class LoaderWatch:
    """Calls back for each pass over a DataLoader and for each of its batches."""

    def __init__(
        self,
        ended: Callable[[LoaderPass], None],
        begun: Callable[[LoaderPass], None] = _ignore,
        asked: Callable[[LoaderPass], None] = _ignore,
        given: Callable[[LoaderPass, object], None] = _ignore,
    ) -> None:
        """Set the hooks.

        Args:
            ended: called when a pass is complete, or when the script has left the loop.
            begun: called when a pass starts.
            asked, given: called before and after a loader returns a batch.
        """
        self.open_passes: list[LoaderPass] = []
        self._starting: list[LoaderPass] = []  # passes whose iterator is being made
        self._ended, self._begun, self._asked, self._given = ended, begun, asked, given
        replace_call(DataLoader, "__iter__", self._watched_iter)
        replace_call(LoaderIterator, "_next_index", self._watched_index)
        replace_call(LoaderIterator, "__next__", self._watched_next)

    def close(self) -> None:
        """End all passes that are still open, as at the end of the script."""
        for loader_pass in self.open_passes.copy():
            self._close(loader_pass)

    def _close(self, loader_pass: LoaderPass) -> None:
        """End a pass, unless it has ended."""
        if any(loader_pass is other for other in self.open_passes):
            self.open_passes = [other for other in self.open_passes if other is not loader_pass]
            self._ended(loader_pass)

    def _watched_iter(self, begin: Callable) -> Callable:
        def call(loader: DataLoader) -> LoaderIterator:
            for left in [old for old in self.open_passes if old.loader_id == id(loader)]:
                self._close(left)
            loader_pass = LoaderPass(loader)
            self._begun(loader_pass)
            self.open_passes.append(loader_pass)
            self._starting.append(loader_pass)
            try:
                iterator = begin(loader)
            finally:
                self._starting.pop()
            iterator.watched_pass = loader_pass
            # A script that leaves the loop, as by next(iter(loader)), drops the iterator.
            dropped = weakref.finalize(iterator, self._close, loader_pass)
            dropped.atexit = False  # type: ignore[misc]  # a property, for which it has a slot
            return iterator

        return call

    def _watched_index(self, next_index: Callable) -> Callable:
        def call(iterator: Any) -> object:
            indices = next_index(iterator)
            # With workers, the iterator asks for the first batches while it is made.
            loader_pass = self._starting[-1] if self._starting else iterator.watched_pass
            if not loader_pass.iterable:
                loader_pass.batch_indices.append(indices)
            return indices

        return call

    def _watched_next(self, following: Callable) -> Callable:
        def call(iterator: Any) -> object:
            loader_pass = iterator.watched_pass
            self._asked(loader_pass)
            try:
                batch = following(iterator)
            except StopIteration:
                loader_pass.complete = True
                self._close(loader_pass)
                raise
            loader_pass.batches += 1
            self._given(loader_pass, batch)
            return batch

        return call


def replace_call(owner: object, name: str, watched: Callable[[Callable], Callable]) -> None:
    """Replace a function of a class or a module with watched(function)."""
    setattr(owner, name, watched(getattr(owner, name)))


def hear(
    owner: object,
    name: str,
    before: Callable[..., object] = _ignore,
    after: Callable[..., object] = _ignore,
) -> None:
    """Call `before` and `after`, with the same arguments, around each call of a function."""

    def watched(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> object:
            before(*args, **options)
            given = function(*args, **options)
            after(*args, **options)
            return given

        return call

    replace_call(owner, name, watched)
