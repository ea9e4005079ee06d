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

import pytest
import refusals
from real import LIMIT, fail_in_ci

from ddp_helpers import ROOT
from ddp_helpers.jobs import Job, Site, render
from ddp_helpers.jobs.site import SITES

PLAIN, ODD = "plain", "an odd (one); $(touch x) `y` & #1 %"
SHIPPED = sorted(path.stem for path in SITES.glob("*.toml"))
ALPINA = ROOT / "tests" / "alpina.toml"  # a cluster of all that clusters have
FILES = [*(SITES / f"{name}.toml" for name in SHIPPED), ALPINA]


def jobs():
    """A job of each kind."""
    for launcher, array, gpus in itertools.product(("srun", "torchrun"), ((), ("1", "2e-3")), (0, 4)):
        program = ("mnist_ddp.py", "--epochs", "1", "--note", "it's; #1 *", "--run-dir", "{run_dir}")
        program += ("--seed", "{array}") if array else ()
        shape = {"nodes": 2, "tasks_per_node": 4, "gpus_per_node": gpus, "cpus_per_task": 8}
        yield Job("ddp-torch", program, **shape, launcher=launcher, array=array, sbatch=("--comment=a #1",))


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
    return render(
        Job("ddp-torch", ("mnist_ddp.py",), 2, 2, 2, cpus_per_task=8, time="00:05:00"), Site.load(name), "run"
    )


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
    steps = ("module purge", "module load anaconda3/2024.6", "conda activate torch-env")
    places = [before.index(f'\n{step} || failed "{step}"\n') for step in steps]
    assert places == sorted(places)
    assert ranks.split("\\\n")[-2].strip() == "python"


def test_greene_runs_each_rank_in_its_image_with_the_overlay_read_only():
    before, _, ranks = seeds("greene").partition("\nsrun ")
    assert "\nmodule purge || " in before and "singularity" not in before
    words = shlex.split(ranks.partition(" || status=")[0].replace("\\\n", " "))
    begin = words.index("singularity")
    assert words[begin : begin + 4] == ["singularity", "exec", "--nv", "--overlay"]
    assert words[begin + 4].endswith(".ext3:ro") and words[begin + 5].endswith(".sif")
    assert words[begin + 6 : begin + 8] == ["/bin/bash", "-c"] and words[begin + 9] == "$run_dir"
    assert words[begin + 10 :] == ["bash", "-c", 'source /ext3/env.sh && exec python "$@"', "python", "mnist_ddp.py"]


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


def test_all_that_an_imaginary_cluster_has_can_be_said(tmp_path):
    site = Site.load(ALPINA)
    job = Job("a", ("mnist_ddp.py",), 2, 2, 2, cpus_per_task=site.cpus_per_rank, time=site.time)
    text = render(job, site, tmp_path / "run")
    assert {*ASKED_OF_ALPINA.split()} <= {*re.findall(r"^#SBATCH (\S+)", text, re.M)}
    steps = text.partition("\nfailed() {")[2].partition("\n\n")[0].splitlines()[1:]
    assert [step.partition(" || failed ")[0] for step in steps] == [*site.setup]
    [command] = re.findall(r"^srun (?:.*\\\n)*.*", text, re.M)
    words = [line.strip(" \\") for line in command.splitlines()]
    assert words[1:3] == [site.srun, site.container] and words[4] == site.python
    assert f"\nruns={tmp_path}\ncourse={shlex.quote(str(ROOT))}\n" in text


def test_a_container_has_the_folders_of_an_arrays_tasks(tmp_path):
    job = Job("px", ("mnist_ddp.py", "--lr", "{array}", "--run-dir", "{run_dir}"), array=("0.1", "1"))
    text = render(job, Site.load("pyxis"), tmp_path / "runs" / "px")
    assert '--container-mounts="$runs:$runs,' in text
    assert f"\nruns={tmp_path / 'runs'}\n" in text  # below it are px-0, and px-45678 of a second submission


def test_an_option_of_the_job_stands_behind_the_sites_and_what_the_job_says_behind_both():
    """Of equal options Slurm takes the last: test_queue asks it."""
    site = Site("a", sbatch=("--nodes=7", "--mem=1G"))
    text = render(Job("a", ("x.py",), nodes=2, sbatch=("--mem=2G", "--time=1")), site, "run")
    assert re.findall(r"--(mem|nodes|time)=(\S+)", text.partition("\nset -")[0]) == [
        ("nodes", "7"),
        ("mem", "1G"),
        ("mem", "2G"),
        ("time", "1"),
        ("nodes", "2"),
        ("time", "00:10:00"),
    ]


# ---- bad files


def refused(text, tmp_path, *named, name="mine.toml"):
    """The one line with which a site file is refused, in which each of these stands."""
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return refusals.refused(Site.load, tmp_path / name, named=[repr(str(tmp_path / name)), *named])


KEYS = {"sbatches": "sbatch", "set_up": "setup", "containers": "container", "Gpus": "gpus"}


@pytest.mark.parametrize(("key", "meant"), KEYS.items())
def test_a_key_that_is_not_known_gets_the_one_that_was_meant(key, meant, tmp_path):
    assert refused(f'{key} = "x"', tmp_path, repr(key)).endswith(f" {meant}?")


