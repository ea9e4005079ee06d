"""The function of each `ddp-course` command.

`cli.main` calls them, in one process, with the namespace of its parser; each returns the exit
status. A command imports its modules when it is called, so that writing a script needs no Jupyter.
All raise PlainError, or stop, if the input cannot be used.
"""

import csv
import io
import json
import os
import platform
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_helpers import ROOT, RUNS, __version__
from ddp_helpers.rank.files import write_atomically
from ddp_tools import PlainError

if TYPE_CHECKING:
    from ddp_helpers.jobs.site import Site


def stage_data(args: Namespace) -> int:
    """Put MNIST, or the offline digits, into a folder."""
    from ddp_helpers.data.staging import stage

    print(f"use it with: --data {stage(args.folder)}")
    return 0


def write_script(args: Namespace) -> int:
    """Write a standalone script."""
    from ddp_helpers.rank.scripts import write_script

    path = write_script(args.name, args.path, args.parts)
    if path.is_file():
        print(f"wrote {path}")
    return 0


def make_job(args: Namespace) -> int:
    """Make a job from a script, print its file, and submit it with --submit."""
    from ddp_helpers.jobs import run, script_jobs
    from ddp_helpers.jobs.job import Job, JobError
    from ddp_helpers.jobs.relative_paths import in_words
    from ddp_helpers.jobs.site import Site

    if args.again:
        if args.site or args.arguments:
            raise JobError("--again FOLDER takes nothing else: the job is in the folder")
        run.resubmit(args.again)
        return 0
    if not (args.site and args.script):
        raise JobError("give a site and a script, as in: job local mnist_ddp -- --data $PWD/data")
    site = Site.load(args.site)
    args.gpus_per_node, args.ranks_per_node = _gpus_and_ranks(args, site)
    usual_name = f"{args.script.stem}-{args.nodes}x{args.ranks_per_node}"
    folder = script_jobs.run_folder(_root_of_runs(args), args.run, usual_name)
    asked: dict[str, Any] = {each.name: getattr(args, each.name, None) for each in fields(Job)}
    for name, whole in in_words(args.arguments, [str(Path.cwd())]) if args.submit else ():
        cure = f"give {whole}, or leave --submit out"
        raise JobError(f"{name} would be relative to the run folder in the job: {cure}")
    script_jobs.prepare(args.script, args.arguments, site, folder, show=True, **asked)
    if script_jobs.keeps_no_record(args.script, args.arguments):
        cure = "give --run-dir '{run_dir}' after --"
        print(f"# the run leaves no record, and collect finds none: {cure}", file=sys.stderr)
    batch = folder / "job.sbatch"
    if not args.submit:
        print(f"# it is not submitted. Read it, then: sbatch '{batch}'", file=sys.stderr)
        return int(not _would_be_taken(batch))
    if run.submit(folder):
        record = f"the records of its tasks: {folder}-0 and on" if args.array else "its record too"
        print(f"# its script and its log: {folder}; {record}", file=sys.stderr)
        collect = f"ddp-course collect '{folder}'"
        print(f"# when it has ended: {collect}", file=sys.stderr)
    return 0


def _root_of_runs(args: Namespace) -> Path:
    """Return where run folders go: $DDP_RUNS, or the course's runs/, or the current folder."""
    return RUNS if args.course or os.environ.get("DDP_RUNS") else Path.cwd()


def _would_be_taken(batch: Path) -> bool:
    """Print Slurm's answer to a job file without submitting it; return False if it refuses it."""
    from ddp_helpers.jobs import queue
    from ddp_helpers.jobs.job import JobError

    if not queue.available():
        print("# no Slurm answers here, so its requests are not checked", file=sys.stderr)
        return True
    try:
        queue.send(batch, "--test-only")
        print("# the Slurm here would take it", file=sys.stderr)
    except JobError as error:
        print(f"# now, and here: {error}", file=sys.stderr)
        return False
    return True


def _gpus_and_ranks(args: Namespace, site: "Site") -> tuple[int, int]:
    """Return the numbers of GPUs and of ranks per node. Raises JobError if that is not clear."""
    from ddp_helpers.jobs.job import JobError

    gpus = int(bool(site.gpus)) if args.gpus_per_node is None else args.gpus_per_node
    ranks = (gpus or 1) if args.ranks_per_node is None else args.ranks_per_node
    if gpus and not site.gpus:
        cure = f"give --gpus-per-node 0 --ranks-per-node {ranks}"
        raise JobError(f"gpus_per_node={gpus}: site {site.name} has no GPUs: {cure}")
    if args.gpus_per_node == 0 and args.ranks_per_node is None:
        raise JobError("gpus_per_node=0: the ranks use CPUs: also give --ranks-per-node")
    return gpus, ranks


