"""The exercise on the network dial: where compression begins to pay."""

from ddp_helpers.lessons.exercise import Exercise


def pays_below(gradients: int, factor: float, extra: float, ranks: int) -> float:
    """Bandwidth in bytes/s below which compression is worth it; gradients in bytes, extra in seconds."""
    return 2 * (ranks - 1) / ranks * gradients * (1 - 1 / factor) / extra


PAYS_BELOW = Exercise(
    pays_below,
    [(4_800_000, 2.0, 0.002, 2), (100_000_000, 64.0, 0.010, 8), (4_800_000, 10.0, 0.004, 1)],
    {
        "The compressed bytes must be sent, too: only the rest, 1 - 1/factor of them, is saved.": (
            lambda gradients, factor, extra, ranks: 2 * (ranks - 1) / ranks * gradients / extra
        ),
        "That counts the bytes that are still sent; asked are those that are saved.": (
            lambda gradients, factor, extra, ranks: 2 * (ranks - 1) / ranks * gradients / factor / extra
        ),
        "In a ring each rank sends 2(n - 1)/n times the gradients, not once.": (
            lambda gradients, factor, extra, ranks: gradients * (1 - 1 / factor) / extra
        ),
        "Up to the sum it is (n - 1)/n; the sum must go back to all ranks, which costs as much again.": (
            lambda gradients, factor, extra, ranks: (ranks - 1) / ranks * gradients * (1 - 1 / factor) / extra
        ),
    },
)
