"""The command line, in one process: `python -m ddp_helpers --help` lists the commands.

It reads the arguments of each; `commands` has what each does.
"""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter, _SubParsersAction
from pathlib import Path
from typing import NoReturn, TypeAlias

from ddp_helpers import PlainError, commands
from ddp_helpers.rank.launchers import stop

_DESCRIPTION = "Stage the data, write a script, examine a job, execute the course"
_DESCRIPTION += ", check a site, or measure: the exit status."


class Parser(ArgumentParser):
    """A parser, and so its commands, that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Stop with the line."""
        stop(f"{self.prog}: {message}; --help lists what can be given")


_Commands: TypeAlias = "_SubParsersAction[Parser]"


def make_parser() -> Parser:
    """Make the parser of every command, in the order in which --help lists them."""
    parser = Parser(prog="python -m ddp_helpers", description=_DESCRIPTION)
    subparsers = parser.add_subparsers(dest="command", required=True)
    _add_data(subparsers)
    _add_script(subparsers)
    _add_run(subparsers)
    _add_keep(subparsers)
    _add_site(subparsers)
    _add_job(subparsers)
    _add_collect(subparsers)
    _add_curve(subparsers)
    _add_ready(subparsers)
    _add_bench(subparsers)
    _add_doctor(subparsers)
    _add_hang(subparsers)
    _add_audit(subparsers)
    _add_explain(subparsers)
    _add_fits(subparsers)
    return parser


# Each of these adds a command: its line in --help, what it calls, and its arguments.


def _add_data(subparsers: _Commands) -> None:
    purpose = "put MNIST, or the offline digits, into a folder"
    command = subparsers.add_parser("data", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.stage_data)
    command.add_argument("folder", type=Path, nargs="?", default=Path("data"))


def _add_script(subparsers: _Commands) -> None:
    purpose = "write a standalone script"
    command = subparsers.add_parser("script", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.write_script)
    command.add_argument("name")
    command.add_argument("path", type=Path)
    force = "also over a file that you have edited, or another one"
    command.add_argument("--force", action="store_true", help=force)


def _add_run(subparsers: _Commands) -> None:
    purpose = "execute the notebooks in order"
    command = subparsers.add_parser("run", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.run_notebooks)
    only = "beginnings of names, such as 03; all without any"
    command.add_argument("only", nargs="*", help=only)
    in_place = "keep the outputs in notebooks/, to be committed"
    command.add_argument("--in-place", action="store_true", help=in_place)


def _add_keep(subparsers: _Commands) -> None:
    purpose = "copy finished runs to notebooks/results, to be committed"
    command = subparsers.add_parser("keep", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.keep_runs)
    command.add_argument("folder", type=Path)
    command.add_argument("name")


_SITE = "one of slurm/sites, or the path of a .toml file"


def _add_site(subparsers: _Commands) -> None:
    purpose = "check a site file, and show the file of a small job there"
    command = subparsers.add_parser("site", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.check_site)
    command.add_argument("name", help=_SITE)


def _add_job(subparsers: _Commands) -> None:
    purpose = "make a job of a script, the course's or your own, and show its file;"
    purpose += " what stands behind -- is the script's"
    command = subparsers.add_parser("job", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.make_job)
    command.add_argument("name", nargs="?", help=_SITE)  # none with --again
    command.add_argument("--nodes", type=int, default=1)
    gpus = "on each node, and one rank for each; else 1, or 0 at a site that has none"
    command.add_argument("--gpus", type=int, help=gpus)
    ranks = "on each node, with --gpus 0: they use CPUs"
    command.add_argument("--ranks", type=int, help=ranks)
    script = "one of the course's scripts, or a file; then -- and what it is given"
    command.add_argument("script", type=Path, nargs="?", help=script)
    cpus = "for each rank; else the site's cpus_per_rank, or 1"
    command.add_argument("--cpus", type=int, help=cpus)
    time = "after which Slurm ends the job; else the site's time, or 00:10:00"
    command.add_argument("--time", help=time)
    launcher = "srun: a task for each rank; torchrun: one on each node"
    command.add_argument("--launcher", default="srun", help=launcher)
    array = "values of {array} among the script's words: a task of the job for each"
    command.add_argument("--array", nargs="+", default=(), help=array)
    requeue = "the script can go on where it stopped; docs/own.md: how it is warned"
    command.add_argument("--requeue", action="store_true", help=requeue)
    command.add_argument("--run", default="", help="the name of the run folder below runs/")
    command.add_argument("--submit", action="store_true")
    again = "instead: submit the job in a run folder again, to go on there"
    command.add_argument("--again", type=Path, metavar="FOLDER", help=again)


