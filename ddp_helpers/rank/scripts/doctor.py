"""Check what a job needs, on all its ranks, before it burns an hour; rank 0 prints a table.

torchrun --standalone --nproc-per-node 2 -- doctor.py --data data
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python doctor.py --data data
mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT python doctor.py --data data
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from ddp_helpers.rank.doctor.arrival import arrive
from ddp_helpers.rank.doctor.case import Case, capture_trouble
from ddp_helpers.rank.doctor.checks import CHECKS, TOGETHER
from ddp_helpers.rank.files import write_whole
from ddp_helpers.rank.launchers import OLDER_NCCL, stop, who_am_i


def main(argv: list[str] | None = None, prog: str | None = None) -> None:
    """Look at the job; every rank calls it.

    Leaves with 0 if all is green, 1 if a row is red, 2 if the arguments are wrong.
    """
    args = parse_flags(argv, prog)
    os.environ.setdefault(*OLDER_NCCL)
    case = Case(*who_am_i(), args)
    status, trouble = examine(case)
    try:
        if trouble:
            stop(f"rank {case.rank} gets no answer from rank 0: {trouble[0]}")
        sys.exit(status)
    finally:
        if case.blocked:  # a thread that waits inside NCCL could hold the interpreter's end
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(2 if trouble else status or 0)


def examine(case: Case) -> tuple[int | None, list[str]]:
    """Meet the other ranks, and make all checks; every rank calls it.

    Returns the exit status, or why there is none.
    """
    trouble: list[str] = []
    if case.size > 1:
        _, trouble = capture_trouble(case.meet)
    if trouble and case.rank:
        return None, trouble
    return capture_trouble(lambda: consult(case, trouble))


def parse_flags(argv: list[str] | None = None, prog: str | None = None) -> Namespace:
    """Read the doctor's flags; every rank calls it. Stops at a value that cannot work."""
    purpose = "Check what a job needs before it burns an hour."
    layout = RawDescriptionHelpFormatter
    usage = "%(prog)s [flags]; --help lists them"
    parser = ArgumentParser(prog, usage, purpose, formatter_class=layout, allow_abbrev=False)
    program = f"--no-python -- {parser.prog}" if prog else f"-- {parser.prog}"
    parser.epilog = f"""example:
  torchrun --standalone --nproc-per-node 2 {program} --data none

exit status: 0: all is green; 1: a row is red; 2: what was given cannot be used"""
    data = os.environ.get("DDP_MNIST_ROOT", "data")
    run_dir_help = "folder for run records, which all nodes share"
    workers_help = "DataLoader workers that each rank will start"
    add = parser.add_argument
    add("--data", type=Path, default=data, help="holds MNIST/raw; none: not asked")
    add("--run-dir", type=Path, default=Path("runs"), help=run_dir_help)
    add("--num-workers", type=int, default=0, help=workers_help)
    add("--timeout", type=int, default=30, help="seconds to wait for other ranks")
    add("--no-cuda", action="store_true", help="use the CPU even where there is a GPU")
    add("--json", type=Path, metavar="FILE", help="rank 0 also writes the rows there")
    args = parser.parse_args(argv)
    if not (0 <= args.num_workers < 2**20 and 1 <= args.timeout < 2**20):
        numbers = f"--num-workers {args.num_workers} or --timeout {args.timeout}"
        parser.error(f"{numbers} is out of range")
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: give a file in a folder that is there")
    return args


