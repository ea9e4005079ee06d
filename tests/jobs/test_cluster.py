"""`slurm/cluster`: a real Slurm, started in folders of its own, so that no cluster of yours is touched."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from threading import Timer

import psutil
import pytest
from changed_text import replaced
from clusters import SCRIPT, Cluster, make_cluster, need_slurm, remove
from real import LIMIT, fail_in_ci, until
from refusals import one_line

NODES = "NODELIST STATE CPUS GRES\nnode1 idle 8 gpu:2\nnode2 idle 8 gpu:2\n"
PARTS = ["munged", "slurmctld", "slurmd", "slurmd"]
ORDINARY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.fixture(scope="module")
def shared():
    """One cluster for this file: `shared.up()` costs nothing where it is up."""
    need_slurm()
    cluster = make_cluster()
    yield cluster
    remove(cluster)


@pytest.fixture
def other():
    """A second one, down, for one test."""
    need_slurm()
    cluster = make_cluster()
    yield cluster
    remove(cluster)


def daemons(cluster):
    """Its daemons alone: the keeper of a job that has just ended goes when it likes."""
    return {pid: name for pid, name in cluster.processes().items() if name in PARTS}


def test_shellcheck():
    if not shutil.which("shellcheck"):
        fail_in_ci("no shellcheck on this machine: apt-get install shellcheck")
    root = SCRIPT.parent.parent
    scripts = [SCRIPT, root / ".ci" / "packages", root / "ddp_tools" / "simulated_gpus" / "bin" / "nvidia-smi"]
    ended = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ended.returncode == 0, ended.stdout


def check_ranks(cluster):
    """2 nodes x 2 tasks know who they are, and see both GPU slots of their node."""
    show = "echo $SLURM_PROCID $SLURM_LOCALID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    out = cluster.slurm("srun", "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2", "bash", "-c", show)
    assert sorted(out.splitlines()) == ["0 0 node1 0,1", "1 1 node1 0,1", "2 0 node2 0,1", "3 1 node2 0,1"]


def test_up_is_two_nodes_with_two_gpu_slots_each(shared):
    shared.up()
    assert shared.slurm("sinfo", "-N", "-o", "%N %t %c %G") == NODES
    assert shared("status").stdout == NODES
    check_ranks(shared)
    assert sorted(daemons(shared).values()) == PARTS


def test_two_jobs_on_a_node_get_one_gpu_slot_each(shared):
    met = tempfile.mkdtemp(dir=shared.home)
    wait = f"touch {met}/$SLURM_JOB_ID; until [ $(ls {met} | wc -l) = 2 ]; do sleep 0.1; done"  # at one time, or never
    one = ("srun", "--nodelist=node1", "--gres=gpu:1", "bash", "-c", f"{wait}; echo $CUDA_VISIBLE_DEVICES")
    options = {"env": shared.up().env(SLURM_CONF=str(shared.state / "slurm.conf")), "text": True}
    pair = [subprocess.Popen(one, stdout=subprocess.PIPE, **options) for _ in range(2)]
    assert sorted(job.communicate(timeout=LIMIT)[0] for job in pair) == ["0\n", "1\n"]


def test_a_controller_that_is_silent_for_longer_than_usual_is_waited_for(shared):
    """As beside programs that take all CPUs; Slurm's commands give up after ten seconds, if nothing else is set."""
    [controller] = [pid for pid, name in daemons(shared.up()).items() if name == "slurmctld"]
    os.kill(controller, signal.SIGSTOP)
    Timer(12, os.kill, (controller, signal.SIGCONT)).start()
    assert shared.slurm("sinfo", "-h", "-o", "%D") == "2\n"
    until(lambda: shared.slurm("sinfo", "-N", "-o", "%N %t %c %G") == NODES, "both nodes are there")


def test_up_twice_changes_nothing(shared):
    before, settings = daemons(shared.up()), (shared.state / "slurm.conf").read_bytes()
    ended = shared("up")
    assert ended.returncode == 0 and "up already" in one_line(ended.stdout)
    assert (daemons(shared), (shared.state / "slurm.conf").read_bytes()) == (before, settings)


