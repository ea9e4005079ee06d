"""The command line: `ddp-course`, in any folder; `python -m ddp_helpers` is the same program.

`main` is its console script, in one process; `commands` has what each command does. Commands
for maintainers (execute, bench, save-runs) are targets of the Makefile.
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

Works in any folder. Runs are saved in $DDP_RUNS; if it is not set, in the current directory, or, in
a clone of the course, in its runs/.
An audit is saved in the folder that --folder names; in a clone of the course, also in build/."""
_EPILOG = """ddp-course COMMAND --help prints an example and the meaning of each exit status.
Status 2 is the same for all commands: the arguments cannot be used; one line explains why."""
# Commands with arguments for a script after --.
_WITH_A_SCRIPT = {"job", "audit", "gpus"}
# Commands whose folder may be the cause of an OSError.
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
            cure = f"; the script's arguments come after --, as in: {example}"
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
    lines += [f"exit status: {statuses}; 2: the arguments cannot be used"]
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
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")


def _add_doctor(subparsers: Commands) -> None:
    purpose = "check what a job needs, on each rank and under any launcher"
    # It reads its arguments by itself, as its script does, and has a help of its own.
    command = subparsers.add_parser("doctor", help=purpose, allow_abbrev=False, add_help=False)
    command.set_defaults(run_command=commands.run_doctor)


def _add_audit(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "audit",
        commands.audit_script,
        "run any DDP script unchanged on two ranks, record its PyTorch calls, and list"
        " its mistakes",
        "audit train.py -- --epochs 2",
        "0: no check failed or is unknown; 1: a check failed; 2, also: the script failed before it"
        " did anything; 3: no check failed, but those on the last line are unknown",
    )
    command.add_argument("script", type=Path, help="script to run; its arguments follow after --")
    folder = "save the audit, and the files that the script writes, in this folder"
    command.add_argument("--folder", type=Path, help=folder)
    cwd = "run the script with links to the files of this folder; none of them is changed"
    command.add_argument("--cwd", type=Path, help=cwd)
    limit = "timeout of each run, in seconds (default: %(default)g)"
    command.add_argument("--limit", type=float, default=120, help=limit)
    on_cpu = "use the CPU for CUDA, and gloo for NCCL, if no GPUs can be simulated"
    command.add_argument("--on-cpu", action="store_true", help=on_cpu)
    two_nodes = "give both ranks local_rank 0, as on two nodes: finds local_rank used as the rank"
    command.add_argument("--two-nodes", action="store_true", help=two_nodes)
    batch_size_flag = (
        "the script's flag for its batch size, to also run one rank with the same global batch"
    )
    command.add_argument("--batch-size-flag", default="", help=batch_size_flag)
    one_rank_with = (
        "without such a flag: extra arguments that give one rank the global batch, as in"
    )
    one_rank_with += " --one-rank-with=--batch-size=48; may be empty"
    command.add_argument("--one-rank-with", help=one_rank_with)
    resume_with = (
        "kill the script, restart it with these extra arguments, and compare; may be empty"
    )
    command.add_argument("--resume-with", help=resume_with)
    preempt = "send one rank a signal twice in an epoch, and kill all ranks during torch.save;"
    preempt += " compare the weights after each restart (with the arguments of --resume-with)"
    command.add_argument("--preempt", action="store_true", help=preempt)
    sarif = "also write the failed checks as SARIF, which code hosts show next to the lines"
    command.add_argument("--sarif", type=Path, metavar="FILE", help=sarif)
    _add_json(command)


def _add_explain(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "explain",
        commands.explain_logs,
        "explain the log of a failed run: the rank that failed first, the meaning of its message,"
        " the likeliest causes in order, and the fix; needs no network",
        "explain train.log",
        "0: the log shows that the run succeeded; 1: a failure is explained; 3: a failure"
        " that no rule matches; 4: neither a failure nor a success is in the log, or not all"
        " of it was read; for a job file, 0: no known fault; 1: a fault; 4: an option, the"
        " script, or the command that starts its ranks was not checked",
    )
    log = "a log, a run folder, a job file, or - for standard input (the default)"
    command.add_argument("log", type=Path, nargs="*", help=log)
    what = "print only the facts in the log, for an issue report or an assistant"
    command.add_argument("--facts", action="store_true", help=what)
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_plan(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "plan",
        commands.plan_script,
        "list the lines of a single-GPU script that must change for several ranks, with the change;"
        " reads the source, runs nothing",
        "plan train.py",
        "1: the lines are listed; 4: they are listed, and a file that may have more was not read",
    )
    command.add_argument(
        "script",
        type=Path,
        help="script to read, with the modules that it imports from its project",
    )
    command.add_argument("--json", action="store_true", help="print all lines as JSON")


