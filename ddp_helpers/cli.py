"""The command line: `ddp-course`, in any folder; `python -m ddp_helpers` is the same program.

`main` is its console script, in one process; `commands` has what each command does. What only
makers need (execute, bench, keep) are targets of the Makefile.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter, _SubParsersAction
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

from ddp_helpers import ROOT, commands
from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.scripts import NAMES
from ddp_tools import PlainError

_DESCRIPTION = """Multi-GPU training scripts: write one, run it on Slurm, find out why it failed.

In any folder. Runs go to $DDP_RUNS; where it is not set, below the folder in which you are, or, in
the course's own, to its runs/.
An audit is kept only in the course's build/, or in the folder that --folder names."""
_EPILOG = """ddp-course COMMAND --help has an example, and what each exit status means.
Status 2 is the same for all: what was given cannot be used, and one line says why."""
# Commands with arguments for a script behind --.
_WITH_A_SCRIPT = {"job", "audit", "gpus"}
# Commands whose folder may be at fault where the system refuses something.
_WITH_A_FOLDER = {"data", "check-site", "hang", "audit", "curve", "gpus"}
_OLD_NAMES = {"ready": "check-site"}
_IN_TORCH = {"torch", "torchvision", "psutil", "cloudpickle"}  # the packages of that extra
_SITE = "one of the course's sites, or the path of a .toml file"


class Parser(ArgumentParser):
    """A parser, and so its commands, that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Stop with the line."""
        stop(f"{self.prog}: {message}; --help lists what can be given")


Commands: TypeAlias = "_SubParsersAction[Parser]"


