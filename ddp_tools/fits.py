"""Predict whether training your model fits a GPU, and how many GPUs of which size it needs.

The command `fits` and notebooks call it, in a process that is not a rank: it takes steps on fake
tensors, which have a shape and no memory. Needs torch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Optimizer

from ddp_tools import PlainError, cards
from ddp_tools.cards import BESIDE, CLOSE, FITS, SIZES, SLACK
from ddp_tools.memory import StepMemory, measure_step
from ddp_tools.model_file import advice, error_line, needs_memory, start_autograd

RANKS = (2, 4, 8, 16, 64)
_SMALL = 0.01  # of the peak: smaller buffers are not mentioned
KINDS = ("parameters", "gradients", "optimizer state", "activations")

# A method ("way") on a number of "GPUs", with bytes per GPU: by KINDS, and at most ("peak").
# "alone" is one GPU without DDP, whose gradients are freed between steps. The peak is not the sum:
# not all memory is in use at one time.
Row = dict[str, Any]
# The rows, how they were counted, the samples per GPU, the bytes of buffers, and the loss in words.
Prediction = TypedDict(
    "Prediction",
    {"rows": list[Row], "how": str, "batch size": int, "buffers": float, "loss": str},
)


class _Measured(NamedTuple):
    """The memory of a step on one GPU, for each method that is measured."""

    alone: StepMemory
    ddp: StepMemory
    few_ranks: StepMemory  # FSDP2 on the first of RANKS
    many_ranks: StepMemory  # FSDP2 on the last of RANKS


def predict(
    make: Callable[[], nn.Module],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    batch_size_per_rank: int = 32,
    optimizer: str = "AdamW",
    bf16: bool = False,
    recompute: bool = False,
) -> Prediction:
    """Predict the memory per GPU of training a model, by method and number of GPUs.

    No rank of a process group can call it.

    Args:
        make: returns the model.
        shape, dtype: of one sample.
        batch_size_per_rank: samples per GPU.
        optimizer: a name in torch.optim, or momentum.
        bf16: use autocast, and FSDP2's MixedPrecisionPolicy.
        recompute: use activation checkpointing on the elements of the outermost containers.

    Returns:
        a row for each method and number of GPUs, with bytes per GPU.

    Raises:
        PlainError: an argument is wrong, or the step failed.
    """
    if min([batch_size_per_rank, *shape]) < 1:
        batch = f"a batch of {batch_size_per_rank} samples of shape {tuple(shape)}"
        raise PlainError(f"{batch}: every number must be 1 or more")
    make_optimizer = _optimizer_named(optimizer)
    batch_shape = (batch_size_per_rank, *shape)
    start_autograd()

    def measure(mode: Callable[[], AbstractContextManager]) -> _Measured:
        step = partial(
            measure_step, mode, make, make_optimizer, batch_shape, dtype, bf16, recompute
        )
        return _Measured(
            alone=step(),
            ddp=step(keep_gradients=True),
            few_ranks=step(ranks=RANKS[0]),
            many_ranks=step(ranks=RANKS[-1]),
        )

    try:
        measured, how = _measure_cheaply(measure)
    except (Exception, SystemExit) as error:
        step_text = f"a step on an input of {batch_shape}, {dtype}"
        raise PlainError(f"{step_text}: {error_line(error)}{advice(error)}") from error
    return {
        "rows": _rows(measured),
        "how": how,
        "batch size": batch_size_per_rank,
        "buffers": measured.ddp.buffers,
        "loss": measured.ddp.loss,
    }


def _measure_cheaply(
    measure: Callable[[Callable[[], AbstractContextManager]], _Measured],
) -> tuple[_Measured, str]:
    """Measure on fake tensors, or else on real ones; also return a text on how it was done."""
    try:
        return measure(FakeTensorMode), "on tensors without memory"
    except (AssertionError, RuntimeError) as error:
        if not needs_memory(error):  # real tensors only if needed: the model may be huge
            raise
        reason = f"since on tensors without memory {error_line(error)}"
    return measure(nullcontext), f"in real steps on the CPU, {reason}"


def _optimizer_named(name: str) -> Callable[[list[nn.Parameter]], Optimizer]:
    """A function that makes this optimizer for a list of parameters. Raises PlainError."""
    optimizers: dict[str, Callable[..., Optimizer]] = {
        optimizer.__name__: optimizer
        for optimizer in vars(torch.optim).values()
        if isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    }
    for none in ("Optimizer", "LBFGS"):  # the base class, and the one that requires a closure
        del optimizers[none]
    optimizers["momentum"] = partial(SGD, momentum=0.9)
    if name not in optimizers:
        choice = "give AdamW, Adam, SGD, momentum, …"
        raise PlainError(f"optimizer {name!r} is not in torch.optim or needs a closure: {choice}")
    make = optimizers[name]
    if "foreach" in signature(make).parameters:  # the default on GPUs
        make = partial(make, foreach=True)
    return partial(make, lr=0.001)


def _rows(measured: _Measured) -> list[Row]:
    """A row for each method and number of GPUs."""
    rows = [_row("alone", 1, measured.alone)]
    rows += [_row("DDP", ranks, measured.ddp) for ranks in RANKS]
    rows += [_row("ZeRO", ranks, zero(measured.ddp, ranks)) for ranks in RANKS]
    for ranks in RANKS:
        memory = _fsdp2(measured.few_ranks, measured.many_ranks, ranks)
        rows.append(_row("FSDP2", ranks, memory))
    return rows


def _row(method: str, gpus: int, memory: StepMemory) -> Row:
    peak = max(memory.backward, memory.step)
    return {"way": method, "GPUs": gpus, **memory.kinds, "peak": peak}


def zero(ddp: StepMemory, ranks: int) -> StepMemory:
    """Compute the memory of the rank with the largest shard of the optimizer's state."""
    shares = [0] * ranks
    for size in ddp.parameter_sizes:  # as ZeroRedundancyOptimizer assigns them
        shares[shares.index(min(shares))] += size
    share = max(shares) / sum(shares)
    state = ddp.kinds["optimizer state"]
    stays = ddp.kinds["parameters"] + ddp.kinds["gradients"]
    return ddp._replace(
        kinds=ddp.kinds | {"optimizer state": share * state},
        backward=ddp.backward - (1 - share) * state,
        step=stays + share * (ddp.step - stays),
    )


