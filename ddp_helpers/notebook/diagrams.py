"""The course's schematic figures: every number in them follows from the arguments."""

import math
from functools import partial

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from ddp_helpers.notebook import shapes
from ddp_helpers.notebook.picture import Picture, described
from ddp_helpers.notebook.shapes import (
    CODE,
    LEFT,
    MINUS,
    RIGHT,
    SMALL,
    TIMES,
    arrow,
    box,
    canvas,
    fitting,
    link,
    pieces,
    span,
    write,
)
from ddp_helpers.notebook.style import GREY, INK, rank_colour


def spmd(world_size: int = 4) -> Picture:
    """One script, many processes: what differs between the ranks, and what all-reduce makes equal again."""
    gradients = [2 * rank + 1 for rank in range(world_size)]
    mean, weight, rate = sum(gradients) / world_size, 10, 0.5
    after, terms = weight - rate * mean, " + ".join(map(str, gradients))
    ax = canvas(6.35, "One program, many processes: different data, the same weights")
    box(ax, (2.3, 0.5), (7.1, 0.42), f"one script, started {world_size} times")
    for rank, (left, width) in enumerate(pieces(2.3, RIGHT, world_size)):
        arrow(ax, (left + width / 2, 0.95), (left + width / 2, 1.25))
        box(ax, (left, 1.27), (width, 4.95), colour=rank_colour(rank), fill=0.04)
        write(ax, left + width / 2, 1.5, f"rank {rank}", weight="bold")
        arrow(ax, (left + width / 2, 3.72), (left + width / 2, 3.99))
    _row(ax, 1.75, "data", [f"shard {rank}" for rank in range(world_size)], own=True)
    _row(ax, 2.5, "forward, backward", [f"w = {weight}"] * world_size)
    _row(ax, 3.25, "gradient", [f"g = {gradient}" for gradient in gradients], own=True)
    _row(ax, 4.75, "averaged gradient", [f"g = {mean:g}"] * world_size)
    _row(ax, 5.5, f"step: w {MINUS} {rate} {TIMES} g", [f"w = {after:g}"] * world_size)
    box(ax, (2.2, 4.0), (7.25, 0.46), f"all-reduce:  ({terms}) / {world_size} = {mean:g}", INK, fill=0.12)
    return described(
        ax.figure,
        f"One script runs as {world_size} processes, each with its own shard of the data. All-reduce turns "
        f"their gradients into one mean, ({terms}) / {world_size} = {mean:g}, so that all replicas of the "
        f"model take the same step, from weight {weight} to {after:g}.",
    )


def _row(ax: Axes, y: float, label: str, texts: list[str], own: bool = False) -> None:
    """One stage of every rank's work: in the rank's colour where it is its own, grey where all agree."""
    write(ax, LEFT, y + 0.12, label, ha="left", weight="bold")
    write(ax, LEFT, y + 0.36, "each rank its own" if own else "the same on all ranks", ha="left", **SMALL)
    for rank, (left, width) in enumerate(pieces(2.3, RIGHT, len(texts))):
        colour, font = rank_colour(rank) if own else GREY, 11.5 if width > 1 else 10
        box(ax, (left + 0.06, y), (width - 0.12, 0.46), texts[rank], colour, size=font)
        if label != "data":  # the first row has nothing above it to come from
            arrow(ax, (left + width / 2, y - 0.29), (left + width / 2, y), shrinkA=1, shrinkB=1)