def _add_collect(subparsers: _Commands) -> None:
    purpose = "ask Slurm how the jobs of these run folders ended, note it in their records,"
    purpose += " and list the runs"
    command = subparsers.add_parser("collect", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.collect_jobs)
    command.add_argument("folder", type=Path, nargs="+", help="of a job that has ended")


def _add_curve(subparsers: _Commands) -> None:
    purpose = "draw loss, accuracy and any other metric of runs by epoch, into a file"
    command = subparsers.add_parser("curve", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.draw_curves)
    folder = "of a run, or one that holds such; several are drawn together"
    command.add_argument("folder", type=Path, nargs="+", help=folder)
    out = "the file: .png, .pdf or .svg"
    command.add_argument("--out", type=Path, default=Path("curve.png"), help=out)


def _add_ready(subparsers: _Commands) -> None:
    purpose = "run the doctor as a job at a site"
    command = subparsers.add_parser("ready", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.run_doctor_job)
    command.add_argument("name", help=_SITE)
    command.add_argument("--nodes", type=int, default=2)
    gpus = "on each node, and one rank for each"
    command.add_argument("--gpus", type=int, default=2, help=gpus)


def _add_bench(subparsers: _Commands) -> None:
    purpose = "measure one device, DDP against none, two ranks against one"
    command = subparsers.add_parser("bench", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.measure_goals)


def _add_doctor(subparsers: _Commands) -> None:
    purpose = "check what a job needs; under any launcher, on each rank"
    # It reads its arguments by itself, as its script does, and has a help of its own.
    command = subparsers.add_parser("doctor", help=purpose, allow_abbrev=False, add_help=False)
    command.set_defaults(run_command=commands.run_doctor)


def _add_hang(subparsers: _Commands) -> None:
    purpose = "run a script with a fault that the seed chose, sell the evidence,"
    purpose += " and judge the answer: the hang lab"
    command = subparsers.add_parser("hang", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.play_hang_lab)
    command.add_argument("--seed", type=int, required=True, help="another fault for each")
    look = "a piece of the evidence of a seed that has been run"
    command.add_argument("--look", nargs="+", default=[], help=look)
    answer = "rank=… line=… kind=… cure=…"
    command.add_argument("--answer", nargs="+", default=[], help=answer)


def _add_audit(subparsers: _Commands) -> None:
    purpose = "run a DDP script, anybody's, unchanged on two CPU ranks under witnesses,"
    purpose += " and say what is wrong with it"
    command = subparsers.add_parser("audit", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.audit_script)
    command.add_argument("script", type=Path, help="then -- and what it is given")
    folder = "of the audit and of what the script writes, else build/audit/NAME"
    command.add_argument("--folder", type=Path, help=folder)
    cwd = "where the script runs, if not in an empty folder"
    command.add_argument("--cwd", type=Path, help=cwd)
    limit = "seconds that the script may take"
    command.add_argument("--limit", type=float, default=120, help=limit)
    on_cpu = "for a script that asks for CUDA: do it on the CPU, under gloo"
    command.add_argument("--on-cpu", action="store_true", help=on_cpu)
    batch_size_flag = "the script's, as in --batch-size-flag=--batch-size: one rank too"
    command.add_argument("--batch-size-flag", default="", help=batch_size_flag)
    resume_with = "end it, start it again with these words besides, as in --resume-with=--resume"
    command.add_argument("--resume-with", help=resume_with)
    command.add_argument("--json", type=Path, help="a file for the table")


