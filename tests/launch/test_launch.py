"""launch.run: labelled lines, the failing rank named, time limits, and one output in a notebook."""

import subprocess
import sys
import threading
import uuid
from pathlib import Path

import psutil
import pytest
from real import LIMIT, need_launcher

from ddp_helpers import ROOT
from ddp_helpers.launch import launch, launchers, screen
from ddp_helpers.launch.screen import Screen, shorten_paths

TAG = "DDP_TEST_TAG"  # an environment variable by which a test finds all processes of its launch


@pytest.fixture
def script(tmp_path):
    """Write a script."""

    def make(text, name="script.py"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return make


@pytest.fixture
def tag():
    """The environment that marks a launch; none of its processes is left when the test ends."""
    env = {TAG: uuid.uuid4().hex}
    yield env
    for process in left(env):
        process.kill()


def left(tag):
    """The processes of a launch that are there now."""
    ranks = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == tag[TAG]:
                ranks.append(process)
        except psutil.Error:
            continue
    return ranks


# ---- lines


def test_lines_bear_their_rank_also_on_uneven_nodes_and_from_an_odd_path(script, tag, capsys):
    path = script(
        "import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\nprint('to stderr', file=sys.stderr)",
        'it\'s a; touch canary $(touch canary) "x" \\ \n.py',
    )
    done = launch.run(path, "a b", "$HOME", "--n", 3, ranks=(2, 1), timeout=LIMIT, env=tag)
    screen = capsys.readouterr().out
    for rank in range(3):  # torchrun keeps no order of stdout and stderr
        assert sorted(done.of(rank)) == [f"rank {rank} a b $HOME --n 3", "to stderr"]
        assert screen.count(f"[rank {rank}]\x1b[0m rank {rank} a b $HOME --n 3\n") == 1
    assert done.seconds > 0 and not left(tag)
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def test_python_alone_has_no_labels_and_no_rank_of_ours(script, monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    path = script(
        "import os\nprint([n for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_PORT') if n in os.environ])"
    )
    assert launch.run(path, launcher="python", timeout=LIMIT).of("") == ["[]"]
    assert capsys.readouterr().out == "[]\n"


UNKNOWN = "nobody-knows-this-name"  # of a machine; in containers, and of laptops in some networks
OWN_NAME = ["unshare", "--uts", "--user", "--map-root-user"]


def test_ranks_meet_on_a_machine_whose_own_name_has_no_address(script):
    if subprocess.run([*OWN_NAME, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody have a host name of their own")
    code = f"import sys; from ddp_helpers.launch import launch; launch.run(sys.argv[1], ranks=2, timeout={LIMIT})"
    text = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nprint('met')"
    inside = f'hostname {UNKNOWN} && getent hosts {UNKNOWN}; exec "$@"'
    command = [*OWN_NAME, "sh", "-c", inside, "sh", sys.executable, "-c", code, script(text)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count("met\n") == 2, done.stderr
    assert UNKNOWN not in done.stdout, "nothing was looked up by that name: torchrun would warn, and wait for minutes"


# ---- failures

FAILS = """
import os, sys, time
if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    print("the last word of rank 1", flush=True)
    raise ValueError("meant to fail")
print("the last word of rank 0", flush=True)
os.mkdir(sys.argv[1])
time.sleep(9999)
"""


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_the_failing_rank_is_named_with_its_last_lines(launcher, script, tag, request, tmp_path, capsys):
    need_launcher(request, launcher)
    with pytest.raises(launch.LaunchError) as error:
        launch.run(script(FAILS), tmp_path / "said", ranks=2, launcher=launcher, timeout=LIMIT, env=tag)
    first, *last = str(error.value).splitlines()
    assert all(word in first for word in (launcher, "exit status 1", "rank 1"))
    assert "the last word of rank 1" in last and any("ValueError: meant to fail" in line for line in last)
    assert "the last word of rank 0" not in last
    assert "[rank 0]\x1b[0m the last word of rank 0\n" in capsys.readouterr().out  # mpirun's lines are labelled too
    assert not left(tag)


AT_EXIT = """
import atexit
def deep(calls):
    return deep(calls - 1) if calls else {}["gone at exit"]
atexit.register(deep, 9)
raise ValueError("meant to fail")
"""


def test_the_last_lines_are_of_the_failure_not_of_what_fails_at_exit(script, tag):
    with pytest.raises(launch.LaunchError) as error:
        launch.run(script(AT_EXIT), ranks=1, timeout=LIMIT, env=tag)
    assert str(error.value).splitlines()[-1] == "ValueError: meant to fail"


# What mpirun prints last, recorded with Open MPI 4.1.4 and 5.0.7, since a machine has one of them; and what it puts
# between a line and its mark.
LAST_WORDS = {
    "4, status": ("", "  Process name: [[51364,1],1]"),
    "5, status": (" ", "   Process name: [prterun-vm-4186@1,1]"),
    "4, signal": ("", "mpirun noticed that process rank 1 with PID 42 on node vm exited on signal 9 (Killed)."),
    "5, signal": (" ", "prterun noticed that process rank 1 with PID 42 on node vm exited on"),
}


@pytest.mark.parametrize(("gap", "last"), LAST_WORDS.values(), ids=LAST_WORDS)
def test_the_failing_rank_is_read_in_the_words_of_each_open_mpi(gap, last):
    done = launch.Launch([], 0.0)
    for line in (f"[1,1]<stderr>:{gap}why", f"[1,0]<stdout>:{gap}the last line of all ranks", last):
        launch.add_line(line, "mpirun", done, Screen())
    first, *rest = launch.failure_report(done, "it failed").splitlines()
    assert first.startswith("it failed; ") and "rank 1" in first and rest == ["why"]


SPAWNS = """
import os, sys
import torch.multiprocessing as mp

def start(rank):
    if rank == 1:
        print("the last word of rank 1", flush=True)
        os.abort()

mp.start_processes(start, nprocs=2, start_method="fork")  # mp.spawn's, without a new Python for each
"""


def test_what_a_rank_said_stands_before_the_traceback_of_who_spawned_it(script):
    with pytest.raises(launch.LaunchError) as error:
        launch.run(script(SPAWNS), launcher="python", timeout=LIMIT)
    first, *last = str(error.value).splitlines()
    assert first.startswith("python ended with exit status 1;")
    assert "the last word of rank 1" in last and "SIGABRT" in last[-1]
    assert "the last word of rank 1" not in last[-launch.LAST_LINES :], "the control: spawn's own lines are many"


def test_a_launcher_that_is_not_there_is_named(script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(launch.LaunchError, match=r"^mpirun "):
        launch.run(script(""), ranks=2, launcher="mpirun")


def test_ranks_share_the_cpus_of_the_machine():
    cpus = launchers.cpus_of_rank()
    shares = [int(launchers.launch_environment([ranks], {})["OMP_NUM_THREADS"]) for ranks in (1, 2, 4 * cpus)]
    assert shares == [cpus, max(1, cpus // 2), 1]


# ---- time limits

ENDLESS = {
    "stubborn": "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(9999)",
    "noisy": "while True:\n    print('x')  # faster than anyone can read",
    "silent": "import os, time\nprint('the last word', flush=True)\nos.close(1)\nos.close(2)\ntime.sleep(9999)",
    "survived by its child": """import os, signal, subprocess, time

def told(*_):
    subprocess.Popen(["sleep", "9999"], start_new_session=True)
    os._exit(0)

signal.signal(signal.SIGTERM, told)
time.sleep(9999)""",
}


def test_the_time_limit_ends_a_script_whatever_it_does(script, tag):
    errors = {}

    def call(name):
        try:
            launch.run(script(ENDLESS[name], f"{name}.py"), launcher="python", timeout=3, env=tag)
        except launch.LaunchError as error:
            errors[name] = str(error)

    callers = [threading.Thread(target=call, args=[name], daemon=True) for name in ENDLESS]
    for caller in callers:  # threads: a time limit that fails would hold this test too
        caller.start()
    for caller in callers:
        caller.join(LIMIT)
    assert errors.keys() == ENDLESS.keys() and all("after 3 s" in error for error in errors.values()), errors
    assert not left(tag)


def test_the_time_limit_ends_ranks_that_torchrun_could_not_end(script, tag):
    text = f"open(__file__ + os.environ['RANK'], 'w')\n{ENDLESS['stubborn']}"
    stubborn = script(f"import os\n{text}", "ranks.py")
    with pytest.raises(launch.LaunchError, match="after 20 s"):
        launch.run(stubborn, ranks=2, launcher="torchrun", timeout=20, env=tag)
    assert all(Path(f"{stubborn}{rank}").exists() for rank in (0, 1)), "the control: both ranks ran"
    assert not left(tag)


# ---- in a notebook

MAGIC = """%%launch 2
import os
for step in range(1, 5):
    print(f"epoch 1 [{'#' * 5 * step:.<20}] {step}/4 loss 0.5")
print("rank", os.environ["RANK"], "is done")"""


def test_the_magic_shows_one_output_in_a_notebook(kernel):
    assert kernel.run("%load_ext ddp_helpers.launch.launch") == ""
    said = kernel.run(MAGIC)
    for rank in range(2):
        lines = [line.partition("] ")[2] for line in said.splitlines() if line.startswith(f"[rank {rank}]")]
        assert lines == ["epoch 1 [####################] 4/4 loss 0.5", f"rank {rank} is done"]
    assert kernel.run("%%launch 1 fails\npass") == "this cell was meant to fail, and did not"
    said = kernel.run("%%launch 1 fails\nraise ValueError('as intended')")
    assert "ValueError: as intended" in said and said.endswith(" are above\n")


def test_a_progress_bar_takes_the_place_of_its_ranks_last_one():
    screen = Screen()
    for label, line in [
        ("rank 0", "epoch 1 [#####...............] 1/4"),
        ("rank 1", "epoch 1 [#####...............] 1/4"),
        ("rank 0", "epoch 1 [##########..........] 2/4"),
        ("rank 1", "epoch 1 [####################] 4/4"),
        ("rank 0", "a word"),
        ("rank 0", "epoch 2 [#####...............] 1/4"),
        ("rank 0", "epoch 2 [##########..........] 2/4"),
    ]:
        screen.add(label, line)
    assert [line.replace("\x1b[0m", "").partition("m")[2] for line in screen.shown] == [
        "[rank 0] epoch 1 [##########..........] 2/4",
        "[rank 1] epoch 1 [####################] 4/4",
        "[rank 0] a word",
        "[rank 0] epoch 2 [##########..........] 2/4",
    ]


@pytest.mark.parametrize(
    ("line", "tidied"),
    [
        ('File "/home/me/course/rank/data.py", line 3', 'File "./rank/data.py", line 3'),
        ("/opt/python/lib/python3", "<python>/lib/python3"),
        ("/home/me/data and /home/me/runs", "~/data and ~/runs"),
        ("file:///home/me/course/README.md", "file://./README.md"),
        ("cannot write to /home/me/course", "cannot write to ."),
        ("/home/me/course: no space left", ".: no space left"),
        ("/home/me/course-old/x", "~/course-old/x"),
        ("/home/meyer/x", "/home/meyer/x"),
        ("/mnt/home/me/data", "/mnt/home/me/data"),
        ("http://host/path 1/2", "http://host/path 1/2"),
        ("", ""),
    ],
)
def test_tidy_takes_this_machines_paths_out(line, tidied, monkeypatch):
    paths = {"/home/me/course": ".", "/opt/python": "<python>", "/home/me": "~"}
    assert screen.PATHS.keys() == {str(ROOT), sys.prefix, sys.base_prefix, str(Path.home())}
    monkeypatch.setattr(screen, "PATHS", paths)
    assert shorten_paths(line) == tidied
