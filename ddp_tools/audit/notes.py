"""The notes of an audit, as records and as lines of JSON, and the rows of its table.

Every rank writes notes while its script runs; the driver process checks them. Needs no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

OK, FAIL, UNKNOWN = "ok", "FAIL", "unknown"
# A check for which no flag was given, and one that does not apply to the script.
SKIPPED, NOT_APPLICABLE = "skipped", "n/a"
CLOSE = 1e-5  # sums that differ by less, relative to the sizes in them, are equal
NO_SUCH_DEVICE = "CUDA error: invalid device ordinal"
STEPS = 40  # first steps, of which gradients, random numbers and digests of samples are noted

# For each tensor its sum and the sum of its absolute values.
TensorSums = Sequence[Sequence[float]]


class Finding(NamedTuple):
    """The result of a check: a verdict, the finding, and the fix if the verdict is FAIL."""

    verdict: str
    seen: str
    cure: str = ""


class Row(NamedTuple):
    """A row of the table: the name of a check and its result."""

    name: str
    verdict: str
    seen: str
    cure: str = ""


_KINDS: dict[str, type["Note"]] = {}  # by name


@dataclass(frozen=True, kw_only=True)
class Note:
    """An event on a rank: its time, in seconds since 1970, and its line, as FILE:LINE."""

    time: float = 0.0
    at: str = ""

    def __init_subclass__(cls) -> None:
        """Register this kind for `_from_line`."""
        _KINDS[cls.__name__] = cls


@dataclass(frozen=True, kw_only=True)
class Start(Note):
    """The script starts."""


@dataclass(frozen=True, kw_only=True)
class Pass(Note):
    """A pass over a DataLoader has ended, at its end or because the script left the loop."""

    begun: str = ""  # the line at which it started
    since: float = 0.0  # the time at which it started
    dataset_size: int | None = None  # undivided; None for a stream
    own_size: int | None = None  # of the loader's dataset, which may be a Subset
    is_part: bool = False  # the loader's dataset is a Subset of the undivided one
    dataset: int = 0  # tells the undivided datasets of a rank apart
    iterable: bool = False  # whether it is a stream
    sampler: str = ""  # the name of its class
    shuffles: bool = False
    with_replacement: bool = False  # samples are drawn with replacement, and may repeat
    batch_size: int = 0  # 0: the loader has none
    batches: int = 0
    complete: bool = False  # the loader had no more batches
    steps: int = 0  # of optimizers during the pass
    samples: Sequence[int | str]  # indices in the undivided dataset; for a stream, digests
    digests: Sequence[str] = ()  # of the samples in the first batches
    augmented: Sequence[str] = ()  # RNG states before batches that drew random numbers


@dataclass(frozen=True, kw_only=True)
class Tensors(Note):
    """Tensors of a model, to compare over ranks and with the audit's later runs."""

    when: str  # begin, forward (a call in training), epoch, test (a pass in eval mode) or end
    model: int = 0  # in the order in which models were wrapped, or copies found
    names: Sequence[str]
    sums: TensorSums
    bits: Sequence[str]  # a digest of each
    sizes: Sequence[int] = ()  # how many numbers each has
    file: str = ""  # with all numbers, one after the other: .f64 as float64, else as float32
    steps: int = 0  # of optimizers until then


@dataclass(frozen=True, kw_only=True)
class Weights(Tensors):
    """The parameters of a wrapped model."""


@dataclass(frozen=True, kw_only=True)
class Buffers(Tensors):
    """The buffers of a wrapped model, without BatchNorm's if DDP broadcasts buffers."""

    transient: Sequence[str] = ()  # the names that a state_dict leaves out


@dataclass(frozen=True, kw_only=True)
class Copy(Tensors):
    """Parameters and buffers, without BatchNorm's, of a copy of a wrapped model."""

    class_name: str
    made: str  # the line that made it