_EXPLAIN = """Say of the log of a failed run which rank failed first, what its message means,
the likeliest causes in order, and the cure. It knows the messages of docs/troubleshooting.md,
and needs no network."""
_EXPLAIN_MORE = """examples:
  python -m ddp_helpers explain slurm-4711.log
  torchrun --nproc-per-node 2 train.py 2>&1 | tee train.log | python -m ddp_helpers explain

exit status: 0 no failure is seen, 1 a failure is explained, 2 wrong use, or a log that cannot be
read, 3 a failure that no rule knows"""


def _add_explain(subparsers: _Commands) -> None:
    purpose = "explain the log of a failed run: who failed first, why, and what to do"
    command = subparsers.add_parser(
        "explain",
        help=purpose,
        allow_abbrev=False,
        description=_EXPLAIN,
        epilog=_EXPLAIN_MORE,
        formatter_class=RawDescriptionHelpFormatter,
    )
    command.set_defaults(run_command=commands.explain_logs)
    log = "a file, a run folder, or - for standard input, which is read without any"
    command.add_argument("log", type=Path, nargs="*", help=log)
    command.add_argument("--json", action="store_true", help="print the verdict as JSON")


def _add_fits(subparsers: _Commands) -> None:
    purpose = "predict whether training a model of your own fits a GPU, with DDP, ZeRO or FSDP2,"
    purpose += " on how many of which size"
    command = subparsers.add_parser("fits", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.predict_fit)
    model = "FILE.py:NAME, a class or a function that makes the model without being given anything"
    command.add_argument("model", help=model)
    shape = "shape of one sample, as in 1 28 28; else read off the first layer"
    command.add_argument("--input", type=int, nargs="+", help=shape)
    dtypes = ("float32", "float16", "bfloat16", "int64")
    command.add_argument(
        "--type",
        choices=dtypes,
        help="of the input; else as the first layer asks",
    )
    batch = "samples on each GPU"
    command.add_argument("--batch-size-per-rank", type=int, default=32, help=batch)
    optimizer = "one of torch.optim, or momentum"
    command.add_argument("--optimizer", default="AdamW", help=optimizer)
    bf16 = "autocast; with FSDP2 its MixedPrecisionPolicy"
    command.add_argument("--bf16", action="store_true", help=bf16)
    gpu, sizes = "GB as sold, or cards: T4, A10G, L40S, H100, …", ("16", "24", "40", "80")
    command.add_argument("--gpu", nargs="+", default=sizes, help=gpu)


# Commands whose folder may be at fault where the system refuses something.
_WITH_A_FOLDER = {"data", "keep", "ready", "bench", "hang", "audit", "curve"}
# Commands with arguments for a script behind --.
_WITH_A_SCRIPT = {"job", "audit"}


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its exit status; stops at arguments that cannot be used.

    argv: the arguments; those of this process if None.
    """
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    end = argv.index("--") if "--" in argv else len(argv)
    args, unknown = parser.parse_known_args(argv[:end])
    args.arguments = unknown  # the doctor's
    if unknown and args.command != "doctor":
        text, cure = " ".join(unknown), ""
        if args.command in _WITH_A_SCRIPT:
            example = f"{args.command} … -- {text}"
            cure = f"; what the script is given stands behind --, as in: {example}"
        parser.error(f"unrecognized arguments: {text}{cure}")
    if args.command in _WITH_A_SCRIPT:
        args.arguments = argv[end + 1 :]
    try:
        return args.run_command(args)
    except PlainError as error:
        stop(str(error))
    except ModuleNotFoundError as error:
        cure = "make .venv/installed, then source .venv/bin/activate"
        stop(f"{args.command} needs {error.name}, which this Python lacks: {cure}")
    except BrokenPipeError:  # whoever read has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if args.command not in _WITH_A_FOLDER:
            raise
        path = error.filename or getattr(args, "folder", "a file")
        cure = "choose another folder"
        stop(f"{args.command}: {path} cannot be used ({error.strerror}): {cure}")


if __name__ == "__main__":
    sys.exit(main())
