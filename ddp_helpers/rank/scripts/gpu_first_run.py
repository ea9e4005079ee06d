"""Try on this machine what only a GPU can show, and write down what was seen; ten minutes at most.

python3 gpu_first_run.py --data data    # the folder with MNIST's files: download_data.py gets them
srun --gres=gpu:2 --cpus-per-task=8 --time=15 python3 gpu_first_run.py --data data
python3 gpu_first_run.py --data data --cpu    # the same steps on two CPU ranks, over gloo; twenty

It starts the scripts that stand beside it. Each step has a time limit of its own, since a hang is a
result, and adds a line to record.jsonl at once; nothing stops the others. At the end it prints a
table, and on GPUs the folder to send or to commit. Needs torch and torchvision. MIT licence.
"""

import itertools
import json
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_helpers.rank.gpu.outside import NO_TIME, STEPS, take_step, verdict
from ddp_helpers.rank.gpu.probes import PROBES
from ddp_helpers.rank.gpu.step import COURSE, MNIST, SIMULATED, Step, raw_file


def main() -> int:
    """Run all steps, each in a process of its own; return 0 if all that was tried went well."""
    args = read_flags()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job's end, as Ctrl-C
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        first = take_step("facts", args, Path(folder), end)
    seen, lines = first["seen"], [first]
    if not first["ok"]:
        why = seen.get("why") or ": ".join([first["ended"], *first["said"][-1:]])
        print(f"no GPU that torch can use, so nothing was tried: {why}")
        print("with --cpu the same steps run on CPUs, over gloo")
        return 1
    vars(args).update({name: seen[name] for name in ("ranks", "gpus", "bf16", "visible")})
    out = new_folder(args.out, "cpu" if args.cpu else seen["names"][0])
    print(f"the record: {out}")
    done = False
    try:
        for name in STEPS:
            if name != "facts" and (not args.only or name in args.only):
                work = Path(tempfile.mkdtemp(dir=out))
                lines.append(take_step(name, args, work, end))
                # First: where the disk is full, this makes room for the line.
                shutil.rmtree(work, ignore_errors=True)
            done = write(out, lines)
            if lines[-1]["ended"] == "interrupted":
                break
    finally:
        print_table(lines)
    if not (args.cpu or SIMULATED):  # what CPUs show is no record of a GPU
        print(f"send this folder to the course, or commit it: {out}")
    if lines[-1]["ended"] == "interrupted":
        return 130
    no_time = any(line["ended"] == NO_TIME for line in lines)
    return int(not done or no_time or any(line["ok"] is False for line in lines))


def read_flags() -> Namespace:
    """Read the command line; stops where it cannot be used."""
    parser = ArgumentParser(usage="%(prog)s --data FOLDER [flags]; --help lists them")
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="folder with MNIST/raw")
    add("--out", type=Path, help="folder in which the record's folder is made")
    add("--seconds", type=float, help="of all steps, 600 or on CPUs 1200: each has its share")
    add("--only", nargs="+", choices=STEPS, help="leave out the other steps")
    add("--example", type=Path, help="main.py of pytorch/examples/mnist, to be timed beside ours")
    add("--cpu", action="store_true", help="hide the GPUs: two ranks on CPUs, over gloo")
    args = parser.parse_args()
    args.data, args.seconds = args.data.resolve(), args.seconds or (1200 if args.cpu else 600)
    if missing := [name for name in MNIST if not raw_file(args.data, name).is_file()]:
        cure = f"download_data.py --data {args.data} gets them, where there is a network"
        parser.error(f"--data {args.data} has no MNIST/raw/{missing[0]}-ubyte: {cure}")
    in_course = (COURSE / "notebooks" / "results").is_dir()
    place = "build" if args.cpu or SIMULATED else "notebooks/results"
    home = COURSE / place if in_course else Path.cwd()
    args.out = (args.out or home / "gpu").resolve()
    args.ranks, args.gpus, args.visible = 0, 0, ""  # `facts` will tell
    return args


def new_folder(out: Path, name: str) -> Path:
    """Make the folder NAME-N for this record, with the first N that is free."""
    name = re.sub(r"\W+", "-", name.lower())
    folders = (out / f"{name}-{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir(parents=True)
    return folder


def write(out: Path, lines: list[dict[str, Any]]) -> bool:
    """Write the record and its log, each whole, or leave those before; tells whether it did."""
    ends = [line | {"said": line["said"][-20:]} for line in lines]
    record = "".join(json.dumps(line) + "\n" for line in ends)
    log = "".join("\n".join([f"==== {line['step']}", *line["said"], ""]) for line in lines)
    part = out / "new.part"
    try:
        for name, text in {"record.jsonl": record, "log.txt": log}.items():
            part.write_text(text)
            part.replace(out / name)
    except OSError as error:
        lines[-1]["found"] += f" (not written at once: {error.strerror})"
        print(f"the record cannot be written now: {error.strerror}", flush=True)
        with suppress(OSError):
            part.unlink()
        return False
    return True


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print a row for each step."""
    print("\nstep       seconds")
    for line in lines:
        print(f"{line['step']:<9} {line['seconds']:8.1f}  {verdict(line)}")
    print(flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        PROBES[sys.argv[2]](*sys.argv[3:])
    elif sys.argv[1:2] == ["--step"]:
        STEPS[sys.argv[2]][0](Step(Namespace(**json.loads(sys.argv[3])), Path(sys.argv[4])))
    else:
        sys.exit(main())
