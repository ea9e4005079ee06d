"""What must never be: code run from a name or a file, a secret in what is kept."""

import ast
import re
import shutil
from pathlib import Path

import nbformat
from papermill.translators import PythonTranslator
from real import LIMIT, python
from refusals import refused

from ddp_helpers import ROOT, jobs
from ddp_helpers.jobs.sweep import execute
from ddp_helpers.launch import launch
from ddp_helpers.rank import scripts
from ddp_helpers.records import runs
from ddp_helpers.upkeep import make_records

NOTEBOOKS = sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "slurm").glob("*.ipynb")])
MODULES = sorted(path for house in ("ddp_helpers", "ddp_tools") for path in (ROOT / house).rglob("*.py"))
SHELL = re.compile(r"%%(slurm|bash|writefile (--append )?[\w./]+\.(sbatch|sh))\b")  # what a learner types in a terminal


def code_of(path):
    """The Python in a module, or in each code cell of a notebook, magics left out, and cells that are a terminal's."""
    if path.suffix == ".py":
        return [path.read_text()]
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    python = [cell for cell in cells if not SHELL.match(cell)]
    return [re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell) for cell in python]


def unsafe(code):
    """The calls in this code that run what they are given, as they stand there."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and runs_input(node)]


def runs_input(call):
    """Whether the call hands text to a shell or to Python, or unpickles whatever a file holds."""
    name = ast.unparse(call.func)
    options = {option.arg: ast.unparse(option.value) for option in call.keywords}
    if name.rpartition(".")[2] == "load" and name not in KNOWN:
        return options.get("weights_only") != "True"
    return options.get("shell", "False") != "False" or bool(UNSAFE.fullmatch(name))


KNOWN = ["json.load", "tomllib.load", "Site.load", "jobs.Site.load", "dcp.load"]  # these do not unpickle
LESSON = ["torch.load(work / 'stranger.pt', weights_only=False)"]  # fault 22, with a checkpoint that does no harm
# The audit runs a script of yours: whatever it loads, and as it loads it, only on the CPU.
LESSON += ["load(f, **options | {'map_location': CPU})"]
LESSON += ["load(path, parts)"]  # 11's own function, whose torch.load has weights_only=True
# grade runs what people have handed in, each in a process of its own: its help and its page say so
LESSON += ["exec(compile(path.read_bytes(), path, 'exec'), vars(module))"]
LESSON += ["load(args.model)"]  # fits imports a file of yours, to make your model
# A learner's own cell on their own ranks, as a kernel runs it in itself: it comes on a pipe from that kernel alone.
CELLS = ["exec(compile(tree, name, 'exec'), variables)"]
CELLS += ["eval(compile(expression, name, 'eval'), variables)"]
# A function of the learner's own process, on a socket from it alone.
LESSON += ["pickle.loads(request.call)", "cloudpickle.loads(work)"]
UNSAFE = re.compile(
    r"eval|exec|__import__|os\.(system|popen)|(subprocess\.)?get(status)?output|((cloud)?pickle\.)?loads?"
)


def test_nothing_runs_what_it_is_given():
    calls = {(path.name, call) for path in MODULES + NOTEBOOKS for code in code_of(path) for call in unsafe(code)}
    assert {call for name, call in calls if name != "cells.py"} <= {*LESSON}
    assert {call for name, call in calls if name == "cells.py"} == {*CELLS}, "the control: these are found"


# ---- a neighbour on the same machine

# Whoever has a login reaches each store of torchrun. c10d keeps its state in one, as a pickle in base64.
PICKLES = """import os, psutil, torch.distributed as dist
agent = psutil.Process(os.getppid())
links = getattr(agent, "net_connections", None) or agent.connections  # psutil before 6
ports = {link.laddr.port for link in links("tcp") if link.status == psutil.CONN_LISTEN}
stores = [dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False) for port in ports]
print([key for store in stores for key in store.list_keys() if store.get(key).startswith(b"gAS")] if stores else None)
"""


def test_a_launch_keeps_no_pickle_where_a_neighbour_can_write(tmp_path):
    script = tmp_path / "neighbour.py"
    script.write_text(PICKLES)
    assert launch.run(script, timeout=LIMIT).of(0) == ["[]"]
    standalone = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost", script]
    assert python(*standalone).stdout.startswith("['torch.rendezvous."), "the control"


# ---- names and paths

NAMES = ["epoch", "_x = 1\nimport os\n_y", "_x; import os; _y", "_x=1#", "_ x", "In = 1\nOut"]
NAMES += ["", " ", "1", "nodes=2;a"]


def test_a_parameter_whose_name_is_code_is_not_executed(tmp_path):
    for name in NAMES:
        refused(execute, "slurm/job.ipynb", tmp_path / "out.ipynb", **{name: 1}, named=["job.ipynb", repr(name)])
        assert not list(tmp_path.iterdir())
    assert "\nimport os\n" in PythonTranslator.codify({NAMES[1]: 1}), "the control: papermill would take it"


ODD = ["a b", "it's", 'a "b"', "a; touch canary", "back\\slash", "two\nlines", "$(touch canary)", "%j", "-rf", "é → 中"]
RECORD = ROOT / "notebooks" / "results" / "two_cpu_cores" / "strong-2x2-cpus1-seed1"


def test_records_in_odd_folders_are_read_and_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_records, "RESULTS", tmp_path / "kept")
    for name in ODD:
        run = runs.read_run(shutil.copytree(RECORD, Path("runs") / name))
        assert (run.state, len(run.epochs), run.problems) == ("done", 3, []), name
        refused(make_records.keep, Path("runs"), name, named=[repr(name)])  # what is committed has a plain name
    assert set(runs.table("runs")["run"]) == set(ODD)
    assert {path.name for path in make_records.keep(Path("runs"), "plain").iterdir()} == set(ODD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "runs"]


# ---- secrets

SECRET = "not-for-anybody-5f1c"
ALL_ODD = '-it\'s; touch canary $(touch canary) `touch canary` "x" \\ \n%j é'


def holding(folder, text):
    """The files below a folder that hold this text."""
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_text(errors="replace")]


def test_a_run_in_an_odd_folder_runs_nothing_else_and_keeps_no_secret(digits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_records, "RESULTS", tmp_path / "kept")
    monkeypatch.setenv("COURSE_TOKEN", SECRET)
    script = scripts.write_script("mnist_ddp", tmp_path / ALL_ODD / f"{ALL_ODD}.py")
    arguments = ["--data", digits, "--dry-run", "--epochs", 1, "--run-dir", tmp_path / "runs" / ALL_ODD]
    launch.run(script, *arguments, launcher="python", timeout=LIMIT)
    run = runs.read_run(tmp_path / "runs" / ALL_ODD)
    assert run.state == "done" and not run.problems and run.spec["run_dir"] == str(run.folder)
    make_records.keep(tmp_path / "runs", "here")
    job = jobs.Job("try", ("mnist_ddp.py", "a $(touch canary)"))
    jobs.write_job(job, jobs.Site("here", setup=("module purge",)), tmp_path / "job")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([ALL_ODD, "job", "kept", "runs"])
    assert not holding(tmp_path, SECRET), "nothing that is kept is the environment"
    says = tmp_path / "says.py"
    says.write_text("import os\nopen('all', 'w').write(str(dict(os.environ)))")
    launch.run(says, launcher="python", timeout=LIMIT)
    assert holding(tmp_path, SECRET) == [tmp_path / "all"], "the control: it was there to be kept"


SECRETS = re.compile(
    r"gh[pousr]_\w{36}|github_pat_\w{20}|AKIA[0-9A-Z]{16}|\bhf_\w{30}|\bsk-[\w-]{20}|xox[baprs]-\w{10}"
    r"|BEGIN [A-Z ]*PRIVATE|(?i:password|passwd|secret|api_?key|token)\\?[\"']?\s*[=:]\s*\\?[\"'][^\"'\\]{6,}"
)
KEPT = [*NOTEBOOKS, *(ROOT / "notebooks" / "results").rglob("*.json*"), *(ROOT / "slurm").rglob("*.toml")]
KEPT += [ROOT / "slurm" / name for name in ("job.sbatch.jinja", "cluster")]
KEPT += [ROOT / name for name in (".ci/packages", "Makefile", "README.md", "pyproject.toml")]


def test_no_file_that_is_handed_out_holds_a_secret():
    secrets = {str(path.relative_to(ROOT)): SECRETS.findall(path.read_text()) for path in KEPT}
    assert {name: what for name, what in secrets.items() if what} == {} and len(secrets) > 50
    for planted in ('"api_key": "5f1c5f1c"', "token='5f1c5f1c'", f"ghp_{36 * 'a'}", "-----BEGIN RSA PRIVATE KEY-----"):
        assert SECRETS.search(planted), "the control"