def ranks_on_nodes(gpus_per_node: tuple[int, ...] = (4, 4), use: str = "local_rank") -> Picture:
    """Which GPU each rank asks for with cuda:local_rank or, the mistake, with cuda:rank."""
    height, pitch = (1.65 if use == "local_rank" else 2.0), min(2.07, 8.25 / max(gpus_per_node))
    ax = canvas(0.55 + height * len(gpus_per_node), f"Every rank asks for cuda:{use}, as in data.to({use})")
    first, lost = 0, []
    for node, gpus in enumerate(gpus_per_node):
        ranks = range(first, first + gpus)
        devices = dict(zip(ranks, range(gpus) if use == "local_rank" else ranks, strict=True))
        lost += _node(ax, 0.55 + height * node, pitch, node, devices)
        first += gpus
    verdict = f"{_ranks(lost)} would fail: no such device" if lost else "every rank has its own GPU"
    nodes = " and ".join(map(str, gpus_per_node))
    return described(ax.figure, f"{first} ranks, nodes of {nodes} GPUs, each using cuda:{use}; {verdict}.")


def _node(ax: Axes, top: float, pitch: float, node: int, devices: dict[int, int]) -> list[int]:
    """A node with the device that each of its ranks asks for; gives the ranks that ask in vain."""
    gpus = len(devices)
    box(ax, (LEFT, top), (0.99 + gpus * pitch, 1.5), fill=0.06)
    write(ax, 0.58, top + 0.75, f"node {node}\n{gpus} GPU" + "s" * (gpus > 1), weight="bold")
    for local, (rank, device) in enumerate(devices.items()):
        corner, text = (1.05 + local * pitch, top + 0.12), f"rank {rank}\nlocal_rank {local}"
        _gpu(ax, corner, (pitch - 0.08, 1.26), text, rank, device, exists=device < gpus)
    lost = [rank for rank, device in devices.items() if device >= gpus]
    if lost:
        has = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        fault = f"{_ranks(lost)}: no such device, node {node} has only {has}"
        write(ax, 0.15, top + 1.72, fault, ha="left", color=shapes.WRONG, weight="bold")
    return lost


def _gpu(ax: Axes, corner: tuple, extent: tuple, text: str, rank: int, device: int, exists: bool) -> None:
    """A rank's box with the device it asks for, crossed out where the node has none such."""
    (x, y), (width, height) = corner, extent
    box(ax, corner, extent, colour=rank_colour(rank))
    write(ax, x + width / 2, y + 0.4, text, size=11.5 if width > 1.2 else 10)
    chip, size = (x + 0.08, y + height - 0.46), (width - 0.16, 0.38)
    box(
        ax,
        chip,
        size,
        f"cuda:{device}",
        GREY if exists else shapes.WRONG,
        fill=0,
        **shapes.halo("white"),
        **CODE,
    )
    if not exists:
        shapes.cross_out(ax, chip, size)