def _add_compare(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "compare",
        commands.compare_weights,
        "compare the weights in two files written by torch.save, and print the largest difference",
        "compare one.pt two.pt",
        "0: the weights are equal, or equal up to rounding in float64; 1: they differ; 3:"
        " their dtype is too coarse to tell",
    )
    command.add_argument("files", type=Path, nargs=2, metavar="FILE")


def _add_fits(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "fits",
        commands.predict_fit,
        "estimate the GPU memory that training a model needs with DDP, ZeRO or FSDP2,"
        " and on how many"
        " GPUs of which size it fits",
        "fits model.py:Net --input 1 28 28 --gpu 16 80",
        "0: some row of the table surely fits one of the GPUs; 1: none surely fits",
    )
    model = (
        "FILE.py:NAME of a class or function that returns the model when called without arguments"
    )
    command.add_argument("model", help=model)
    shape = "shape of one sample, as in 1 28 28 (default: from the first layer)"
    command.add_argument("--input", type=int, nargs="+", help=shape)
    dtypes = ("float32", "float16", "bfloat16", "int64")
    command.add_argument(
        "--type",
        choices=dtypes,
        help="dtype of the input (default: from the first layer)",
    )
    batch = "samples per GPU (default: %(default)d)"
    command.add_argument("--batch-size-per-rank", type=int, default=32, help=batch)
    optimizer = "a class of torch.optim, or momentum (default: %(default)s)"
    command.add_argument("--optimizer", default="AdamW", help=optimizer)
    bf16 = "mixed precision: autocast; with FSDP2, MixedPrecisionPolicy"
    command.add_argument("--bf16", action="store_true", help=bf16)
    gpu, sizes = "sizes in GB, or names: T4, A10G, L40S, H100, …", ("16", "24", "40", "80")
    command.add_argument("--gpu", nargs="+", default=sizes, help=gpu)
    _add_json(command)


def _add_gpus(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "gpus",
        commands.run_on_simulated_gpus,
        "run a command, and all processes that it starts, with simulated NVIDIA GPUs"
        " beneath PyTorch:"
        " scripts for cuda and nccl run unchanged, on the CPU",
        "gpus 2 -- torchrun --standalone --nproc-per-node 2 train.py",
        "0: the command succeeded; otherwise the command's status, or 128 plus the number of"
        " the signal that ended it",
    )
    count = "number of GPUs that the command sees; the command follows after --"
    command.add_argument("count", type=int, metavar="N", help=count)
    memory = "memory of each GPU in MB; beyond it CUDA is out of memory (default: %(default)d)"
    command.add_argument("--memory-mb", type=int, default=2048, help=memory)
    beside = "simulate GPUs on a machine with a real GPU, and hide the real one"
    command.add_argument("--beside-real-gpus", action="store_true", help=beside)


def _add_job(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "job",
        commands.make_job,
        "make a Slurm job that runs a script, the course's or your own, and print its job file;"
        " the script's arguments follow after --",
        "job local train.py --gpus-per-node 0 --ranks-per-node 2 --run first -- --epochs 2",
        "0: the job is made, and submitted if --submit is given; 1: it is made, but the Slurm"
        " of this machine would refuse it",
    )
    command.add_argument("site", nargs="?", help=_SITE)  # none with --again
    command.add_argument("--nodes", type=int, default=1, help="nodes of the job (default: 1)")
    gpus = "GPUs per node, one rank for each (default: 1, or 0 at a site without GPUs)"
    command.add_argument("--gpus-per-node", "--gpus", type=int, help=gpus)
    ranks = "ranks per node on CPUs, if no GPU is requested"
    command.add_argument("--ranks-per-node", "--ranks", type=int, help=ranks)
    script = "name of a script of the course, or a file"
    command.add_argument("script", type=Path, nargs="?", help=script)
    command.add_argument(
        "--cpus-per-rank", "--cpus", type=int, help="CPUs per rank (default: the site's)"
    )
    time = "time limit of the job (default: the site's)"
    command.add_argument("--time", help=time)
    launcher = (
        "srun starts one task per rank, torchrun one per node (default: torchrun if the script"
    )
    launcher += " or its modules read only torchrun's variables, else srun)"
    command.add_argument("--launcher", default="", choices=("srun", "torchrun"), help=launcher)
    sbatch = "additional sbatch options, as in --sbatch='--account=physics --mem=64G'"
    command.add_argument("--sbatch", default="", metavar="OPTIONS", help=sbatch)
    array = "make a job array, one task per value; each value replaces {array} in the"
    array += " script's arguments"
    command.add_argument("--array", nargs="+", default=(), help=array)
    requeue = (
        "requeue after the time limit or a preemption; the script must be able to resume. A signal"
    )
    requeue += " warns it before the end if it handles SIGUSR2 (docs/your-script.md)"
    command.add_argument("--requeue", action="store_true", help=requeue)
    run_name = "name of the run folder (default: from the script's name and the number of ranks)"
    command.add_argument("--run", default="", help=run_name)
    command.add_argument("--submit", action="store_true", help="submit the job to Slurm")
    again = "instead of a new job, resubmit the job of a run folder, to resume it"
    command.add_argument("--again", type=Path, metavar="FOLDER", help=again)


