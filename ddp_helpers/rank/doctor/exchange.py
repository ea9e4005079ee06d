"""What the doctor tries with all ranks together: a sum, its speed, the clocks, and a file that all see."""

import os
import secrets
import statistics
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_helpers.rank.doctor.facts import Facts

LARGE = 2**22  # float32 numbers: 16 MB
PATIENCE = 2.0  # seconds until a file written on one host must be seen on another


def contribution(rank: int) -> float:
    """What a rank adds to the sum whose value is known: 1 + 2 + … + world_size."""
    return rank + 1.0


def now() -> float:
    """This host's clock, in seconds."""
    return time.time()


def fast_group(facts: Facts, seconds: float) -> dist.ProcessGroup | None:
    """A group over NCCL if each rank has a GPU of its own, else None, which means gloo; every rank calls it.

    NCCL can hang or abort where two ranks hold one GPU, or one rank holds none: so all ask first, over gloo.
    """
    mine = torch.tensor([zlib.crc32(f"{facts.host} {facts.gpu}".encode()) if facts.gpu else -1])
    claims = [torch.zeros_like(mine) for _ in range(facts.world_size)]
    dist.all_gather(claims, mine)
    numbers = {claim.item() for claim in claims}
    if -1 in numbers or len(numbers) < facts.world_size:
        return None
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # an error that can be caught, in place of an abort
    return dist.new_group(backend="nccl", timeout=timedelta(seconds=seconds))


def seconds_of(total: Tensor, group: dist.ProcessGroup | None, times: int) -> float:
    """The median time of an all-reduce of this tensor; every rank calls it."""
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        dist.all_reduce(total, group=group)
        if total.is_cuda:
            torch.cuda.synchronize()  # until here it was queued, not done
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def try_reduce(facts: Facts, seconds: float) -> None:
    """Sum over all ranks, compare with the sum that must come out, and time it; every rank calls it."""
    group, size = fast_group(facts, seconds), facts.world_size
    facts.backend = "nccl" if group else "gloo"
    large = torch.full((LARGE,), contribution(facts.rank), device=facts.device if group else "cpu")
    small, right = large[:1].clone(), size * (size + 1) / 2
    for total in (small, large):
        dist.all_reduce(total, group=group)
        wrong = total[total != right]  # also what is not a number
        if len(wrong) and not facts.reduce_error:
            facts.reduce_error = f"the sum of {size} ranks is {wrong[0].item():g}, not {right:g}"
        total.zero_()  # sums of sums would overflow below
    facts.latency = seconds_of(small, group, 20)
    facts.bandwidth = large.nbytes / seconds_of(large, group, 3) * 2 * (size - 1) / size


def compare_clocks(facts: Facts) -> None:
    """Ask rank 0 for its time, there and back, several times, and believe the fastest; every rank calls it."""
    said = torch.zeros(1, dtype=torch.float64)
    if facts.rank == 0:
        for peer in range(1, facts.world_size):
            for _ in range(8):
                dist.recv(said, peer)
                said[0] = now()
                dist.send(said, peer)
        return
    trips = []
    for _ in range(8):
        begin = now()
        dist.send(said, 0)
        dist.recv(said, 0)
        end = now()
        trips.append((end - begin, (begin + end) / 2 - said.item()))
    facts.skew = min(trips)[1]


def share_file(facts: Facts) -> None:
    """Rank 0 writes a number that nobody can guess, the others must read it; every rank calls it. Nothing is left."""
    folder, nonce, trouble = Path(facts.folder).absolute(), secrets.token_hex(8), ""
    new = [path for path in (folder, *folder.parents) if is_new(path)]
    said = [nonce, trouble]
    try:
        if facts.rank == 0:
            said[1] = write_nonce(folder, nonce)
        dist.broadcast_object_list(said, 0)
        nonce, trouble = said
        if trouble:
            facts.folder_error = trouble if facts.rank == 0 else ""
        elif not sees(folder, nonce):
            facts.folder_error = f"not in {folder}: the file that rank 0 wrote"
        dist.barrier()  # nobody still looks for it
    finally:
        if facts.rank == 0:
            with suppress(OSError):  # it was never there
                (folder / f".doctor-{nonce}").unlink()
            for path in new:
                with suppress(OSError):  # another run is there by now
                    path.rmdir()


def is_new(folder: Path) -> bool:
    """Whether this folder would have to be made."""
    try:
        return not folder.exists()
    except OSError:  # a name that is too long, a folder that may not be entered
        return True


def write_nonce(folder: Path, nonce: str) -> str:
    """Write the file, and the folder if need be; what went wrong, or ''."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".doctor-{nonce}").write_text(nonce)
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return ""


def sees(folder: Path, nonce: str) -> bool:
    """Whether the file is there, with this number in it, before patience ends."""
    end = time.monotonic() + PATIENCE
    while True:
        with suppress(OSError):
            if (folder / f".doctor-{nonce}").read_text() == nonce:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