def collect_jobs(args: Namespace) -> int:
    """Note in the records of these run folders how Slurm saw their jobs end; list the runs."""
    from ddp_helpers.jobs.monitor import collect

    runs = [run for folder in args.folder for run in collect(folder)]
    for run in runs:
        print(f"{run.folder}: {run.state}, {len(run.epochs)} epochs")
    return 0


def draw_curves(args: Namespace) -> int:
    """Draw loss, accuracy and any other metric of runs by epoch, into a file."""
    import matplotlib

    from ddp_helpers.records import runs, scaling

    matplotlib.use("agg")  # no window, regardless of MPLBACKEND and DISPLAY
    from ddp_helpers.draw.curves import curves

    if args.out.suffix not in (".png", ".pdf", ".svg"):
        raise PlainError(f"--out {args.out}: give a name that ends in .png, .pdf or .svg")
    for folder in args.folder:
        if not runs.run_folders(folder):
            lack = "holds no record of a run (no spec.json, no job.json)"
            raise PlainError(f"{folder} {lack}: give a run's folder")
    table = runs.table(*args.folder)
    if scaling.begun(table).empty:
        raise PlainError(f"no run to draw, {scaling.left_out(table)}: wait for an epoch's end")
    picture = curves(table)
    print(f"{picture.alt} Drawn in: {picture.save(args.out)}")
    return 0


def run_doctor_job(args: Namespace) -> int:
    """Run the doctor as a job at a site; the status is 1 unless all checks are ok."""
    from ddp_helpers.jobs.script_jobs import ready
    from ddp_helpers.records import runs

    folder = runs.new_run_folder(_root_of_runs(args), "ready")
    data = ROOT / "data" if args.course else None
    return int(not ready(args.site, folder, data, args.nodes, args.gpus_per_node))


def run_doctor(args: Namespace) -> int:
    """Check what a job needs; under any launcher, on each rank."""
    from ddp_helpers.rank.scripts.doctor import main

    # Outside the course there is no MNIST: the last --data counts.
    usual = [] if args.course else ["--data", "none", "--run-dir", str(_root_of_runs(args))]
    main([*usual, *args.arguments], args.prog)
    return 0


def play_hang_lab(args: Namespace) -> int:
    """Run a script with a fault that the seed chose, show the evidence, or check the answer."""
    from ddp_helpers.lessons.break_it_and_fix_it.hang import play

    return play(args.seed, args.look, args.answer)


