"""The command line, in one process: `python -m ddp_helpers --help` lists the commands.

It reads the arguments of the course's own; `cli` has those of the tools, and starts all of them.
"""

import sys
from pathlib import Path

from ddp_helpers import IN_CHECKOUT, ROOT, commands
from ddp_helpers.cli import SITE, Commands, Parser, add_tools, run

_DESCRIPTION = "Stage the data, write a script, examine a job, execute the course"
_DESCRIPTION += ", check a site, or measure: the exit status."


def make_parser() -> Parser:
    """Make the parser of every command, in the order in which --help lists them."""
    parser = Parser(prog="python -m ddp_helpers", description=_DESCRIPTION)
    subparsers = parser.add_subparsers(dest="command", required=True)
    _add_data(subparsers)
    _add_run(subparsers)
    _add_keep(subparsers)
    _add_collect(subparsers)
    _add_curve(subparsers)
    _add_ready(subparsers)
    _add_bench(subparsers)
    _add_hang(subparsers)
    add_tools(subparsers)
    return parser


# Each of these adds a command: its line in --help, what it calls, and its arguments.


def _add_data(subparsers: Commands) -> None:
    purpose = "put MNIST, or the offline digits, into a folder"
    command = subparsers.add_parser("data", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.stage_data)
    command.add_argument("folder", type=Path, nargs="?", default=Path("data"))


def _add_run(subparsers: Commands) -> None:
    purpose = "execute notebooks: the core of the course, 01 to 09, if none is named"
    command = subparsers.add_parser("run", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.run_notebooks)
    only = "beginnings of names, such as 03"
    command.add_argument("only", nargs="*", help=only)
    command.add_argument("--all", action="store_true", help="every notebook")
    in_place = "keep the outputs in notebooks/, to be committed"
    command.add_argument("--in-place", action="store_true", help=in_place)


def _add_keep(subparsers: Commands) -> None:
    purpose = "copy finished runs to notebooks/results, to be committed"
    command = subparsers.add_parser("keep", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.keep_runs)
    command.add_argument("folder", type=Path)
    command.add_argument("name")


def _add_collect(subparsers: Commands) -> None:
    purpose = "ask Slurm how the jobs of these run folders ended, note it in their records,"
    purpose += " and list the runs"
    command = subparsers.add_parser("collect", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.collect_jobs)
    command.add_argument("folder", type=Path, nargs="+", help="of a job that has ended")


def _add_curve(subparsers: Commands) -> None:
    purpose = "draw loss, accuracy and any other metric of runs by epoch, into a file"
    command = subparsers.add_parser("curve", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.draw_curves)
    folder = "of a run, or one that holds such; several are drawn together"
    command.add_argument("folder", type=Path, nargs="+", help=folder)
    out = "the file: .png, .pdf or .svg"
    command.add_argument("--out", type=Path, default=Path("curve.png"), help=out)


def _add_ready(subparsers: Commands) -> None:
    purpose = "run the doctor as a job at a site"
    command = subparsers.add_parser("ready", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.run_doctor_job)
    command.add_argument("name", help=SITE)
    command.add_argument("--nodes", type=int, default=2)
    gpus = "on each node, and one rank for each"
    command.add_argument("--gpus", type=int, default=2, help=gpus)


def _add_bench(subparsers: Commands) -> None:
    purpose = "measure one device, DDP against none, two ranks against one"
    command = subparsers.add_parser("bench", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.measure_goals)


def _add_hang(subparsers: Commands) -> None:
    purpose = "run a script with a fault that the seed chose, sell the evidence,"
    purpose += " and judge the answer: the hang lab"
    command = subparsers.add_parser("hang", help=purpose, allow_abbrev=False)
    command.set_defaults(run_command=commands.play_hang_lab)
    command.add_argument("--seed", type=int, required=True, help="another fault for each")
    look = "a piece of the evidence of a seed that has been run"
    command.add_argument("--look", nargs="+", default=[], help=look)
    answer = "rank=… line=… kind=… cure=…"
    command.add_argument("--answer", nargs="+", default=[], help=answer)


# Commands whose folder may be at fault where the system refuses something.
_WITH_A_FOLDER = ("data", "keep", "ready", "bench", "hang", "audit", "curve")


def main(argv: list[str] | None = None) -> int:
    """Run one command, and return its exit status; stops at arguments that cannot be used.

    argv: the arguments; those of this process if None.
    """
    course = ROOT if IN_CHECKOUT else None
    return run(make_parser(), argv, course, _WITH_A_FOLDER)


if __name__ == "__main__":
    sys.exit(main())