@dataclass(frozen=True, kw_only=True)
class Communication(Note):
    """A call by which ranks talk to each other."""

    name: str
    size: Sequence[int] | None = None  # of its first tensor
    numbers: Sequence[float] = ()  # this rank's input, if it is a few numbers
    counts: bool = False  # this rank's input is integers only
    lengths: Sequence[int] = ()  # of this rank's input, and of its parts if it is an object
    adds: bool = False  # it computes a sum or a mean
    added: TensorSums = ()  # over this rank's input to a sum, unless it is integers
    callers: Sequence[str] = ()  # the script's lines on the stack above the call, innermost first


@dataclass(frozen=True, kw_only=True)
class Collective(Communication):
    """A call of all ranks."""


@dataclass(frozen=True, kw_only=True)
class GroupCollective(Communication):
    """A call of the ranks of a subgroup."""


@dataclass(frozen=True, kw_only=True)
class PointToPoint(Communication):
    """A call of two ranks."""


@dataclass(frozen=True, kw_only=True)
class Join(Note):
    """A call of init_process_group: its rank and world size, given or from the environment."""

    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Wrap(Note):
    """A model was wrapped in DistributedDataParallel."""

    has_batch_norm: bool = False
    broadcasts: bool = True  # rank 0's buffers, at each forward pass in training


@dataclass(frozen=True, kw_only=True)
class RandomUse(Note):
    """Random numbers were drawn from torch's generator; state: a digest of its state before."""

    state: str
    in_loop: bool = False  # by the script between two batches; else by a forward pass


@dataclass(frozen=True, kw_only=True)
class Inputs(Note):
    """A wrapped model was called in training; digest: of its inputs."""

    digest: str


@dataclass(frozen=True, kw_only=True)
class NotFinite(Note):
    """The output of a wrapped model, or the loss, was infinite or NaN."""

    what: str
    steps: int  # of optimizers until then


@dataclass(frozen=True, kw_only=True)
class Loss(Note):
    """A backward pass starts; divisor: the loss is a sum of terms divided by it."""

    divisor: float


@dataclass(frozen=True, kw_only=True)
class Step(Note):
    """An optimizer is about to step."""

    sums: TensorSums  # over the gradients of wrapped models
    other_sums: TensorSums = ()  # over the gradients of other models
    weights: TensorSums = ()  # over the weights of both
    rates: Sequence[float] = ()  # the learning rates
    forwards: int = 0  # calls of wrapped models until then
    wrapped_parameters: int = 0  # how many of this optimizer's parameters wrapped models have
    sharded: bool = False  # its parameters are shards, as with FSDP
    sync_changed: bool = False  # require_backward_grad_sync changed between forward and backward
    seconds: Mapping[str, float] = field(default_factory=dict)  # since the last step, by phase


@dataclass(frozen=True, kw_only=True)
class Schedule(Note):
    """Steps of learning-rate schedulers and of optimizers, counted at the end of the script."""

    calls: int
    steps: int
    idle: int  # steps at a rate of 0 after a higher one


@dataclass(frozen=True, kw_only=True)
class EvalMode(Note):
    """A wrapped model, or its inner module, is put into eval mode."""

    steps: int  # of optimizers until then


@dataclass(frozen=True, kw_only=True)
class Save(Note):
    """torch.save was called."""

    names: Sequence[str] = ()  # keys of the saved dictionary, and of those inside it
    wrapper: bool = False  # the DDP wrapper itself was saved


@dataclass(frozen=True, kw_only=True)
class FileWritten(Note):
    """A file was opened for writing, or renamed to this path."""

    path: str
    tool: str = ""  # logging or hydra, if one of these wrote it


@dataclass(frozen=True, kw_only=True)
class Stopped(Note):
    """All ranks are about to be killed; the audit starts them again."""

    file: str = ""  # the name of the half-written file, if it is killed within torch.save


