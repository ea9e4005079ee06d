"""Say which rank was lost, when a collective fails because a peer is gone or does not answer."""

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import torch.distributed as dist

from ddp_helpers.rank.topology import Topology

# What backends say where a peer is gone or does not answer; any other error is this rank's own.
LOST = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out")


def brief(error: BaseException) -> str:
    """The first line of an error, without the file names and the advice that gloo puts around it."""
    return re.sub(r"^\[\S+\] *|\. This is .*", "", str(error).partition("\n")[0])


@contextmanager
def lost_ranks_named(me: Topology, store: dist.Store) -> Iterator[None]:
    """In this block, inside the group, a lost peer ends this rank with one line and status 1; every rank enters.

    How long a collective waits for a peer is the process group's `seconds`.
    """
    try:
        yield
        dist.barrier()  # a peer that is lost on the last stretch is named too
    except RuntimeError as error:
        if LOST.search(str(error)):
            roll_call(me, store, brief(error))
        raise


def roll_call(me: Topology, store: dist.Store, why: str) -> None:
    """Say which ranks do not answer, and exit with status 1; every rank whose collective failed calls it.

    Each signs the store; who has not signed after a second is lost. Returns if all have: then nobody is.
    """

    def leave(verdict: str) -> None:
        what = "does not answer: killed, hanging, or waiting for one that is"
        print(f"rank {me.rank}: {verdict} {what} ({why})", file=sys.stderr, flush=True)
        os._exit(1)  # a hanging rank would keep the group from being taken down

    # Rank 0 or its launcher keeps the store: if that is what is lost, no answer comes, or nobody listens.
    keeper = f"rank 0 of {me.world_size}, or its launcher,"
    if me.rank and not me.answers():
        leave(keeper)
    alarm = Timer(1.5, leave, [keeper])
    alarm.start()
    try:
        store.set(f"alive {me.rank}", "yes")
        names, end = [f"alive {rank}" for rank in range(me.world_size)], time.monotonic() + 1
        while not store.check(names) and not store.check(["lost"]) and time.monotonic() < end:
            time.sleep(0.02 + me.world_size / 50_000)  # one store answers all ranks
        if not store.check(names) and store.add("lists", 1) == 1:
            lost = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
            if lost:
                store.set("lost", f"rank {', '.join(lost)} of {me.world_size}")
        if not store.check(names) or store.check(["lost"]):
            leave(store.get("lost").decode())  # one rank has listed them for all, who lose that rank as well
    except RuntimeError:
        leave(keeper)
    finally:
        alarm.cancel()