def _ranks(ranks: list[int]) -> str:
    """Some ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def shard_indices(order: list[int], world_size: int, drop_last: bool = False) -> list[list[int]]:
    """The samples that DistributedSampler gives each rank, as many to one as to another."""
    each = len(order) // world_size if drop_last else math.ceil(len(order) / world_size)
    total = each * world_size
    padded = order * math.ceil(total / len(order))  # repeats from the front; what is too much is cut off next
    return [padded[:total][rank::world_size] for rank in range(world_size)]


def shards(samples: int = 10, world_size: int = 4, drop_last: bool = False, order: list[int] | None = None) -> Picture:
    """Which samples each rank gets, and which are repeated or dropped to make the shares equal."""
    order = list(range(samples)) if order is None else order
    parts = shard_indices(order, world_size, drop_last)
    dealt, given = len(parts[0]) * world_size, len(order)
    ax = canvas(1.7 + 0.5 * world_size, f"{given} samples for {world_size} ranks, drop_last={drop_last}")
    pitch = min(0.62, 6.95 / max(dealt, given))
    _deal(ax, order, world_size, dealt, pitch)
    for rank, part in enumerate(parts):
        write(ax, LEFT, 1.8 + 0.5 * rank, f"rank {rank}", ha="left", weight="bold")
        write(ax, RIGHT, 1.8 + 0.5 * rank, f"{len(part)} samples", ha="right")
    fate = "repeated" if dealt > given else "dropped" if dealt < given else ""
    write(ax, 1.35 + pitch * ((dealt + given) / 2 - 0.05), 0.65, fate, style="italic")
    shares = "; ".join(f"rank {rank} gets {', '.join(map(str, part))}" for rank, part in enumerate(parts))
    last = f" {abs(dealt - given)} {fate}." if fate else ""
    heading = f"{given} samples dealt to {world_size} ranks, drop_last={drop_last}"
    return described(ax.figure, f"{heading}: {shares}.{last}")


def _deal(ax: Axes, order: list[int], world_size: int, dealt: int, pitch: float) -> None:
    """The epoch's order, with what is repeated or dropped at its end, and each rank's samples below it."""
    write(ax, LEFT, 1.05, "this epoch's\norder", ha="left")
    for place in range(max(dealt, len(order))):
        rank, x, sample = place % world_size, 1.35 + place * pitch, order[place % len(order)]
        if place < dealt:
            look = {"colour": rank_colour(rank), "hatch": "///" if place >= len(order) else ""}
            box(ax, (x, 1.6 + 0.5 * rank), (pitch * 0.9, 0.4), sample, **look)
        else:
            look = {"line": ":", "fill": 0.05, "color": GREY}
        box(ax, (x, 0.83), (pitch * 0.9, 0.44), sample, **look)


def collectives(world_size: int = 4) -> Picture:
    """What each collective leaves on every rank, before and after, in numbers."""
    panels, sums = _exchanges(world_size)
    across, height = 2 if world_size <= 4 else 1, 0.95 + 0.4 * world_size
    ax = canvas(0.7 + height * 4 / across, f"Four collectives on {world_size} ranks: before → after")
    for number, (name, (effect, before, after)) in enumerate(panels.items()):
        left, width = pieces(LEFT, RIGHT, across, gap=0.4)[number % across]
        top, middle = 0.5 + height * (number // across), left + 0.32 + width / 2
        write(ax, left, top + 0.2, name, ha="left", weight="bold", family="monospace")
        write(ax, left, top + 0.46, effect, ha="left")
        for rank in range(world_size):
            y = top + 0.85 + 0.4 * rank
            write(ax, left, y, f"rank {rank}", ha="left", **SMALL)
            _cells(ax, left + 0.65, middle - 0.2, y, before[rank])
            arrow(ax, (middle - 0.15, y), (middle + 0.15, y))
            _cells(ax, middle + 0.2, left + width, y, after[rank])
    key = "Colour: the rank that held the number. Grey: a sum over all ranks. Dotted: empty."
    write(ax, LEFT, 0.5 + height * 4 / across, key, ha="left", **SMALL)
    return described(
        ax.figure,
        f"Before and after on {world_size} ranks: broadcast copies rank 0's numbers to all, all_reduce "
        f"leaves the sums {sums} on every rank, reduce_scatter leaves one of these sums on each, and "
        "all_gather puts every rank's part on all.",
    )


def _exchanges(world_size: int) -> tuple[dict[str, tuple], str]:
    """For each collective its effect and all ranks' cells, (number, rank it came from), before and after."""
    ranks = range(world_size)
    own = [[((rank + 1) * (place + 1), rank) for place in ranks] for rank in ranks]
    sums = [sum(number for number, _ in column) for column in zip(*own, strict=True)]
    summed, held = [(number, None) for number in sums], list(zip(sums, ranks, strict=True))

    def scattered(cells: list[tuple]) -> list[list]:
        return [[cells[place] if place == rank else None for place in ranks] for rank in ranks]

    return {
        "broadcast": ("every rank gets rank 0's numbers", own, [own[0]] * world_size),
        "all_reduce": ("every rank gets every sum", own, [summed] * world_size),
        "reduce_scatter": ("each rank gets the sum of one part", own, scattered(summed)),
        "all_gather": ("every rank gets every rank's part", scattered(held), [held] * world_size),
    }, ", ".join(map(str, sums))


