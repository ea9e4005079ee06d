"""The small command line: `python -m ddp_helpers --help`."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from ddp_helpers.rank.topology import stop


class Parser(argparse.ArgumentParser):
    """A parser, and so its commands, that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Stop with the line."""
        stop(f"{self.prog}: {message}; --help lists what can be given")


def main(argv: list[str] | None = None) -> int:
    """Stage the data, write a script, examine a job, execute the course, check a site, or measure: the exit status."""
    parser = Parser(prog="python -m ddp_helpers", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="put MNIST, or the offline digits, into a folder")
    data.add_argument("folder", type=Path, nargs="?", default=Path("data"))
    script = commands.add_parser("script", help="write a standalone script")
    script.add_argument("name")
    script.add_argument("path", type=Path)
    run = commands.add_parser("run", help="execute the notebooks in order")
    run.add_argument("only", nargs="*", help="beginnings of names, such as 03; all without any")
    run.add_argument("--in-place", action="store_true", help="keep the outputs in notebooks/, to be committed")
    keep = commands.add_parser("keep", help="copy finished runs to notebooks/results, to be committed")
    keep.add_argument("folder", type=Path)
    keep.add_argument("name")
    site = commands.add_parser("site", help="check a site file, and show the file of a job there")
    site.add_argument("name", help="one of slurm/sites, or the path of a .toml file")
    commands.add_parser("bench", help="measure single against plain, DDP against none, two ranks against one")
    accuracy = commands.add_parser("accuracy", help="train the plain and the fast recipe, five seeds, 14 epochs")
    accuracy.add_argument("folder", type=Path, help="of the runs; those that are done stay")
    commands.add_parser("doctor", help="check what a job needs; under any launcher, on each rank", add_help=False)
    args, flags = parser.parse_known_args(argv)
    if flags and args.command != "doctor":  # which has a parser of its own, as its script has
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    # Imported here, so that writing a script needs no Jupyter.
    if args.command == "data":
        from ddp_helpers.rank.staging import stage

        print(f"use it with: --data {stage(args.folder)}")
    elif args.command == "script":
        from ddp_helpers.notebook.scripts import write

        print(f"wrote {write(args.name, args.path)}")
    elif args.command == "run":
        from ddp_helpers.notebook.course import run as run_course

        return run_course(args.only, args.in_place)
    elif args.command == "keep":
        from ddp_helpers.notebook.keep import keep as keep_runs

        print(f"kept in {keep_runs(args.folder, args.name)}")
    elif args.command == "site":
        show_site(args.name)
    elif args.command == "doctor":
        from ddp_helpers.rank.doctor.examine import examine

        return examine(flags, f"{parser.prog} doctor")
    elif args.command == "accuracy":
        from ddp_helpers.notebook.accuracy import accuracy as compare
        from ddp_helpers.rank.staging import stage

        compare(stage(Path("data")), args.folder)
    else:
        from ddp_helpers.notebook.bench import bench

        bench()
    return 0


def show_site(name: str) -> None:
    """Print the sbatch file of a small job at this site. Stops with one line at what the site cannot be."""
    from ddp_helpers.notebook import slurm

    program = ("mnist_ddp.py", "--epochs", "1", "--run-dir", "{run_dir}")
    job = slurm.Job("try-site", program, nodes=2, tasks_per_node=2, gpus_per_node=2, cpus_per_task=4)
    try:
        print(slurm.render(job, slurm.Site.load(name), Path("runs/try-site")))
    except slurm.JobError as error:
        stop(str(error))
    print(f"# {name} is sound. Try the lines above there, in a file: sbatch --test-only FILE", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
