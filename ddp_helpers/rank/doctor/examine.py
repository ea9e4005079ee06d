"""The preflight: the ranks of a job come together, look at what it needs, and rank 0 prints one table."""

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_helpers.rank.doctor.checks import check_cpus, check_devices, check_ranks, check_versions
from ddp_helpers.rank.doctor.exchange import compare_clocks, share_file, try_reduce
from ddp_helpers.rank.doctor.facts import Facts, Row
from ddp_helpers.rank.doctor.probes import look, overhear
from ddp_helpers.rank.doctor.shared_checks import (
    check_clocks,
    check_dataset,
    check_folder,
    check_network,
    check_reduce,
    check_shm,
    check_space,
)
from ddp_helpers.rank.lost import lost_ranks_named
from ddp_helpers.rank.process_group import process_group
from ddp_helpers.rank.topology import Topology, stop

EACH = (check_versions, check_devices, check_cpus, check_network)
FILES = (check_dataset, check_space, check_shm)
ALONE = (*EACH, *FILES)  # what a rank can say without the others
TOGETHER = (check_ranks, *EACH, check_reduce, check_clocks, check_folder, *FILES)
CURES = {  # a word of the line with which a meeting fails, and what to do
    "missing": "start all ranks, each with the same MASTER_ADDR and MASTER_PORT, and read the missing one's own output",
    "cannot listen": "export MASTER_PORT= another number from 1024 to 32767, the same for all ranks",
}
OTHER = "read the other ranks' output; are MASTER_ADDR and GLOO_SOCKET_IFNAME right, and is the port open to all nodes?"


def parse_flags(argv: list[str] | None = None, prog: str | None = None) -> Namespace:
    """Read the doctor's flags; every rank calls it. Stops at a value that cannot work."""
    parser = ArgumentParser(prog, description="Check what a job needs before it burns an hour.", allow_abbrev=False)
    parser.error = lambda message: stop(f"{parser.prog}: {message}; --help lists the flags")  # one line, not a page
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("DDP_MNIST_ROOT", "data"), help="folder that holds MNIST/raw")
    add("--run-dir", type=Path, default=Path("runs"), help="folder for run records, which all nodes share")
    add("--num-workers", type=int, default=0, help="DataLoader workers that each rank will start")
    add("--timeout", type=int, default=30, help="seconds to wait for other ranks")
    add("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    args = parser.parse_args(argv)
    for flag, lowest in {"num_workers": 0, "timeout": 1}.items():
        if not lowest <= (value := getattr(args, flag)) < 2**20:
            parser.error(f"--{flag.replace('_', '-')} {value} is out of range: give {lowest} or more")
    return args


def table(rows: list[Row]) -> str:
    """The rows below each other, a cure below each red one; green and red in colour on a terminal only."""
    # mpirun gives its ranks a terminal, also where its own output goes into a file.
    terminal = sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
    colour = {True: "\033[32m", False: "\033[31m"} if terminal else {True: "", False: ""}
    lines = [f"{'check':<11} {'':<3} what was seen"]
    for row in rows:
        state = f"{colour[row.ok]}{'ok' if row.ok else 'RED':<3}{chr(27) + '[0m' if colour[row.ok] else ''}"
        lines.append(f"{row.check:<11} {state} {plain(row.seen)}")
        if not row.ok:
            lines.append(f"{'':<15} cure: {plain(row.cure)}")
    red = sum(not row.ok for row in rows)
    return "\n".join([*lines, f"{red} of {len(rows)} checks RED" if red else f"all {len(rows)} checks green"])


def show(rows: list[Row]) -> None:
    """Print the table; rank 0 calls it."""
    sys.stdout.write(f"{table(rows)}\n")  # at once: print() would send the last line's end by itself, to be marked
    sys.stdout.flush()


def plain(text: str) -> str:
    """Text from outside on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def consult(me: Topology, args: Namespace, facts: Facts) -> list[Row]:
    """The rows of all checks; every rank calls it, and each gets the same. Rank 0 prints them before any rank leaves.

    Raises RuntimeError if a rank is lost on the way.
    """
    _, trouble = overhear(lambda: try_reduce(facts, args.timeout))
    facts.reduce_error = trouble or facts.reduce_error
    compare_clocks(facts)
    share_file(facts)
    everyone = [facts] * me.world_size
    dist.all_gather_object(everyone, facts)
    rows = [check(everyone) for check in TOGETHER]
    if me.rank == 0:
        show(rows)
    return rows


def alone(me: Topology, facts: Facts, trouble: str) -> int:
    """What a rank says when the ranks did not come together: rank 0 a table, the others one line. The exit status."""
    if me.rank == 0:
        cure = next((cure for word, cure in CURES.items() if word in trouble), OTHER)
        show([Row("ranks", False, trouble, cure), *(check([facts]) for check in ALONE)])
        return 1
    print(trouble, file=sys.stderr, flush=True)
    with suppress(OSError):
        if me.answers():  # rank 0 is there, and goes last: launchers end all ranks as soon as one has failed
            time.sleep(2)
            return 1
    return 2


def examine(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Check everything and print the table; every rank calls it. The exit status: 0 if all is green, 1 if not.

    Stops, with status 2, at a wrong flag or variable, and where there is no rank 0 to print a table.
    """
    args = parse_flags(argv, prog)
    me = Topology.from_env()
    facts = look(me, args)
    group = process_group(me, torch.device("cpu"), args.timeout)  # gloo, which can say what is wrong with a GPU
    try:
        with ExitStack() as stack:
            store, trouble = overhear(lambda: stack.enter_context(group))
            if trouble:
                return alone(me, facts, trouble)
            stack.enter_context(lost_ranks_named(me, store))
            rows = consult(me, args, facts)
    except RuntimeError as error:
        return alone(me, facts, str(error).partition("\n")[0])
    return 0 if all(row.ok for row in rows) else 1