def _cells(ax: Axes, left: float, right: float, y: float, cells: list[tuple | None]) -> None:
    """One rank's numbers in a row."""
    for cell, (x, width) in zip(cells, pieces(left, right, len(cells), gap=0.04), strict=True):
        number, owner = cell or ("", None)
        look = {"fill": 0.25, "line": "-"} if cell else {"fill": 0.03, "line": ":"}
        colour = GREY if owner is None else rank_colour(owner)
        box(ax, (x, y - 0.17), (width, 0.34), number, colour, **look, **SMALL)


def ddp_buckets(layers: int = 6, per_bucket: int = 2, layer_ms: float = 2, all_reduce_ms: float = 3) -> Picture:
    """How DDP hides communication: a bucket's all-reduce runs while earlier layers still compute."""
    order = list(range(layers, 0, -1))  # backward goes from the last layer to the first
    buckets = [order[start : start + per_bucket] for start in range(0, layers, per_bucket)]
    full = [layer_ms * (layers - bucket[-1] + 1) for bucket in buckets]
    slow = full[-1] + all_reduce_ms * len(buckets) + layer_ms
    sizes = (layer_ms, all_reduce_ms, 8.1 / slow)
    ax = canvas(5.9, "Backward pass on every rank: when are the gradients averaged?")
    fast = _timeline(ax, 0.55, "DDP: each bucket as soon as it is full", buckets, full, sizes)
    late = [full[-1]] * len(buckets)
    _timeline(ax, 3.25, "Without overlap: after the backward pass", buckets, late, sizes)
    return described(
        ax.figure,
        f"Backward through {layers} layers, {layer_ms:g} ms each, gradients in {len(buckets)} buckets, "
        f"{all_reduce_ms:g} ms an all-reduce. DDP starts a bucket's all-reduce while earlier layers still "
        f"compute, and takes {fast:g} ms; without overlap it takes {slow:g} ms.",
    )


def _timeline(ax: Axes, top: float, title: str, buckets: list[list[int]], starts: list[float], sizes: tuple) -> float:
    """Draw one schedule, whose all-reduces may start at the given times; give its total time."""
    layer_ms, all_reduce_ms, scale = sizes
    now = free = 0.0
    bar = partial(_bar, ax, top, scale)
    _lanes(ax, top, title)
    for number, (layers, earliest) in enumerate(zip(buckets, starts, strict=True)):
        name, short = f"bucket {number}", str(number)
        bar(now, layer_ms * len(layers), 0.95, [f"{name} fills", name, short], fill=0, line="--")
        for layer in layers:
            bar(now, layer_ms, 0.4, [f"layer {layer}", str(layer)])
            now += layer_ms
        begin = max(free, earliest)
        free = begin + all_reduce_ms
        bar(begin, all_reduce_ms, 1.6, [f"all-reduce\n{name}", short], INK, fill=0.8, color="white")
        if math.isclose(begin, now):  # it starts the moment the bucket is full
            arrow(ax, (1.28 + now * scale, top + 1.42), (1.4 + now * scale, top + 1.6))
    bar(now, free - now, 0.4, ["waits"], fill=0, line=":")
    bar(free, layer_ms, 0.4, ["step"], INK)
    span(ax, 1.3, 1.3 + (free + layer_ms) * scale, top + 2.28, f"{free + layer_ms:g} ms")
    return free + layer_ms


def _lanes(ax: Axes, top: float, title: str) -> None:
    """The names of a schedule and of its lanes."""
    write(ax, LEFT, top + 0.15, title, ha="left", weight="bold")
    for lane, name in ((0.63, "compute"), (1.18, "gradients"), (1.83, "network"), (2.28, "time")):
        write(ax, LEFT, top + lane, name, ha="left")


def _bar(
    ax: Axes,
    top: float,
    scale: float,
    begin: float,
    duration: float,
    lane: float,
    texts: list[str],
    colour: str = GREY,
    **look,
) -> None:
    """A piece of work on the time axis, with the longest of the texts that fits into it."""
    corner, width = (1.3 + begin * scale, top + lane), duration * scale - 0.04
    box(ax, corner, (width, 0.46), fitting(width, *texts), colour, **SMALL, **look)


