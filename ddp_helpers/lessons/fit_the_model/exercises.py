"""The exercises of notebook 14: bytes by ZeRO's stages, micro-batches, gradients before a step.

`lessons.check` asks them for verdicts, in the driver process.
"""

import math
from itertools import chain

from ddp_helpers.lessons.exercise import Exercise

# ---- 1: what a rank keeps, by the stage of ZeRO

# Bytes for each parameter in float32, in the order in which the stages shard them.
_STATE, _GRADIENT, _PARAMETER = 8, 4, 4  # AdamW keeps two averages


def kept_bytes(parameters: int, ranks: int, stage: int) -> float:
    """Count the bytes that a rank keeps with AdamW in float32; stage 0 is DDP."""
    return parameters * _kept(ranks, stage, _STATE, _GRADIENT, _PARAMETER)


def _kept(ranks: int, stage: int, *sizes: int) -> float:
    """Count the bytes that are kept for a parameter, if each stage shards one more of the sizes."""
    return sum(sizes[:stage]) / ranks + sum(sizes[stage:])


_KEPT_BYTES = Exercise(
    kept_bytes,
    [(1000, 4, 0), (1000, 4, 1), (1000, 4, 2), (1000, 4, 3), (7_000_000_000, 8, 3)],
    {
        "A stage also shards what earlier stages shard: ZeRO-3 shards all three kinds.": (
            lambda parameters, ranks, stage: (
                kept_bytes(parameters, ranks, 0)
                - kept_bytes(parameters, ranks, stage - 1)
                + kept_bytes(parameters, ranks, stage)
            )
        ),
        "The optimizer state, the largest kind, is sharded first; the parameters last.": (
            lambda parameters, ranks, stage: (
                parameters * _kept(ranks, stage, _PARAMETER, _GRADIENT, _STATE)
            )
        ),
        "AdamW keeps two averages for each parameter, 8 bytes.": (
            lambda parameters, ranks, stage: parameters * _kept(ranks, stage, 4, 4, 4)
        ),
    },
)


# ---- 2: micro-batches


def pieces_needed(batch: int, a_sample: float, free: float) -> int | None:
    """Return the least number of equal micro-batches that fit into `free` bytes, or None."""
    for pieces in range(1, batch + 1):
        if batch % pieces == 0 and batch // pieces * a_sample <= free:
            return pieces
    return None


_PIECES_NEEDED = Exercise(
    pieces_needed,
    [(32, 1e9, 40e9), (32, 2e9, 40e9), (12, 3e9, 8e9), (6, 1e9, 1e9), (8, 9e9, 8e9)],
    {
        "The micro-batches must be equal: their number divides the batch.": (
            lambda batch, a_sample, free: (
                math.ceil(batch * a_sample / free) if a_sample <= free else None
            )
        ),
        "That is the number of samples in a micro-batch.": (
            lambda batch, a_sample, free: (
                (pieces := pieces_needed(batch, a_sample, free)) and batch // pieces
            )
        ),
        "If one sample does not fit, accumulation does not help: return None.": (
            lambda batch, a_sample, free: pieces_needed(batch, a_sample, free) or batch
        ),
    },
)


# ---- 3: unscale, look, clip

Gradients = list[list[float]]


def ready_gradients(scaled: Gradients, scale: float, max_norm: float) -> Gradients | None:
    """Unscale gradients and clip their norm; None if one is infinite or not a number."""
    gradients = [[value / scale for value in one] for one in scaled]
    if not all(math.isfinite(value) for one in gradients for value in one):
        return None
    norm = math.hypot(*chain.from_iterable(gradients))
    factor = min(1.0, max_norm / norm)
    return [[value * factor for value in one] for one in gradients]


def _clips_each(scaled: Gradients, scale: float, max_norm: float) -> Gradients | None:
    """A mistake: each parameter's gradient is clipped separately."""
    parts = [ready_gradients([one], scale, max_norm) for one in scaled]
    return None if None in parts else [part[0] for part in parts if part]


_READY_GRADIENTS = Exercise(
    ready_gradients,
    [
        ([[24.0, 32.0], [8.0]], 8.0, 1.0),
        ([[8.0], [16.0, 16.0]], 8.0, 6.0),
        ([[8.0, math.inf]], 8.0, 1.0),
        ([[1.0], [math.nan]], 8.0, 1.0),
    ],
    {
        "Divide by the scale first: max_norm applies to the true gradients.": (
            lambda scaled, scale, max_norm: ready_gradients(scaled, scale, max_norm / scale)
        ),
        "Use one norm of all parameters: otherwise the step's direction changes.": _clips_each,
        "Gradients that are short enough stay as they are.": (
            lambda scaled, scale, max_norm: ready_gradients(scaled, scale / 1e6, max_norm)
        ),
    },
)

EXERCISES = [_KEPT_BYTES, _PIECES_NEEDED, _READY_GRADIENTS]
