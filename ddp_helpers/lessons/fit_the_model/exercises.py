"""The exercises of notebook 14: bytes by ZeRO's stages, pieces of a batch, gradients made ready.

`lessons.check` asks them for verdicts, in the learner's process.
"""

import math

from ddp_helpers.lessons.exercise import Exercise

# ---- 1: what a rank keeps, by the stage of ZeRO

_PARAMETER, _GRADIENT, _STATE = 4, 4, 8  # bytes for each parameter: float32, and AdamW's averages


def kept_bytes(parameters: int, ranks: int, stage: int) -> float:
    """Count the bytes that a rank keeps with AdamW in float32; stage 0 is DDP."""
    state = _STATE / ranks if stage >= 1 else _STATE
    gradients = _GRADIENT / ranks if stage >= 2 else _GRADIENT
    weights = _PARAMETER / ranks if stage >= 3 else _PARAMETER
    return parameters * (weights + gradients + state)


def _only_one_kind(parameters: int, ranks: int, stage: int) -> float:
    """A mistake: each stage cuts another kind, and no other."""
    sizes = [_STATE, _GRADIENT, _PARAMETER]
    return parameters * sum(
        size / ranks if stage == number else size for number, size in enumerate(sizes, 1)
    )


def _parameters_first(parameters: int, ranks: int, stage: int) -> float:
    """A mistake: the parameters are cut first, the optimizer state last."""
    sizes = [_PARAMETER, _GRADIENT, _STATE]
    return parameters * sum(
        size / ranks if stage >= number else size for number, size in enumerate(sizes, 1)
    )


def _one_average(parameters: int, ranks: int, stage: int) -> float:
    """A mistake: AdamW keeps one number for each parameter."""
    saved = _STATE / 2
    return kept_bytes(parameters, ranks, stage) - parameters * (
        saved / ranks if stage >= 1 else saved
    )


_KEPT_BYTES = Exercise(
    kept_bytes,
    [(1000, 4, 0), (1000, 4, 1), (1000, 4, 2), (1000, 4, 3), (7_000_000_000, 8, 3)],
    {
        "A stage cuts what the stages before it cut, too: ZeRO-3 cuts all three kinds.": (
            _only_one_kind
        ),
        "The optimizer state, the largest kind, is cut first; the parameters last.": (
            _parameters_first
        ),
        "AdamW keeps two averages for each parameter, 8 bytes.": _one_average,
    },
)


# ---- 2: pieces of a batch


def pieces_needed(batch: int, a_sample: float, free: float) -> int | None:
    """Return the least number of equal pieces whose activations fit into `free` bytes, or None."""
    for pieces in range(1, batch + 1):
        if batch % pieces == 0 and batch // pieces * a_sample <= free:
            return pieces
    return None


def _pieces_of_any_size(batch: int, a_sample: float, free: float) -> int | None:
    """A mistake: the pieces need not be equal."""
    return math.ceil(batch * a_sample / free) if a_sample <= free else None


def _samples_in_a_piece(batch: int, a_sample: float, free: float) -> int | None:
    """A mistake: the samples of a piece, not the number of pieces."""
    pieces = pieces_needed(batch, a_sample, free)
    return pieces and batch // pieces


def _always_fits(batch: int, a_sample: float, free: float) -> int | None:
    """A mistake: one sample at a time is tried, and never measured."""
    return pieces_needed(batch, a_sample, free) or batch


_PIECES_NEEDED = Exercise(
    pieces_needed,
    [(32, 1e9, 40e9), (32, 2e9, 40e9), (12, 3e9, 8e9), (6, 1e9, 1e9), (8, 9e9, 8e9)],
    {
        "The pieces must be equal: their number divides the batch.": _pieces_of_any_size,
        "That is the number of samples in a piece.": _samples_in_a_piece,
        "If one sample does not fit, accumulation does not help: return None.": _always_fits,
    },
)


# ---- 3: unscale, look, clip

Gradients = list[list[float]]


def ready_gradients(scaled: Gradients, scale: float, max_norm: float) -> Gradients | None:
    """Unscale gradients and clip their norm; None where one is infinite or not a number."""
    gradients = [[value / scale for value in one] for one in scaled]
    if not all(math.isfinite(value) for one in gradients for value in one):
        return None
    return _clip(gradients, max_norm)


def _clip(gradients: Gradients, max_norm: float) -> Gradients:
    """Shorten gradients so that the norm of all their numbers is max_norm at most."""
    norm = math.sqrt(sum(value**2 for one in gradients for value in one))
    factor = min(1.0, max_norm / norm) if norm else 1.0
    return [[value * factor for value in one] for one in gradients]


def _clips_scaled(scaled: Gradients, scale: float, max_norm: float) -> Gradients | None:
    """A mistake: clipped first, divided after."""
    if ready_gradients(scaled, scale, max_norm) is None:
        return None
    return [[value / scale for value in one] for one in _clip(scaled, max_norm)]


def _clips_each(scaled: Gradients, scale: float, max_norm: float) -> Gradients | None:
    """A mistake: each parameter's gradient is clipped for itself."""
    parts = [ready_gradients([one], scale, max_norm) for one in scaled]
    return None if None in parts else [part[0] for part in parts if part]


def _always_clips(scaled: Gradients, scale: float, max_norm: float) -> Gradients | None:
    """A mistake: gradients that are short enough are made longer."""
    gradients = ready_gradients(scaled, scale, math.inf)
    if gradients is None:
        return None
    norm = math.sqrt(sum(value**2 for one in gradients for value in one))
    return [[value * max_norm / norm for value in one] for one in gradients]


def _drops_infinite(scaled: Gradients, scale: float, max_norm: float) -> Gradients | None:
    """A mistake: what is not finite becomes 0, and the step is taken."""
    finite = [[value if math.isfinite(value) else 0.0 for value in one] for one in scaled]
    return ready_gradients(finite, scale, max_norm)


_READY_GRADIENTS = Exercise(
    ready_gradients,
    [
        ([[24.0, 32.0], [8.0]], 8.0, 1.0),
        ([[8.0], [16.0, 16.0]], 8.0, 6.0),
        ([[8.0, math.inf]], 8.0, 1.0),
        ([[1.0], [math.nan]], 8.0, 1.0),
    ],
    {
        "Divide by the scale first: max_norm is meant for the true gradients.": _clips_scaled,
        "One norm of all parameters together: else the direction of the step changes.": _clips_each,
        "Gradients that are short enough stay as they are.": _always_clips,
        "One number that is not finite spoils the step for all: return None, and skip it.": (
            _drops_infinite
        ),
    },
)

EXERCISES = [_KEPT_BYTES, _PIECES_NEEDED, _READY_GRADIENTS]
