"""Check what a job needs, on all its ranks, before it burns an hour; rank 0 prints a table.

torchrun --standalone --nproc-per-node 2 -- doctor.py --data data
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python doctor.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python doctor.py --data data
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch.distributed as dist

from ddp_helpers.rank.doctor.case import Case, CheckFailed, capture, one_line
from ddp_helpers.rank.doctor.checks import CHECKS, TOGETHER, judge, look, make_plan
from ddp_helpers.rank.launchers import who_am_i

VERDICTS = "ok", "FAIL"


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Check the job; every rank calls it.

    Exits with 0 if all checks are ok, 1 if a check failed, 2 if the arguments cannot be used.
    """
    args = parse_flags(argv, prog)
    case = Case(*who_am_i(), args)
    try:
        status = examine(case)
    except (CheckFailed, dist.DistError) as error:
        print(f"rank {case.rank} gets no answer from rank 0: {one_line(error)}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    if case.blocked:  # a thread that waits inside NCCL could block the interpreter's exit
        os._exit(status)
    sys.exit(status)


def parse_flags(argv: list[str] | None = None, prog: str | None = None) -> Namespace:
    """Read the doctor's flags; every rank calls it."""
    purpose = "Check what a job needs before it burns an hour."
    layout = RawDescriptionHelpFormatter
    usage = "%(prog)s [flags]; --help lists them"
    parser = ArgumentParser(prog, usage, purpose, formatter_class=layout, allow_abbrev=False)
    program = f"--no-python -- {parser.prog}" if prog else f"-- {parser.prog}"
    parser.epilog = f"""example:
  torchrun --standalone --nproc-per-node 2 {program} --data none

exit status: 0: all checks are ok; 1: a check failed; 2: the arguments cannot be used"""
    data, runs = os.environ.get("DDP_MNIST_ROOT", "data"), os.environ.get("DDP_RUNS") or "runs"
    run_dir_help = "folder for run records, which all nodes share"
    workers_help = "DataLoader workers that each rank will start"
    add = parser.add_argument
    add("--data", type=Path, default=data, help="holds MNIST/raw; none: not asked")
    add("--run-dir", type=Path, default=runs, help=run_dir_help)
    add("--num-workers", type=int, default=0, help=workers_help)
    add("--timeout", type=int, default=30, help="seconds to wait for other ranks")
    add("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    add("--json", type=Path, metavar="FILE", help="rank 0 also writes the rows there")
    return parser.parse_args(argv)


def examine(case: Case) -> int:
    """Have each rank check, and rank 0 compare; every rank calls it and returns the exit status.

    Raises CheckFailed or DistError on a rank that rank 0 does not answer.
    """
    seconds = case.args.timeout
    _, trouble = capture(case.meet)
    if trouble and case.rank:
        raise CheckFailed(trouble)
    case.tell("found", look(case, [name for name in CHECKS if name not in TOGETHER]))
    if case.rank == 0:
        found = case.gather("found", 1 if trouble else seconds)
        lost = missing(case, found)
        if lost and not trouble:
            trouble = f"{lost} missing after {seconds} s"
        case.store.set("plan", json.dumps({} if trouble else make_plan(case, found)))
    case.plan = case.hear("plan")
    if case.plan:
        case.tell("found together", look(case, TOGETHER))
    if case.rank == 0:
        names = [name for name in CHECKS if case.plan or name not in TOGETHER]
        if case.plan:
            together = case.gather("found together", seconds + 10)
            if case.plan["file"]:
                Path(case.plan["file"]).unlink()
            if lost := missing(case, together):
                trouble = f"{lost} stopped answering"
            found = {rank: found[rank] | told for rank, told in together.items()}
        rows = [judge(name, found) for name in names]
        if trouble:
            rows[0] = ("ranks", trouble, CHECKS["ranks"][-1])
        case.store.set("status", json.dumps(print_table(rows)))
        if case.args.json:
            table = [
                {"name": n, "verdict": VERDICTS[bool(c)], "seen": s, "cure": c} for n, s, c in rows
            ]
            case.args.json.write_text(json.dumps({"rows": table}, indent=1) + "\n")
    status = case.hear("status")
    case.tell("end", status)
    if case.rank == 0:
        case.gather("end", 2)  # rank 0, which may host the store, exits last
    return status


def missing(case: Case, told: dict) -> str:
    """Name the ranks that have not answered; "" if all have."""
    ranks = [str(rank) for rank in range(case.size) if rank not in told]
    return f"rank {', '.join(ranks)} of {case.size}" if ranks else ""


def print_table(rows: list[tuple[str, str, str]]) -> int:
    """Print the rows, a fix below each that failed, and return the exit status; rank 0 calls it."""
    lines = [f"{'check':<11} {'':<4} finding"]
    for name, seen, cure in rows:
        lines.append(f"{name:<11} {VERDICTS[bool(cure)]:<4} {seen}")
        if cure:
            lines.append(f"{'':<16} fix: {cure}")
    failed = sum(bool(cure) for _, _, cure in rows)
    lines.append(f"{len(rows)} checks: {failed} failed" if failed else f"all {len(rows)} checks ok")
    text = "\n".join(lines)
    sys.stdout.write(f"{text}\n")  # in one write: print() would send the last newline separately
    sys.stdout.flush()
    return min(failed, 1)


if __name__ == "__main__":
    main()
