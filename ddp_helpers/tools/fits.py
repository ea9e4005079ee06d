"""Does training a model of your own fit a GPU, and how many of which size? A step on tensors without memory tells."""

import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.conv import _ConvNd
from torch.optim import SGD

from ddp_helpers import PlainError
from ddp_helpers.tools.memory import movable, step

RANKS = (2, 4, 8, 16, 64)
# What nvidia-smi reports of a card. Most are from github.com/modal-labs/modal-client/pull/2797, the V100-16
# from 4paradigm/k8s-vgpu-scheduler issue 7; A10G, V100-32 and H200 are as many public logs have them.
CARDS = {
    "T4": (16, 15_360),  # sold as so many GB, MiB
    "V100-16": (16, 16_160),
    "A10": (24, 23_028),
    "A10G": (24, 23_028),
    "L4": (24, 23_034),
    "V100-32": (32, 32_510),
    "A100-40": (40, 40_960),
    "L40S": (48, 46_068),
    "H100": (80, 81_559),
    "A100-80": (80, 81_920),
    "H200": (141, 143_771),
}
# Of that the driver keeps up to 0.8 GB: in errors out of memory a T4 has 14.56 GiB (Zheng-Chong/CatVTON
# issue 133), an L40S 44.42 (stepfun-ai/Step-Video-T2V issue 8), an H100 79.11 (vllm-project/vllm issue 27508).
DRIVER = 0.8e9
# For CUDA's context, NCCL and cuBLAS; for the allocator, and what the prediction is off: never measured here.
BESIDE, SLACK = 1e9, 0.05
GPUS = ("16", "24", "40", "80")
KINDS = ("parameters", "gradients", "optimizer state", "activations")
NEED_MEMORY = tuple(
    getattr(fake_tensor, f"{name}Exception")
    for name in ("DataDependentOutput", "DynamicOutputShape", "UnsupportedFakeTensor", "UnsupportedOperator")
)
SAY_SO = "convert all Tensors to FakeTensors", "data pointer of Tensor", "numpy() is not supported for tensor subclass"

logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)  # an error is told here, in a line


class FitsError(PlainError):
    """The model cannot be loaded, or cannot take a step."""


def zero(ddp: dict, ranks: int) -> dict:
    """Give what a rank with the largest share of the optimizer's state holds, from what DDP holds."""
    shares = [0] * ranks
    for size in ddp["sizes"]:  # so ZeroRedundancyOptimizer deals them out
        shares[shares.index(min(shares))] += size
    share, state, rest = max(shares) / sum(shares), ddp["optimizer state"], ddp["parameters"] + ddp["gradients"]
    found = {"optimizer state": share * state, "backward": ddp["backward"] - (1 - share) * state}
    return ddp | found | {"step": rest + share * (ddp["step"] - rest)}


def fsdp2(few: dict, many: dict, ranks: int) -> dict:
    """Give what a rank holds, from the least and the most ranks: all is a constant and a part that they share."""
    weight = (1 / ranks - 1 / RANKS[-1]) / (1 / RANKS[0] - 1 / RANKS[-1])
    return {kind: weight * few[kind] + (1 - weight) * many[kind] for kind in (*KINDS, "backward", "step")}


