"""Exercises of notebook 05."""

from ddp_helpers.lessons.exercise import Exercise


def without_prefix(state: dict) -> dict:
    """The same state dict for the plain model: no `module.` in front of any name."""
    return {name.removeprefix("module."): value for name, value in state.items()}


def fill_buckets(sizes: list[int], cap: int) -> list[list[int]]:
    """The buckets, in the order in which they leave, each with the sizes of its gradients."""
    buckets, bucket = [], []
    for size in sizes:
        bucket.append(size)
        if sum(bucket) >= cap:
            buckets.append(bucket)
            bucket = []
    return [*buckets, bucket] if bucket else buckets


def sent_per_step(mb: float, world_size: int, micro_batches: int, no_sync: bool) -> float:
    """MB that each rank sends in one optimizer step, round the ring."""
    return 2 * (world_size - 1) / world_size * mb * (1 if no_sync else micro_batches)


def drifted(replicas: list[dict]) -> list[str]:
    """The names of the parameters that are not the same in all replicas."""
    return [name for name, values in replicas[0].items() if any(one[name] != values for one in replicas)]


def _never_above(sizes: list[int], cap: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    for size in sizes:
        if buckets and sum(buckets[-1]) + size <= cap:
            buckets[-1].append(size)
        else:
            buckets.append([size])
    return buckets


EQUAL = {"fc.weight": [0.25, 0.5], "fc.bias": [1.0]}

EXERCISES = [
    Exercise(
        without_prefix,
        [
            ({"module.fc1.weight": 1, "module.fc1.bias": 2},),
            ({"module.head.module.bias": 3, "model.weight": 4},),
            ({},),
        ],
        {
            "Only the front of a name goes: a layer further inside may be called module too.": lambda state: {
                name.replace("module.", ""): value for name, value in state.items()
            },
            "A name without the prefix stays as it is.": lambda state: {
                name[len("module.") :]: value for name, value in state.items()
            },
            "lstrip takes away any of these letters, not the word.": lambda state: {
                name.lstrip("module."): value for name, value in state.items()
            },
        },
    ),
    Exercise(
        fill_buckets,
        [([4, 4, 4, 4, 4], 8), ([1, 30, 2, 2], 25), ([5, 3, 9], 8)],
        {
            "A bucket leaves when it holds cap or more: it takes the gradient that fills it.": _never_above,
            "The last bucket leaves too, with what there is.": lambda sizes, cap: [
                bucket for bucket in fill_buckets(sizes, cap) if sum(bucket) >= cap
            ],
        },
    ),
    Exercise(
        sent_per_step,
        [(100, 4, 8, True), (100, 4, 8, False), (100, 1, 8, False), (12, 3, 2, True)],
        {
            "Without no_sync every micro-batch ends in an all-reduce.": lambda mb, world_size, k, no_sync: (
                2 * (world_size - 1) / world_size * mb
            ),
            "The ring is gone round twice: once to add up, once to share.": lambda mb, world_size, k, no_sync: (
                (world_size - 1) / world_size * mb * (1 if no_sync else k)
            ),
            "no_sync saves all-reduces: with it there is one a step.": lambda mb, world_size, k, no_sync: (
                2 * (world_size - 1) / world_size * mb * (k if no_sync else 1)
            ),
        },
    ),
    Exercise(
        drifted,
        [
            ([EQUAL, EQUAL],),
            ([EQUAL, EQUAL | {"fc.bias": [1.5]}, EQUAL],),
            ([EQUAL, EQUAL, EQUAL | {"fc.weight": [0.5, 0.25]}],),
        ],
        {
            "Any rank may have drifted, not only the last: compare all of them.": lambda replicas: [
                name for name in replicas[0] if replicas[0][name] != replicas[-1][name]
            ],
            "Different weights can have the same sum: compare them one by one.": lambda replicas: [
                name for name in replicas[0] if len({sum(one[name]) for one in replicas}) > 1
            ],
        },
    ),
]