def global_batch(per_rank: int = 64, world_size: int = 4) -> Picture:
    """One optimizer step sees world_size batches side by side: together they are the global batch."""
    total = per_rank * world_size
    ax = canvas(3.75, "One optimizer step sees the batches of all ranks")
    for rank, (left, width) in enumerate(pieces(LEFT, RIGHT, world_size)):
        box(ax, (left, 0.55), (width, 2.4), colour=rank_colour(rank), fill=0.08)
        write(ax, left + width / 2, 0.77, f"rank {rank}", weight="bold")
        across = min(width * 0.85, 1.5)
        columns = math.ceil(math.sqrt(per_rank * across / 1.5))
        rows = math.ceil(per_rank / columns)
        step = min(across / columns, 1.5 / rows)
        dots = [divmod(sample, columns) for sample in range(per_rank)]
        x = [left + width / 2 + (column - columns / 2 + 0.5) * step for _, column in dots]
        y = [1.72 + (row - rows / 2 + 0.5) * step for row, _ in dots]
        ax.scatter(x, y, s=(step * 45) ** 2, color=rank_colour(rank), linewidths=0)
        write(ax, left + width / 2, 2.72, f"{per_rank} samples", size=11.5 if width > 1.2 else 10)
    product = f"{world_size} ranks {TIMES} {per_rank} samples = a global batch of {total} samples"
    span(ax, LEFT, RIGHT, 3.2, product, size=13)
    return described(
        ax.figure,
        f"{world_size} ranks with {per_rank} samples each, side by side: one optimizer step averages the "
        f"gradients of a global batch of {world_size} {TIMES} {per_rank} = {total} samples.",
    )


def data_parallel_vs_ddp(gpus: int = 4) -> Picture:
    """Why not DataParallel: all its traffic passes through GPU 0, while DDP has no hub."""
    ax = canvas(4.65, f"The same {gpus} GPUs, two ways to share the work")
    write(ax, 2.35, 0.65, f"DataParallel: 1 process, {gpus} threads", weight="bold")
    box(ax, (LEFT, 0.85), (4.5, 2.9), fill=0.06)
    hub = box(ax, (1.7, 1.0), (1.3, 0.5), "GPU 0", rank_colour(0), weight="bold")
    for gpu, (left, width) in enumerate(pieces(0.25, 4.45, gpus - 1), start=1):
        wide = min(width, 1.1)
        corner = (left + (width - wide) / 2, 3.05)
        other = box(ax, corner, (wide, 0.5), f"GPU {gpu}", rank_colour(gpu), size=10)
        link(ax, hub, other, bend=0.12)
        link(ax, other, hub, bend=0.12, line="--")
    sent = "solid: a piece of the batch, a copy of the model\ndashed: outputs, gradients"
    write(ax, 2.35, 4.2, f"every step, all through GPU 0\n{sent}", **SMALL)
    _ring(ax, gpus)
    return described(
        ax.figure,
        f"DataParallel: one process with {gpus} threads; at every step GPU 0 sends a piece of the batch "
        f"and a copy of the model to each of the other {gpus - 1}, and takes back outputs and gradients. DDP:"
        f" {gpus} processes, one a GPU, pass gradients round a ring, with no hub.",
    )


def _ring(ax: Axes, gpus: int) -> None:
    """DDP: a process for each GPU, and gradients passed on from neighbour to neighbour."""
    write(ax, 7.15, 0.65, f"DDP: {gpus} processes, no hub", weight="bold")
    places: list[FancyBboxPatch] = []
    for gpu in range(gpus):
        angle = 2 * math.pi * gpu / gpus - math.pi / 2
        corner = (6.65 + 1.7 * math.cos(angle), 2.02 + 1.17 * math.sin(angle))
        places.append(box(ax, corner, (1.0, 0.56), f"rank {gpu}\nGPU {gpu}", rank_colour(gpu), size=10))
    for here, following in zip(places, places[1:] + places[:1], strict=True):
        link(ax, here, following, bend=-0.2)
    sent = "every step, round the ring\nall-reduce of the gradients,\nno copies of the model"
    write(ax, 7.15, 4.2, sent, **SMALL)