def _add_script(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "script",
        commands.write_script,
        "write a standalone script of the course, such as mnist_ddp, to start from; an"
        " existing file"
        " with different content is kept as PATH.old",
        "script mnist_ddp my_ddp.py",
        "0: the script is written",
    )
    command.add_argument("name", help=f"one of {', '.join(NAMES)}")
    command.add_argument("path", type=Path, help="file to write; - prints the script")
    parts = (
        "file with your own Net, datasets, loss_and_metrics or make_optimizer, and what they need;"
    )
    parts += " they replace the script's"
    command.add_argument("--parts", type=Path, help=parts)


def _add_who_hangs(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "who-hangs",
        commands.name_who_hangs,
        "report which rank missed which collective, from the flight recorder dumps of all ranks",
        "who-hangs recorder_rank*.json",
        "0: all ranks made the same calls, and all calls ended; 1: a rank waits, is missing,"
        " or kept no record",
    )
    dumps = "flight recorder dump of every rank, as watched.py writes it"
    command.add_argument("dumps", type=Path, nargs="*", help=dumps)
    watched = (
        "instead, write watched.py: under it each rank of a script dumps its flight recorder on a"
    )
    watched += " signal"
    command.add_argument("--watched", type=Path, metavar="FILE", help=watched)
    _add_json(command)


def _add_data(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "data",
        commands.stage_data,
        "download MNIST into a folder; without a network, make synthetic digits instead",
        "data my_data",
        "0: the data are there and complete",
    )
    command.add_argument("folder", type=Path, nargs="?", default=Path("data"))


def _add_check_site(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "check-site",
        commands.run_doctor_job,
        "check that a cluster can run the course's jobs: run the doctor there as a job"
        " on two nodes",
        "check-site della --gpus-per-node 4",
        "0: each check of the doctor is ok; 1: a check failed",
    )
    command.add_argument("site", help=_SITE)
    command.add_argument("--nodes", type=int, default=2, help="nodes of the job (default: 2)")
    gpus = "GPUs per node, one rank for each (default: %(default)d)"
    command.add_argument("--gpus-per-node", "--gpus", type=int, default=2, help=gpus)


def _add_collect(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "collect",
        commands.collect_jobs,
        "ask Slurm how jobs ended, record it in their run folders, and list the runs",
        "collect runs/first",
        "0: the end of each job is recorded",
    )
    command.add_argument("folder", type=Path, nargs="+", help="run folder of a job that has ended")


def _add_curve(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "curve",
        commands.draw_curves,
        "plot loss, accuracy and all other metrics of runs by epoch",
        "curve runs/first runs/second --out curve.pdf",
        "0: the figure is written",
    )
    folder = "run folder, or a folder of run folders; several are plotted together"
    command.add_argument("folder", type=Path, nargs="+", help=folder)
    out = "file to write: .png, .pdf or .svg (default: %(default)s)"
    command.add_argument("--out", type=Path, default=Path("curve.png"), help=out)


def _add_hang(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "hang",
        commands.play_hang_lab,
        "practise on a real hang: a training script with a hidden fault runs on three"
        " ranks; look at"
        " one piece of evidence at a time, and name the rank, the line and the fix",
        "hang --seed 7",
        "0: the run ended, or the answer is correct; 1: the answer is wrong",
    )
    command.add_argument("--seed", type=int, required=True, help="number that selects the fault")
    look = "print a piece of evidence of a run with this seed"
    command.add_argument("--look", nargs="+", default=[], help=look)
    answer = "your answer: rank=… line=… kind=… fix=…"
    command.add_argument("--answer", nargs="+", default=[], help=answer)


def _add_grade(subparsers: Commands) -> None:
    command = _add(
        subparsers,
        "grade",
        commands.grade_notebooks,
        "run the exercises in many people's notebooks, each in its own process, with a timeout and"
        " without a network, and print who solved what. This runs their code as your user: use an"
        " account or a container with nothing to lose",
        "grade handed_in --csv results.csv",
        "0: each notebook was graded, with any result; 1: a notebook, or a part of one, could"
        " not be graded",
    )
    folder = "folder with NAME/02_….ipynb or NAME_02….ipynb, at any depth"
    command.add_argument("folder", type=Path, help=folder)
    limit = "timeout of each exercise, in seconds (default: %(default)g)"
    command.add_argument("--limit", type=float, default=120, help=limit)
    out = "also write the table to FILE"
    command.add_argument("--csv", type=Path, metavar="FILE", help=out)
