"""The sites: each loads, its jobs pass shellcheck and do what the clusters' own examples do; bad ones are named."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields

import jsonschema
import pytest
import refusals
from real import LIMIT, fail_in_ci

from ddp_helpers import ROOT
from ddp_helpers.__main__ import main
from ddp_helpers.jobs import Job, Site, allowed, render
from ddp_helpers.jobs.allowed import quoted
from ddp_helpers.jobs.site import SITES
from ddp_helpers.upkeep.site_schema import SCHEMA, descriptions, schema

PLAIN, ODD = "plain", "an odd (one); $(touch x) `y` & #1 %"
SHIPPED = sorted(path.stem for path in SITES.glob("*.toml"))
ALPINA = ROOT / "tests" / "alpina.toml"  # a cluster of all that clusters have
FILES = [*(SITES / f"{name}.toml" for name in SHIPPED), ALPINA]


def jobs():
    """A job of each kind."""
    for launcher, array, gpus in itertools.product(("srun", "torchrun"), ((), ("1", "2e-3")), (0, 4)):
        program = ("mnist_ddp.py", "--epochs", "1", "--note", "it's; #1 *", "--run-dir", "{run_dir}")
        program += ("--seed", "{array}") if array else ()
        shape = {"nodes": 2, "tasks_per_node": 4, "gpus_per_node": gpus, "cpus_per_task": 8, "memory": "32G"}
        yield Job("ddp-torch", program, **shape, launcher=launcher, array=array)


def checked(paths, leave_out="SC1090,SC1091"):
    """What shellcheck says of these files; those two are that the file which a site sources is not here."""
    if not shutil.which("shellcheck"):
        fail_in_ci("no shellcheck on this machine: apt-get install shellcheck")
    command = ["shellcheck", "--format=json", f"--exclude={leave_out}", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    return [f"{problem['file']}:{problem['line']}: {problem['message']}" for problem in json.loads(done.stdout)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_site_renders_each_kind_of_job_and_shellcheck_finds_nothing(file, tmp_path):
    site, paths = Site.load(file), []
    assert site.name == file.stem and site.description
    for folder, job in itertools.product((PLAIN, ODD), jobs()):
        paths.append(tmp_path / f"{len(paths)}.sbatch")
        paths[-1].write_text(render(job, site, tmp_path / folder))
        text = paths[-1].read_text()
        assert text.startswith("#!/bin/bash\n") and "{{" not in text and "{%" not in text
        assert bool(re.search(r"--(gres=gpu:|gpus-per-node=)([\w.-]+:)?4\b", text)) == (job.gpus_per_node == 4)
        directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        last = max(number for number, line in enumerate(text.splitlines()) if line.startswith("#SBATCH"))
        assert all(line.startswith("#") for line in text.splitlines()[:last])  # Slurm reads no directive behind code
        assert len({line.split("=")[0] for line in directives}) == len(directives)
    assert not checked(paths[:8])
    assert not checked(paths[8:], "SC1090,SC1091,SC2016") and len(paths) == 16  # SC2016: it asks whether $(…) is meant


def seeds(name):
    """The job of the clusters' own examples, as this site renders it."""
    job = Job("ddp-torch", ("mnist_ddp.py",), 2, 2, 2, cpus_per_task=8, time="00:05:00", memory="32G")
    return render(job, Site.load(name), "run")


ASKED = """--job-name=ddp-torch --nodes=2 --ntasks-per-node=2 --cpus-per-task=8 --mem=32G --gres=gpu:2 --time=00:05:00
--mail-type=BEGIN,END,FAIL"""
UNIVERSITY = {"della": "princeton", "greene": "nyu"}


