"""The small command line: `python -m ddp_helpers --help`."""

import argparse
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

from ddp_helpers import PlainError
from ddp_helpers.rank.launchers import stop

# What a command needs is imported when it is called, so that writing a script needs no Jupyter.


class Parser(argparse.ArgumentParser):
    """A parser, and so its commands, that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Stop with the line."""
        stop(f"{self.prog}: {message}; --help lists what can be given")


def data(args: Namespace) -> None:
    """Put MNIST, or the offline digits, into a folder."""
    from ddp_helpers.rank.staging import stage

    print(f"use it with: --data {stage(args.folder)}")


def script(args: Namespace) -> None:
    """Write a standalone script."""
    from ddp_helpers.launch.scripts import is_output, write

    if not is_output(write(args.name, args.path, force=args.force)):
        print(f"wrote {args.path}")


def run(args: Namespace) -> int:
    """Execute the notebooks in order."""
    from ddp_helpers.upkeep.course import run as run_course

    return run_course(args.only, args.in_place)


def keep(args: Namespace) -> None:
    """Copy finished runs to notebooks/results, to be committed."""
    from ddp_helpers.upkeep.records import keep as keep_runs

    print(f"kept in {keep_runs(args.folder, args.name)}")


def site(args: Namespace) -> None:
    """Check a site file, and show the file of a small job there."""
    from ddp_helpers import jobs

    program = ("mnist_ddp.py", "--epochs", "1", "--run-dir", "{run_dir}")
    place = jobs.Site.load(args.name)
    shape = {"time": place.time or jobs.Job.time, "cpus_per_task": place.cpus_per_rank or 4}
    job = jobs.Job("try-site", program, nodes=2, tasks_per_node=2, gpus_per_node=2, **shape)
    print(jobs.render(job, place, Path("runs/try-site")))
    print(f"# {args.name} is sound. Try the lines above there, in a file: sbatch --test-only FILE", file=sys.stderr)


def job(args: Namespace) -> None:
    """Make a job of a script, the course's or your own, and show its file; what stands behind -- is the script's."""
    from ddp_helpers import ROOT, jobs

    if args.again:
        if args.name or args.words:
            raise jobs.JobError("--again FOLDER takes nothing else: the job stands in the folder")
        jobs.again(args.again)
        return
    if not (args.name and args.script):
        raise jobs.JobError("give a site and a script, as in: job local mnist_ddp -- --data data")
    place = jobs.Site.load(args.name)
    gpus = int(bool(place.gpus)) if args.gpus is None else args.gpus
    ranks = (gpus or 1) if args.ranks is None else args.ranks
    if gpus and not place.gpus:
        raise jobs.JobError(f"--gpus {gpus}: site {place.name} has no GPUs: give --gpus 0 --ranks {ranks}")
    if gpus not in (0, ranks) or (args.gpus == 0 and args.ranks is None):
        raise jobs.JobError(f"--gpus {gpus}: a rank has a GPU of its own, or all use CPUs: --gpus 0 --ranks {ranks}")
    shape = {"nodes": args.nodes, "tasks_per_node": ranks, "gpus_per_node": gpus, "array": args.array}
    shape |= {"cpus_per_task": args.cpus, "time": args.time, "launcher": args.launcher, "requeue": args.requeue}
    folder = jobs.run_folder(ROOT / "runs", args.run, f"{args.script.stem}-{args.nodes}x{ranks}")
    jobs.prepare(args.script, args.words, place, folder, **shape)
    if jobs.keeps_no_record(args.script, args.words):
        print(
            "# the run leaves no record, and collect finds none: give --run-dir '{run_dir}' behind --", file=sys.stderr
        )
    print((folder / "job.sbatch").read_text())
    if not args.submit:
        print(f"# it is not submitted. Read it, then: sbatch '{folder / 'job.sbatch'}'", file=sys.stderr)
    elif jobs.submit(folder):
        record = f"the records of its tasks: {folder}-0 and on" if args.array else "its record too"
        print(f"# its script and its log: {folder}; {record}", file=sys.stderr)
        print(f"# when it has ended: python -m ddp_helpers collect '{folder}'", file=sys.stderr)


def collect(args: Namespace) -> None:
    """Ask Slurm how the jobs of these run folders ended, note it in their records, and list the runs."""
    from ddp_helpers import jobs

    for run in [run for folder in args.folder for run in jobs.collect(folder)]:
        print(f"{run.folder}: {run.state}, {len(run.epochs)} epochs")


