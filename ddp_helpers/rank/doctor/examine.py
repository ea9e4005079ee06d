"""The preflight: the ranks of a job come together, look at what it needs, and rank 0 prints one table."""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from ddp_helpers.rank.doctor.case import Case, overhear
from ddp_helpers.rank.doctor.checks import (
    check_cpus,
    check_dataset,
    check_devices,
    check_network,
    check_ranks,
    check_shm,
    check_space,
    check_versions,
    claim,
)
from ddp_helpers.rank.doctor.exchange import check_clocks, check_folder, check_reduce
from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.topology import Topology, sign_in

CHECKS = {  # each row of the table: its check, and the usual cure
    "ranks": (check_ranks, "let one launcher number all ranks, export none; read the missing one's own output"),
    "versions": (check_versions, "use one environment on all nodes"),
    "devices": (
        check_devices,
        "one GPU for each rank, as many GPUs as tasks on a node, a torch for them; or --no-cuda",
    ),
    "cpus": (check_cpus, 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK"'),
    "network": (check_network, "export GLOO_SOCKET_IFNAME= the interface between the nodes: ip -brief address"),
    "all-reduce": (check_reduce, "the same code on all nodes, and no red row above; --no-cuda, NCCL_DEBUG=INFO"),
    "clocks": (check_clocks, "have the clocks of the nodes set (chronyc makestep, as root)"),
    "run folder": (check_folder, "a --run-dir on a file system that all nodes share, and that you may write to"),
    "data": (check_dataset, "one --data for all ranks, on a shared file system"),
    "space": (check_space, "make room for 1 GB, or another --run-dir"),
    "/dev/shm": (check_shm, "docker run --shm-size=1g, or --ipc=host; or --num-workers 0"),
}
ALONE = ("versions", "devices", "cpus", "network", "data", "space", "/dev/shm")  # what a rank can say by itself
CURES = {  # a word of the line with which a meeting fails, and what to do
    "missing": "start all ranks, each with the same MASTER_ADDR and MASTER_PORT, and read the missing one's own output",
    "cannot listen": "export MASTER_PORT= another number from 1024 to 32767, the same for all ranks",
    "": "read the other ranks' output: is MASTER_ADDR right, and is the port open to all nodes?",
}
Row = tuple[str, str, str]  # what the check is called, what was seen, and the cure, or '' if all is well


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
    if not (0 <= args.num_workers < 2**20 and 1 <= args.timeout < 2**20):
        parser.error(f"--num-workers {args.num_workers} or --timeout {args.timeout} is out of range")
    return args


def visit(case: Case, name: str) -> list[str]:
    """What a check says of this rank: what was seen, and the cure, or '' if all is well."""
    check, cure = CHECKS[name]
    seen, trouble = overhear(lambda: check(case))
    return [*trouble, cure][:2] if trouble else [seen, ""]


def judge(name: str, told: dict[int, list[str]]) -> Row:
    """The row of a check, from what it said of each rank: red with the ranks at fault, or what is fine. Any process."""
    reds: dict[str, list[str]] = {}
    for rank, (seen, cure) in told.items():
        if cure:
            reds.setdefault(seen, []).append(str(rank))
    if not reds:
        return name, "; ".join(list(dict.fromkeys(seen for seen, _ in told.values() if seen))[:4]), ""
    who = {seen: f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" for seen, ranks in reds.items()}
    who |= {seen: "all ranks" for seen, ranks in reds.items() if len(ranks) == len(told) > 1}
    cures = dict.fromkeys(cure for _, cure in told.values() if cure)
    return name, "; ".join(f"{ranks}: {seen}" for seen, ranks in who.items()), "; ".join(cures)


def show(rows: list[Row]) -> int:
    """Print the rows below each other, a cure below each red one, and give the exit status; rank 0 calls it."""
    lines = [f"{'check':<11} {'':<3} what was seen"]
    for name, seen, cure in rows:
        lines.append(f"{name:<11} {'RED' if cure else 'ok':<3} {plain(seen)}")
        lines += [f"{'':<15} cure: {plain(cure)}"] if cure else []
    red = sum(bool(cure) for *_, cure in rows)
    lines.append(f"{red} of {len(rows)} checks RED" if red else f"all {len(rows)} checks green")
    sys.stdout.write("\n".join(lines) + "\n")  # at once: print() would send the last line's end by itself, to be marked
    sys.stdout.flush()
    return min(red, 1)


def plain(text: str) -> str:
    """Text from outside on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def consult(case: Case) -> int:
    """Make all checks, and have rank 0 print the table before any rank leaves; every rank calls it."""
    me, store, seconds = case.me, case.store, case.args.timeout
    store.set_timeout(timedelta(seconds=seconds))
    case.arrive()
    _, lost = overhear(lambda: case.come("arrive"))
    told = json.dumps({name: visit(case, name) for name in ([] if lost else CHECKS)})
    store.set_timeout(timedelta(seconds=3 * seconds + 10))
    # Some notice only after `seconds` that a peer is lost.
    absent = sign_in(store, "told", me.rank, me.world_size, 0 if me.rank else seconds + 5, told)
    if me.rank == 0:
        every = {r: json.loads(store.get(f"told {r}")) for r in range(me.world_size) if str(r) not in absent}
        rows = [judge(name, {rank: said[name] for rank, said in every.items() if name in said}) for name in CHECKS]
        if absent:
            rows[0] = ("ranks", f"rank {', '.join(absent)} of {me.world_size} did not answer", CHECKS["ranks"][1])
        store.set("status", str(show(rows)))
    status = int(store.get("status"))
    sign_in(store, "end", me.rank, me.world_size, 1)  # rank 0 may keep the store
    return status


def alone(case: Case, trouble: str) -> int:
    """What a rank says when the ranks did not come together: rank 0 a table, the others one line. The exit status."""
    if case.me.rank == 0:
        case.arrive()
        cure = next(cure for word, cure in CURES.items() if word in trouble)
        return show([("ranks", trouble, cure), *(judge(name, {0: visit(case, name)}) for name in ALONE)])
    print(trouble, file=sys.stderr, flush=True)
    with suppress(OSError, UnicodeError):
        if case.me.answers():  # rank 0 is there, and goes last: launchers end all ranks as soon as one has failed
            time.sleep(2)
            return 1
    return 2


def examine(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Check everything and print the table; every rank calls it. The exit status: 0 if all is green, 1 if not.

    Stops, with status 2, at a wrong flag or variable, and where there is no rank 0 to print a table.
    """
    args = parse_flags(argv, prog)
    me = Topology.from_env()
    case = Case(me, args)
    found, trouble = overhear(lambda: claim(me, not args.no_cuda))
    (case.device, case.gpu), case.device_error = found or ("none", ""), "".join(trouble)
    store, trouble = overhear(lambda: me.meet(args.timeout))
    if trouble:
        return alone(case, trouble[0])
    case.store = store
    status, trouble = overhear(lambda: consult(case))
    if trouble:
        print(f"rank 0, which prints the table, is lost: {trouble[0]}", file=sys.stderr)
        return 1
    return status
