"""Check what a job needs, on all its ranks, before it burns an hour; rank 0 prints a table.

torchrun --standalone --nproc-per-node 2 doctor.py --data data
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python doctor.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python doctor.py --data data
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from ddp_helpers.rank.doctor.case import Case, overhear
from ddp_helpers.rank.doctor.checks import CHECKS, TOGETHER, arrive
from ddp_helpers.rank.launchers import OLDER_NCCL, stop, who_am_i


def parse_flags(argv: list[str] | None = None, prog: str | None = None) -> Namespace:
    """Read the doctor's flags; every rank calls it. Stops at a value that cannot work."""
    parser = ArgumentParser(prog, description="Check what a job needs before it burns an hour.", allow_abbrev=False)
    parser.error = lambda message: stop(f"{parser.prog}: {message}; --help lists the flags")  # one line, not a page
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("DDP_MNIST_ROOT", "data"), help="holds MNIST/raw; none: not asked")
    add("--run-dir", type=Path, default=Path("runs"), help="folder for run records, which all nodes share")
    add("--num-workers", type=int, default=0, help="DataLoader workers that each rank will start")
    add("--timeout", type=int, default=30, help="seconds to wait for other ranks")
    add("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    args = parser.parse_args(argv)
    if not (0 <= args.num_workers < 2**20 and 1 <= args.timeout < 2**20):
        parser.error(f"--num-workers {args.num_workers} or --timeout {args.timeout} is out of range")
    return args


def visit(case: Case, name: str) -> list[str]:
    """Run a check on this rank; return what was seen, and the cure, or '' if all is well."""
    check, cure = CHECKS[name]
    seen, trouble = overhear(lambda: check(case))
    return [*trouble, cure][:2] if trouble else [seen, ""]


def judge(name: str, told: dict[int, list[str]]) -> tuple[str, str, str]:
    """The row of a check, from what it said of each rank: red with the ranks at fault, or what is fine. Any process."""
    reds: dict[str, list[str]] = {}
    for rank, (seen, cure) in told.items():
        reds.setdefault(seen, []).extend([str(rank)] if cure else [])
    who = {seen: f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for seen, ranks in reds.items() if ranks}
    who |= {seen: "all ranks" for seen, ranks in reds.items() if len(ranks) == len(told) > 1}
    what = [f"{ranks}: {seen}" for seen, ranks in who.items()] or [seen for seen in reds if seen][:4]
    return name, "; ".join(what), "; ".join(dict.fromkeys(cure for _, cure in told.values() if cure))


def show(rows: list[tuple[str, str, str]]) -> int:
    """Print the rows below each other, a cure below each red one, and give the exit status; rank 0 calls it."""
    lines = [f"{'check':<11} {'':<3} what was seen"]
    for name, seen, cure in rows:
        lines.append(f"{name:<11} {'RED' if cure else 'ok':<3} {seen}")
        lines += [f"{'':<15} cure: {cure}"] if cure else []
    red = sum(bool(cure) for *_, cure in rows)
    lines.append(f"{red} of {len(rows)} checks RED" if red else f"all {len(rows)} checks green")
    lines = ["".join(letter if letter.isprintable() else " " for letter in line) for line in lines]  # no terminal obeys
    sys.stdout.write("\n".join([*lines, ""]))  # at once: print() would send the last line's end by itself
    sys.stdout.flush()
    return min(red, 1)


def consult(case: Case, trouble: list[str]) -> int:
    """Make all checks that can be made, and have rank 0 print them before any rank leaves; every rank calls it."""
    arrive(case)
    trouble = trouble or overhear(lambda: case.together("arrive"))[1]
    told = {name: visit(case, name) for name in CHECKS if not (trouble and name in TOGETHER)}
    # Who was not waiting for the one that is lost notices only after --timeout.
    patience = 0 if case.rank else 1 if trouble else 3 if case.lost else case.args.timeout + 5
    lost = case.come("told", patience, json.dumps(told))
    if case.rank == 0:
        every = {r: json.loads(case.store.get(f"told of {r}")) for r in range(case.size) if r not in lost}
        rows = [judge(name, {r: said[name] for r, said in every.items() if name in said}) for name in told]
        if lost or trouble:
            trouble = trouble or [f"rank {', '.join(map(str, lost))} of {case.size} is lost"]
            rows[0] = ("ranks", *[*trouble, CHECKS["ranks"][1]][:2])
        case.store.set("status", str(show(rows)))
    case.store.set_timeout(timedelta(seconds=2 * case.args.timeout + 10))
    status = int(case.store.get("status"))
    case.store.add("end came", 1) if case.rank else case.come("end", 2)  # rank 0, which may keep the store, goes last
    return status


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Look at the job, and leave with 0 if all is green, 1 if a row is red, 2 if the arguments are wrong. Any rank."""
    args = parse_flags(argv, prog)
    os.environ.setdefault(*OLDER_NCCL)
    case = Case(*who_am_i(), args)
    _, trouble = overhear(case.meet) if case.size > 1 else (None, [])
    status, lost = overhear(lambda: consult(case, trouble)) if not (trouble and case.rank) else (2, trouble)
    try:
        if lost:
            stop(f"rank {case.rank} gets no answer from rank 0: {lost[0]}")
        sys.exit(status)
    finally:
        if case.blocked:  # a thread that waits inside NCCL could hold the interpreter's end
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(2 if lost else status)


if __name__ == "__main__":
    main()
