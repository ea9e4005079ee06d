"""`explain`: each rule knows its message and no other, logs of real failures name who failed first, and bad input."""

import ast
import gzip
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import nbformat
import pytest
from explained import answer, explain
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import assigned, ways
from real import LIMIT, THOROUGH, need_launcher
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.cli import main
from ddp_helpers.launch.launchers import clean_environment, free_port
from ddp_helpers.upkeep import troubleshooting
from ddp_tools.explain.judge import judge
from ddp_tools.explain.lines import Line, Logs, read_logs
from ddp_tools.explain.report import as_data, as_text, page_of
from ddp_tools.explain.rules import HOLE, Rule, best_rule, literal_pieces, load_rules

RULES = load_rules()
SPOKEN = [rule for rule in RULES if not rule.silent]
BY_ID = {rule.id: rule for rule in RULES}

# ---- the rules


def example_of(rule: Rule) -> str:
    return rule.example or HOLE.join(literal_pieces(rule)[0]).replace(HOLE, "7")


def known_otherwise(lines: Iterable[tuple[Rule, str]]) -> list[str]:
    """Which lines another rule knows better than the one that they belong to, or no rule knows."""
    failures = []
    for rule, line in lines:
        known = best_rule(SPOKEN, line)
        if known is None or (known.meaning, known.cure) != (rule.meaning, rule.cure):
            failures.append(f"{rule.id}: {known and known.id} knows it better: {line}")
    return failures


EXAMPLES = [(rule, example_of(rule)) for rule in SPOKEN if rule.example or not rule.statuses]


def test_each_rule_knows_its_example_and_no_other_knows_it_better() -> None:
    failures = known_otherwise(EXAMPLES)
    assert not failures, "\n".join(failures)


def test_each_spelling_of_a_rule_is_that_of_a_line_and_no_other_rule_knows_the_line_better() -> None:
    logs = ROOT / "tests" / "logs"
    spelled = tomllib.loads((logs / "spellings" / "lines.toml").read_text())
    lines = [(BY_ID[name], line) for name, its_lines in spelled.items() for line in its_lines]
    failures = known_otherwise(lines)
    texts = [line for _, line in (*lines, *EXAMPLES)] + (logs / "example.log").read_text().splitlines()
    for path in (*logs.glob("*.toml"), logs / "clean" / "runs.toml"):
        texts += [line for entry in tomllib.loads(path.read_text())["log"] for line in entry["text"].splitlines()]
    for rule in SPOKEN:
        patterns = [HOLE.join(pieces) for pieces in literal_pieces(rule)]
        alone = [replace(rule, patterns=(pattern,), regexes=()) for pattern in patterns]
        alone += [replace(rule, patterns=(), regexes=(regex,)) for regex in rule.regexes]
        dead = [one for one in alone if len(alone) > 1 and not any(map(one.match, texts))]
        failures += [f"{one.id}: no line has {one.patterns or one.regexes}" for one in dead]
    assert not failures, "\n".join(failures)


def is_there(link: str) -> bool:
    """Whether a page is there, and its anchor on it."""
    page, _, anchor = link.partition("#")
    if not (ROOT / page).exists() or not anchor:
        return (ROOT / page).exists()
    text = (ROOT / page).read_text()
    if page.endswith(".ipynb"):
        return f'<a id=\\"{anchor}\\">' in text
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_each_rule_has_a_name_of_its_own_and_says_what_it_means_what_to_do_and_where_to_read_on() -> None:
    said = {rule.id: rule.meaning and rule.cure and (rule.source or rule.seen) for rule in SPOKEN}
    assert len(BY_ID) == len(RULES) and not [name for name, words in said.items() if not words]
    assert not [rule.id for rule in SPOKEN if not is_there(rule.page)]
    assert not is_there("docs/none.md") and not is_there("docs/tools.md#none")  # the controls


ORDINARY = """\
epoch 3: loss 0.31, error 4.2 %, 10,211 images/s
mean squared error: 0.0231
validation error improved from 0.31 to 0.29; saving the model
no errors in 3 of 3 files; killed 0 workers, retried 0 times
0 failed, 12 passed; timeout is 600 s, rank 0 exits
2024-11-22 10:00:00,123 INFO error_rate=0.02 memory 12.1 GB of 40 GB
NCCL version 2.21.5+cuda12.4
node1:123:456 [0] NCCL INFO Connected all rings
the connection to the database was closed after 12 queries
"""


