"""Each site's jobs pass shellcheck and ask for what its cluster's own examples ask for; a bad site file is named."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import fields

import nbformat
import pytest
from real import LIMIT, fail_in_ci
from refusals import refused

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
        shape = {"nodes": 2, "ranks_per_node": 4, "gpus_per_node": gpus, "cpus_per_rank": 8}
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


def example(name):
    """The job of the clusters' own examples, as this site renders it."""
    job = Job("ddp-torch", ("mnist_ddp.py",), 2, 2, 2, cpus_per_rank=8, time="00:05:00")
    return render(job, Site.load(name), "run")


ASKED = """--job-name=ddp-torch --nodes=2 --ntasks-per-node=2 --cpus-per-task=8 --mem=32G --gres=gpu:2 --time=00:05:00
--mail-type=BEGIN,END,FAIL"""


@pytest.mark.parametrize(("name", "university"), [("della", "princeton"), ("greene", "nyu")])
def test_a_university_site_asks_for_all_that_its_examples_ask_for(name, university, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ab123")
    asked = re.findall(r"^#SBATCH (\S+)", example(name), re.M)
    assert {*ASKED.split(), f"--mail-user=ab123@{university}.edu"} <= {*asked}


def test_greene_runs_each_rank_in_its_image_with_the_overlay_read_only():
    before, _, ranks = example("greene").partition("\nsrun ")
    assert "\nmodule purge || " in before and "singularity" not in before
    words = shlex.split(ranks.partition(" || status=")[0].replace("\\\n", " "))
    begin = words.index("singularity")
    assert words[begin : begin + 4] == ["singularity", "exec", "--nv", "--overlay"]
    assert words[begin + 4].endswith(".ext3:ro") and words[begin + 5].endswith(".sif")
    assert words[begin + 6 : begin + 8] == ["/bin/bash", "-c"] and words[begin + 9] == "$run_dir"
    assert words[begin + 10 :] == ["bash", "-c", 'source /ext3/env.sh && exec python "$@"', "python", "mnist_ddp.py"]


def test_a_sites_srun_options_come_first_then_its_container_and_its_python(tmp_path):
    site = Site.load(ALPINA)
    text = render(Job("a", ("x.py",), gpus_per_node=1), site, tmp_path / "run")
    [command] = re.findall(r"^srun (?:.*\\\n)*.*", text, re.M)
    words = [line.strip(" \\") for line in command.splitlines()]
    assert words[1:3] == [site.srun, site.container] and words[4] == site.python


# ---- bad files

# What stands in a site file, and what is told of it. What a command tells of such files is in test_commands.
BAD = {
    'sbatches = "x"': "'sbatches' is not known: did you mean sbatch?",
    'account = "a"': "sbatch = ['--account=…']",
    'cpus_per_rank = "16"': "give a whole number",
    "cpus_per_rank = true": "give a whole number",
    "cpus_per_rank = 0": "give a whole number",
    "description = 5": "give a text",
    "sbatch = [1]": "give a list of texts",
    'setup = "module purge"': "give a list of texts",
    "sbatch = ['--mem', '32G']": "an option begins with --",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_line_of_a_site_file_is_named(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refused(Site.load, path, named=[repr(str(path)), text.partition(" ")[0], BAD[text]])


NEAREST = {"cpus_per_rank = 1": 1, 'gpus = ""': "", "setup = []": (), "sbatch = ['-A a', '--x']": ("-A a", "--x")}


def test_what_stands_nearest_to_a_bad_line_is_taken(tmp_path):
    path = tmp_path / "mine.toml"
    for text, value in NEAREST.items():
        path.write_text(text)
        assert getattr(Site.load(path), text.partition(" ")[0]) == value


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


def test_the_templates_line_names_the_site_in_each_notebook_that_has_one(tmp_path):
    [line] = re.findall(r"(?m)^#     (sed -i .*)$", (SITES / "TEMPLATE.toml").read_text())
    found = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "notebooks" / "solutions").glob("*.ipynb")]
    for path in (*found, ROOT / "slurm" / "job.ipynb"):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))

    def sites():
        codes = [cell.source for path in tmp_path.rglob("*.ipynb") for cell in nbformat.read(path, 4).cells]
        return re.findall(r'(?m)^site = "(.*?)"', "\n".join(codes))

    before = sites()
    subprocess.run(["bash", "-c", line.replace("NAME", "ours")], cwd=tmp_path, check=True)
    assert len(before) > 5 and {*before} == {"local"} and sites() == ["ours"] * len(before)


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
    text = render(Job("a", ("x.py",), ranks_per_node=4, gpus_per_node=4), Site("a", gpus=""), "run")
    assert not re.search("^#SBATCH .*gpu", text, re.I | re.M) and "\n#SBATCH --ntasks-per-node=4 " in text


# ---- the learner


def test_a_learners_own_file_counts_more_than_the_shared_one_but_for_the_local_site(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "ddp-course" / "site.toml"
    own.parent.mkdir()
    own.write_text('sbatch = ["--account=physics", "--partition=debug"]\npython = "mine"\n')
    site = Site.load("classroom")
    assert site.admission[-2:] == ["--account=physics", "--partition=debug"] and site.python == "mine"
    assert "--qos=teaching" in site.admission and "--exclude=gpu07" in site.sbatch
    assert Site.load("local").sbatch == ("--partition=course",)
    own.write_text("a")
    refused(Site.load, "classroom", named=[f"site file {str(own)!r}", "TOML"])
