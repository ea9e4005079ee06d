"""The first GPU run, whole, on two CPU ranks: its protocol is tried before the first GPU tries it."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real import LIMIT, python, until, weekly
from simulated import start

from ddp_helpers import ROOT
from ddp_helpers.launch.processes import marked_processes
from ddp_helpers.rank.gpu.probes import read_lanes
from ddp_helpers.rank.scripts.gpu_first_run import read_flags, write
from ddp_helpers.upkeep import gpu_record

PROGRAM = ROOT / "slurm" / "scripts" / "gpu_first_run.py"
STEPS = ["facts", "scripts", "equal", "graph", "speed", "resume", "memory", "overlap", "timeout", "restart", "killed"]
STEPS += ["full", "scaling"]
SECONDS = 3000  # five times the limits: beside other tests a step takes longer
# All that it starts, 46 programs with torch, is forked from one process; make test-all starts them, too.
FORKED = [Path(__file__).with_name("forked_programs.py"), PROGRAM]


def lines_of(out):
    """The lines of the one record in a folder."""
    [path] = out.glob("cpu-*/record.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(
    scope="module", params=[pytest.param(FORKED, id="forked"), pytest.param([PROGRAM], id="started", marks=weekly)]
)
def whole(request, digits, tmp_path_factory):
    """All steps, run once: what the program said, its status, and the folder of the record."""
    out = tmp_path_factory.mktemp("gpu")
    flags = ["--data", digits, "--cpu", "--out", out, "--seconds", SECONDS]
    done = python(*request.param, *flags, limit=2 * SECONDS)
    return done, out / "cpu-1"


def test_every_step_comes_to_its_end_on_two_ranks_over_gloo(whole):
    done, folder = whole
    lines = lines_of(folder.parent)
    assert [line["step"] for line in lines] == STEPS
    ended = {line["step"]: (line["ended"], line["ok"]) for line in lines}
    measured = {"graph", "speed", "memory", "overlap", "scaling"}  # which prove nothing on CPUs
    assert ended == {step: ("by itself", None if step in measured else True) for step in STEPS}, done.stdout
    assert done.returncode == 0 and f"the record: {folder}" in done.stdout
    assert "commit it" not in done.stdout, "which is said of a GPU's alone"
    table = done.stdout.split("seconds\n")[1]
    assert all(re.search(rf"^{step} +\d+\.\d  (ok|seen) ", table, re.M) for step in STEPS)


def test_its_controls_differ_and_what_they_control_does_not(whole):
    seen = {line["step"]: line["seen"] for line in lines_of(whole[1].parent)}
    assert seen["resume"]["off"]["killed at 17"] == 0 < 1e-3 < seen["resume"]["off"]["control"]
    off = seen["equal"]["off"]
    assert max(off["one rank"], off["ranks"]) < 1e-5 < 1e-2 < off["control"]
    assert seen["graph"]["off"]["graph"] == 0 < 1e-3 < seen["graph"]["off"]["control"]
    assert set(seen["scripts"]["statuses"].values()) == {0} and len(seen["scripts"]["statuses"]) == 6
    assert set(seen["scripts"]["warnings"].values()) == {0}
    assert seen["timeout"]["statuses"][0] == 1 and seen["timeout"]["waited"] > 3
    assert seen["restart"]["lived"] == {"mnist_ddp_resumable": True}
    assert seen["restart"]["begun"] == {"mnist_ddp_resumable": 2}
    assert seen["killed"]["statuses"][1] == -signal.SIGKILL
    lanes = seen["overlap"]["classes"]["gloo"]
    assert lanes["sent"] >= lanes["hidden"] >= 0 < len(lanes["lanes"]["compute"])


# What torch's own code for CUDA and NCCL decides, and no hardware.
DECIDED = ["scripts", "equal", "graph", "resume", "timeout", "restart", "killed", "full"]


@weekly
def test_what_needs_no_hardware_is_true_on_two_simulated_gpus(simulated_gpus, digits, tmp_path):
    words = [sys.executable, PROGRAM, "--data", digits, "--out", tmp_path, "--seconds", SECONDS, "--only", *DECIDED]
    process = start(simulated_gpus, words, memory_mb=2048)
    out, err = process.communicate(timeout=2 * SECONDS)
    [record] = tmp_path.glob("simulated-gpu-*")
    lines = {line["step"]: line for line in map(json.loads, (record / "record.jsonl").read_text().splitlines())}
    assert {step: line["ok"] for step, line in lines.items()} == dict.fromkeys(["facts", *DECIDED], True), out + err
    assert process.returncode == 0 and lines["facts"]["seen"]["simulated"]
    for step in ("graph", "resume"):
        off = lines[step]["seen"]["off"]
        assert 0 in off.values() and off["control"] > 1e-3, off


def test_what_is_hidden_of_a_gpus_all_reduces_is_read_from_its_kernels():
    def kernel(name, begin, end):
        return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}

    events = [kernel("gemm", 1000, 3000), kernel("gemm", 3000, 5000), kernel("ncclDevKernel_AllReduce", 2000, 6000)]
    events += [{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000}, {"name": "a mark", "ts": 0}]
    seen = read_lanes(events, on_gpu=True)
    assert seen == {"lanes": {"compute": [[0, 4]], "all-reduce": [[1, 5]]}, "hidden": 3, "sent": 4}


def test_a_record_names_neither_this_machine_nor_its_folders(whole):
    text = "".join(path.read_text() for path in whole[1].iterdir())
    for name in (os.uname().nodename, str(ROOT), str(whole[1].parent), str(Path.home()) + "/"):
        assert name not in text
    assert "HOST" in text, "the control: it was there"
    assert {path.name for path in whole[1].iterdir()} == {"record.jsonl", "log.txt"}


def test_what_was_seen_is_drawn_with_a_title_that_says_it(whole):
    record = gpu_record.read_record(whole[1])
    speed, lanes = gpu_record.draw_speed(record), gpu_record.draw_overlap(record)
    rungs = "|".join(gpu_record._RUNGS)  # which of them is the fastest is this machine's affair
    assert re.match(rf"({rungs}): \d+\.\d times the images per second of (?!\1)({rungs})", speed.alt)
    share = record["overlap"]["found"].removeprefix("hidden, of what can be: gloo ")
    assert f"All-reduces hidden behind computing, of what can be: {share} (gloo)" in lanes.alt


def test_the_fastest_is_compared_with_the_slowest_also_where_the_plain_loader_wins(whole):
    record = gpu_record.read_record(whole[1])
    rates = {"plain, no workers": 421, "plain, with workers": 400, "fast, batch 64, seed 1": 257}
    for name, rate in rates.items():
        record["speed"]["seen"]["rows"][name]["images_per_second"] = [rate]
    title = "plain loader, no workers: 1.6 times the images per second of mnist_fast, batch 64"
    assert title in gpu_record.draw_speed(record).alt


def test_without_a_gpu_it_says_so_and_tries_nothing(digits, tmp_path):
    done = python(PROGRAM, "--data", digits, "--out", tmp_path)
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert "no GPU that torch can use, so nothing was tried: torch sees none" in done.stdout
    assert done.stdout.endswith("with --cpu the same steps run on CPUs, over gloo\n")


def test_without_data_it_says_what_gets_them(tmp_path):
    done = python(PROGRAM, "--data", tmp_path, "--cpu")
    assert done.returncode == 2 and f"download_data.py --data {tmp_path} gets them" in done.stderr


def test_the_job_file_runs_it_on_a_real_slurm(cluster, digits, tmp_path):
    flags = [digits, "--cpu", "--only", "memory", "--out", tmp_path, "--seconds", SECONDS]
    job = ["sbatch", "--wait", f"--output={tmp_path}/log", "slurm/gpu_first_run.sbatch", *map(str, flags)]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(job, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()
    assert [line["step"] for line in lines_of(tmp_path)] == ["facts", "memory"], "on two ranks, in a task of Slurm's"


HANGS = "import subprocess, sys, time\nsubprocess.Popen(['sleep', '9999'], start_new_session=True)\ntime.sleep(9999)\n"
FAILS = "if __name__ == '__main__':\n    raise SystemExit('a mistake')\n"  # and not where it is imported


@pytest.fixture
def scripts(tmp_path):
    """The scripts alone in a folder, to be harmed there."""
    return shutil.copytree(PROGRAM.parent, tmp_path / "scripts")


@pytest.fixture
def started(scripts, digits):
    """Start it with some steps beside the scripts; gives the process, which ends with the test."""
    runs = []

    def start(*steps, **options):
        command = [sys.executable, scripts / PROGRAM.name, "--data", digits, "--cpu"]
        command += ["--seconds", SECONDS, "--only", *steps]
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": scripts.parent}
        runs.append(subprocess.Popen(list(map(str, command)), **options))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
        run.communicate()


def of_a_step(run):
    """The processes of the step `scripts` that live."""
    return marked_processes(f"{run.pid}-scripts", "GPU_FIRST_RUN")


def test_a_step_that_hangs_or_dies_or_fails_is_told_and_the_next_one_runs_in_a_folder_of_the_scripts_alone(
    scripts, started
):
    program = scripts / PROGRAM.name
    program.write_text(program.read_text().replace('"scripts": (scripts, 90)', '"scripts": (scripts, 1.2)'))
    (scripts / "doctor.py").write_text(HANGS)
    (scripts / "mnist_fast.py").write_text(FAILS + "import os\nos.kill(os.getppid(), 9)\n")
    (scripts / "mnist_ddp.py").rename(scripts / "right.py")
    (scripts / "mnist_ddp.py").write_text(FAILS + "from right import *\n")
    run = started("scripts", "equal", "graph", "speed", "memory")
    said, _ = run.communicate(timeout=LIMIT)
    lines = {line["step"]: line for line in lines_of(scripts.parent / "gpu")}
    ended = {step: (line["ended"], line["ok"]) for step, line in lines.items()}
    assert run.returncode == 1 and not of_a_step(run), said
    assert ended.pop("facts") == ("by itself", True)
    assert ended.pop("scripts") == ("ended at its limit of 6 s", False)
    assert "NOT OK  ended at its limit of 6 s\n" in said, "which may be a hang, or slow"
    assert ended.pop("graph") == ("died: status -9", False)
    assert ended.pop("speed") == ("by itself", False) and "a mistake" in "\n".join(lines["speed"]["said"])
    assert ended == {"equal": ("by itself", None), "memory": ("by itself", None)}
    assert lines["equal"]["found"] == "left out: spirals.py is not here"
    assert lines["memory"]["commands"] == ["2 ranks: python scripts/gpu_first_run.py --probe memory DATA"]


WARNS = "import warnings\nwarnings.warn('once')\n"
WARNS_WHILE_IT_ENDS = "held = [open(__file__)]\n"


def test_a_script_that_warns_is_named_also_where_python_has_no_status_for_it_any_more(scripts, started):
    others = {"doctor": WARNS, "simple_ddp": WARNS_WHILE_IT_ENDS, "mnist_ddp": "", "mnist_fast": ""}
    for name, text in others.items():
        (scripts / f"{name}.py").write_text(text)
    run = started("scripts")
    run.communicate(timeout=LIMIT)
    line = lines_of(scripts.parent / "gpu")[-1]
    assert line["seen"]["statuses"] == {"mnist_ddp_resumable": 0} | dict.fromkeys(others, 0) | {"doctor": 1}
    assert line["found"] == "these failed or warned: doctor, simple_ddp" and line["ok"] is False


def test_on_cpus_there_is_twice_the_time(digits, monkeypatch):
    for flags, seconds in ([], 600), (["--cpu"], 1200), (["--cpu", "--seconds=5"], 5):
        monkeypatch.setattr(sys, "argv", ["gpu_first_run.py", f"--data={digits}", *flags])
        assert read_flags().seconds == seconds


def test_ctrl_c_leaves_a_record_that_says_so_and_no_process(scripts, started):
    (scripts / "doctor.py").write_text(HANGS)
    run = started("scripts", "equal")
    until(lambda: len(of_a_step(run)) >= 3, "the step, its program, and what that has started")
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=LIMIT)
    _, interrupted = lines_of(scripts.parent / "gpu")
    assert interrupted["ended"] == "interrupted" and run.returncode == 130
    assert "scripts" in said.split("seconds\n")[1] and not of_a_step(run)


def test_a_step_that_finds_the_disk_full_says_so_in_the_record(scripts, started):
    run = started("graph", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)))
    run.communicate(timeout=LIMIT)
    line = lines_of(scripts.parent / "gpu")[-1]
    assert line["step"] == "graph" and line["ok"] is False and run.returncode == 1
    assert "File too large" in line["said"][-1]


def test_a_record_that_cannot_be_written_stays_as_it_was_and_says_it_when_it_can(tmp_path, capsys):
    line = {"step": "facts", "found": "a machine", "said": ["x"] * 30}
    assert write(tmp_path, [line])
    before = (tmp_path / "record.jsonl").read_text()
    (tmp_path / "new.part").mkdir()  # nothing can be written now
    lines = [line, {"step": "equal", "found": "", "said": []}]
    assert not write(tmp_path, lines) and (tmp_path / "record.jsonl").read_text() == before
    assert "the record cannot be written now: Is a directory" in capsys.readouterr().out
    (tmp_path / "new.part").rmdir()
    assert write(tmp_path, lines)
    facts, equal = map(json.loads, (tmp_path / "record.jsonl").read_text().splitlines())
    assert len(facts["said"]) == 20 and equal["found"] == " (not written at once: Is a directory)"
