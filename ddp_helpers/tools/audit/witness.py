"""Run an unchanged script on this rank, and note what it does: torchrun … witness.py NOTES LIMIT SCRIPT ITS_ARGUMENTS.

A note is a line of JSON in NOTES/rankN.jsonl, written at once: none is lost with a rank that is ended. Needs torch.
"""

import functools
import hashlib
import json
import os
import re
import runpy
import signal
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

STEPS = 40  # of which gradients and random numbers are noted
HERE = str(Path(__file__).resolve())
LIBRARIES = ("<frozen", str(Path(HERE).parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
# What ranks call to talk to each other; the second, only two of them.
KINDS = re.compile("all_|broadcast|barrier|monitored|reduce(?!_op)|gather|scatter|i?send|i?recv|batch_isend")
PAIRS = re.compile("i?send|i?recv|batch_isend")


def places(frame: FrameType | None) -> list[str]:
    """Where the script, and what lies beside it, stands in this frame and in those that called it: file:line."""
    found = []
    while frame:
        name = frame.f_code.co_filename
        if name == HERE and frame.f_code.co_name == "testify":  # below are the launcher's
            break
        if not name.startswith(LIBRARIES):
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def sums(tensors: Iterable[torch.Tensor]) -> list[tuple[float, float]]:
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
    plain = isinstance(batch, torch.Tensor) and batch.layout == torch.strided and not batch.is_complex()
    flat = [row.detach().cpu().reshape(-1).view(torch.uint8) for row in batch] if plain and batch.dim() else []
    return [hashlib.sha1(row.numpy().tobytes()).hexdigest()[:12] for row in flat]


class Witness:
    """What is noted of one rank, and the hooks that note it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.me = folder / f"rank{os.environ.get('RANK', '0')}.jsonl", os.getpid()
        self.file = self.path.open("w", buffering=1)
        self.open, self.beginning = [], []  # passes over a loader: that have not ended; whose iterator is being made
        self.inside, self.wrapped, self.stepping = False, [], None  # in a collective, which may call others; the models
        self.steps = self.forwards = self.saved = 0  # saved: after which step first
        (folder / f"{self.path.stem}.pid").write_text(str(self.me))

    def note(self, kind: str, **more: object) -> None:
        """Write a note; a loader's worker, which has this file too, writes none."""
        if os.getpid() == self.me and not self.file.closed:
            told = {"kind": kind, "time": time.time(), "at": (places(sys._getframe(1)) or [""])[0], **more}
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
        whole = None if record["iterable"] else len(dataset)
        self.note("pass", **record, samples=record["rows"] if whole is None else flat, complete=complete, whole=whole)
        if record["steps"] and complete:
            self.weights("epoch")

    def weights(self, when: str) -> None:
        """Note the weights of each wrapped model."""
        for number, model in enumerate(self.wrapped):
            named = dict(model.module.named_parameters())
            bits = b"".join(one.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for one in named.values())
            told = {"names": [*named], "sums": sums(named.values()), "bits": [hashlib.sha1(bits).hexdigest()]}
            self.note("weights", when=when, model=number, **told)

    def hook_loaders(self) -> None:
        """Note what each pass over a DataLoader gives."""
        begin, index, following = DataLoader.__iter__, Batches._next_index, Batches.__next__

        def noted_begin(loader: DataLoader) -> Batches:
            for old in [old for old in self.open if old["loader"] == id(loader)]:
                self.close_pass(old, False)
            iterable, sampler = isinstance(loader.dataset, IterableDataset), loader.sampler
            record = {"loader": id(loader), "dataset": loader.dataset, "iterable": iterable, "asked": [], "batches": 0}
            record |= {"begun": (places(sys._getframe(1)) or [""])[0], "since": time.time(), "steps": 0}
            record |= {"sampler": type(sampler).__name__, "shuffles": bool(getattr(sampler, "shuffle", False))}
            record |= {"batch": loader.batch_size or 0, "augmented": [], "rows": []}
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
            record["rows"].extend(rows(batch) if record["iterable"] or record["batches"] <= STEPS else ())
            return batch

        DataLoader.__iter__, Batches._next_index, Batches.__next__ = noted_begin, noted_index, noted_next

    def hook_collectives(self) -> None:
        """Note each collective, and what is sent from rank to rank, in order."""

        def noting(name: str, call: Callable) -> Callable:
            @functools.wraps(call)
            def noted(*things: object, **options: object) -> object:
                if self.inside:
                    return call(*things, **options)
                groups = [g for g in (*things, *options.values()) if isinstance(g, dist.ProcessGroup)]
                first = next((t for t in (*things, *options.values()) if isinstance(t, torch.Tensor)), None)
                size = None if first is None else [*first.shape]
                kind = "collective" if not groups or groups[0] is dist.group.WORLD else "other group"
                self.note("pair" if PAIRS.match(name) else kind, name=name, size=size)
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
            self.note("wrapped", norms=any("BatchNorm" in type(part).__name__ for part in model.modules()))
            self.weights("begin")

        def noted_forward(model: DDP, *things: object, **options: object) -> object:
            gradients = torch.is_grad_enabled() and model.require_backward_grad_sync
            if gradients or (model.broadcast_buffers and any(True for _ in model.buffers())):
                self.note("collective", name="DDP's forward", size=None)
            self.forwards += 1
            before = dice() if self.forwards <= 10 * STEPS else ""
            given = forward(model, *things, **options)
            if before and torch.is_grad_enabled() and dice() != before:
                self.note("random", state=before)
            return given

        def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self.stepping = None if self.stepping is optimizer else self.stepping

        def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if self.stepping:  # ZeroRedundancyOptimizer has one of its own for its share of the weights
                return
            self.stepping = optimizer
            for record in self.open:
                record["steps"] += 1
            self.steps += 1
            ours = {id(p) for model in self.wrapped for p in model.parameters()}
            given = [p for group in optimizer.param_groups for p in group["params"]]
            if self.steps <= STEPS:
                grads = [p.grad for p in given if id(p) in ours and p.grad is not None and not p.grad.is_sparse]
                self.note("step", sums=sums(grads), forwards=self.forwards, ours=sum(id(p) in ours for p in given))
            if os.environ.get("DDP_AUDIT_STOP") == os.environ.get("RANK") and 0 < self.saved < self.steps - 2:
                self.stop()

        DDP.__init__, DDP.forward = noted_wrap, noted_forward
        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(after_step)

    def hook_files(self) -> None:
        """Note which files are written, and the names in what is saved."""
        save = torch.save

        def noted_save(obj: object, f: object, *things: object, **options: object) -> None:
            self.note("saved", names=[*names(obj)][:2000], whole=isinstance(obj, DDP))
            self.saved = self.saved or self.steps
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

    def stop(self) -> None:
        """End all ranks at once, two steps after something was saved; rank 0 calls it."""
        self.note("stopped")
        for path in sorted(self.path.parent.glob("rank*.pid"), reverse=True):  # rank 0, which does it, is the last
            os.kill(int(path.read_text()), signal.SIGKILL)

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
        yield from names(value, depth - 1) if depth else ()


def testify(folder: str, limit: float, script: str, *words: str) -> None:
    """Run the script with all hooks; every rank calls it. What the script raises goes on."""
    for name in ["as_launched"] + ["without_gpus"] * bool(os.environ.get("DDP_AUDIT_ON_CPU")):
        runpy.run_path(str(Path(HERE).with_name("stand_in.py")))[name]()
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
        why = (error.code if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}") or ""
        status = why if isinstance(why, int) else int(bool(why))
        why = "" if isinstance(why, int) else str(why).partition("\n")[0]
        stack = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        at = next((place for place in reversed(stack) if not place.startswith(LIBRARIES)), "")
        raise
    finally:
        for record in [*witness.open]:
            witness.close_pass(record, False)
        witness.weights("end")
        witness.note("ends", status=status, why=why, at=at)


if __name__ == "__main__":
    testify(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
