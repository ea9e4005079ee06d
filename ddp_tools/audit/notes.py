"""The notes of an audit's witnesses, as records and as lines of JSON, and the rows of its table.

The witness writes notes on every rank; the learner's process reads and judges them. Needs no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

OK, FAIL, UNKNOWN = "ok", "FAIL", "unknown"
# A row for which no flag was given, and one for which the script has nothing.
SKIPPED, NOT_APPLICABLE = "skipped", "n/a"
CLOSE = 1e-5  # sums that differ by less, relative to the sizes in them, are equal
NO_SUCH_DEVICE = "CUDA error: invalid device ordinal"
STEPS = 40  # of which gradients, random numbers and digests of samples are noted

# For each tensor its sum, and the sum of its absolute values.
TensorSums = Sequence[Sequence[float]]


class Finding(NamedTuple):
    """What a check found: a verdict, what was seen, and the fix if it is FAIL."""

    verdict: str
    seen: str
    cure: str = ""


class Row(NamedTuple):
    """A row of the table: the name of a check, and what it found."""

    name: str
    verdict: str
    seen: str
    cure: str = ""


_KINDS: dict[str, type["Note"]] = {}  # by name


@dataclass(frozen=True, kw_only=True)
class Note:
    """Something that a rank did: when, in seconds since 1970, and at which line, FILE:LINE."""

    time: float = 0.0
    at: str = ""

    def __init_subclass__(cls) -> None:
        """Have `_from_line` find this kind."""
        _KINDS[cls.__name__] = cls


@dataclass(frozen=True, kw_only=True)
class Start(Note):
    """The script begins."""


@dataclass(frozen=True, kw_only=True)
class Pass(Note):
    """A pass over a loader ended, or was left."""

    begun: str = ""  # the line at which it began
    since: float = 0.0  # when it began
    dataset_size: int | None = None  # undivided; None for a stream
    own_size: int | None = None  # of the loader's dataset, which may be a part
    is_part: bool = False  # of the undivided dataset, as a Subset
    dataset: int = 0  # tells the undivided datasets of a rank apart
    iterable: bool = False  # whether it is a stream
    sampler: str = ""  # the name of its class
    shuffles: bool = False
    with_replacement: bool = False  # its samples are drawn so, and may come twice
    batch_size: int = 0  # 0: the loader has none
    batches: int = 0
    complete: bool = False  # the loader had no more batches
    steps: int = 0  # of optimizers, meanwhile
    samples: Sequence[int | str]  # numbers in the undivided dataset; of a stream, digests
    digests: Sequence[str] = ()  # of the samples in the first batches
    augmented: Sequence[str] = ()  # states of the random numbers before batches that used some


@dataclass(frozen=True, kw_only=True)
class Tensors(Note):
    """Tensors of a model: what is compared over ranks, and with other runs."""

    when: str  # begin, forward (a call in training), epoch, test (a pass in eval mode) or end
    model: int = 0  # in the order in which models were wrapped, or copies found
    names: Sequence[str]
    sums: TensorSums
    bits: Sequence[str]  # a digest of each
    sizes: Sequence[int] = ()  # how many numbers each has
    file: str = ""  # that has all numbers, one after the other: .f64 as float64, else as float32
    steps: int = 0  # of optimizers until then


@dataclass(frozen=True, kw_only=True)
class Weights(Tensors):
    """The parameters of a wrapped model."""


@dataclass(frozen=True, kw_only=True)
class Buffers(Tensors):
    """The buffers of a wrapped model; without those of BatchNorm where DDP broadcasts them."""

    transient: Sequence[str] = ()  # those that a state_dict leaves out


@dataclass(frozen=True, kw_only=True)
class Copy(Tensors):
    """Parameters and buffers, without BatchNorm's, of another model like a wrapped one."""

    class_name: str
    made: str  # at which line


@dataclass(frozen=True, kw_only=True)
class Communication(Note):
    """A call by which ranks talk to each other."""

    name: str
    size: Sequence[int] | None = None  # of its first tensor
    numbers: Sequence[float] = ()  # in what this rank gives, if they are few
    counts: bool = False  # all that this rank gives are integers
    lengths: Sequence[int] = ()  # of what this rank gives, and of its parts if it is an object
    adds: bool = False  # it makes a sum or a mean
    added: TensorSums = ()  # over what this rank gives to a sum, if it is no integers
    callers: Sequence[str] = ()  # the script's lines that called that of the call, innermost first


@dataclass(frozen=True, kw_only=True)
class Collective(Communication):
    """A call of all ranks."""


@dataclass(frozen=True, kw_only=True)
class GroupCollective(Communication):
    """A call of the ranks of a group that the script has made."""


@dataclass(frozen=True, kw_only=True)
class PointToPoint(Communication):
    """A call of two ranks."""


@dataclass(frozen=True, kw_only=True)
class Join(Note):
    """init_process_group is called, with what it is given or else finds in RANK and WORLD_SIZE."""

    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Wrap(Note):
    """A model was wrapped in DistributedDataParallel."""

    has_batch_norm: bool = False
    broadcasts: bool = True  # rank 0's buffers, at each forward pass in training


