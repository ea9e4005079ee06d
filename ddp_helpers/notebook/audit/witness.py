"""Run an unchanged script on this rank, and note what it does: torchrun … witness.py NOTES LIMIT SCRIPT ITS_ARGUMENTS.

A note is a line of JSON in NOTES/rankN.jsonl, written at once, so that no note is lost with a rank that is ended.
The file needs nothing but torch.
"""

import functools
import hashlib
import json
import os
import re
import runpy
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

STEPS = 40  # of which gradients and random numbers are noted
HERE = str(Path(__file__).resolve())
LIBRARIES = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
KINDS = re.compile("all_|broadcast|barrier|monitored|reduce(?!_op)|gather|scatter")  # of collectives


def places(frame: FrameType | None) -> list[str]:
    """Where the script, and what lies beside it, stands in this frame and in those that called it: file:line."""
    found = []
    while frame:
        name = frame.f_code.co_filename
        if name == HERE:
            if frame.f_code.co_name == "testify":  # below are the launcher's
                break
        elif not name.startswith(LIBRARIES):
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def sums(tensors: Iterator[torch.Tensor]) -> list[tuple[float, float]]:
    """For each tensor its sum and the sum of its sizes, in float64."""
    doubles = (tensor.detach().double() for tensor in tensors)
    return [(float(double.sum()), float(double.abs().sum())) for double in doubles]


def dice() -> str:
    """A digest of the state of torch's random numbers on the CPU."""
    return hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12]


def rows(batch: object) -> list[str]:
    """A digest of each sample in a batch, of the first tensor that is found in it."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    several = isinstance(batch, torch.Tensor) and batch.dim()
    return [hashlib.sha1(row.contiguous().numpy().tobytes()).hexdigest()[:12] for row in batch] if several else []


class Witness:
    """What is noted of one rank, and the hooks that note it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.me = folder / f"rank{os.environ.get('RANK', '0')}.jsonl", os.getpid()
        self.file = self.path.open("w", buffering=1)
        self.open: list[dict] = []  # passes over a loader that have not ended
        self.beginning: list[dict] = []  # the pass whose iterator is being made
        self.inside = False  # a collective, which may call others
        self.wrapped: list[DDP] = []
        self.steps = self.forwards = 0

    def note(self, kind: str, **more: object) -> None:
        """Write a note; a loader's worker, which has this file too, writes none."""
        if os.getpid() == self.me and not self.file.closed:
            at = places(sys._getframe(1))[:1]
            told = {"kind": kind, "time": time.time(), "at": at[0] if at else "", **more}
            self.file.write(json.dumps(told) + "\n")

    def close_pass(self, record: dict, complete: bool) -> None:
        """Note which samples one pass over a loader gave: numbers in the undivided dataset, or digests."""
        if not any(record is one for one in self.open):
            return
        self.open = [one for one in self.open if one is not record]
        asked, dataset = record.pop("asked")[: record["batches"]], record.pop("dataset")
        flat = [i for batch in asked for i in (batch if isinstance(batch, list | tuple) else [batch])]
        flat = [int(i) if hasattr(i, "__int__") else str(i) for i in flat]
        while isinstance(dataset, Subset):
            flat, dataset = [int(dataset.indices[i]) for i in flat], dataset.dataset
        record["whole"] = None if record["iterable"] else len(dataset)
        self.note("pass", **{"samples": flat, **record}, complete=complete)
        if record["steps"] and complete:
            self.weights("epoch")

    def weights(self, when: str) -> None:
        """Note the weights of each wrapped model."""
        for number, model in enumerate(self.wrapped):
            names = [name for name, _ in model.module.named_parameters()]
            self.note("weights", when=when, model=number, names=names, sums=sums(model.module.parameters()))

    def hook_loaders(self) -> None:
        """Note what each pass over a DataLoader gives."""
        begin, index, following = DataLoader.__iter__, Batches._next_index, Batches.__next__

        def noted_begin(loader: DataLoader) -> Batches:
            for old in [old for old in self.open if old["loader"] == id(loader)]:
                self.close_pass(old, False)
            iterable, sampler = isinstance(loader.dataset, IterableDataset), loader.sampler
            record = {"loader": id(loader), "dataset": loader.dataset, "iterable": iterable, "asked": [], "batches": 0}
            record |= {"begun": (places(sys._getframe(1)) or [""])[0], "steps": 0, "augmented": []}
            record |= {"sampler": type(sampler).__name__, "shuffles": bool(getattr(sampler, "shuffle", False))}
            record |= {"batch": loader.batch_size or 0, "workers": loader.num_workers}
            self.open.append(record)
            self.beginning.append(record)
            try:
                batches = begin(loader)
            finally:
                self.beginning.pop()
            batches.noted = record
            weakref.finalize(batches, self.close_pass, record, False).atexit = False  # as after next(iter(loader))
            return batches

        def noted_index(batches: Batches) -> object:
            asked = index(batches)
            record = self.beginning[-1] if self.beginning else batches.noted
            if not record["iterable"]:
                record["asked"].append(asked)
            return asked

        def noted_next(batches: Batches) -> object:
            record, before = batches.noted, dice() if batches.noted["batches"] in (1, 2) else ""
            try:
                batch = following(batches)
            except StopIteration:
                self.close_pass(record, True)
                raise
            record["batches"] += 1
            if before and dice() != before:
                record["augmented"].append(before)
            if record["iterable"]:
                record.setdefault("samples", []).extend(rows(batch))
            return batch

        DataLoader.__iter__, Batches._next_index, Batches.__next__ = noted_begin, noted_index, noted_next

    def hook_collectives(self) -> None:
        """Note each collective of the group of all ranks, in order."""

        def noting(name: str, call: Callable) -> Callable:
            @functools.wraps(call)
            def noted(*things: object, **options: object) -> object:
                if self.inside:
                    return call(*things, **options)
                groups = [g for g in (*things, *options.values()) if isinstance(g, dist.ProcessGroup)]
                first = next((t for t in (*things, *options.values()) if isinstance(t, torch.Tensor)), None)
                size = None if first is None else [*first.shape]
                if not groups or groups[0] is dist.group.WORLD:
                    self.note("collective", name=name, size=size)
                else:
                    self.note("other group", name=name)
                self.inside = True
                try:
                    return call(*things, **options)
                finally:
                    self.inside = False

            return noted

        for name in filter(KINDS.match, distributed_c10d.__all__):
            call = noting(name, getattr(distributed_c10d, name))
            setattr(dist, name, call)
            setattr(distributed_c10d, name, call)

    def hook_model(self) -> None:
        """Note when a model is wrapped, called through its wrapper, and stepped."""
        wrap, forward = DDP.__init__, DDP.forward

        def noted_wrap(model: DDP, *things: object, **options: object) -> None:
            wrap(model, *things, **options)
            self.wrapped.append(model)
            norms = any("BatchNorm" in type(part).__name__ for part in model.modules())
            self.note("wrapped", names=[name for name, _ in model.module.named_parameters()], norms=norms)
            self.weights("begin")

        def noted_forward(model: DDP, *things: object, **options: object) -> object:
            gradients = torch.is_grad_enabled() and model.require_backward_grad_sync
            if gradients or (model.broadcast_buffers and any(True for _ in model.buffers())):
                self.note("collective", name="DDP's forward", size=None)
            self.forwards += 1
            before = dice() if self.forwards <= STEPS else ""
            given = forward(model, *things, **options)
            if before and torch.is_grad_enabled() and dice() != before:
                self.note("random", state=before)
            return given

        def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for record in self.open:
                record["steps"] += 1
            self.steps += 1
            ours = {id(p) for model in self.wrapped for p in model.parameters()}
            given = [p for group in optimizer.param_groups for p in group["params"]]
            grads = [p.grad for p in given if id(p) in ours and p.grad is not None and not p.grad.is_sparse]
            if self.steps <= STEPS:
                self.note("step", sums=sums(grads), forwards=self.forwards, ours=sum(id(p) in ours for p in given))

        DDP.__init__, DDP.forward = noted_wrap, noted_forward
        register_optimizer_step_pre_hook(before_step)

    def hook_files(self) -> None:
        """Note which files are written, and the names in what is saved."""
        save = torch.save

        def noted_save(obj: object, f: object, *things: object, **options: object) -> None:
            self.note("saved", names=[*names(obj)][:2000], whole=isinstance(obj, DDP))
            if isinstance(f, str | os.PathLike):
                self.note("wrote", path=str(Path(f).absolute()))
            save(obj, f, *things, **options)

        def heard(event: str, given: tuple) -> None:
            writes = event == "open" and isinstance(given[0], str | bytes) and given[2] & (os.O_WRONLY | os.O_RDWR)
            path = given[0] if writes else given[1] if event == "os.rename" else ""
            path = str(Path(os.fsdecode(path)).absolute()) if path else ""
            if path and "__pycache__" not in path and not path.startswith(("/dev/", "/proc/", str(self.path.parent))):
                self.note("wrote", path=path)

        torch.save = noted_save
        sys.addaudithook(heard)  # sees each open() of Python's, pathlib's too

    def watch_clock(self, limit: float) -> None:
        """After so many seconds, note where this rank stands, and end it; the others have time to note theirs."""

        def ring() -> None:
            time.sleep(limit)
            frame = sys._current_frames()[threading.main_thread().ident]
            self.note("stands", at=(places(frame) or [""])[0], doing=frame.f_code.co_name)
            time.sleep(3)
            os._exit(124)

        threading.Thread(target=ring, daemon=True).start()