@dataclass(frozen=True, kw_only=True)
class Told(Note):
    """This rank is about to get a signal."""

    signal: str  # its name
    handled: bool  # the script has a handler for it
    steps: int  # of optimizers until then, including the one that starts


@dataclass(frozen=True, kw_only=True)
class TimeUp(Note):
    """The time limit was reached while the rank was in this function."""

    function: str
    limit: float = 0.0  # seconds


@dataclass(frozen=True, kw_only=True)
class End(Note):
    """The script has ended."""

    status: int
    why: str = ""  # the error, in one line
    by_stand_in: bool = False  # a CUDA error under --on-cpu, which the CPU's stand-in may cause
    raised: bool = False  # by an exception other than SystemExit
    steps: int = 0  # of optimizers


Notes = list[Note]
_NoteType = TypeVar("_NoteType", bound=Note)


def to_line(note: Note) -> str:
    """Write a note as a line of JSON."""
    return json.dumps({"kind": type(note).__name__, **vars(note)}) + "\n"


def _from_line(line: str) -> Note:
    """Read a note from a line of JSON; raises json.JSONDecodeError if the line is truncated."""
    fields = json.loads(line)
    kind = _KINDS[fields.pop("kind")]
    return kind(**fields)


def read_notes(folder: Path, ranks: int) -> list[Notes]:
    """Read the notes of each rank: an empty list if it never started; no truncated line."""
    notes_of_ranks = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.jsonl"
        notes = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                notes.append(_from_line(line))
            except json.JSONDecodeError:
                break
        notes_of_ranks.append(notes)
    return notes_of_ranks


def select(notes: Notes, kind: type[_NoteType]) -> list[_NoteType]:
    """Select the notes of this kind, in order."""
    return [note for note in notes if isinstance(note, kind)]


def short_line(at: str) -> str:
    """Shorten FOLDER/FILE:LINE to FILE:LINE."""
    return at.rpartition("/")[2] or "an unknown line"


def differ(sums: TensorSums, others: TensorSums, close: float = CLOSE) -> bool:
    """Whether sums over tensors differ by more than rounding; two NaN do not differ.

    close: the tolerance, relative to the sums of absolute values.
    """
    pairs = zip_longest(sums, others, fillvalue=(float("inf"), 0.0))
    return any(
        str(total) != str(other_total)
        and not abs(total - other_total) <= close * max(size, other_size, 1e-12)
        for (total, size), (other_total, other_size) in pairs
    )


def is_finite(sums: TensorSums) -> bool:
    """Whether all numbers in these tensors are finite."""
    return all(math.isfinite(size) for _, size in sums)


def training_passes(notes: Notes) -> list[Pass]:
    """Select a rank's training passes over datasets with a length."""
    return [note for note in select(notes, Pass) if note.steps and not note.iterable]


def datasets_differ(ranks: list[Notes]) -> bool:
    """Whether an index gives a different sample on each rank.

    It compares only datasets that return the same sample for an index each time: augmented
    datasets differ anyway.
    """
    digests, *others = (digests_by_sample(notes) for notes in ranks)
    repeated = [seen for seen in digests.values() if len(seen) > 1]
    shared = []
    for other in others:
        samples = [sample for sample in digests if sample in other]
        shared += [{*digests[sample]} & {*other[sample]} for sample in samples]
    constant = all(len({*seen}) == 1 for seen in repeated)
    return constant and bool(repeated and shared) and not any(shared)


def digests_by_sample(notes: Notes) -> dict[tuple[int | None, int | str], list[str]]:
    """Collect the digests of each training sample of a rank, by dataset size and index."""
    digests: dict[tuple[int | None, int | str], list[str]] = {}
    for note in select(notes, Pass):
        whole_batches = len(note.digests) in (len(note.samples), STEPS * note.batch_size)
        if note.steps and note.digests and whole_batches:
            for sample, digest in zip(note.samples, note.digests, strict=False):
                digests.setdefault((note.dataset_size, sample), []).append(digest)
    return digests