@dataclass(frozen=True, kw_only=True)
class RandomUse(Note):
    """Random numbers of torch were used, whose state was this before."""

    state: str
    in_loop: bool = False  # by the script between a batch and the next; else by a forward pass


@dataclass(frozen=True, kw_only=True)
class Inputs(Note):
    """A wrapped model was called in training, with inputs of this digest."""

    digest: str


@dataclass(frozen=True, kw_only=True)
class NotFinite(Note):
    """The output of a wrapped model, or the loss, was infinite or no number."""

    what: str
    steps: int  # of optimizers until then


@dataclass(frozen=True, kw_only=True)
class Loss(Note):
    """A backward pass begins, at a loss that is a sum of terms divided by this number."""

    divisor: float


@dataclass(frozen=True, kw_only=True)
class Step(Note):
    """An optimizer is about to step."""

    sums: TensorSums  # over the gradients of wrapped models
    other_sums: TensorSums = ()  # over those of other models
    weights: TensorSums = ()  # of both
    rates: Sequence[float] = ()  # the learning rates
    forwards: int = 0  # calls of wrapped models until then
    wrapped_parameters: int = 0  # that this optimizer has of wrapped models
    sharded: bool = False  # it has shards of weights, as FSDP makes them
    sync_changed: bool = False  # require_backward_grad_sync, between forward and backward
    seconds: Mapping[str, float] = field(default_factory=dict)  # since the last step, by phase


@dataclass(frozen=True, kw_only=True)
class Schedule(Note):
    """How often schedulers of learning rates stepped, and optimizers, at the end of the script."""

    calls: int
    steps: int
    idle: int  # of these steps, those at a rate of 0 after a higher one


@dataclass(frozen=True, kw_only=True)
class EvalMode(Note):
    """A wrapped model, or the one inside, is put into eval mode."""

    steps: int  # of optimizers until then


@dataclass(frozen=True, kw_only=True)
class Save(Note):
    """torch.save was called."""

    names: Sequence[str] = ()  # in what is saved
    wrapper: bool = False  # it is the wrapped model itself


@dataclass(frozen=True, kw_only=True)
class FileWritten(Note):
    """A file was opened to write, or renamed to this path."""

    path: str
    tool: str = ""  # logging or hydra, if one of these writes it


@dataclass(frozen=True, kw_only=True)
class Stopped(Note):
    """All ranks are about to be killed, to be started again."""

    file: str = ""  # the name of the one that is half written, if it is in torch.save


@dataclass(frozen=True, kw_only=True)
class Told(Note):
    """This rank is about to get a signal."""

    signal: str  # its name
    handled: bool  # the script has a handler for it
    steps: int  # of optimizers until then, with the one that begins


@dataclass(frozen=True, kw_only=True)
class TimeUp(Note):
    """The time limit came, and the rank was in this function."""

    function: str
    limit: float = 0.0  # seconds


@dataclass(frozen=True, kw_only=True)
class End(Note):
    """The script has ended."""

    status: int
    why: str = ""  # the error, in a line
    by_stand_in: bool = False  # it is of CUDA, in whose place the CPU stands
    raised: bool = False  # it is an exception, and not SystemExit
    steps: int = 0  # of optimizers


Notes = list[Note]
_NoteType = TypeVar("_NoteType", bound=Note)


def to_line(note: Note) -> str:
    """Write a note as a line of JSON."""
    return json.dumps({"kind": type(note).__name__, **vars(note)}) + "\n"


def _from_line(line: str) -> Note:
    """Read a note from a line of JSON; raises json.JSONDecodeError where it is cut short."""
    fields = json.loads(line)
    kind = _KINDS[fields.pop("kind")]
    return kind(**fields)


def read_notes(folder: Path, ranks: int) -> list[Notes]:
    """Read the notes of each rank: none of one that never began, and no line that is cut short."""
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
    """Whether sums over tensors differ by more than rounding; two that are no numbers do not.

    close: relative to the sizes in them.
    """
    pairs = zip_longest(sums, others, fillvalue=(float("inf"), 0.0))
    return any(
        str(total) != str(other_total)
        and not abs(total - other_total) <= close * max(size, other_size, 1e-12)
        for (total, size), (other_total, other_size) in pairs
    )


def is_finite(sums: TensorSums) -> bool:
    """Whether all numbers behind these sums are finite."""
    return all(math.isfinite(size) for _, size in sums)


def training_passes(notes: Notes) -> list[Pass]:
    """Select a rank's training passes over datasets with a length."""
    return [note for note in select(notes, Pass) if note.steps and not note.iterable]


def datasets_differ(ranks: list[Notes]) -> bool:
    """Whether a number stands for another sample on each rank.

    Only of datasets that give one sample for one number: augmented ones tell nothing.
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
    """Collect the digests under which a rank was given each sample, in training."""
    digests: dict[tuple[int | None, int | str], list[str]] = {}
    for note in select(notes, Pass):
        whole_batches = len(note.digests) in (len(note.samples), STEPS * note.batch_size)
        if note.steps and note.digests and whole_batches:
            for sample, digest in zip(note.samples, note.digests, strict=False):
                digests.setdefault((note.dataset_size, sample), []).append(digest)
    return digests