def signal_path(local_rank: int = 2, gpus: int = 4) -> Picture:
    """How the local rank gets from the launcher to the device."""
    bottom, colour = max(3.35, 0.95 + 0.36 * gpus), rank_colour(local_rank)
    ax, middle = canvas(bottom + 0.2, "How a process finds its GPU"), (0.95 + bottom) / 2
    for x, heading in zip((0.65, 2.98, 6.2, 8.75), ("launcher", "environment", "script", "node"), strict=True):
        write(ax, x, 0.7, heading, weight="bold")
    calls = f"local_rank = {local_rank}\ntorch.cuda.set_device({local_rank})"
    script = box(ax, (4.95, middle - 0.4), (2.5, 0.8), calls, colour, **CODE)
    _launchers(ax, middle, local_rank)
    for gpu, (top, height) in enumerate(pieces(0.95, bottom, gpus, gap=0.1)):
        look = {"colour": colour, "weight": "bold"} if gpu == local_rank else {"fill": 0.05}
        device = box(ax, (8.15, top), (1.2, height), f"cuda:{gpu}", **look, **CODE)
        if gpu == local_rank:
            link(ax, script, device)
    return described(
        ax.figure,
        f"torchrun sets LOCAL_RANK={local_rank}, srun SLURM_LOCALID={local_rank}, mpirun "
        f"OMPI_COMM_WORLD_LOCAL_RANK={local_rank}; the script hands the number to torch.cuda.set_device and "
        f"so works on cuda:{local_rank}, one of the {gpus} GPUs of its node.",
    )


def _launchers(ax: Axes, middle: float, local_rank: int) -> None:
    """Each launcher with the variable by which it tells a process its local rank."""
    launchers = {"torchrun": "LOCAL_RANK", "srun": "SLURM_LOCALID", "mpirun": "OMPI_COMM_WORLD_LOCAL_RANK"}
    for row, (launcher, variable) in enumerate(launchers.items()):
        y = middle + 0.85 * (row - 1)
        box(ax, (LEFT, y - 0.25), (1.1, 0.5), launcher, **CODE)
        arrow(ax, (1.22, y), (1.6, y))
        box(ax, (1.62, y - 0.25), (2.72, 0.5), f"{variable}={local_rank}", rank_colour(local_rank), **CODE)
        arrow(ax, (4.36, y), (4.93, middle + 0.2 * (row - 1)))


def memory_of_gradients(parameters_mb: float = 100) -> Picture:
    """What gradient_as_bucket_view saves: the second copy of all gradients."""
    apart, together = ["gradients", "buckets: a second copy"], ["gradients, in the buckets"]
    ax = canvas(3.95, "GPU memory of one rank, here rank 0")
    for y, view, blocks in ((1.0, False, ["parameters", *apart]), (2.65, True, ["parameters", *together])):
        write(ax, LEFT, y - 0.22, f"gradient_as_bucket_view={view}", ha="left", weight="bold", **CODE)
        for text, (left, width) in zip(blocks, pieces(LEFT, RIGHT, 3), strict=False):
            hatch = "///" if "copy" in text else ""
            box(ax, (left, y), (width, 0.65), f"{text}\n{parameters_mb:g} MB", rank_colour(0), hatch=hatch)
        span(ax, LEFT, left + width, y + 0.82, f"{len(blocks) * parameters_mb:g} MB")
    return described(
        ax.figure,
        f"Memory of one rank: without gradient_as_bucket_view, {parameters_mb:g} MB of parameters, as much "
        f"of gradients and a copy of them in buckets, {3 * parameters_mb:g} MB in all; with it the gradients "
        f"live in the buckets, {2 * parameters_mb:g} MB in all.",
    )