def curve(args: Namespace) -> None:
    """Draw loss, accuracy and any other metric of runs by epoch, into a file."""
    import matplotlib

    from ddp_helpers.records import runs, scaling

    matplotlib.use("agg")  # no window, whatever the terminal's MPLBACKEND and DISPLAY say
    from ddp_helpers.draw.curves import curves

    if args.out.suffix not in (".png", ".pdf", ".svg"):
        raise PlainError(f"--out {args.out}: give a name that ends in .png, .pdf or .svg")
    if bare := [str(folder) for folder in args.folder if not runs.run_folders(folder)]:
        raise PlainError(f"{bare[0]} holds no record of a run (no spec.json, no job.json): give a run's folder")
    table = runs.table(*args.folder)
    if scaling.finished(table).empty:
        raise PlainError(f"no run to draw, {scaling.left_out(table)}: wait until one is done, with an epoch")
    picture = curves(table)
    print(f"{picture.alt} Drawn in: {picture.save(args.out)}")


def ready(args: Namespace) -> int:
    """Run the doctor as a job at a site."""
    from ddp_helpers import jobs

    return int(not jobs.ready(args.name, args.nodes, args.gpus))


def bench(args: Namespace) -> None:
    """Measure one device, DDP against none, two ranks against one."""
    from ddp_helpers.upkeep.bench import bench as measure

    measure()


def doctor(args: Namespace) -> None:
    """Check what a job needs; under any launcher, on each rank."""
    from ddp_helpers.rank.scripts.doctor import main as examine

    examine(args.words, "python -m ddp_helpers doctor")


def hang(args: Namespace) -> int:
    """Run a script with a fault that the seed chose, sell the evidence, and judge the answer: the hang lab."""
    from ddp_helpers.lessons.break_it_and_fix_it.hang import play

    return play(args.seed, args.look, args.answer)


def audit(args: Namespace) -> int:
    """Run a DDP script, anybody's, unchanged on two CPU ranks under witnesses, and say what is wrong with it."""
    from ddp_helpers.tools.audit import command

    rows = command.audit(
        args.script,
        args.words,
        folder=args.folder,
        cwd=args.cwd,
        limit=args.limit,
        on_cpu=args.on_cpu,
        batch_size_flag=args.batch_size_flag,
        resume_with=args.resume_with,
    )
    return command.report(rows, args.json)


def fits(args: Namespace) -> None:
    """Predict whether training a model of your own fits a GPU, with DDP, ZeRO or FSDP2, on how many of which size."""
    import torch

    from ddp_helpers.tools.fits import predict, show
    from ddp_helpers.tools.model_file import load, sample_of

    make = load(args.model)
    types = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in types}
    shape, dtype, read = sample_of(make, args.input, by_name.get(args.type))
    print(read, end="\n" * bool(read))
    print(show(predict(make, shape, dtype, args.batch_size_per_rank, args.optimizer, args.bf16), args.gpu))