def grade_notebooks(args: Namespace) -> int:
    """Grade the notebooks below a folder, and print a table; the status is 1 if one cannot be."""
    from ddp_helpers.lessons.grade import NOT_GRADED, Row, grade

    if not args.folder.is_dir():
        raise PlainError(f"{args.folder} is no folder: give the one with people's notebooks")
    if not args.limit > 0:
        raise PlainError(f"--limit {args.limit:g}: give the seconds that an exercise may take")
    _check_file(args.csv, "--csv")
    rows = []
    for row in grade(args.folder, args.limit):
        rows.append(row)
        print(f"{row.person:16} {row.notebook:26} {row.exercise:18} {row.result}", flush=True)
    if args.csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([Row._fields, *rows])
        _write(args.csv, text.getvalue().encode())
    lacking = [row for row in rows if row.result.startswith(NOT_GRADED)]
    if failed := dict.fromkeys(f"{row.person}: {row.notebook}" for row in lacking):
        print(f"# not graded, or in part: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def audit_script(args: Namespace) -> int:
    """Audit a DDP script on two CPU ranks; `command.report` says what each status means."""
    from ddp_tools.audit import command
    from ddp_tools.audit.sarif import to_sarif

    if find_spec("torch") is None:  # before a rank starts and fails for it
        raise ModuleNotFoundError(name="torch")
    _check_file(args.json)
    _check_file(args.sarif, "--sarif")
    folder = args.folder
    if folder is None and args.course:
        script = args.script.resolve()
        name = f"{script.parent.name}-{script.stem}"  # many scripts are called train.py
        folder = args.course / "build" / "audit" / name
    rows = command.audit(
        args.script,
        args.arguments,
        folder=folder,
        two_nodes=args.two_nodes,
        cwd=args.cwd,
        limit=args.limit,
        on_cpu=args.on_cpu,
        batch_size_flag=args.batch_size_flag,
        one_rank_with=args.one_rank_with,
        resume_with=args.resume_with,
        preempts=args.preempt,
    )
    status = command.report(rows)
    if folder:
        print(f"kept in {folder.resolve()}")
    answer = {"script": str(args.script), "arguments": args.arguments}
    _write_json(args.json, answer | {"rows": [row._asdict() for row in rows]})
    if args.sarif:
        _write(args.sarif, f"{json.dumps(to_sarif(args.script, rows), indent=1)}\n".encode())
    return status


def explain_logs(args: Namespace) -> int:
    """Explain the logs of a failed run; the status says whether it is known."""
    from ddp_tools.explain.command import explain

    return explain(args.log, args.json, args.facts)


def plan_script(args: Namespace) -> int:
    """List the lines of a script for one device that need a decision; see `plan` for the status."""
    from ddp_tools.plan.command import plan

    return plan(args.script, args.json)


def compare_weights(args: Namespace) -> int:
    """Print how far apart the weights of two files are; the status is 1 unless they agree."""
    from ddp_tools.compare import compare

    return compare(*args.files)


def predict_fit(args: Namespace) -> int:
    """Print whether training a model fits a GPU; the status is 1 if no way of training does."""
    import torch

    from ddp_tools.changes import what_would_fit
    from ddp_tools.fits import Prediction, fits_somewhere, predict, show_table
    from ddp_tools.model_file import load, sample_of

    _check_file(args.json)
    make = load(args.model)
    types = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in types}
    shape, dtype, notice = sample_of(make, args.input, by_name.get(args.type))
    if notice:
        print(notice)

    def predict_with(batch: int, bf16: bool, recompute: bool) -> Prediction:
        return predict(make, shape, dtype, batch, args.optimizer, bf16, recompute)

    prediction = predict_with(args.batch_size_per_rank, args.bf16, False)
    print(show_table(prediction, args.gpu), flush=True)
    change, line = what_would_fit(predict_with, prediction, args.bf16, args.gpu)
    print(line, end="\n" if line else "")
    would_fit = change and change._asdict()
    answer = {"model": args.model, "gpus": args.gpu, **prediction, "would fit": would_fit}
    _write_json(args.json, answer)
    return int(not fits_somewhere(prediction, args.gpu))


def run_on_simulated_gpus(args: Namespace) -> int:
    """Run a command with simulated GPUs beneath PyTorch; the status is the command's."""
    from ddp_tools.simulated_gpus.command import run

    return run(args.count, args.memory_mb, args.arguments, args.beside_real_gpus)


def name_who_hangs(args: Namespace) -> int:
    """Print which rank missed which collective; the status is 1 unless all ranks ended the same.

    Or write the file that makes a script's ranks save their flight recorders.
    """
    from ddp_tools import watched, who_hangs

    if args.watched:
        if args.dumps or args.json:
            raise PlainError("--watched FILE takes nothing else: it writes watched.py")
        if args.watched.exists():
            raise PlainError(f"{args.watched} is there already: give another path")
        _write(args.watched, Path(watched.__file__).read_bytes())
        print(f"wrote {args.watched}")
        return 0
    _check_file(args.json)
    try:
        lines = who_hangs.who_hangs(who_hangs.read_dumps(args.dumps))
    except ValueError as error:
        raise PlainError(str(error)) from None
    print("\n".join(lines))
    ended = lines == [who_hangs.SAME]
    _write_json(args.json, {"ended": ended, "lines": lines})
    return int(not ended)


def _check_file(path: Path | None, flag: str = "--json") -> None:
    """Raise PlainError, before anything is done, if an answer could not be written."""
    if path and (path.is_dir() or not path.absolute().parent.is_dir()):
        cure = "give a file in a folder that is there"
        raise PlainError(f"{flag} {path} cannot be written: {cure}")


def _write_json(path: Path | None, answer: dict[str, Any]) -> None:
    """Write an answer as JSON, with the versions that gave it, if a file is named.

    `who-hangs` needs only Python: torch's version is left out if it is not installed.
    """
    if path:
        versions = {"ddp-course": __version__, "python": platform.python_version()}
        with suppress(PackageNotFoundError):
            versions["torch"] = version("torch")
        _write(path, f"{json.dumps(answer | {'versions': versions}, indent=1)}\n".encode())


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises PlainError if that is refused."""
    try:
        write_atomically(path, content)
    except OSError as error:
        cure = "choose another path"
        raise PlainError(f"{path} cannot be written ({error.strerror}): {cure}") from None