def test_nobody_else_can_enter(shared):
    shared.up()
    assert shared.state.stat().st_mode & 0o777 == 0o700
    assert (shared.state / "munge.key").stat().st_mode & 0o077 == 0


def test_down_leaves_no_process_and_job_ids_go_on(shared):
    """A job that ignores the signal, a child that left its session, and a job that waits."""
    shared.up()
    stubborn = shared.submit("--nodes=2", "--wrap=trap '' TERM; setsid sleep 611 & srun sleep 612; sleep 613")
    waits = shared.submit("--nodes=2", "--exclusive", "--wrap=sleep 614")
    until(lambda: {"slurmstepd", "sleep"} <= {*shared.processes().values()}, "the job runs")
    ended = shared("down")
    assert (ended.returncode, shared.processes()) == (0, {}), ended.stderr
    assert shared("down").returncode == 0 and shared("status").returncode == 1
    one_line(shared("status").stderr)
    shared.up()
    assert shared.slurm("squeue", "-h") == ""
    states = [shared.slurm("scontrol", "-o", "show", "job", str(job)) for job in (stubborn, waits)]
    assert all("JobState=CANCELLED" in state for state in states)
    assert shared.submit("--wrap=true") == waits + 1


def test_down_ends_the_keeper_of_a_job_that_is_where_slurmd_is(other):
    """A keeper (slurmstepd) begins in the folder of slurmd, and is asked to end like those in their node's."""
    script = other.home / "cluster"
    script.write_text(replaced(script.read_text(), [("grace=10 ", "grace=1 ")]))  # each step waits that long for it
    other.up().submit("--wrap=sleep 615")
    until(lambda: "sleep" in other.processes().values(), "the job runs")
    keepers = [pid for pid, name in other.processes().items() if name == "slurmstepd"]
    for pid in keepers:
        os.kill(pid, signal.SIGSTOP)  # it cannot end by itself
    ended = other("down")
    assert keepers and (ended.returncode, other.processes()) == (0, {}), ended.stderr


def test_down_spares_a_terminal_that_uses_the_cluster(shared):
    terminal = subprocess.Popen(["sleep", "600"], env=shared.up().env(SLURM_CONF=str(shared.state / "slurm.conf")))
    try:
        assert shared("down").returncode == 0
        assert terminal.poll() is None
    finally:
        terminal.kill()
        terminal.wait(timeout=LIMIT)


def test_with_leaves_up_what_was_up(shared):
    before = daemons(shared.up())
    command = 'echo "$SLURM_CONF"; umask; exit 7'
    mask = shared.run("bash", "-c", "umask").stdout
    ended = shared("with", "bash", "-c", command)
    assert (ended.returncode, ended.stdout) == (7, f"{shared.state}/slurm.conf\n{mask}")
    assert daemons(shared) == before