def names(obj: object, depth: int = 3) -> Iterator[str]:
    """The names in what is saved, also of the dictionaries in it."""
    for name, value in obj.items() if isinstance(obj, dict) else ():
        yield str(name)
        if depth:
            yield from names(value, depth - 1)


def testify(folder: str, limit: float, script: str, *words: str) -> None:
    """Run the script with all hooks; every rank calls it. What the script raises goes on."""
    if os.environ.get("DDP_AUDIT_ON_CPU"):
        runpy.run_path(str(Path(HERE).with_name("on_cpu.py")))["begin"]()
    witness = Witness(Path(folder))
    for hook in (witness.hook_loaders, witness.hook_collectives, witness.hook_model, witness.hook_files):
        hook()
    sys.argv, sys.path[0] = [script, *words], str(Path(script).parent)
    witness.note("begins")
    witness.watch_clock(limit)
    status, why, at = 0, "", ""
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        left = isinstance(error, SystemExit)
        why = (error.code if left else f"{type(error).__name__}: {error}") or ""
        status = why if isinstance(why, int) else int(bool(why))
        why = "" if isinstance(why, int) else str(why).partition("\n")[0]
        stack = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        at = next((place for place in reversed(stack) if not place.startswith((*LIBRARIES, HERE))), "")
        raise
    finally:
        for record in [*witness.open]:
            witness.close_pass(record, False)
        witness.weights("end")
        witness.note("ends", status=status, why=why, at=at)


if __name__ == "__main__":
    testify(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
