"""Exercises of notebook 12."""

from ddp_helpers.lessons.exercise import Exercise


def bytes_per_rank(parameters: int, ranks: int, way: str) -> float:
    """Compute the memory of a rank in float32 with Adam, without activations; way: DDP, ZeRO or FSDP2."""
    return parameters * {"DDP": 16, "ZeRO": 8 + 8 / ranks, "FSDP2": 16 / ranks}[way]


def bytes_a_step(parameters: int, ranks: int, way: str) -> float:
    """Compute what a rank sends in a step in float32, with bandwidth-optimal collectives; way: DDP or FSDP2."""
    collectives = {"DDP": 2, "FSDP2": 3}[way]
    return collectives * (ranks - 1) / ranks * 4 * parameters


def fewest_pieces(batch: int, fixed: float, each: float, memory: float) -> int | None:
    """The smallest number of equal micro-batches that fits; None if nothing helps."""
    for pieces in range(1, batch + 1):
        if batch % pieces == 0 and fixed + batch // pieces * each <= memory:
            return pieces
    return None


def unequal_pieces(batch: int, fixed: float, each: float, memory: float) -> int | None:
    """As if micro-batches need not be of equal size."""
    sizes = {pieces: -(-batch // pieces) for pieces in range(1, batch + 1)}
    return next((pieces for pieces, size in sizes.items() if fixed + size * each <= memory), None)


def one_image_always_fits(batch: int, fixed: float, each: float, memory: float) -> int:
    """As if the smallest micro-batch had to fit."""
    return fewest_pieces(batch, fixed, each, memory) or batch


SIZES = [(1000, ranks, way) for ranks in (2, 8, 1) for way in ("DDP", "ZeRO", "FSDP2")]
SENT = [(1000, ranks, way) for ranks in (2, 64, 1) for way in ("DDP", "FSDP2")]

EXERCISES = [
    Exercise(
        bytes_per_rank,
        SIZES,
        {
            "Adam keeps two numbers for each parameter, so its state has 8 bytes, and the sum for DDP is 16.": (
                lambda parameters, ranks, way: parameters * {"DDP": 12, "ZeRO": 8 + 4 / ranks, "FSDP2": 12 / ranks}[way]
            ),
            "ZeroRedundancyOptimizer cuts the optimizer state only; parameters and gradients stay whole.": (
                lambda parameters, ranks, way: parameters * (16 if way == "DDP" else 16 / ranks)
            ),
            "DDP cuts nothing: every rank holds a whole replica, its gradients and its optimizer state.": (
                lambda parameters, ranks, way: parameters * {"ZeRO": 8 + 8 / ranks}.get(way, 16 / ranks)
            ),
        },
    ),
    Exercise(
        bytes_a_step,
        SENT,
        {
            "An all-reduce is a reduce-scatter and an all-gather: twice the cost of one.": (
                lambda parameters, ranks, way: {"DDP": 1, "FSDP2": 3}[way] * (ranks - 1) / ranks * 4 * parameters
            ),
            "FSDP2 gathers the weights twice, in forward and in backward, and then scatters gradients.": (
                lambda parameters, ranks, way: 2 * (ranks - 1) / ranks * 4 * parameters
            ),
            "That counts numbers; in float32 each has 4 bytes.": lambda parameters, ranks, way: (
                bytes_a_step(parameters, ranks, way) / 4
            ),
        },
    ),
    Exercise(
        fewest_pieces,
        [(64, 10, 0.5, 80), (64, 50, 1, 80), (64, 50, 1, 57), (12, 50, 1, 52.5), (12, 50, 2, 60), (64, 80, 1, 80)],
        {
            "The pieces are to be of equal size: their number must divide the batch.": unequal_pieces,
            "What stays may already be too much, or one image; then no number of pieces helps: None.": (
                one_image_always_fits
            ),
            "What stays, `fixed`, is there beside the activations.": lambda batch, fixed, each, memory: fewest_pieces(
                batch, 0, each, memory
            ),
        },
    ),
]