def predict(
    make: Callable[[], nn.Module],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    batch_size_per_rank: int = 32,
    optimizer: str = "AdamW",
    bf16: bool = False,
) -> dict:
    """Predict the memory in bytes of a GPU in training, by way and number of GPUs, for the model that `make` returns.

    shape, dtype: of one sample; batch_size_per_rank: samples on each GPU; optimizer: of torch.optim, or momentum;
    bf16: autocast, and FSDP2's MixedPrecisionPolicy. Raises FitsError. No rank of a process group can call it.
    Returns "rows", each with its "way" (DDP, ZeRO, FSDP2, or "alone": one GPU without DDP, whose gradients are freed
    between steps), its number of "GPUs", the bytes of each of KINDS and the "peak"; "how" they were counted; and
    "batch size".
    """
    if min([batch_size_per_rank, *shape]) < 1:
        batch = f"a batch of {batch_size_per_rank} samples of shape {tuple(shape)}"
        raise FitsError(f"{batch}: every number must be 1 or more")
    rule = partial(SGD, momentum=0.9) if optimizer == "momentum" else getattr(torch.optim, optimizer, None)
    if not callable(rule):
        raise FitsError(f"optimizer {optimizer!r} is none of torch.optim's: give AdamW, Adam, SGD, momentum, …")
    foreach = {"foreach": True} if "foreach" in signature(rule).parameters else {}  # as it does on GPUs
    batch, rule = ((batch_size_per_rank, *shape), dtype), partial(rule, lr=0.001, **foreach)
    torch.ones((), requires_grad=True).backward()  # else the first one starts threads, and no rank can be forked

    def steps(mode: Callable) -> list[dict]:
        ways = {}, {"stay": True}, {"ranks": RANKS[0]}, {"ranks": RANKS[-1]}
        return [step(mode, make, rule, batch, bf16, **way) for way in ways]

    try:
        try:
            how, (alone, ddp, few, many) = "on tensors without memory", steps(FakeTensorMode)
        except (AssertionError, RuntimeError) as error:  # only what needs memory gets it: the model may be huge
            if not needs_memory(error):
                raise
            how = f"in real steps on the CPU, since on tensors without memory {said(error)}"
            alone, ddp, few, many = steps(nullcontext)
    except (Exception, SystemExit) as error:
        raise FitsError(f"a step on an input of {tuple(batch[0])}, {dtype}: {said(error)}") from error
    ways = [("alone", 1, alone), *(("DDP", ranks, ddp) for ranks in RANKS)]
    ways += [("ZeRO", ranks, zero(ddp, ranks)) for ranks in RANKS]
    ways += [("FSDP2", ranks, fsdp2(few, many, ranks)) for ranks in RANKS]
    rows = [
        {"way": way, "GPUs": ranks, **{kind: one[kind] for kind in KINDS}, "peak": max(one["backward"], one["step"])}
        for way, ranks, one in ways
    ]
    return {"rows": rows, "how": how, "batch size": batch_size_per_rank}


def needs_memory(error: BaseException) -> bool:
    """Whether torch cannot do it on tensors without memory, so that real ones are needed."""
    return isinstance(error, NEED_MEMORY) or any(words in str(error) for words in SAY_SO)