def make_parser() -> Parser:
    """Every command with what it takes."""
    parser = Parser(prog="python -m ddp_helpers", description=main.__doc__)
    commands, takes = parser.add_subparsers(dest="command", required=True), {}
    for do in (data, script, run, keep, site, job, collect, curve, ready, bench, doctor, hang, audit, fits):
        line = do.__doc__[0].lower() + do.__doc__[1:].rstrip(".")
        more = {"add_help": do is not doctor, "allow_abbrev": False}  # the doctor has a help of its own
        command = commands.add_parser(do.__name__, help=line, **more)
        command.set_defaults(do=do)
        takes[do] = command.add_argument
    takes[data]("folder", type=Path, nargs="?", default=Path("data"))
    takes[script]("name")
    takes[script]("path", type=Path)
    takes[script]("--force", action="store_true", help="also over a file that you have edited, or another one")
    takes[run]("only", nargs="*", help="beginnings of names, such as 03; all without any")
    takes[run]("--in-place", action="store_true", help="keep the outputs in notebooks/, to be committed")
    takes[keep]("folder", type=Path)
    takes[keep]("name")
    for each in (site, job, ready):
        optional = {"nargs": "?"} if each is job else {}  # with --again there is none
        takes[each]("name", help="one of slurm/sites, or the path of a .toml file", **optional)
    takes[ready]("--nodes", type=int, default=2)
    takes[ready]("--gpus", type=int, default=2, help="on each node, and one rank for each")
    add = takes[job]
    add("--nodes", type=int, default=1)
    add("--gpus", type=int, help="on each node, and one rank for each; else 1, or 0 at a site that has none")
    add("--ranks", type=int, help="on each node, with --gpus 0: they use CPUs")
    add("script", type=Path, nargs="?", help="one of the course's scripts, or a file; then -- and what it is given")
    add("--cpus", type=int, help="for each rank; else the site's cpus_per_rank, or 1")
    add("--time", help="after which Slurm ends the job; else the site's time, or 00:10:00")
    add("--launcher", default="srun", help="srun: a task for each rank; torchrun: one on each node")
    add("--array", nargs="+", default=(), help="values of {array} among the script's words: a task of the job for each")
    add("--requeue", action="store_true", help="the script can go on where it stopped; docs/own.md: how it is warned")
    add("--run", default="", help="the name of the run folder below runs/")
    add("--submit", action="store_true")
    add("--again", type=Path, metavar="FOLDER", help="instead: submit the job in a run folder again, to go on there")
    takes[hang]("--seed", type=int, required=True, help="another fault for each")
    takes[hang]("--look", nargs="+", default=[], help="a piece of the evidence of a seed that has been run")
    takes[hang]("--answer", nargs="+", default=[], help="rank=… line=… kind=… cure=…")
    takes[audit]("script", type=Path, help="then -- and what it is given")
    takes[audit]("--folder", type=Path, help="of the audit and of what the script writes, else build/audit/NAME")
    takes[audit]("--cwd", type=Path, help="where the script runs, if not in an empty folder")
    takes[audit]("--limit", type=float, default=120, help="seconds that the script may take")
    takes[audit]("--on-cpu", action="store_true", help="for a script that asks for CUDA: do it on the CPU, under gloo")
    takes[audit](
        "--batch-size-flag", default="", help="the script's, as in --batch-size-flag=--batch-size: one rank too"
    )
    takes[audit]("--resume-with", help="end it, start it again with these words besides, as in --resume-with=--resume")
    takes[audit]("--json", type=Path, help="a file for the table")
    add = takes[fits]
    add("model", help="FILE.py:NAME, a class or a function that makes the model without being given anything")
    add("--input", type=int, nargs="+", help="shape of one sample, as in 1 28 28; else read off the first layer")
    add(
        "--type", choices=("float32", "float16", "bfloat16", "int64"), help="of the input; else as the first layer asks"
    )
    add("--batch-size-per-rank", type=int, default=32, help="samples on each GPU")
    add("--optimizer", default="AdamW", help="one of torch.optim, or momentum")
    add("--bf16", action="store_true", help="autocast; with FSDP2 its MixedPrecisionPolicy")
    sizes = ("16", "24", "40", "80")
    add("--gpu", nargs="+", default=sizes, help="GB as sold, or cards: T4, A10G, L40S, H100, …")
    takes[collect]("folder", type=Path, nargs="+", help="of a job that has ended")
    takes[curve]("folder", type=Path, nargs="+", help="of a run, or one that holds such; several are drawn together")
    takes[curve]("--out", type=Path, default=Path("curve.png"), help="the file: .png, .pdf or .svg")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Stage the data, write a script, examine a job, execute the course, check a site, or measure: the exit status."""
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args, args.words = parser.parse_known_args(words[:cut])
    if args.do in (job, audit) and not args.words:
        args.words = words[cut + 1 :]
    elif args.words and args.do is not doctor:  # which has a parser of its own, as its script has
        words = " ".join(args.words)
        cure = f"; what the script is given stands behind --, as in: {args.command} … -- {words}"
        parser.error(f"unrecognized arguments: {words}{cure if args.do in (job, audit) else ''}")
    try:
        return args.do(args) or 0
    except PlainError as error:
        stop(str(error))
    except ModuleNotFoundError as error:
        cure = "make .venv/installed, then source .venv/bin/activate"
        stop(f"{args.command} needs {error.name}, which this Python lacks: {cure}")
    except BrokenPipeError:  # whoever read has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if args.do not in (data, keep, ready, bench, hang, audit, curve):
            raise
        place = error.filename or getattr(args, "folder", "a file")
        stop(f"{args.command}: {place} cannot be used ({error.strerror}): choose another folder")


if __name__ == "__main__":
    sys.exit(main())