def test_with_takes_down_what_it_started(other):
    ended = other("with", "bash", "-c", "srun --nodes=2 hostname >hosts; sbatch --wrap='sleep 621'; exit 7")
    assert (ended.returncode, other.processes()) == (7, {}), ended.stderr
    assert re.fullmatch(r"Submitted batch job \d+\n", ended.stdout), "what is not the command's own goes to stderr"
    assert len((other.home / "hosts").read_text().splitlines()) == 2
    assert other("with", "no-such-command").returncode == 127 and other.processes() == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_takes_down_after_a_signal(other, number):
    """The signal reaches the command, which ends as it likes, and the cluster goes."""
    command = "trap 'exit 9' INT TERM; echo here; while :; do sleep 0.1; done"
    heeds = ["env", "--default-signal=INT,TERM"]  # a test run in the background was started without Ctrl-C
    script = [*heeds, other.home / "cluster", "with", "bash", "-c", command]
    child = subprocess.Popen(script, env=other.env(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "here\n"
    child.send_signal(number)
    assert (child.wait(timeout=LIMIT), other.processes()) == (9, {})


def test_up_heals_what_crashed_while_jobs_go_on(shared):
    go = shared.home / "go"
    job = shared.up().submit_saved(f"until [ -e {go} ]; do sleep 1; done")
    keep = {pid for pid, name in shared.processes().items() if name in ("slurmd", "munged")}
    shared.kill("slurmctld")
    assert shared("status").returncode == 1
    shared.up()
    assert len(keep) == 3 and keep <= set(shared.processes())
    go.touch()
    until(lambda: "JobState=COMPLETED" in shared.slurm("scontrol", "show", "job", str(job)), "it completes")
    shared.kill("slurmctld", "slurmd", "munged")
    check_ranks(shared.up())


def test_down_after_a_crash_leaves_nothing_and_cancels(shared):
    job = shared.up().submit_saved("sleep 631")
    shared.kill("slurmctld", "slurmd")
    assert (shared("down").returncode, shared.processes()) == (0, {})
    assert "JobState=CANCELLED" in shared.up().slurm("scontrol", "show", "job", str(job))


def test_a_failed_start_says_why_and_leaves_nothing(other):
    """Settings that Slurm refuses."""
    broken = (other.home / "cluster").read_text().replace("JobRequeue=1", "JobRequeue=perhaps")
    (other.home / "cluster").write_text(broken)
    ended = other("up")
    assert (ended.returncode, other.processes()) == (1, {})
    assert ended.stderr.startswith("slurm/cluster: slurmctld ") and "JobRequeue" in ended.stderr


def test_a_machine_that_belongs_to_a_cluster_is_left_alone(shared, other):
    conf = str(shared.up().state / "slurm.conf")
    before = daemons(shared)
    for verb in (["up"], ["with", "printenv", "SLURM_CONF"]):
        ended = other(*verb, SLURM_CONF=conf)
        assert ended.returncode == 0
        one_line(ended.stderr, "ddp-course")
    assert ended.stdout == f"{conf}\n"
    assert other("down", SLURM_CONF=conf).returncode == 0
    assert daemons(shared) == before and not other.state.exists()
    dead = other("with", "printenv", "SLURM_CONF", SLURM_CONF="/nowhere/slurm.conf")
    assert dead.stdout == f"{other.state}/slurm.conf\n", "settings that lead nowhere are no cluster"


CGROUPS = {  # what to mount instead of this machine's cgroups: most distributions mount version 2, containers none
    "version 2": "mount -t cgroup2 none /sys/fs/cgroup",
    "none": "true",
}


@pytest.mark.parametrize("mounted", CGROUPS)
def test_an_ordinary_user_needs_no_rights_whatever_cgroups_are_mounted(mounted):
    need_slurm()
    if os.getuid() != 0:
        pytest.skip("only root can mount other cgroups; all other tests ran as an ordinary user")
    # Private first: what is unmounted here must stay mounted outside.
    mount = f'mount --make-rprivate /sys; umount -R /sys/fs/cgroup; {CGROUPS[mounted]} && exec "$@"'
    own = ("unshare", "--mount", "--propagation=unchanged", "sh", "-c", mount, "sh")
    cluster = make_cluster((*own, *ORDINARY))
    try:
        seen = cluster.run("sh", "-c", "grep -c ' /sys/fs/cgroup cgroup2 ' /proc/mounts").stdout
        assert seen == {"version 2": "1\n", "none": "0\n"}[mounted]
        check_ranks(cluster.up())
        assert {psutil.Process(pid).uids().effective for pid in cluster.processes()} == {65534}
    finally:
        remove(cluster)


def test_the_cluster_of_a_container_is_not_taken_for_our_own(other):
    """Its processes have the same words, of the same path, which is another folder there."""
    if os.getuid() != 0:
        pytest.skip("only root can mount another folder at the same path")
    folder = tempfile.mkdtemp(dir="/tmp")
    other.state.mkdir(mode=0o700)
    mount = f'mount --make-rprivate /; mount --bind {folder} {other.state} && exec "$@"'
    inside = ("unshare", "--mount", "--propagation=unchanged", "sh", "-c", mount, "sh")
    started = Cluster(other.home, inside).start(other.home / "cluster", "with", "sh", "-c", "echo up; read _")
    try:
        assert started.stdout.readline() == "up\n"
        assert "munged" in other.processes().values(), "the container's"
        check_ranks(other.up())
        assert other("down").returncode == 0
        assert started.poll() is None and "munged" in other.processes().values(), "the container's is still there"
    finally:
        started.communicate("\n", timeout=LIMIT)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("home", "reason"),
    [
        ("Heim von Anna", "Slurm cannot use the folder"),
        ("jörg", "Slurm cannot use the folder"),
        ("x" * 80, "longer than 107"),
        (None, "is not yours"),  # HOME is not set
    ],
)
def test_a_home_that_slurm_cannot_use_keeps_no_notebook_shut(home, reason):
    need_slurm()
    cluster = make_cluster(ORDINARY if os.getuid() == 0 else ())
    unset = () if home else ("env", "--unset=HOME")
    own = {"HOME": str(cluster.home / home) if home else "", "XDG_STATE_HOME": ""}
    script = (*unset, cluster.home / "cluster")
    try:
        ended = cluster.run(*script, "with", "bash", "-c", "echo ran; exit 3", **own)
        assert (ended.returncode, ended.stdout) == (3, "ran\n")
        one_line(ended.stderr, reason, "XDG_STATE_HOME", "torchrun")
        for verb, env in ((["up"], {}), (["with", "echo", "ran"], {"CI": "true"})):
            ended = cluster.run(*script, *verb, **own, **env)
            assert (ended.returncode, ended.stdout) == (1, "")
            one_line(ended.stderr, reason, "XDG_STATE_HOME")
        assert not home or not (cluster.home / home).exists()
    finally:
        remove(cluster)


def test_a_folder_that_is_relative_is_one_line(other):
    ended = other("up", XDG_STATE_HOME="nowhere")
    assert ended.returncode == 1 and "nowhere" in one_line(ended.stderr) and not Path("nowhere").exists()


def test_without_slurm_the_command_runs_and_ci_fails(tmp_path):
    """A PATH with nothing but what the script calls; daemons may still lie in /usr/sbin."""
    for name in ("bash", "env", "timeout", "grep", "cut", "sort", "sed", "echo"):
        (tmp_path / name).symlink_to(shutil.which(name))
    shutil.copy(SCRIPT, tmp_path / "cluster")
    bare = Cluster(tmp_path)
    ended = bare("with", "bash", "-c", "echo ran; exit 3", PATH=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (3, "ran\n")
    one_line(ended.stderr, "torchrun")
    for verb, env in ((["up"], {}), (["with", "echo", "ran"], {"CI": "true"})):
        ended = bare(*verb, PATH=str(tmp_path), **env)
        assert (ended.returncode, ended.stdout) == (1, "")
        one_line(ended.stderr, "apt-get install slurmctld slurmd slurm-client munge")
    assert not bare.state.exists()


def test_without_any_network_the_command_runs_and_ci_fails(other):
    """A laptop whose wifi is off: glibc then resolves nothing, not even numbers, and slurmctld does not start."""
    if os.getuid() != 0:
        pytest.skip("only root can take the network away; all other tests ran as an ordinary user")
    alone = 'ip link set lo up; exec "$@"'
    offline = Cluster(other.home, ("unshare", "--net", "sh", "-c", alone, "sh"))
    ended = offline("with", "echo", "ran")
    assert (ended.returncode, ended.stdout) == (0, "ran\n")
    cure = "ip addr add 127.0.1.1/8 dev lo"
    one_line(ended.stderr, cure, "torchrun")
    for verb, env in ((["up"], {}), (["with", "echo", "ran"], {"CI": "true"})):
        ended = offline(*verb, **env)
        assert (ended.returncode, ended.stdout) == (1, "")
        one_line(ended.stderr, cure)
    mended = Cluster(other.home, ("unshare", "--net", "sh", "-c", f"{cure}; {alone}", "sh"))
    assert "node2 idle" in mended("with", "sinfo", "-hN", "-o", "%N %t").stdout, "the cure is one"


def test_usage():
    for args in [], ["start"], ["with"], ["up", "now"]:
        ended = subprocess.run([SCRIPT, *args], capture_output=True, text=True, timeout=LIMIT, check=False)
        assert ended.returncode == 2 and one_line(ended.stderr).startswith("slurm/cluster: usage:")