def sample_of(
    make: Callable[[], nn.Module], shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> tuple[tuple[int, ...], torch.dtype, str]:
    """Complete the shape and type of one sample of the model that `make` returns from its first layer with weights.

    Returns both, and a line that says what was read off, or "". Raises FitsError where the layer does not tell.
    """
    if shape and dtype:
        return tuple(shape), dtype, ""
    layer = first_layer(make)
    if not dtype and isinstance(layer, nn.Embedding):
        dtype = torch.int64
    dtype = dtype or (next(layer.parameters()).dtype if layer else torch.float32)  # .half() and the like
    if shape:
        return tuple(shape), dtype, ""
    if not isinstance(layer, nn.Linear):
        example, tells = unread(layer)
        raise FitsError(f"give the shape of one sample, as in --input {example}: {tells}")
    first = f"{type(layer).__name__}, the first layer with weights, takes {layer.in_features} numbers"
    return (layer.in_features,), dtype, f"{first}: so many are taken for a sample. --input gives another shape."


def unread(layer: nn.Module | None) -> tuple[str, str]:
    """Give an example of the shape that a first layer takes, and what it tells of it."""
    first = f"the first layer with weights, {type(layer).__name__},"
    if isinstance(layer, _ConvNd):
        sides, channels = len(layer.kernel_size), layer.in_channels
        return f"{channels}{sides * ' 32'}", f"{first} takes {channels} channel{'s' * (channels > 1)} of any size"
    if isinstance(layer, nn.Embedding):
        return "128", f"{first} takes any number of tokens"
    if isinstance(layer, nn.RNNBase):
        return f"100 {layer.input_size}", f"{first} takes {layer.input_size} numbers at each of any number of steps"
    return "1 28 28", f"{first} does not tell it" if layer else "no layer has weights"


def first_layer(make: Callable[[], nn.Module]) -> nn.Module | None:
    """Get the first layer with weights of its own in the model that `make` returns; or raises FitsError."""
    try:
        try:
            with FakeTensorMode(), movable():
                layers = list(make().modules())
        except (AssertionError, RuntimeError) as error:
            if not needs_memory(error):
                raise
            layers = list(make().modules())
    except (Exception, SystemExit) as error:
        raise FitsError(f"the model cannot be made: {said(error)}") from error
    return next((layer for layer in layers if list(layer.parameters(recurse=False))), None)


def said(error: BaseException) -> str:
    """Tell an error in one line, with the last line of code that is neither torch's nor this file's."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def load(place: str) -> Callable[[], nn.Module]:
    """Get what makes the model out of FILE.py:NAME, a class or a function that needs no argument; raises FitsError."""
    file, _, name = place.rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise FitsError(f"{place!r} is not FILE.py:NAME, with a file that is there and a class or a function in it")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as for a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise FitsError(f"{path.name} cannot be imported: {said(error)}") from error
    if not callable(getattr(module, name, None)):
        raise FitsError(f"{path.name} has no class and no function {name!r}")
    return getattr(module, name)


def digits(number: float) -> str:
    """Write it with three digits, or with all those before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


class Gpu(NamedTuple):
    """A kind of GPU: its name, and in bytes what surely fits, and what torch can have at most."""

    name: str
    sure: float
    most: float

    def answer(self, need: float) -> str:
        """Whether tensors of so many bytes fit: fits, too close to tell, or does not fit."""
        if need <= self.sure:
            return "fits"
        return "too close to tell" if need <= self.most else "does not fit"


def kinds_of(names: Sequence[str] = GPUS) -> list[Gpu]:
    """GPUs by name, the smallest first: of CARDS, or GB as sold, the least such card. Raises FitsError."""
    kinds = []
    for name in names:
        sizes = [mib * 2**20 for card, (sold, mib) in CARDS.items() if name.upper() in (card, str(sold))]
        try:
            size = min(sizes) if sizes else float(name) * 1e9  # no card of the table has less
        except ValueError:
            size = 0
        if not 0 < size < 1e18:
            raise FitsError(f"--gpu {name} is no number of GB, and none of {', '.join(CARDS)}")
        most = size - DRIVER
        label = f"type {name.upper()}" if name.upper() in CARDS else f"{name} GB"
        kinds.append(Gpu(label, most * (1 - SLACK) - BESIDE, most))
    return sorted(kinds, key=lambda gpu: gpu.most)


def own(found: dict) -> str:
    """A line on this machine's GPU, or "". It starts CUDA, after which no rank can be forked."""
    if not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    gpu = Gpu("this GPU", free * (1 - SLACK) - BESIDE, total)
    answer = gpu.answer(need_of(found))
    room = f"{digits(free / 1e9)} of {digits(total / 1e9)} GB free"
    return f"this machine's GPU has {room}; DDP on it: {answer}"


def need_of(found: dict) -> float:
    """What DDP takes of each GPU, in bytes."""
    return next(row["peak"] for row in found["rows"] if row["way"] == "DDP")


def finding(found: dict, gpus: Sequence[str] = GPUS) -> str:
    """Say in a line which is the smallest GPU for DDP, or else what fits, and where it is close."""
    kinds, need, samples = kinds_of(gpus), need_of(found), found["batch size"]
    takes = f"{digits(need / 1e9)} GB ± {SLACK:.0%} with {samples} samples on each"
    close = [gpu.name for gpu in kinds if gpu.answer(need) == "too close to tell"]
    note = f"; too close to tell: {', '.join(close)}" if close else ""
    for gpu in kinds:
        if gpu.answer(need) == "fits":
            beside = f"{BESIDE / 1e9:g} GB for CUDA and NCCL"
            return f"DDP fits a GPU of {gpu.name}: {takes}, and {beside}{note}"
    ways = []
    for gpu in kinds:
        if row := next((row for row in found["rows"] if gpu.answer(row["peak"]) == "fits"), None):
            ways.append(f"{row['way']} fits {gpu.name} from {row['GPUs']} GPUs on")
    rest = "; ".join(ways) or "nothing else surely fits: fewer samples, or activation checkpointing"
    place = f"more than {kinds[-1].name} has room for"
    if close:
        place = f"too close to tell on {', '.join(close)}"
    return f"DDP needs {takes} GPU, {place}; {rest}"


def show(found: dict, gpus: Sequence[str] = GPUS) -> str:
    """Make a table of a prediction, in GB, and the finding below it."""
    kinds, lines = kinds_of(gpus), [("way", "GPUs", *KINDS, "peak", "fits")]
    for row in found["rows"]:
        fits = next((gpu.name for gpu in kinds if gpu.answer(row["peak"]) == "fits"), "-")
        lines.append((row["way"], row["GPUs"], *(digits(row[kind] / 1e9) for kind in (*KINDS, "peak")), fits))
    table = [" ".join(f"{word:>15}" for word in line) for line in lines]
    told = f"GB of each GPU, counted {found['how']}. The peak is no sum: not all is there at one time."
    room = f"{BESIDE / 1e9:g} GB and {SLACK:.0%} left for CUDA, NCCL and the allocator"
    left = f"fits: with {room}, which was measured on no GPU."
    return "\n".join([*table, f"{told} {left}", *filter(None, [own(found)]), finding(found, gpus)])