def make_parser() -> Parser:
    """Make the parser of all commands, in the order in which --help lists them."""
    parser = Parser(
        prog="ddp-course",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_data(subparsers)
    _add_script(subparsers)
    _add_doctor(subparsers)
    _add_job(subparsers)
    _add_check_site(subparsers)
    _add_collect(subparsers)
    _add_curve(subparsers)
    _add_explain(subparsers)
    _add_plan(subparsers)
    _add_audit(subparsers)
    _add_compare(subparsers)
    _add_fits(subparsers)
    _add_gpus(subparsers)
    _add_who_hangs(subparsers)
    _add_hang(subparsers)
    _add_grade(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its exit status; stops at arguments that cannot be used.

    argv: the arguments; those of this process if None.
    """
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    argv[:1] = [_OLD_NAMES.get(word, word) for word in argv[:1]]
    end = argv.index("--") if "--" in argv else len(argv)
    args, unknown = parser.parse_known_args(argv[:end])
    in_course = (ROOT / "notebooks").is_dir() and Path.cwd().is_relative_to(ROOT)
    args.course, args.prog = ROOT if in_course else None, f"{parser.prog} {args.command}"
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
        extra = "torch" if error.name in _IN_TORCH else "notebook"
        # In a clone by its path: the name alone would be looked up on PyPI.
        course = str(ROOT) if (ROOT / "pyproject.toml").exists() else "ddp-course"
        cure = f"pip install '{course}[{extra}]'"
        if str(error.name).startswith("ddp_helpers."):
            cure = "it is part of the course, not of its wheel: clone that"
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


# ---- Each of these adds a command: its line in --help, what it calls, its arguments, an example.


def _add(
    subparsers: Commands,
    name: str,
    run_command: Callable[[Namespace], int],
    purpose: str,
    example: str,
    statuses: str,
) -> Parser:
    """Add a command without its arguments.

    example: a command line that works. statuses: what each exit status but 2 means.
    """
    program = subparsers._prog_prefix  # as in `ddp-course`
    lines = [f"example:\n  {program} {example}"]
    lines += [f"exit status: {statuses}; 2: what was given cannot be used"]
    command = subparsers.add_parser(
        name,
        help=purpose,
        description=purpose,
        epilog="\n\n".join(lines),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run_command=run_command)
    return command


def _add_json(command: Parser) -> None:
    """Add the flag --json."""
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the answer there")


def _add_doctor(subparsers: Commands) -> None:
    purpose = "check, on each rank and under any launcher, all that a job needs"
    # It reads its arguments by itself, as its script does, and has a help of its own.
    command = subparsers.add_parser("doctor", help=purpose, allow_abbrev=False, add_help=False)
    command.set_defaults(run_command=commands.run_doctor)


def _add_audit(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "audit",
        commands.audit_script,
        "run a DDP script, anybody's, unchanged on two ranks, record what it asks of torch,"
        " and say what is wrong with it",
        "audit train.py -- --epochs 2",
        "0: no check failed, and none is unknown; 1: a check failed; 2, also: the script failed"
        " before it did anything; 3: no check failed, but those of the last line are unknown",
    )
    command.add_argument("script", type=Path, help="then -- and what it is given")
    folder = "keep the audit and what the script writes there"
    command.add_argument("--folder", type=Path, help=folder)
    cwd = "whose files the script finds where it runs, in place of none; it changes none of them"
    command.add_argument("--cwd", type=Path, help=cwd)
    limit = "seconds that the script may take"
    command.add_argument("--limit", type=float, default=120, help=limit)
    on_cpu = "for a script that asks for CUDA, where no GPUs can be simulated: use the CPU"
    command.add_argument("--on-cpu", action="store_true", help=on_cpu)
    two_nodes = "each rank is told that it is alone on its node: finds local_rank taken for rank"
    command.add_argument("--two-nodes", action="store_true", help=two_nodes)
    batch_size_flag = "the script's, as in --batch-size-flag=--batch-size: one rank too"
    command.add_argument("--batch-size-flag", default="", help=batch_size_flag)
    one_rank_with = "where no such flag is found: the words that give one rank the global batch,"
    one_rank_with += " as in --one-rank-with=--batch-size=48, maybe none"
    command.add_argument("--one-rank-with", help=one_rank_with)
    resume_with = "end it, start it again with these words besides, as in --resume-with=--resume"
    command.add_argument("--resume-with", help=resume_with)
    preempt = "send one rank a signal twice in an epoch, kill all within torch.save, and compare"
    preempt += " the weights each time; with --resume-with, if a restart needs words"
    command.add_argument("--preempt", action="store_true", help=preempt)
    sarif = "also write the failed checks as SARIF, which code hosts show beside the lines"
    command.add_argument("--sarif", type=Path, metavar="FILE", help=sarif)
    _add_json(command)


def _add_explain(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "explain",
        commands.explain_logs,
        "explain the log of a failed run: who failed first, what its message means, the likeliest"
        " causes in order, and the cure; without a network",
        "explain train.log",
        "0: it says that the run ended well; 1: a failure is explained; 3: a failure that no rule"
        " knows; 4: no failure is seen, but neither is a good end, or not all was read; of a job"
        " file, 0: no known fault; 1: a fault; 4: an option, the script, or what starts its ranks"
        " was not seen",
    )
    log = "a file, a run folder, a job file, or - for standard input, which is read without any"
    command.add_argument("log", type=Path, nargs="*", help=log)
    what = "print what the log shows, without advice: for an issue, or for an assistant"
    command.add_argument("--facts", action="store_true", help=what)
    command.add_argument("--json", action="store_true", help="print the answer as JSON")


def _add_plan(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "plan",
        commands.plan_script,
        "list the lines of a script for one GPU that need a decision before several ranks run it,"
        " from its text alone, with what becomes of each",
        "plan train.py",
        "1: they are listed; 4: so they are, and what can hold more was not seen",
    )
    command.add_argument("script", type=Path, help="what it imports from its project is read, too")
    command.add_argument("--json", action="store_true", help="print all lines as JSON")


def _add_compare(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "compare",
        commands.compare_weights,
        "compare the weights in two files that torch.save has written: the largest difference",
        "compare one.pt two.pt",
        "0: they are equal, or in float64 up to rounding; 1: they differ; 3: their type is too"
        " coarse to tell",
    )
    command.add_argument("files", type=Path, nargs=2, metavar="FILE")


def _add_fits(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "fits",
        commands.predict_fit,
        "predict whether training a model of your own fits a GPU, with DDP, ZeRO or FSDP2,"
        " on how many of which size",
        "fits model.py:Net --input 1 28 28 --gpu 16 80",
        "0: some way in the table surely fits one of the GPUs; 1: none surely fits",
    )
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
    _add_json(command)


def _add_gpus(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "gpus",
        commands.run_on_simulated_gpus,
        "run a command, and all that it starts, with simulated NVIDIA GPUs beneath PyTorch: scripts"
        " that say cuda and nccl run as they are, on the CPU",
        "gpus 2 -- torchrun --standalone --nproc-per-node 2 train.py",
        "0: the command's is 0; else the command's, or 128 plus the number of the signal that"
        " ended it",
    )
    count = "how many of them the command sees; then -- and the command"
    command.add_argument("count", type=int, metavar="N", help=count)
    memory = "of each, after which PyTorch says: CUDA out of memory"
    command.add_argument("--memory-mb", type=int, default=2048, help=memory)
    beside = "even where a real GPU is: the command does not see that"
    command.add_argument("--beside-real-gpus", action="store_true", help=beside)


def _add_job(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "job",
        commands.make_job,
        "make a job of a script, the course's or your own, and show its file;"
        " what stands behind -- is the script's",
        "job local train.py --gpus-per-node 0 --ranks-per-node 2 --run first -- --epochs 2",
        "0: the job is made, and submitted where that was asked for; 1: it is made, and the Slurm"
        " of this machine would not take it",
    )
    command.add_argument("site", nargs="?", help=_SITE)  # none with --again
    command.add_argument("--nodes", type=int, default=1)
    gpus = "one rank for each; else 1, or 0 at a site that has none"
    command.add_argument("--gpus-per-node", "--gpus", type=int, help=gpus)
    ranks = "where no GPU is asked for: they use CPUs"
    command.add_argument("--ranks-per-node", "--ranks", type=int, help=ranks)
    script = "one of the course's scripts, or a file; then -- and what it is given"
    command.add_argument("script", type=Path, nargs="?", help=script)
    command.add_argument("--cpus-per-rank", "--cpus", type=int, help="else the site's")
    time = "after which Slurm ends the job; else the site's time"
    command.add_argument("--time", help=time)
    launcher = "srun: a task for each rank; torchrun: one on each node, as for a script that reads"
    launcher += " only torchrun's RANK; else what the texts of the script and its modules name"
    command.add_argument("--launcher", default="", choices=("srun", "torchrun"), help=launcher)
    sbatch = "more options of sbatch, as in --sbatch='--account=physics --mem=64G'"
    command.add_argument("--sbatch", default="", metavar="OPTIONS", help=sbatch)
    array = "values of {array} among the script's words: a task of the job for each"
    command.add_argument("--array", nargs="+", default=(), help=array)
    requeue = "the script can go on where it stopped; it is warned before its end if its text, or"
    requeue += " that of a module beside it, names SIGUSR2: docs/your-script.md"
    command.add_argument("--requeue", action="store_true", help=requeue)
    run_name = "the name of the run folder; else it is made from the script's name and the ranks"
    command.add_argument("--run", default="", help=run_name)
    command.add_argument("--submit", action="store_true")
    again = "instead: submit the job in a run folder again, to go on there"
    command.add_argument("--again", type=Path, metavar="FOLDER", help=again)


def _add_script(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "script",
        commands.write_script,
        "write a standalone script of the course, such as mnist_ddp, to make your own of;"
        " another text that is there is kept as PATH.old",
        "script mnist_ddp my_ddp.py",
        "0: it is written",
    )
    command.add_argument("name", help=f"one of {', '.join(NAMES)}")
    command.add_argument("path", type=Path, help="the file to write; - prints it")
    parts = "a file with your own Net, datasets, loss_and_metrics or make_optimizer, and what they"
    parts += " need, to stand in the script instead of its own"
    command.add_argument("--parts", type=Path, help=parts)


def _add_who_hangs(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "who-hangs",
        commands.name_who_hangs,
        "say which rank missed which collective, from the flight recorder of each rank",
        "who-hangs recorder_rank*.json",
        "0: all ranks called the same, and it ended; 1: a rank waits, is lost, or kept no record",
    )
    dumps = "the flight recorder of every rank, as watched.py writes it"
    command.add_argument("dumps", type=Path, nargs="*", help=dumps)
    watched = "instead: write watched.py, which starts a script so that a signal has each rank"
    watched += " write its flight recorder"
    command.add_argument("--watched", type=Path, metavar="FILE", help=watched)
    _add_json(command)


def _add_data(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "data",
        commands.stage_data,
        "put MNIST into a folder; without a network, digits that the course draws itself",
        "data my_data",
        "0: the data are there, and whole",
    )
    command.add_argument("folder", type=Path, nargs="?", default=Path("data"))


def _add_check_site(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "check-site",
        commands.run_doctor_job,
        "find out whether a cluster is ready for jobs: run the doctor as a job there, on two nodes",
        "check-site della --gpus-per-node 4",
        "0: each check of the doctor is ok; 1: a check failed",
    )
    command.add_argument("site", help=_SITE)
    command.add_argument("--nodes", type=int, default=2)
    gpus = "one rank for each"
    command.add_argument("--gpus-per-node", "--gpus", type=int, default=2, help=gpus)


def _add_collect(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "collect",
        commands.collect_jobs,
        "ask Slurm how jobs ended, note it in their run folders, and list the runs",
        "collect runs/first",
        "0: all that ended is noted",
    )
    command.add_argument("folder", type=Path, nargs="+", help="of a job that has ended")


def _add_curve(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "curve",
        commands.draw_curves,
        "draw loss, accuracy and any other metric of runs by epoch, into a file",
        "curve runs/first runs/second --out curve.pdf",
        "0: it is drawn",
    )
    folder = "of a run, or one that holds such; several are drawn together"
    command.add_argument("folder", type=Path, nargs="+", help=folder)
    out = "the file: .png, .pdf or .svg"
    command.add_argument("--out", type=Path, default=Path("curve.png"), help=out)


def _add_hang(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "hang",
        commands.play_hang_lab,
        "practise on a real hang: a fault is hidden in a training script, which runs on three"
        " ranks; you ask for evidence, piece by piece, and say who is to blame",
        "hang --seed 7",
        "0: it ran, or the answer is right; 1: the answer is wrong",
    )
    command.add_argument("--seed", type=int, required=True, help="another fault for each")
    look = "a piece of the evidence of a seed that has been run"
    command.add_argument("--look", nargs="+", default=[], help=look)
    answer = "rank=… line=… kind=… fix=…"
    command.add_argument("--answer", nargs="+", default=[], help=answer)


def _add_grade(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "grade",
        commands.grade_notebooks,
        "run the exercises in many people's notebooks, each in a process of its own with a time"
        " limit and without a network, and print who solved what. This runs their code as you:"
        " use an account or a container that has nothing to lose",
        "grade handed_in --csv results.csv",
        "0: each notebook was graded, whatever the results; 1: one could not be, or not all of it",
    )
    folder = "NAME/02_….ipynb or NAME_02….ipynb, as many as there are, at any depth"
    command.add_argument("folder", type=Path, help=folder)
    limit = "seconds for each exercise"
    command.add_argument("--limit", type=float, default=120, help=limit)
    out = "also write the table there"
    command.add_argument("--csv", type=Path, metavar="FILE", help=out)