def test_ordinary_lines_are_known_to_no_rule_and_are_no_failure(tmp_path: Path) -> None:
    for line in ORDINARY.splitlines():
        assert best_rule(SPOKEN, line) is None, line
    assert explain(tmp_path, ORDINARY).root is None
    assert explain(tmp_path, ORDINARY + "RuntimeError: CUDA out of memory.\n").root is not None  # the control


RAISES = re.compile(r"\w+Error\(|self\._log_and_throw\(")


def test_each_line_with_which_a_script_ends_is_known() -> None:
    lines = set()
    for path in (ROOT / "ddp_helpers" / "rank" / "scripts").glob("mnist_*.py"):
        for function in ast.parse(path.read_text()).body:
            names = assigned(ast.walk(function))
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("exit", "error"):
                    lines |= {text.replace("\0", "7") for text in ways(call.args[0], names) if text != "\0"}
    rules = {line: best_rule([rule for rule in SPOKEN if rule.seen == "this course"], line) for line in lines}
    assert [line for line, rule in rules.items() if rule is None] == []
    assert BY_ID["nan-stop"] in rules.values() and BY_ID["no-launcher"] in rules.values()


def test_six_of_the_messages_that_ddp_itself_raises_are_known() -> None:
    """The rest tell of a fault of torch, or of hooks and meshes that few people use."""
    torch = Path(find_spec("torch").origin).parent  # which is not imported
    tree = ast.parse((torch / "nn" / "parallel" / "distributed.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and RAISES.match(ast.unparse(node))]
    texts = {text.replace("\0", "7") for call in calls for text in ways(call.args[-1], {})}
    assert len(texts) > 20 and sum(best_rule(SPOKEN, text) is not None for text in texts) >= 6


def test_the_pages_are_written_from_the_rules() -> None:
    assert troubleshooting.INDEX.read_text() == troubleshooting.index(RULES) != troubleshooting.index(RULES[1:])
    text = troubleshooting.PAGE.read_text()
    assert troubleshooting.page(text, RULES) == text
    assert troubleshooting.page(text, [rule for rule in RULES if rule.id != "slurm-oom"]) != text  # the control


def test_a_rule_counts_the_threads_that_had_it_and_the_page_shows_what_was_asked_three_times() -> None:
    logs = [
        log
        for path in (ROOT / "tests" / "logs").glob("threads*.toml")
        for log in tomllib.loads(path.read_text())["log"]
    ]
    had = Counter(name for log in logs for name in log["expects"])
    counted = {
        rule.id: had[rule.id] + len(rule.source.split(", ") if rule.source else []) for rule in RULES if rule.who
    }
    assert {name: BY_ID[name].asked for name in counted} == counted
    shown = {rule.id for rule in RULES if rule.who and rule.on_page}
    often = {name for name, times in counted.items() if times > 2}
    assert shown > {name for name in often if not BY_ID[name].says_cure} and shown < counted.keys()
    assert "no-space" in often - shown  # anybody knows it
    assert "slurm-qos" not in shown and "missing-keys" in shown  # asked by nobody; treated by notebook 05
    assert page_of(BY_ID["slurm-qos"]) == "" and "#slurm-and-mpi" in page_of(BY_ID["slurm-oom"])


# ---- prefixes: the same log, as each launcher would mark it

FAILS = """\
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    loss.backward()
RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons"""
GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:26503."
PREFIXES = {
    "torch": "[rank{}]: ",
    "torchrun": "[default{}]:",
    "both": "[default{0}]:[rank{0}]: ",
    "srun": "{}: ",
    "Open MPI 4": "[1,{}]<stderr>:",
    "Open MPI 5": "[prterun-node-1-4711@1,{}]<stderr>: ",
    "course": "\x1b[38;5;231;48;5;27m[rank {}]\x1b[0m ",
}


TIMES = {
    "torch": "[rank{rank}]:[E1122 10:0{minute}:00.{tenth}23456789 x.cpp:1] {text}",
    "iso": "[rank{rank}]: 2024-11-22T10:0{minute}:00.{tenth}23Z {text}",
    "logging": "[rank{rank}]: [2024-11-22 10:0{minute}:00,{tenth}23] {text}",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_a_rank_is_read_from_its_prefix(tmp_path: Path, prefix: str) -> None:
    texts = {0: GONE, 3: FAILS, 1: GONE}
    log = "".join(textwrap.indent(text, prefix.format(rank)) + "\n" for rank, text in texts.items())
    verdict = explain(tmp_path, log)
    assert verdict.root.rule is BY_ID["ready-twice"] and verdict.first == 3
    follows = {(finding.rule.id, finding.rank) for finding in verdict.follows}
    assert follows == {("peer-gone-gloo", 0), ("peer-gone-gloo", 1)}
    assert verdict.own[-1].text.startswith("RuntimeError: Expected to mark")


def test_without_prefixes_the_error_is_known_and_no_rank_is_invented(tmp_path: Path) -> None:
    verdict = explain(tmp_path, f"{GONE}\n{FAILS}\n")
    assert verdict.root.rule is BY_ID["ready-twice"] and verdict.first is None


def test_what_slurm_and_a_signal_do_besides_the_root_is_told_where_it_helps(tmp_path: Path) -> None:
    verdict = explain(tmp_path, STEP.format(" DUE TO PREEMPTION") + WORKER + EXITED)
    assert [finding.rule.id for finding in verdict.others] == ["worker-told-to-end"]  # with its own cure
    for text in (REFUSED, "RuntimeError: CUDA out of memory.\nKilled\n"):  # "no such GPU" is what came of it
        assert explain(tmp_path, text).others == []


def test_a_folder_of_many_logs_is_read_in_order_and_what_is_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_tools.explain.lines._MOST_FILES", 24)
    for rank in (*range(21), 22, *range(24, 30)):
        (tmp_path / f"rank{rank:02}.log").write_text("a\n")
    logs = read_logs([tmp_path])
    [notice] = logs.notices
    assert "4 of its 28 logs were not read" in notice and "rank26.log on" in notice
    assert "ranks 0 to 20, 22, 24, 25." in as_text([judge(logs)], logs)


UNREAD = {  # what is given: a setting of the reader under which a part of it is not read
    "": ("_MOST_FILES", 1),
    "a.log": ("_PART", 19),
    "-": ("_PART", 19),
    "odd": ("_PART", 100),  # zeros among its logs: no setting
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_good_end_counts_only_where_all_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = "JobState=COMPLETED\n" * 3
    for log in ("a.log", "odd/b.log", "odd/c.log"):
        (tmp_path / log).parent.mkdir(exist_ok=True)
        (tmp_path / log).write_text(text)
    given = name if name == "-" else str(tmp_path / name)
    for status in (0, 4):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["explain", given]) == status
        setting, least = UNREAD[name]
        monkeypatch.setattr(f"ddp_tools.explain.lines.{setting}", least)
        (tmp_path / "odd" / "c.log").write_bytes(bytes(99))


def test_a_folder_of_logs_is_read_rank_by_rank(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "failed", "why": f"RuntimeError: {GONE}"}))
    for rank, text in {0: GONE, 1: FAILS}.items():
        (tmp_path / f"rank{rank}.log").write_text(text)
    verdict = judge(read_logs([tmp_path]))
    assert (verdict.first, answer(verdict)) == (1, "ready-twice")


@pytest.mark.parametrize("form", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("unit", ["minute", "tenth"])
@pytest.mark.parametrize("late", [0, 2])
def test_the_earliest_by_time_is_first_wherever_it_stands(tmp_path: Path, form: str, unit: str, late: int) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    times = [{"minute": 5, "tenth": 5} | ({unit: 3} if rank == late else {}) for rank in range(3)]
    lines = [form.format(rank=rank, text=text, **times[rank]) for rank in (1, 0, 2)]
    verdict = explain(tmp_path, "\n".join(lines))
    assert (verdict.first, verdict.by) == (late, "by time")


# ---- what it says, and its exit statuses

RAISED = """Traceback (most recent call last):
  File "/home/me/fit.py", line 12, in <module>
    rows[key]
  File "/opt/lib/python3.12/site-packages/x/y.py", line 3, in get
    raise
{}
"""
OWN = "".join(RAISED.splitlines(keepends=True)[:3]) + "{}\n"
AT_LIMIT = "slurmstepd: error: *** STEP 4.0 CANCELLED DUE TO TIME LIMIT ***\n"
ENDS_OF_LOGS = {  # the status, and what is said
    OWN.format("KeyError: 'a'"): (1, "your own code raised"),
    OWN.format("KeyError: 'b'"): (1, "job.log:4: KeyError: 'b'"),  # once, though its form alone tells it, too
    OWN.format("x.Odd: a"): (1, "read /home/me/fit.py:12"),
    OWN.format("AssertionError: 8 ranks are needed"): (3, "Your own line in its traceback: /home/me/fit.py:12"),
    RAISED.format("KeyError: 'a'"): (3, "Raised in x, reached from your line /home/me/fit.py:12"),
    RAISED.format("x.Odd: a"): (3, "Raised in x, reached from your line /home/me/fit.py:12"),
    RAISED.format("x.Odd: a") + AT_LIMIT: (3, "Not known"),
    ORDINARY + textwrap.indent(FAILS, "[rank1]: "): (1, "Failed first: rank 1"),
    ORDINARY: (4, "No failure is seen, and nothing says that the run ended well."),
    "": (4, "No failure is seen"),
    "rank 0 exit status 0\n": (4, "No failure is seen"),  # of the others nothing is known
    "epoch 1: loss 0.3\nJobState=COMPLETED\n": (0, ""),
    "git: fatal: odd\n": (3, "git: fatal: odd"),
    "[rank0]: KeyError: 7\n[rank1]: ValueError: odd\n": (3, "Also seen:\n  rank 1, "),
    textwrap.indent(RAISED.format("my.Odd: row 7"), "[rank2]: "): (3, "rank 2"),
}


@pytest.mark.parametrize("text", ENDS_OF_LOGS)
def test_each_end_has_its_status(capsys, tmp_path: Path, text: str) -> None:
    (tmp_path / "job.log").write_text(text)
    status, said = ENDS_OF_LOGS[text]
    assert main(["explain", str(tmp_path / "job.log")]) == status
    assert said in capsys.readouterr().out


INNERMOST = {  # the file of the innermost frame, and which package of it raised the exception; "" for the reader's own
    "/opt/v/lib/python3.12/site-packages/torch/distributed/device_mesh.py": "torch",
    "/usr/lib/python3/dist-packages/deepspeed/runtime/engine.py": "deepspeed",
    "C:\\Python\\Lib\\site-packages\\lightning\\trainer.py": "lightning",
    "/usr/lib/python3.12/json/decoder.py": "json",
    "/src/torch/_inductor/codecache.py": "/src/torch/_inductor/codecache.py",
    "/home/me/torch/net.py": "",
}


def test_the_innermost_frame_says_whose_exception_it_is(tmp_path: Path) -> None:
    for file, package in INNERMOST.items():
        text = RAISED.format("ValueError: odd").replace("/opt/lib/python3.12/site-packages/x/y.py", file)
        verdict = explain(tmp_path, text)
        assert (verdict.raised.package, verdict.known) == (package, not package), file


class Terminal(io.TextIOWrapper):
    """A standard input at which a person sits."""

    def isatty(self) -> bool:
        return True


def test_a_message_is_pasted_and_explained(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(io.BytesIO(b"RuntimeError: CUDA out of memory.\n")))
    refused(main, ["explain"], named=["paste"])
    assert main(["explain", "-"]) == 1
    said = capsys.readouterr()
    assert "Ctrl+D" in said.err and "a GPU has no room for a tensor" in said.out


def test_the_verdict_as_json_and_from_standard_input(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    log = textwrap.indent(FAILS, "[rank1]: ").encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    assert main(["explain", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "explained" and data["first_failed"] == 1
    assert data["root"]["rule"] == "ready-twice" and data["root"]["line"] == 1 + FAILS.count("\n")


@pytest.mark.parametrize("path", ["logs/example.log", "tools/jobfiles/torchrun_each.sbatch"])
def test_the_page_shows_what_the_command_prints(capsys, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["explain", f"tests/{path}"]) == 1
    page = (ROOT / "docs" / "tools.md").read_text()
    assert capsys.readouterr().out in re.findall(r"```text\n(.*?)```", page, re.S)


def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path) -> None:
    bad = {
        "zeros": bytes(10_000),
        "gzip": gzip.compress(b"RuntimeError"),
        "binary": os.urandom(64) + bytes(1000),
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    for name in (*bad, "missing", "folder"):
        refused(main, ["explain", str(tmp_path / name)], named=["holds no log" if name == "folder" else name])


# ---- real failures of this course: notebook 10 and its appendix, as they were executed; launchers, here

ANY = (0, 1)
# A fault: which rank failed first, which was not there, and what explains it.
FAULTS = {
    1: (0, [], "waiting-for-clients"),
    2: (None, [], "port-of-outgoing"),
    3: (ANY, [], "address-in-use"),  # two ranks want one address: either may be the second
    4: (None, [], "invalid-device-id"),  # ranks 1 and 3, and nothing says which was first
    5: (None, [], "clean"),
    6: (0, [], "gloo-interface"),
    7: (1, [], "sigkill"),
    8: (0, [1], "monitored-barrier"),
    9: (None, [], "ended-at-limit"),
    10: (None, [], "collective-mismatch"),
    11: (1, [], "received-size"),
    12: (0, [], "unused-parameter"),
    13: (None, [], "loss-nan-seen"),
    14: (None, [], "clean"),
    15: (None, [], "clean"),
    16: (None, [], "clean"),
    17: (1, [], "gzip-cut"),
    18: (0, [], "worker-killed"),
    22: (None, [], "map-location"),
    23: (None, [], "sigusr"),
    24: (1, [0], "gloo-timeout"),
    25: (None, [], "sigkill"),
    26: (0, [], "ready-twice"),
    27: (1, [0], "gloo-timeout"),
    28: (0, [], "open-files"),
    29: (1, [], "no-such-file"),
}


@cache
def faults() -> dict[int, str]:
    """The output of each fault of notebook 10 and its appendix, without its cure, from the first cell that has one."""
    outputs: dict[int, str] = {}
    for name in ("10_break_it_and_fix_it", "10b_look_up_a_fault"):
        number = 0
        for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells:
            numbers = re.findall(r'<a id="fault-(\d+)">', cell.source)
            number = int(numbers[-1]) if numbers else number
            texts = [out.text for out in cell.get("outputs", []) if out.output_type == "stream"]
            broken = re.split(r"^fixed", "".join(texts), flags=re.M)[0]
            if number and broken.strip() and not broken.startswith("Writing "):  # what it tries, and no log
                outputs.setdefault(number, broken)
    return outputs


@pytest.mark.parametrize("number", FAULTS)
def test_a_fault_of_the_clinic_is_explained_and_its_rank_named(tmp_path: Path, number: int) -> None:
    """One that leaves no message is no failure."""
    verdict = explain(tmp_path, faults()[number])
    first, *others = FAULTS[number]
    assert verdict.first in (ANY if first is ANY else (first,))
    assert [list(verdict.late), answer(verdict)] == others


FAILS_ALONE = """import os, signal, sys, torch, torch.distributed as dist
from ddp_helpers.rank.launchers import who_am_i
rank = who_am_i()[1]
dist.init_process_group("gloo", rank=rank, world_size=2)
dist.barrier()
if rank == 1 and sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and sys.argv[1] == "fails":
    open("train.csv")
dist.all_reduce(torch.ones(1))
print("trained")
dist.destroy_process_group()
"""
ENDS = {"killed": "sigkill", "fails": "no-such-file", "ends well": "clean"}
STARTS = {
    "torchrun": ["torchrun", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"],
    "torchrun, tee": [
        *["torchrun", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"],
        *["--log-dir", "logs", "--tee", "3"],
    ],
    "mpirun": ["mpirun", "--oversubscribe", "--tag-output", "-np", "2", sys.executable],
    "srun": ["srun", "--partition=course", "--ntasks=2", "--label", sys.executable],
    "srun, no labels": ["srun", "--partition=course", "--ntasks=2", sys.executable],
}


# make test-all has every pair.
USUAL = [("torchrun, tee", "fails"), ("srun", "killed")]


@pytest.mark.parametrize(("start", "end"), [*product(STARTS, ENDS)] if THOROUGH else USUAL)
def test_the_rank_that_failed_first_is_named_under_a_real_launcher(
    tmp_path: Path, request: pytest.FixtureRequest, start: str, end: str
) -> None:
    need_launcher(request, start.partition(",")[0])
    (tmp_path / "train.py").write_text(FAILS_ALONE)
    env = clean_environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*STARTS[start], "train.py", end],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    verdict = explain(tmp_path, done.stdout)
    assert answer(verdict) == ENDS[end], done.stdout
    assert verdict.first == (None if end == "ends well" else 1), done.stdout
    assert all(line.text.strip() for line in verdict.own), "a line with nothing but its prefix"


# ---- what is read of a text

STEP = "slurmstepd: error: *** STEP 4.0 ON n1 CANCELLED AT 2026-09-01T10:00:00{} ***\n"
WORKER = "RuntimeError: DataLoader worker (pid 3034) is killed by signal: Terminated.\n"
WAITS = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"
REFUSED = """sbatch: error: Failed to validate job spec. --gpus-per-task or --tres-per-task used without either \
--gpus or -n/--ntasks is not allowed.
sbatch: error: Invalid generic resource (gres) specification
"""
CLOSED = "Process group watchdog thread terminated with exception: "
REQUEUED = "slurmstepd: error: *** JOB 608 ON node1 CANCELLED AT 2022-08-12T02:06:12 DUE TO JOB REQUEUE ***\n"
TRIES = "[W socket.cpp:601] [c10d] The client socket has failed to connect to [node0]:29500 (errno: 110 - timed out).\n"
EXITED = "srun: error: node1: task 0: Exited with exit code 1\n"
# Open MPI 5.0.7, the installed library
PRTERUN = "prterun noticed that process rank 1 with PID 42 on node vm exited on\nsignal 9 (Killed).\n"
TEXTS = {
    # a path or a number in the message is used
    "OSError: [Errno 116] Stale file handle: '/home/me/.triton/cache/AB/k.so'": "cache-race",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.csv'": "no-such-file",
    "OSError: address already in use, port: 29500": "address-in-use",
    "RuntimeError: unable to mmap 72 bytes from file </torch_9>: Cannot allocate memory (12)": "mmap-limit",
    "RuntimeError: unable to mmap 98304000 bytes from file </torch_9>: Cannot allocate memory (12)": "cannot-allocate",
    "OSError: address already in use, port: 40000": "port-of-outgoing",
    # a loss of NaN that is printed is a failure
    "epoch 1: loss 0.3\nloss: nan": "loss-nan-seen",
    "step 3 | loss is NaN": "loss-nan-seen",
    "{'loss': nan, 'lr': 0.1}": "loss-nan-seen",
    "3,0.1,nan,0.5": "loss-nan-seen",
    "nan_filter: loss 0.2": "clean",
    "Nancy,3,0.1": "clean",
    "loss 0.3, nan samples skipped: 0": "clean",
    # a warning at which a log ends explains it
    TRIES * 3: "client-socket",
    TRIES * 3 + "epoch 1: loss 0.3\n": "clean",
    # a line that reports another error is explained by that one
    f"[rank0]:[E1 x.cpp:1] [Rank 0] {CLOSED}CUDA error: an illegal memory access was encountered": "illegal-address",
    f"[rank0]:[E1 x.cpp:1] [Rank 0] {CLOSED}odd": "nccl-watchdog-exception",
    # what comes behind the end by Slurm is not its cause
    REQUEUED + "RuntimeError: Connection refused\n": "slurm-requeue",
    "RuntimeError: Connection refused\n" + REQUEUED: "connection-refused",
    # a job that waits until Slurm ends it, and one that trained in between
    WAITS + AT_LIMIT: "srun-memory-step",
    WAITS + "srun: Step created for job 7\n" + AT_LIMIT: "slurm-time",
    WAITS + "epoch 1: loss 0.3\n" + AT_LIMIT: "slurm-time",
    # a signal from outside that reaches the workers
    WORKER: "worker-told-to-end",
    WORKER + EXITED + STEP.format(""): "worker-told-to-end",
    STEP.format("") + WORKER + EXITED: "slurm-step-cancelled",
    STEP.format(" DUE TO PREEMPTION") + WORKER + EXITED: "slurm-preempted",
    "KeyError: 7\n" + STEP.format("") + WORKER: None,
    # the device, and the sentence of Slurm that says why
    "RuntimeError: No backend type associated with device type cpu": "no-backend",
    "RuntimeError: No backend type associated with device type xpu": "no-backend-of-device",
    REFUSED: "slurm-gpus-per-task",
    "srun: error: Unable to create step for job 7: More processors requested than permitted": "srun-too-large",
    "sbatch: error: Batch job submission failed: More processors requested than permitted": "slurm-config",
    # an error that no rule knows comes before a launcher's summary
    "tool | Error: no licence\n" + EXITED: None,
    EXITED: "srun-task-exit",
    # what a launcher says in two lines
    f"[rank0]: {GONE}\n{'-' * 74}\n{PRTERUN}{'-' * 74}\n": "sigkill",
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_explained_by_its_cause(tmp_path: Path, text: str) -> None:
    assert answer(explain(tmp_path, text)) == TEXTS[text]


CALL = (
    "[rank{0}]:[E x.cpp:1] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={1}, OpType={2}, NumelIn={3},\n"
)
DONE = "[rank{0}]:[E x.cpp:1] [PG ID 0 Rank {0}] last enqueued NCCL work: {1}, last completed NCCL work: {2}.\n"


@pytest.mark.parametrize(
    ("calls", "completed", "words", "late"),
    [
        (
            {0: (7, "BROADCAST", 4), 1: (9, "ALLREDUCE", 4)},
            6,
            "rank 0 in BROADCAST of 4 numbers, number 7; rank 1 in ALLREDUCE of 4",
            [],
        ),
        (dict.fromkeys((0, 1), (7, "ALLREDUCE", 4)), -1, "nothing goes through between the GPUs", []),
        (dict.fromkeys((0, 1), (7, "ALLREDUCE", 4)), 6, "has gone", []),
        ({0: (7, "ALLREDUCE", 4), 1: (6, "ALLREDUCE", 4)}, 5, "rank 1 made fewer calls", [1]),
        (  # uneven batches: all eight speak
            {rank: (7, "ALLREDUCE", 2049000 if rank == 5 else 1) for rank in range(8)},
            6,
            "ranks 0 to 4, 6, 7 in ALLREDUCE of 1 number, number 7; rank 5 in ALLREDUCE of 2,049,000 numbers, number 7 "
            "(NCCL's barrier is",
            [],
        ),
        (dict.fromkeys(range(1, 8), (7, "ALLREDUCE", 4)), 6, "rank 0 did not come to it", [0]),
    ],
)
def test_the_watchdogs_numbers_are_compared_over_the_ranks(tmp_path, calls, completed, words, late) -> None:
    log = "".join(CALL.format(rank, *call) + DONE.format(rank, 9, completed) for rank, call in calls.items())
    verdict = explain(tmp_path, log)
    assert words in verdict.root.rule.meaning and verdict.late == late and verdict.first is None
    assert is_there(verdict.root.rule.page)


@pytest.mark.parametrize(("group", "compared"), [("0(default_pg)", True), ("1(a_part)", False)])
def test_one_group_is_known_by_both_of_its_names(tmp_path, group, compared) -> None:
    """torch 2.14 names it once by its GUID alone, and once with an ID; a call of another group is not compared."""
    caught = CALL.format(1, 26, "ALLREDUCE", 5).partition("[Rank 1] ")[2].strip()
    lines = [
        CALL.format(0, 26, "ALLREDUCE", 1).replace("[Rank 0]", "[PG GUID 0(default_pg) Rank 0]"),
        CALL.format(1, 26, "ALLREDUCE", 5).replace("[Rank 1]", f"[PG GUID {group} Rank 1]"),
        f"[rank1]:[E x.cpp:2] [PG ID 0 PG GUID {group} Rank 1] {CLOSED}[PG GUID {group} Rank 1] {caught}\n",
    ]
    verdict = explain(tmp_path, "".join(lines))
    assert ("the same call with different sizes" in verdict.root.rule.meaning) == compared


NETWORKS = {  # what NCCL says of its network, and the word by which the report calls it slow; "" where it is right
    "n1:7:7 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is HSN (found 4 nics)": "",
    "n1:7:7 [0] NCCL INFO Using network AWS Libfabric": "",
    "n1:7:7 [0] NCCL INFO NET/OFI Selected Provider is tcp (found 1 nics)": "`Selected provider is cxi`",
    "n1:7:7 [0] NCCL INFO Using network Socket": "uses TCP",
}


@pytest.mark.parametrize("line", NETWORKS)
def test_a_slow_network_is_told_and_is_no_failure(line: str, tmp_path: Path) -> None:
    verdict = explain(tmp_path, line)
    said = as_text([verdict], Logs([], ["job.log"], []))
    assert answer(verdict) == "clean" and bool(verdict.seen.harmless) == bool(NETWORKS[line]) and NETWORKS[line] in said


def test_a_torchrun_in_each_task_is_seen_by_its_two_numbers(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("9: [rank2]: a\n10: [rank10]: b\n")
    assert "srun's task 9 holds torch's rank 2" in read_logs([tmp_path / "job.log"]).notices[0]


def test_a_mark_behind_other_text_begins_a_line_of_its_rank(tmp_path: Path) -> None:
    text = "24/200 [01:08<08:18,  2.83s/it][rank1]: ValueError: odd[rank2]: ValueError: even\n"
    (tmp_path / "job.log").write_text(text)
    lines = [(line.rank, line.text) for line in read_logs([tmp_path / "job.log"]).lines]
    assert lines[1:] == [(1, "ValueError: odd"), (2, "ValueError: even")] and lines[0][0] is None


def test_a_rank_that_its_launcher_ended_is_not_the_first(tmp_path: Path) -> None:
    log = """\
E1125 20:02:16.897000 3993 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -6) local_rank: 1
Failures:
[1]:
  time      : 2026-11-25_20:02:16
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 4274)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_20:02:16
  rank      : 1 (local_rank: 1)
  exitcode  : -6 (pid: 4275)  (SIGABRT)
"""
    verdict = explain(tmp_path, log)
    assert (verdict.first, answer(verdict)) == (1, "sigabrt")


def test_a_log_of_progress_bars_many_and_long_lines_and_colours_is_read(tmp_path: Path) -> None:
    bar = "\r".join(f"{percent}%|### | {percent}/100" for percent in range(100))
    log = tmp_path / "job.log"
    log.write_bytes(f"{bar}\r\x1b[31mRuntimeError: CUDA out of memory.\x1b[0m\r\n".encode("utf-16"))
    verdict = judge(read_logs([log]))
    assert answer(verdict) == "cuda-oom" and verdict.root.lines[0].number == 1
    log.write_text(f"0: begins\n1: \r{bar}\r\n1: RuntimeError: CUDA out of memory.\n")  # labelled, as by srun
    labelled = read_logs([log])
    assert judge(labelled).first == 1 and not labelled.notices and {line.rank for line in labelled.lines} == {0, 1}
    steps = "".join(f"step {step}: loss 0.5\n" for step in range(2000))
    log.write_text(f"{steps}RuntimeError: CUDA out of memory.\n{steps}")
    verdict = judge(read_logs([log]))
    assert answer(verdict) == "cuda-oom" and verdict.root.lines[0].number == 2001
    log.write_bytes(b"\xff\xfe caf\xe9 " + b"x" * 100_000 + b"\nRuntimeError: CUDA out of memory.\n")
    assert answer(judge(read_logs([log]))) is not None


PIECES = [prefix.format(1) for prefix in PREFIXES.values()]
PIECES += [FAILS, GONE, "Traceback (most recent call last):", "srun: error: n1: tasks 0-3: Killed", "exitcode  : -9"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(), min_size=1).map("\n".join))
def test_no_text_makes_it_fail_or_prints_what_a_terminal_would_obey(text: str) -> None:
    lines = [Line("x.log", number, None, None, line) for number, line in enumerate(text.split("\n"), start=1)]
    logs = Logs(lines, ["x.log"], [])
    report = as_text([judge(logs)], logs)
    assert all(letter.isprintable() or letter == "\n" for letter in report)
    json.dumps(as_data(judge(logs), logs))
