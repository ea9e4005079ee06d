"""A cluster as universities run theirs: accounts, a quality of service, a reservation, typed GPUs; a real slurmdbd."""

import re
import shutil
import socket
import subprocess
from dataclasses import replace

import pytest
from clusters import SBIN, make_cluster, need_slurm, our_python, remove
from real import LIMIT, fail_in_ci, until, weekly

from ddp_helpers.jobs import Job, Site, write_job
from ddp_helpers.launch.launchers import free_port

GRANT = """CREATE DATABASE accounts;
CREATE USER slurm@localhost IDENTIFIED BY 'slurm';
GRANT ALL ON accounts.* TO slurm@localhost;
"""
DATABASE = """AuthType=auth/munge
AuthInfo=socket={state}/munge.socket
DbdHost=localhost
DbdPort={ports[0]}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports[1]}
StorageUser=slurm
StoragePass=slurm
StorageLoc=accounts
PidFile={state}/slurmdbd.pid
LogFile={state}/slurmdbd.log
"""
SETTINGS = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports[0]}
AccountingStoragePass={state}/munge.socket
AccountingStorageEnforce=associations,qos
NodeName=gpu07 NodeHostname=nowhere State=DOWN
PartitionName=gpu Nodes=node[1-2],gpu07
PartitionName=gpu-long Nodes=node[1-2],gpu07 MaxTime=08:00:00
"""


def answers(port):
    """Whether somebody listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def database(cluster, ports, user):
    """Start MariaDB and slurmdbd beside a cluster; gives the processes as they come up."""
    env = cluster.env(SLURM_CONF=str(cluster.state / "slurm.conf"), PATH=SBIN)
    log = cluster.home / "database.log"
    data = cluster.home / "sql"
    made = cluster.run("mariadb-install-db", f"--datadir={data}", f"--user={user}", "--skip-test-db", PATH=SBIN)
    assert made.returncode == 0, made.stdout + made.stderr
    (cluster.home / "grant.sql").write_text(GRANT)
    paths = [f"--datadir={data}", f"--socket={data}/sql", f"--pid-file={data}/pid", f"--init-file={data}/../grant.sql"]
    network = ["--bind-address=127.0.0.1", f"--port={ports[1]}"]
    dbd = cluster.state / "slurmdbd.conf"
    dbd.write_text(DATABASE.format(state=cluster.state, ports=ports, user=user))
    dbd.chmod(0o600)
    programs = ["mariadbd", "--no-defaults", f"--user={user}", *paths, *network], ["slurmdbd", "-D"]
    for words, port in zip(programs, reversed(ports), strict=True):
        with log.open("a") as file:
            yield subprocess.Popen(words, env=env, stdout=file, stderr=file, cwd=cluster.home)
        until(lambda port=port: answers(port), f"{words[0]} listens: {log}")


@pytest.fixture
def university():
    """The local Slurm made into such a cluster: a database beside it, its settings changed, all started again."""
    need_slurm()
    if not all(shutil.which(name, path=SBIN) for name in ("slurmdbd", "mariadbd", "mariadb-install-db")):
        fail_in_ci("no accounting on this machine: apt-get install slurmdbd mariadb-server")
    cluster, ports, started = make_cluster(), [free_port(), free_port()], []
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    try:
        cluster.up()
        started.extend(database(cluster, ports, user))
        conf, gpus = cluster.state / "slurm.conf", cluster.state / "gres.conf"
        text = conf.read_text().replace("gpu:2", "gpu:a100-sxm4-80gb:2")
        conf.write_text(text + SETTINGS.format(state=cluster.state, ports=ports))
        gpus.write_text(gpus.read_text().replace("Name=gpu", "Name=gpu Type=a100-sxm4-80gb"))
        cluster.slurm("sacctmgr", "-i", "add", "cluster", "ddp-course")
        cluster.kill("slurmctld", "slurmd")
        (cluster.state / "slurmctld" / "clustername").unlink()  # Slurm 24.11 compares its number with the database's
        cluster.up()  # munged lives, so the settings stay as they are
        cluster.slurm("sacctmgr", "-i", "add", "qos", "teaching")
        cluster.slurm("sacctmgr", "-i", "add", "account", "physics")
        cluster.slurm("sacctmgr", "-i", "add", "user", user, "account=physics", "qos=normal,teaching")
        booked = ["nodes=node1,node2", f"users={user}", "starttime=now", "duration=60"]
        cluster.slurm("scontrol", "create", "reservation", "ReservationName=ddp-course", *booked)
        yield cluster
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(LIMIT)
        remove(cluster)


@pytest.fixture
def asks(university, tmp_path, monkeypatch):
    """Submit a job for a site as a learner there would, and give what sbatch said."""
    for name in ("module", "ml"):
        monkeypatch.setenv(f"BASH_FUNC_{name}%%", "() { :; }")
    our_python(tmp_path / "bin" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("SCRATCH", str(tmp_path))

    def submit(site, folder):
        write_job(Job("hello", ("hello.py",), 2, 2, 2, time="00:05:00"), site, folder)
        (folder / "hello.py").write_text("print('hello')")
        settings = str(university.state / "slurm.conf")
        return university.run("sbatch", "--parsable", folder / "job.sbatch", SLURM_CONF=settings)

    return submit


@weekly
def test_the_classroom_site_gets_what_it_asks_for(university, asks, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ddp-course").mkdir()
    (tmp_path / "ddp-course" / "site.toml").write_text('sbatch = ["--account=physics", "--mem-per-cpu=50M"]\n')
    site = Site.load("classroom")
    wrong = {"account": "Invalid account", "qos": "Invalid qos", "reservation": "Requested reservation is invalid"}
    for name, why in wrong.items():  # the control: this cluster looks at what a job asks for
        wrong_site = replace(site, sbatch=(*site.sbatch, f"--{name}=nonsense"))
        assert why in asks(wrong_site, tmp_path / name).stderr
    number = asks(site, tmp_path / "right").stdout.strip()
    until(lambda: "JobState=COMPLETED" in university.slurm("scontrol", "show", "job", number), "it completes")
    said = dict(re.findall(r"(\S+?)=(\S+)", university.slurm("scontrol", "-o", "show", "job", number)))
    asked = {"Account": "physics", "QOS": "teaching", "Reservation": "ddp-course", "ExcNodeList": "gpu07"}
    said["TresPerNode"] = said["TresPerNode"].replace("gres/", "gres:")  # so it is called since Slurm 24.11
    asked |= {"MinMemoryCPU": "50M", "TresPerNode": "gres:gpu:a100-sxm4-80gb:2"}
    assert {name: said[name] for name in asked} == asked and said["Partition"] in ("gpu", "gpu-long", "gpu,gpu-long")
    assert (tmp_path / "right" / f"slurm-{number}.log").read_text().count(": hello\n") == 4