@pytest.mark.parametrize("name", ["della", "greene"])
def test_a_university_site_asks_for_all_that_its_examples_ask_for(name, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ab123")
    asked = re.findall(r"^#SBATCH (\S+)", seeds(name), re.M)
    assert {*ASKED.split(), f"--mail-user=ab123@{UNIVERSITY[name]}.edu"} <= {*asked}
    assert "{user}" not in seeds(name)


def test_della_loads_its_modules_and_its_environment_before_the_ranks():
    before, _, ranks = seeds("della").partition("\nsrun ")
    lines = before.splitlines()
    steps = [
        lines.index('module purge || failed "module purge"'),
        *(i for i, line in enumerate(lines) if line.startswith("module load anaconda3")),
    ]
    steps.append(lines.index('conda activate torch-env || failed "conda activate torch-env"'))
    assert len(steps) == 3 and steps == sorted(steps)
    assert ranks.split("\\\n")[-2].strip() == "python"


def test_greene_runs_each_rank_in_its_image_with_the_overlay_read_only(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ab123")
    before, _, ranks = seeds("greene").partition("\nsrun ")
    assert "\nmodule purge || " in before and "singularity" not in before
    overlay, image = r"/scratch/ab123/\S+\.ext3:ro", r"/scratch/work/public/singularity/\S+\.sif"
    inside = r"/bin/bash -c '.* source /ext3/env.sh && exec \"\$@\"' \"\$run_dir\" \\\n  python \\\n  mnist_ddp.py\n"
    assert re.search(rf" singularity exec --nv --overlay {overlay} {image} \\\n  {inside}", ranks)


MISTAKES = {
    "a rank from the batch body, where it is always 0": r"\bRANK=",
    "a world size that the launcher knows": r"WORLD_SIZE=",
    "a fixed port": r"MASTER_PORT=(?!\$\(\(\d+ \+ \(?SLURM_JOB_ID)",
    "a download that all ranks race for": r"download",
    "GPUs counted by the digits of their numbers": r"SLURM_JOB_GPUS|wc ",
    "tasks that may all land on one node": r"--ntasks=",
    "one GPU for each task, hidden from its neighbours": r"--gpus-per-task",
    "an overlay that only one rank can mount": r"\.ext3(?!:ro)\b",
}
SEED = """export MASTER_PORT=12345
export RANK=$SLURM_PROCID WORLD_SIZE=4
gpus_per_node=$(printf ${SLURM_JOB_GPUS} | sed 's/[^0-9]*//g' | wc --chars)
#SBATCH --ntasks=4
#SBATCH --gpus-per-task=1
srun singularity exec --overlay my.ext3 image /bin/bash -c "python download_data.py; python train.py"
"""


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_site_repeats_a_mistake_of_the_examples(file, mistake):
    assert re.search(MISTAKES[mistake], SEED)
    for job in jobs():
        code = re.sub(r"(?m)(?<=\s)#(?!SBATCH).*$", "", render(job, Site.load(file), "run"))
        assert not re.search(MISTAKES[mistake], code)


ASKED_OF_ALPINA = """--account=edu/ddp@a100 --partition=gpu-a100,gpu-a100-long --reservation=ddp-course,ddp-reserve
--mem=0 --constraint=a100&!old --gres=gpu:a100:2,nvme:100G --cpus-per-task=16 --time=01:00:00 --hint=nomultithread
--licenses=scratch@alpina --switches=1@00:10:00 --export=NONE --wckey=ddp --ntasks-per-node=2 --nodes=2"""


def test_all_that_an_imaginary_cluster_has_can_be_said(capsys):
    assert main(["site", str(ALPINA)]) == 0
    text = capsys.readouterr().out
    assert {*ASKED_OF_ALPINA.split()} <= {*re.findall(r"^#SBATCH (\S+)", text, re.M)}
    steps = text.partition("\nfailed() {")[2].partition("\n\n")[0].splitlines()[1:]
    assert [step.split()[0] for step in steps] == [line.split()[0] for line in Site.load(ALPINA).setup]
    assert 'export LD_LIBRARY_PATH="${CUDA_HOME:?}/lib64:$LD_LIBRARY_PATH"' in steps
    assert "export NCCL_SOCKET_IFNAME='^lo,docker'" in steps
    [command] = re.findall(r"^srun (?:.*\\\n)*.*", text, re.M)
    words = [shlex.split(line) for line in command.replace("\\\n", "\n").splitlines()]
    assert words[1] == ["--cpu-bind=cores", "--gpu-bind=none", "--mem-bind=local"]
    assert words[2][3:] == [
        *("--bind", f"{ROOT}/runs,{ROOT}"),
        *("--bind=${SCRATCH:?}:/scratch", "${SCRATCH:?}/images/pytorch.sif"),
    ]


def test_a_container_has_the_folders_of_an_arrays_tasks(tmp_path):
    job = Job("px", ("mnist_ddp.py", "--lr", "{array}", "--run-dir", "{run_dir}"), array=("0.1", "1"))
    [mounts] = re.findall(r"--container-mounts=(\S+)", render(job, Site.load("pyxis"), tmp_path / "runs" / "px"))
    above = tmp_path / "runs"  # run_dir becomes runs/px-0, and runs/px-45678 in a second submission
    assert f"{above}:{above}" in mounts.split(",")


@pytest.mark.parametrize("word", ["--container-mounts={folder}:{folder}", "--bind={folder}", "--mount=/a,{folder}:/b"])
@pytest.mark.parametrize("key", ["srun", "prefix"])
def test_a_mount_in_which_an_arrays_records_would_be_lost_is_refused(key, word, tmp_path):
    refused(f'{key} = ["{word}"]', tmp_path, word, "mount {runs}")
    (tmp_path / "mine.toml").write_text(f'{key} = ["{word.replace("folder", "runs")}", "--cd={{folder}}"]')
    assert Site.load(tmp_path / "mine.toml").name == "mine"


# ---- bad files


def refused(text, tmp_path, *named, name="mine.toml"):
    """The one line with which a site file is refused, in which each of these stands."""
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return refusals.refused(Site.load, tmp_path / name, named=[repr(str(tmp_path / name)), *named])


def test_a_good_file_is_taken(tmp_path):
    (tmp_path / "mine.toml").write_text('partition = "gpu"\nsetup = ["module load a/1.2 b", "export A_B=c:d"]\n')
    site = Site.load(str(tmp_path / "mine.toml"))
    assert (site.name, site.partition, site.setup) == ("mine", "gpu", ("module load a/1.2 b", "export A_B=c:d"))


KEYS = {"acount": "account", "partitions": "partition", "set_up": "setup", "mail": "mail_user", "Gpus": "gpus"}


@pytest.mark.parametrize(("key", "meant"), KEYS.items())
def test_a_key_that_is_not_known_gets_the_one_that_was_meant(key, meant, tmp_path):
    assert refused(f'{key} = "x"', tmp_path, repr(key)).endswith(f" {meant}?")


@pytest.mark.parametrize("key", ["zzz", '"a\\nb"', '""'])
def test_a_key_like_no_other_gets_the_list(key, tmp_path):
    refused(f'{key} = "x"', tmp_path, ", ".join(field.name for field in fields(Site)[1:]))


WRONG = ["account = 5", "account = true", 'account = ["a"]', "account = 2026-01-01", 'setup = "module purge"']
WRONG += ["setup = [1]", 'setup = [["module purge"]]', "[account]\nx = 1", "prefix = {}", "mail_type = 'END'"]


@pytest.mark.parametrize("text", WRONG)
def test_a_value_of_the_wrong_type_is_named(text, tmp_path):
    key = re.match(r"\W*(\w+)", text)[1]
    cure = "list of texts" if key in LISTS else "a text"
    refused(text, tmp_path, f": {key} = ", cure)


@pytest.mark.parametrize("text", ["account = ", "= 5", 'a = "x', "[[", "a = 1\na = 2", b"account = '\xff'", b"\x00"])
def test_a_file_that_is_not_toml_is_named(text, tmp_path):
    refused(text, tmp_path, "TOML")


@pytest.mark.parametrize("name", ["nowhere", "", "della.toml", "../sites/x", "a\nb", "TEMPLATE2", "a\0b"])
def test_a_site_that_is_not_known_gets_the_list(name):
    refusals.refused(Site.load, name, named=[repr(name), ", ".join(site for site in SHIPPED if site != "TEMPLATE")])


@pytest.mark.parametrize("name", ["a b.toml", "a\nb.toml", "$(x).toml", "-x.toml"])
def test_a_file_whose_name_cannot_stand_in_a_job_is_named(name, tmp_path):
    refused('account = "a"', tmp_path, "name = ", name=name)


SHELL = [
    "$(touch x)",
    "`touch x`",
    "a; touch x",
    "a && touch x",
    "a | x",
    "a > x",
    "$1",
    "a\\nb",
    "'a'",
    '\\"a',
    "a\\\\b",
]
TEXTS = ["account", "partition", "constraint", "gpus", "memory", "mail_user", "python", "source"]
LISTS = ["setup", "prefix", "script_args", "mail_type"]
START = {"gpus": "--gres=gpu:{n}", "memory": "32G", "mail_user": "a@b.c", "setup": "module load a", "mail_type": "END"}


@pytest.mark.parametrize("shell", SHELL)
@pytest.mark.parametrize("key", TEXTS + LISTS)
def test_shell_in_a_value_is_refused_with_what_may_stand_there(key, shell, tmp_path):
    for value in (shell, START.get(key, "a") + shell):
        text = f'["{value}"]' if key in LISTS else f'"{value}"'
        line = refused(f"{key} = {text}", tmp_path, f": {key} = ")
        assert re.search("(give|behind) ", line), "what may stand there"


# What a line of set-up becomes for the shell; each word stays one word, whatever its variable holds.
SETUP = {
    "export PATH=/project/ddp/bin:$PATH": 'export PATH="/project/ddp/bin:$PATH"',
    "export LD_LIBRARY_PATH=$A/lib:${LD_LIBRARY_PATH}": 'export LD_LIBRARY_PATH="${A:?}/lib:${LD_LIBRARY_PATH}"',
    "export HF_HOME=$SCRATCH/$USER/hf": 'export HF_HOME="${SCRATCH:?}/${USER:?}/hf"',
    "export PATH=~/bin:~/.local/bin": 'export PATH="${HOME:?}/bin:${HOME:?}/.local/bin"',
    "export NCCL_SOCKET_IFNAME=^lo,docker": "export NCCL_SOCKET_IFNAME='^lo,docker'",
    "export http_proxy=http://proxy:3128": "export http_proxy=http://proxy:3128",
    "export EMPTY=": "export EMPTY=",
    "source ~/miniforge3/etc/profile.d/conda.sh": 'source "${HOME:?}/miniforge3/etc/profile.d/conda.sh"',
    "source $HOME/env.sh gpu --quiet": 'source "${HOME:?}/env.sh" gpu --quiet',
    "source activate ddp": "source activate ddp",
    "conda activate $ENVS/ddp": 'conda activate "${ENVS:?}/ddp"',
    "module use $SCRATCH/modules": 'module use "${SCRATCH:?}/modules"',
} | {line: line for line in ("module reset", "module restore X", "module restore", "module -q load X", "umask 027")}
SETUP |= {line: line for line in ("module --force purge", "module list", "spack env activate e", "ulimit -Sn 4096")}


@pytest.mark.parametrize(("line", "becomes"), SETUP.items())
def test_a_line_of_set_up_is_quoted_for_the_shell(line, becomes, tmp_path):
    (tmp_path / "mine.toml").write_text(f'setup = ["{line}"]')
    text = render(Job("a", ("x.py",)), Site.load(tmp_path / "mine.toml"), "run")
    assert f"\n{becomes}{'' if line.startswith('export') else f' {named(line)}'}\n" in text


def named(line):
    """How a line of set-up is named where it fails."""
    return f'|| failed "{line}"'.replace("$", "\\$")


NO_SETUP = {  # a line of set-up, and what must be named of it or given in its place
    "rm -rf /": ["'rm'"],
    "conda activate a b": ["activate NAME"],
    "export PATH=$(x)": ["'$'", "$NAME and ${NAME}"],
    "export PATH=a:~b": ["'~'"],
    "export 1a=b": ["NAME=value"],
    "export A=b c": ["NAME=value"],
    "umask 999": ["umask", "digits"],
    "module purge; x": ["';'"],
    "module": ["load try-load unload"],
    "module frobnicate": ["load try-load unload"],
    "export A='b'": ['"\'"'],
    "": ["module, "],
}


@pytest.mark.parametrize(("line", "why"), NO_SETUP.items())
def test_a_line_of_set_up_that_is_more_than_set_up_is_refused(line, why, tmp_path):
    refused(f'setup = ["{line}"]', tmp_path, f"setup = {line!r}", *why)


HELD = {"HOME": "/h o", "CONDA_PREFIX": "$(touch x)", "SCRATCH": "/s;t", "b": "`touch x`", "C": "a\nb"}
FILLED_IN = {
    "~/e/x": "/h o/e/x",
    "$CONDA_PREFIX/x": "$(touch x)/x",
    "${SCRATCH}y/$b:$C": "/s;ty/`touch x`:a\nb",
    "--bind=~/a:/b,~/c": "--bind=/h o/a:/b,/h o/c",
    "/x^%,y": "/x^%,y",
}


@pytest.mark.parametrize(("word", "means"), FILLED_IN.items())
@pytest.mark.parametrize("key", ["python", "source", "prefix", "srun"])
def test_a_path_may_hold_variables_and_begin_at_home(key, word, means, tmp_path):
    if key == "srun" and not word.startswith("--"):
        word, means = f"--chdir={word}", f"--chdir={means}"
    command = ["bash", "-c", f"printf %s {quoted(word)}"]
    done = subprocess.run(command, env=HELD, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=LIMIT)
    assert done.stdout == means and not list(tmp_path.iterdir())
    text = f'{key} = ["{word}"]' if key in ("prefix", "srun") else f'{key} = "{word}"'
    (tmp_path / "mine.toml").write_text(text)
    assert quoted(word) in render(Job("a", ("x.py",)), Site.load(tmp_path / "mine.toml"), "run")


def test_a_variable_that_is_not_set_is_named_and_ends_the_job():
    command = ["bash", "-c", f"echo {quoted('/a/$SCRATCH/b')}; echo on"]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode and not done.stdout and "SCRATCH: parameter null or not set" in done.stderr


SBATCH = [
    "--switches=1",
    "--licenses=matlab:1",
    "--hint=nomultithread",
    "--comment=a@b",
    "--get-user-env",
    "--nice=10",
]
NO_SBATCH = {
    "--nodes=3": "the job says it",
    "--ntasks=1": "the job says it",
    "--time=1:00": "time and longest",
    "--gres=nvme:1": "the key gpus says it",
    "--output=x": "the log lies in the run folder",
    "--qos=a": "a key of its own",
    "--clusters=b": "only the cluster",
    "--wrap=rm": "a site may add only acctg-freq, begin",
    "--switch=1": "a site may add only",
    "-N3": "give --name or --name=value",
    "--nice=1 --nodes=2": "' ' may not stand in it",
    "--comment=a\\nb": "may not stand in it",
}


def test_further_lines_of_sbatch_stand_in_the_job_file(tmp_path):
    (tmp_path / "mine.toml").write_text(f"sbatch = {json.dumps(SBATCH)}")
    text = render(Job("a", ("x.py",)), Site.load(tmp_path / "mine.toml"), "run")
    assert all(f"\n#SBATCH {word}\n" in text for word in SBATCH)


@pytest.mark.parametrize(("word", "why"), NO_SBATCH.items())
def test_an_option_of_sbatch_that_the_job_file_or_a_key_says_is_refused_with_the_reason(word, why, tmp_path):
    refused(f'sbatch = ["{word}"]', tmp_path, "sbatch = ", why)


def test_no_option_of_sbatch_is_said_by_a_key_and_by_the_key_sbatch():
    assert {key.name.replace("_", "-") for key in fields(Site)}.isdisjoint(allowed.SBATCH.split())


# Keys whose example in TEMPLATE.toml is what holds without them, and another value.
OTHER_VALUES = {
    "gpus": '"--gpus-per-node={n}"',
    "mail_type": '["ALL"]\nmail_user = "a@b.c"',
}


# For people, a bound, and what whoever makes a job takes from its site: other tests have them.
NOT_IN_THE_FILE = {"name", "description", "longest", "time", "cpus_per_rank", "script_args"}


@pytest.mark.parametrize("key", [key.name for key in fields(Site) if key.name not in NOT_IN_THE_FILE])
def test_each_key_changes_the_job_file(key, tmp_path):
    """A key without a line in the template would be read, and forgotten."""
    examples = dict(re.findall(r"(?m)^(?:# (?:or )?)?([a-z_]+) = (.*)$", (SITES / "TEMPLATE.toml").read_text()))
    plain, given = tmp_path / "plain" / "mine.toml", tmp_path / "given" / "mine.toml"
    for path, text in ((plain, ""), (given, f"{key} = {OTHER_VALUES.get(key, examples[key])}")):
        path.parent.mkdir()
        path.write_text('mail_user = "a@b.c"\n' if key == "mail_type" and not text else text)
    job = Job("a", ("slurm/scripts/mnist_ddp.py",), gpus_per_node=1)
    before, after = (render(job, Site.load(path), "run") for path in (plain, given))
    assert before.split() != after.split()


NO_SRUN = ["--ntasks=1", "--ntasks-per-node=1", "--nta=1", "--nodes=1", "--cpus-per-task=1", "--label", "--wait=0"]
NO_SRUN += [
    "--kill-on-bad-exit=0",
    "--kill",
    "--export=NONE",
    "--hint=nomultithread",
    "--output=x",
    "--gpus-per-task=1",
]


@pytest.mark.parametrize("word", NO_SRUN)
def test_a_flag_of_srun_that_the_job_file_sets_is_refused(word, tmp_path):
    refused(f'srun = ["--cpu-bind=cores", "{word}"]', tmp_path, f"srun = {word!r}", "leave it out")
    (tmp_path / "mine.toml").write_text(
        'srun = ["--cpu-bind=cores", "--gpu-bind=none", "--network=a", "--mem-bind=local"]'
    )
    assert len(Site.load(tmp_path / "mine.toml").srun) == 4


def test_a_site_without_gpus_asks_for_none_and_its_ranks_stay(tmp_path):
    (tmp_path / "mine.toml").write_text('gpus = ""')
    text = render(Job("a", ("x.py",), tasks_per_node=4, gpus_per_node=4), Site.load(tmp_path / "mine.toml"), "run")
    assert "gpu:" not in text and "--gpus" not in text and "\n#SBATCH --ntasks-per-node=4 " in text


def test_a_sites_longest_time_is_a_bound_and_its_usual_one_within_it(tmp_path):
    (tmp_path / "mine.toml").write_text('time = "01:00:00"\nlongest = "1-0"')
    site = Site.load(tmp_path / "mine.toml")
    assert "\n#SBATCH --time=24:00:00 " in render(Job("a", ("x.py",), time="24:00:00"), site, "run")
    job = Job("a", ("x.py",), time="24:00:01")
    refusals.refused(render, job, site, "run", named=["time='24:00:01'", "1-0", "mine"])
    refused('time = "2-0"\nlongest = "1-0"', tmp_path, "time = '2-0'", "longest = '1-0'")
    refused('longest = "1h"', tmp_path, "longest = '1h'", "'h'")


@pytest.mark.parametrize("value", ['"16"', "true", "1.5", "[16]", "-1", "0", "100000"])
def test_cpus_are_a_whole_number(value, tmp_path):
    refused(f"cpus_per_rank = {value}", tmp_path, "cpus_per_rank = ", "whole number")


# ---- the learner


def test_the_learners_name_is_filled_in_and_an_odd_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text('mail_user = "{user}@x.org"\nprefix = ["run", "/home/{user}/i"]\n')
    monkeypatch.setattr("getpass.getuser", lambda: "ab-1")
    site = Site.load(tmp_path / "mine.toml")
    assert (site.mail_user, site.prefix) == ("ab-1@x.org", ("run", "/home/ab-1/i"))
    monkeypatch.setattr("getpass.getuser", lambda: "a; touch x")
    line = refusals.refused(Site.load, tmp_path / "mine.toml")
    assert "'a; touch x'" in line
    (tmp_path / "none.toml").write_text('mail_user = "me@x.org"\n')
    assert Site.load(tmp_path / "none.toml").mail_user == "me@x.org"


def test_a_learners_own_file_counts_more_than_the_shared_one_but_for_the_local_site(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "ddp-course" / "site.toml"
    own.parent.mkdir()
    own.write_text('account = "physics"\npartition = "debug"\n')
    site = Site.load("classroom")
    assert site.flags == ["--account=physics", "--partition=debug", "--qos=teaching", "--reservation=ddp-course"]
    assert Site.load("local").flags == ["--partition=course"]
    for text, named in {
        'acount = "physics"': ["'acount'", " account?"],
        'account = "a b"': ["account = 'a b'", "' '"],
        'memory = "1G"\nmemory_per_cpu = "1G"': ["memory and memory_per_cpu"],
        "account = 5": ["account = 5", "in quotes"],
        "account": ["TOML"],
    }.items():
        own.write_text(text)
        refusals.refused(Site.load, "classroom", named=[f"site file {str(own)!r}", *named])


def test_exclusive_is_true_or_false(tmp_path):
    (tmp_path / "a.toml").write_text("exclusive = true")
    assert "\n#SBATCH --exclusive " in render(Job("a", ("x.py",)), Site.load(tmp_path / "a.toml"), "run")
    refused('exclusive = "yes"', tmp_path, "exclusive = 'yes'", "true or false")
    refused('memory = "1G"\nmemory_per_cpu = "1G"', tmp_path, "memory and memory_per_cpu")


def test_one_learner_changes_what_is_hers_and_it_is_checked_too():
    site = Site.load("della").but(account="physics", partition="")
    assert (site.account, site.partition, site.name) == ("physics", "", "della")
    assert "\n#SBATCH --account=physics\n" in render(Job("a", ("x.py",)), site, "run")
    assert Site.load("local").but(partition="").partition == "course"
    for bad in ("a b", "$(x)", "a\nb", 5):
        refusals.refused(site.but, account=bad, named=["site 'della'", "account = "])


def test_the_command_that_checks_a_site_shows_a_job_or_one_line(capsys, tmp_path):
    assert main(["site", "greene"]) == 0
    out, err = capsys.readouterr()
    assert "#SBATCH --nodes=2" in out and "singularity exec" in out and "greene" in err
    (tmp_path / "bad.toml").write_text("acount = 'a'")
    refusals.refused(main, ["site", str(tmp_path / "bad.toml")], named=["'acount'", " account?"])


@pytest.mark.parametrize("before", ["", "import pandas"])
def test_the_command_that_checks_a_site_imports_nothing_heavy(before):
    code = f"{before}\nimport sys\nfrom ddp_helpers.__main__ import main\nmain(['site', 'della'])\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"IPython", "matplotlib", "nbformat", "numpy", "pandas", "papermill", "psutil", "scipy", "torch"}
    imported = heavy & set(done.stdout.splitlines()[-1].split())
    assert bool(imported) == bool(before), f"{imported}: with pandas, the control, it would be seen"


# ---- the schema, by which editors check a site file


def valid(text):
    """Whether the schema takes a site file."""
    return jsonschema.Draft4Validator(json.loads(SCHEMA.read_text())).is_valid(tomllib.loads(text))


def test_the_schema_is_made_from_the_keys_and_the_words_of_the_template():
    assert SCHEMA.read_text() == schema(), "run: python -m ddp_helpers.upkeep.site_schema"
    keys = json.loads(schema())["properties"]
    assert [*keys] == [key.name for key in fields(Site)][1:] and all(
        len(key["description"]) > 9 for key in keys.values()
    )
    assert {*keys} == {*descriptions()}, "TEMPLATE.toml explains a key that is none"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_site_leads_editors_to_the_schema_and_is_valid_by_it(file):
    text = file.read_text()
    schema_of = re.match(r"#:schema (\S+)\n", text)
    assert (file.parent / schema_of[1]).resolve() == SCHEMA
    assert valid(text) and valid(re.sub(r"(?m)^# (?=[a-z_]+ = )", "", text))


@pytest.mark.parametrize("text", [*WRONG, 'acount = "a"', 'exclusive = "yes"', 'cpus_per_rank = "16"'])
def test_the_schema_refuses_what_the_check_refuses_for_its_type(text, tmp_path):
    assert refused(text, tmp_path) and not valid(text)
