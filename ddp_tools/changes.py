"""Find changes that make training fit a GPU: a smaller batch, bf16, checkpointing, FSDP2.

The command `fits` calls it, in a process that is not a rank. Needs torch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from ddp_tools import PlainError, cards
from ddp_tools.cards import FITS, SIZES
from ddp_tools.fits import KINDS, RANKS, Prediction, Row, digits, need_of_ddp


class Change(NamedTuple):
    """A configuration that needs less memory than the requested one."""

    batch_size: int  # per GPU
    pieces: int  # micro-batches that are accumulated, so that the global batch stays the same
    bf16: bool
    recompute: bool
    way: str
    GPUs: int


def what_would_fit(
    predict_change: Callable[[int, bool, bool], Prediction],
    asked: Prediction,
    bf16: bool,
    gpus: Sequence[str] = SIZES,
) -> tuple[Change | None, str]:
    """Find the first change that makes training fit the largest of these GPUs.

    Args:
        predict_change: predicts with a batch size, bf16 and activation checkpointing.
        asked: the prediction for the requested configuration.
        bf16: whether that one uses bf16.
        gpus: names of GPUs, or GB as sold.

    Returns:
        the change, or None if none fits, and a line that describes it; None and "" if DDP fits
        without a change.

    Raises:
        PlainError: a name in `gpus` is unknown.
    """
    kind = cards.gpus_named(gpus)[-1]
    if kind.answer(need_of_ddp(asked)) == FITS:
        return None, ""

    @cache
    def look_up(batch_size: int, few_bits: bool, recompute: bool) -> Prediction:
        if (batch_size, few_bits, recompute) == (asked["batch size"], bf16, False):
            return asked
        return predict_change(batch_size, few_bits, recompute)

    for change in _changes(asked["batch size"], bf16):
        row = _row_of(asked, change)
        if sum(row[stays] for stays in KINDS[:3]) > kind.sure:
            continue  # the batch size cannot help, so skip the prediction
        try:
            row = _row_of(look_up(change.batch_size, change.bf16, change.recompute), change)
        except PlainError:  # as with BatchNorm and a single sample
            continue
        accumulated = row["gradients"] if change.pieces > 1 and change.way == "FSDP2" else 0
        if kind.answer(need := row["peak"] + accumulated) == FITS:
            words = "; ".join(_change_words(change, asked["batch size"], bf16))
            return change, f"to make it fit {kind.name}, {digits(need / 1e9)} GB: {words}"
    tried = "fewer samples, bf16, activation checkpointing and FSDP2 over up to 8 GPUs"
    return None, f"no change makes it surely fit {kind.name}; tried: {tried}, and all together"


def _changes(batch_size: int, bf16: bool) -> Iterator[Change]:
    """Each change alone, the least work first, and then all of them together."""
    asked = Change(batch_size, 1, bf16, recompute=False, way="DDP", GPUs=RANKS[0])
    halves = [2**power for power in range(1, 20) if batch_size % 2**power == 0]
    pieces = [*dict.fromkeys([*halves, batch_size][batch_size == 1 :])]  # down to one sample each
    sharded = [asked._replace(way="FSDP2", GPUs=ranks) for ranks in RANKS[:3]]
    for number in pieces:
        yield asked._replace(batch_size=batch_size // number, pieces=number)
    yield asked._replace(bf16=True)
    yield asked._replace(recompute=True)
    yield from sharded
    for change in (asked, *sharded):
        for number in (1, *pieces):
            smaller = change._replace(batch_size=batch_size // number, pieces=number)
            yield smaller._replace(bf16=True, recompute=True)


def _change_words(change: Change, batch_size: int, bf16: bool) -> Iterator[str]:
    """Describe the flag to give, or the line to write, for each part of a change."""
    if change.pieces > 1:
        loop = f"(loss / {change.pieces}).backward() for each, then one optimizer.step()"
        stays = f"{change.pieces} micro-batches make {batch_size}: the same global batch"
        yield f"--batch-size-per-rank {change.batch_size}, of which {stays}: {loop}"
    if change.bf16 and not bf16:
        policy = "fully_shard's MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        autocast = 'with torch.autocast("cuda", torch.bfloat16): around forward and loss'
        yield f"--bf16: {policy if change.way == 'FSDP2' else autocast}"
    if change.recompute:
        line = "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
        yield f"activation checkpointing: in forward, {line} for each block"
    if change.way == "FSDP2":
        line = "fully_shard(block) for each block, then fully_shard(model)"
        yield f"FSDP2 over {change.GPUs} GPUs: {line}, before the optimizer is made"


def _row_of(prediction: Prediction, change: Change) -> Row:
    """The row with a change's method and number of GPUs."""
    way = (change.way, change.GPUs)
    return next(row for row in prediction["rows"] if (row["way"], row["GPUs"]) == way)