def test_a_key_like_no_other_gets_the_list_and_how_an_option_of_sbatch_is_said(tmp_path):
    refused('account = "x"', tmp_path, ", ".join(field.name for field in fields(Site)[1:]), "sbatch = ['--account=…']")


WRONG = {"description = 5": "a text", "gpus = ['a']": "a text", "python = 2026-01-01": "a text", "srun = {}": "a text"}
WRONG |= {
    'setup = "module purge"': "list of texts",
    "sbatch = [1]": "list of texts",
    "[sbatch]\nx = 1": "list of texts",
}
WRONG |= {f"cpus_per_rank = {value}": "whole number" for value in ('"16"', "true", "1.5", "[16]", "-1", "0")}


@pytest.mark.parametrize(("text", "cure"), WRONG.items())
def test_a_value_of_the_wrong_type_is_named(text, cure, tmp_path):
    [key] = tomllib.loads(text)
    refused(text, tmp_path, f": {key} = ", cure)


@pytest.mark.parametrize("text", ["python = ", "= 5", 'a = "x', "[[", "a = 1\na = 2", b"python = '\xff'", b"\x00"])
def test_a_file_that_is_not_toml_is_named(text, tmp_path):
    refused(text, tmp_path, "TOML")


@pytest.mark.parametrize("name", ["nowhere", "", "della.toml", "../sites/x", "a\nb", "TEMPLATE2", "a\0b"])
def test_a_site_that_is_not_known_gets_the_list(name):
    refusals.refused(Site.load, name, named=[repr(name), ", ".join(site for site in SHIPPED if site != "TEMPLATE")])


def test_the_template_is_good_and_so_are_its_examples(tmp_path):
    text = (SITES / "TEMPLATE.toml").read_text()
    examples = re.sub(r"(?m)^# (?=[a-z_]+ = |  \"|\]$)", "", text)
    assert {*tomllib.loads(examples)} == {field.name for field in fields(Site)[1:]}, "each key is explained"
    (tmp_path / "mine.toml").write_text(examples)
    site = Site.load(tmp_path / "mine.toml")
    assert len(site.setup) == 4 and site.script_args == ("--no-cuda",)
    path = tmp_path / "job.sbatch"
    path.write_text(render(Job("a", ("x.py",)), site, tmp_path))
    assert not checked([path])


@pytest.mark.parametrize(
    "key", [key.name for key in fields(Site)[2:] if key.name not in ("time", "cpus_per_rank", "script_args")]
)
def test_each_key_changes_the_job_file(key):
    """A key without a line in the template would be read, and forgotten."""
    value = ("--exclusive",) if key in ("sbatch", "setup") else "--gres=gpu:a:{n}"
    job = Job("a", ("x.py",), gpus_per_node=1)
    before, after = (render(job, site, "run") for site in (Site("a"), Site("a", **{key: value})))
    assert before != after


def test_a_site_without_gpus_asks_for_none_and_its_ranks_stay():
    text = render(Job("a", ("x.py",), tasks_per_node=4, gpus_per_node=4), Site("a", gpus=""), "run")
    assert "gpu:" not in text and "--gpus" not in text and "\n#SBATCH --ntasks-per-node=4 " in text


# ---- the learner


def test_the_learners_name_is_filled_in(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text('sbatch = ["--mail-user={user}@x.org"]\n')
    monkeypatch.setattr("getpass.getuser", lambda: "ab-1")
    assert Site.load(tmp_path / "mine.toml").sbatch == ("--mail-user=ab-1@x.org",)


def test_a_learners_own_file_counts_more_than_the_shared_one_but_for_the_local_site(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "ddp-course" / "site.toml"
    own.parent.mkdir()
    own.write_text('sbatch = ["--account=physics", "--partition=debug"]\npython = "mine"\n')
    site = Site.load("classroom")
    assert site.admission[-2:] == ["--account=physics", "--partition=debug"] and site.python == "mine"
    assert "--qos=teaching" in site.admission and "--exclude=gpu07" in site.sbatch
    assert Site.load("local").sbatch == ("--partition=course",)
    for text, named in {
        'sbach = ["a"]': ["'sbach'", " sbatch?"],
        'sbatch = "a"': ["list of texts"],
        "a": ["TOML"],
    }.items():
        own.write_text(text)
        refusals.refused(Site.load, "classroom", named=[f"site file {str(own)!r}", *named])


@pytest.mark.parametrize("before", ["", "import pandas"])
def test_the_command_that_makes_a_job_imports_nothing_heavy(before, tmp_path):
    code = f"{before}\nimport sys\nfrom ddp_helpers.cli import main\n"
    code += "main(['job', 'della', 'simple_ddp', '--gpus', '1', '--run', 'a'])\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    heavy = {"IPython", "matplotlib", "nbformat", "numpy", "pandas", "papermill", "psutil", "scipy", "torch"}
    imported = heavy & set(done.stdout.splitlines()[-1].split())
    assert bool(imported) == bool(before), f"{imported}: with pandas, the control, it would be seen"
