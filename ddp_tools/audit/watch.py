"""Watch a script's calls on this rank: passes over loaders, wrapped models, saved objects.

The audit's observer derives a `Watcher`, and the witness starts it on every rank before the script.
It needs torch.
"""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator


class LoaderPass:
    """One pass over a DataLoader, as far as the script has come in it."""

    def __init__(self, loader: DataLoader) -> None:
        # The loader itself would keep its iterator, whose end is the end of a pass that was left.
        self.loader_id = id(loader)
        self.dataset = loader.dataset
        self.sampler: Any = loader.sampler  # a Sampler, or anything to iterate over
        self.iterable = isinstance(loader.dataset, IterableDataset)
        self.batches = 0  # that the script has taken
        self.complete = False  # the loader had no more of them
        self.batch_indices: list[Any] = []  # of the batches, also of those to come

    def indices(self) -> list[int | str]:
        """List the samples that the script has taken, by their numbers in the undivided dataset."""
        flat: list[Any] = []
        for batch in self.batch_indices[: self.batches]:
            flat += batch if isinstance(batch, list | tuple) else [batch]
        for subset in self._subsets():
            flat = [subset.indices[int(index)] for index in flat]
        return [int(index) if hasattr(index, "__int__") else str(index) for index in flat]

    def dataset_size(self) -> int | None:
        """Count the samples of the undivided dataset; None for an IterableDataset."""
        if self.iterable:
            return None
        subsets = self._subsets()
        undivided: Any = subsets[-1].dataset if subsets else self.dataset
        return len(undivided)

    def _subsets(self) -> list[Subset]:
        """The subsets around the undivided dataset, from the outermost on."""
        subsets = []
        dataset = self.dataset
        while isinstance(dataset, Subset):
            subsets.append(dataset)
            dataset = dataset.dataset
        return subsets


PassType = TypeVar("PassType", bound=LoaderPass)


class Watcher(Generic[PassType]):
    """Hears of a script's calls, once it is started: a subclass overrides what it wants to hear."""

    def __init__(self) -> None:
        self.open_passes: list[PassType] = []
        self._starting: list[PassType] = []  # whose iterator is being made

    def new_pass(self, loader: DataLoader) -> PassType:
        """Make the record of a pass that begins."""
        raise NotImplementedError

    def before_batch(self, loader_pass: PassType) -> None:
        """Called before a loader gives a batch."""

    def after_batch(self, loader_pass: PassType, batch: object) -> None:
        """Called after a loader gave a batch."""

    def after_pass(self, loader_pass: PassType) -> None:
        """Called at the end of a pass, or when the script has left it."""

    def after_wrap(self, model: DDP) -> None:
        """Called after a model was wrapped."""

    def before_save(self, saved: object, file: object) -> None:
        """Called before torch.save writes an object."""

    def start(self) -> None:
        """Listen from now on, until this process ends."""
        self._watch_loaders()

        def watched_wrap(wrap: Callable) -> Callable:
            def call(model: DDP, *args: Any, **options: Any) -> None:
                wrap(model, *args, **options)
                self.after_wrap(model)

            return call

        def watched_save(save: Callable) -> Callable:
            def call(obj: object, f: object, *args: Any, **options: Any) -> None:
                self.before_save(obj, f)
                save(obj, f, *args, **options)

            return call

        replace_call(DDP, "__init__", watched_wrap)
        replace_call(torch, "save", watched_save)

    def close_passes(self) -> None:
        """End all passes that are still open, as at the end of the script."""
        for loader_pass in self.open_passes.copy():
            self._close(loader_pass)

    def _close(self, loader_pass: PassType) -> None:
        """End a pass, unless that was done."""
        if any(loader_pass is other for other in self.open_passes):
            self.open_passes = [other for other in self.open_passes if other is not loader_pass]
            self.after_pass(loader_pass)

    def _watch_loaders(self) -> None:
        """Hear of each pass over a DataLoader, and of what it asks for and gives."""

        def watched_iter(begin: Callable) -> Callable:
            def call(loader: DataLoader) -> LoaderIterator:
                for left in [old for old in self.open_passes if old.loader_id == id(loader)]:
                    self._close(left)
                loader_pass = self.new_pass(loader)
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

        def watched_index(next_index: Callable) -> Callable:
            def call(iterator: LoaderIterator) -> object:
                indices = next_index(iterator)
                # With workers, the iterator asks for the first batches while it is made.
                loader_pass = self._starting[-1] if self._starting else pass_of(iterator)
                if not loader_pass.iterable:
                    loader_pass.batch_indices.append(indices)
                return indices

            return call

        def watched_next(following: Callable) -> Callable:
            def call(iterator: LoaderIterator) -> object:
                loader_pass = pass_of(iterator)
                self.before_batch(loader_pass)
                try:
                    batch = following(iterator)
                except StopIteration:
                    loader_pass.complete = True
                    self._close(loader_pass)
                    raise
                loader_pass.batches += 1
                self.after_batch(loader_pass, batch)
                return batch

            return call

        def pass_of(iterator: LoaderIterator) -> PassType:
            return vars(iterator)["watched_pass"]

        replace_call(DataLoader, "__iter__", watched_iter)
        replace_call(LoaderIterator, "_next_index", watched_index)
        replace_call(LoaderIterator, "__next__", watched_next)


def replace_call(owner: object, name: str, watched: Callable[[Callable], Callable]) -> None:
    """Replace a function of a class or a module by what `watched` makes of it."""
    setattr(owner, name, watched(getattr(owner, name)))
