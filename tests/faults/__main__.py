"""The fault matrix as a table: python -m faults [--times 3] [part of a row's name]. `make faults` calls it."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from faults.matrix import Matrix
from faults.rows import ROWS
from faults.slurm_rows import SLURM_ROWS


def main() -> int:
    """Run the rows that are asked for, print each as it ends, and return 1 if one has not passed."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="only rows whose fault has this in its name")
    parser.add_argument("--times", type=int, default=1, help="the whole matrix so often")
    args = parser.parse_args()
    rows = [row for row in [*ROWS, *SLURM_ROWS] if args.only in row[0]]
    if not rows:
        names = "; ".join(dict.fromkeys(row[0] for row in [*ROWS, *SLURM_ROWS]))
        parser.error(f"no fault has {args.only!r} in its name: give a part of one of {names}")
    failed, begin = 0, time.monotonic()
    for again in range(args.times):
        print(
            f"{'fault':<28} {'phase':<22} {'left after':>10}  passed   (time {again + 1} of {args.times})", flush=True
        )
        with tempfile.TemporaryDirectory() as folder:
            matrix = Matrix(Path(folder))
            for fault, phase, check in rows:
                try:
                    seconds, passed = f"{check(matrix):.1f} s", "yes"
                except Exception as error:
                    seconds, passed, failed = "", f"NO: {error}", failed + 1
                print(f"{fault:<28} {phase:<22} {seconds:>10}  {passed}", flush=True)
    print(f"{args.times * len(rows) - failed} of {args.times * len(rows)} passed, {time.monotonic() - begin:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