def _fsdp2(few: StepMemory, many: StepMemory, ranks: int) -> StepMemory:
    """Interpolate the memory of a rank between the first and the last number of RANKS.

    Each number of bytes is a constant plus a part that is divided by the number of ranks.
    """
    least, most = RANKS[0], RANKS[-1]
    weight = (1 / ranks - 1 / most) / (1 / least - 1 / most)

    def between(few_bytes: float, many_bytes: float) -> float:
        return weight * few_bytes + (1 - weight) * many_bytes

    return few._replace(
        kinds={kind: between(few.kinds[kind], many.kinds[kind]) for kind in KINDS},
        backward=between(few.backward, many.backward),
        step=between(few.step, many.step),
    )


def finding(prediction: Prediction, gpus: Sequence[str] = SIZES) -> str:
    """A line on the smallest GPU for DDP, or on the memory that DDP needs if none fits."""
    kinds = cards.gpus_named(gpus)
    need = need_of_ddp(prediction)
    gradients = next(row.get("gradients", 0.0) for row in prediction["rows"] if row["way"] == "DDP")
    size = f"{digits(need / 1e9)} GB ± {SLACK:.0%}"
    takes = f"{size} with {prediction['batch size']} samples on each"
    close = [gpu.name for gpu in kinds if gpu.answer(need) == CLOSE]
    for gpu in kinds:
        if gpu.answer(need) == FITS:
            beside = f"{BESIDE / 1e9:g} GB for CUDA and NCCL"
            note = f"; {CLOSE}: {', '.join(close)}" if close else ""
            if gpu.answer(need + gradients) != FITS:  # without it, DDP's buckets are copies
                more = f"{digits(gradients / 1e9)} GB more"
                note += f"; give DDP gradient_as_bucket_view=True: without it, {more}"
            return f"DDP fits a GPU of {gpu.name}: {takes}, and {beside}{note}"
    answer = f"which is more than {kinds[-1].name} can hold"
    if close:
        answer = f"{CLOSE} on {', '.join(close)}"
    return f"DDP needs {takes} GPU, {answer}"


def fits_somewhere(prediction: Prediction, gpus: Sequence[str] = SIZES) -> bool:
    """Whether any method surely fits one of these GPUs."""
    kinds = cards.gpus_named(gpus)
    peaks = [row["peak"] for row in prediction["rows"]]
    return any(gpu.answer(peak) == FITS for gpu in kinds for peak in peaks)


def need_of_ddp(prediction: Prediction) -> float:
    """The peak memory of DDP per GPU, in bytes."""
    return next(row["peak"] for row in prediction["rows"] if row["way"] == "DDP")


def show_table(prediction: Prediction, gpus: Sequence[str] = SIZES) -> str:
    """Make a table of a prediction, in GB, and the finding below it."""
    kinds = cards.gpus_named(gpus)
    table = [_columns("way", "GPUs", *KINDS, "peak", "fits")]
    for row in prediction["rows"]:
        fitting = [gpu.name for gpu in kinds if gpu.answer(row["peak"]) == FITS]
        sizes = [digits(row[kind] / 1e9) for kind in KINDS]
        peak = digits(row["peak"] / 1e9)
        table.append(_columns(row["way"], row["GPUs"], *sizes, peak, *(fitting[:1] or ["-"])))
    counted = f"GB of each GPU, counted {prediction['how']}; the loss is {prediction['loss']}."
    not_sum = "The peak is not the sum: not all memory is in use at one time."
    if prediction["buffers"] > _SMALL * need_of_ddp(prediction):
        size = digits(prediction["buffers"] / 1e9)
        not_sum += f" Buffers, {size} GB, are only in the peak."
    room = f"{BESIDE / 1e9:g} GB and {SLACK:.0%} left for CUDA, NCCL and the allocator"
    left = f"fits: with {room}, an estimate that was not measured on a GPU."
    here = this_machine(prediction)
    lines = [*table, f"{counted} {not_sum} {left}"]
    lines += [here] if here else []
    return "\n".join([*lines, finding(prediction, gpus)])


def _columns(*cells: object) -> str:
    """A line of the table."""
    return " ".join(f"{cell:>15}" for cell in cells)


def this_machine(prediction: Prediction) -> str:
    """A line on this machine's GPU, or "". It starts CUDA: no rank can be forked afterwards."""
    if not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    answer = cards.gpu_with("this GPU", free, total).answer(need_of_ddp(prediction))
    room = f"{digits(free / 1e9)} of {digits(total / 1e9)} GB free"
    return f"this machine's GPU has {room}; DDP on it: {answer}"


def digits(number: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