def consult(case: Case, trouble: list[str]) -> int:
    """Make all checks that can be made, and have rank 0 print them; every rank calls it.

    trouble: why the ranks could not meet, if they could not. Returns the exit status, before which
    no rank leaves.
    """
    arrive(case)
    trouble = trouble or capture_trouble(lambda: case.together("arrive"))[1]
    names = [name for name in CHECKS if not (trouble and name in TOGETHER)]
    answers = {name: run_check(case, name) for name in names}
    lost = case.come("told", patience(case, trouble), json.dumps(answers))
    if case.rank == 0:
        rows = judge_all(case, names, lost)
        if lost or trouble:
            seen = trouble or [f"rank {', '.join(map(str, lost))} of {case.size} is lost"]
            _, usual_cure = CHECKS["ranks"]
            rows[0] = ("ranks", seen[0], seen[1] if len(seen) > 1 else usual_cure)
        if case.args.json:
            write_json(rows, case.args.json)
        case.store.set("status", str(print_table(rows)))
    case.store.set_timeout(timedelta(seconds=2 * case.args.timeout + 10))
    status = int(case.store.get("status"))
    if case.rank:
        case.store.add("end came", 1)
    else:
        case.come("end", 2)  # rank 0, which may keep the store, goes last
    return status


def patience(case: Case, trouble: list[str]) -> int:
    """Choose the seconds to wait for the other ranks' answers.

    Who was not waiting for the one that is lost notices only after --timeout.
    """
    if case.rank:
        return 0
    if trouble:
        return 1
    return 3 if case.lost else case.args.timeout + 5


def run_check(case: Case, name: str) -> list[str]:
    """Run a check on this rank; return what was seen, and the cure, or "" if all is well."""
    check, usual_cure = CHECKS[name]
    seen, trouble = capture_trouble(lambda: check(case))
    if trouble:
        return [*trouble, usual_cure][:2]
    return [seen or "", ""]


def judge_all(case: Case, names: list[str], lost: list[int]) -> list[tuple[str, str, str]]:
    """Read the answers of all ranks that are not lost, and judge them; rank 0 calls it."""
    ranks = [rank for rank in range(case.size) if rank not in lost]
    notes = {rank: json.loads(case.store.get(f"told of {rank}")) for rank in ranks}
    rows = []
    for name in names:
        answers = {rank: note[name] for rank, note in notes.items() if name in note}
        rows.append(judge_check(name, answers))
    return rows


def judge_check(name: str, answers: dict[int, list[str]]) -> tuple[str, str, str]:
    """Make the row of a check from each rank's answer: its name, what was seen, and the cure.

    A red row says which ranks are at fault, another what is fine. Any process calls it.
    """
    at_fault: dict[str, list[str]] = {}  # ranks, by what was seen
    for rank, (seen, cure) in answers.items():
        at_fault.setdefault(seen, []).extend([str(rank)] if cure else [])
    faults = []
    for seen, ranks in at_fault.items():
        if len(ranks) == len(answers) > 1:
            faults.append(f"all ranks: {seen}")
        elif ranks:
            faults.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {seen}")
    fine = [seen for seen in at_fault if seen][:4]
    cures = dict.fromkeys(cure for _, cure in answers.values() if cure)
    return name, "; ".join(faults or fine), "; ".join(cures)


def print_table(rows: list[tuple[str, str, str]]) -> int:
    """Print the rows, a cure below each red one, and give the exit status; rank 0 calls it."""
    lines = [f"{'check':<11} {'':<3} what was seen"]
    red = 0
    for name, seen, cure in rows:
        lines.append(f"{name:<11} {'RED' if cure else 'ok':<3} {seen}")
        if cure:
            lines.append(f"{'':<15} cure: {cure}")
            red += 1
    lines.append(f"{red} of {len(rows)} checks RED" if red else f"all {len(rows)} checks green")
    text = "\n".join(printable(line) for line in lines)
    sys.stdout.write(f"{text}\n")  # at once: print() would send the last line's end by itself
    sys.stdout.flush()
    return min(red, 1)


def write_json(rows: list[tuple[str, str, str]], path: Path) -> None:
    """Write the rows to a file, each with its verdict; rank 0 calls it."""
    names = ("name", "verdict", "seen", "cure")
    table = [
        dict(zip(names, (name, "RED" if cure else "ok", seen, cure), strict=True))
        for name, seen, cure in rows
    ]
    write_whole(path, f"{json.dumps({'rows': table}, indent=1)}\n".encode())


def printable(line: str) -> str:
    """Replace what a terminal would obey by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in line)


if __name__ == "__main__":
    main()
