"""The Dockerfile, built and used for real, weekly: the notebooks run in the container that it makes.

Buildah builds it, without a daemon. The base, under the name that stands behind FROM, is a Debian made by mmdebstrap,
since no registry of images is asked: it has Debian's own Python, 3.11 in bookworm.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from real import LIMIT, THOROUGH, fail_in_ci, until

from ddp_helpers import ROOT

pytestmark = [
    pytest.mark.skipif(not THOROUGH, reason="a container is built in minutes: make test-all"),
    pytest.mark.timeout(2 * 3600),  # 5 GB of packages, then all notebooks
]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
FROM = re.search(r"^FROM (\S+)$", DOCKERFILE, re.M)[1]
PROCESSES = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # Docker shows a container only its own


CERTIFICATES = "/etc/pip.pem"  # for pip in the build; at the usual place the image has its own


def done(command, **options):
    """Run a command to its end, with the seconds that it took, and show what it wrote."""
    begin = time.monotonic()
    ended = subprocess.run([*map(str, command)], text=True, stdout=-1, stderr=subprocess.STDOUT, check=False, **options)
    print(f"{command[0]}: exit status {ended.returncode} after {time.monotonic() - begin:.0f} s\n{ended.stdout}")
    return ended


def must(command, **options):
    """Run a command that must not fail, and give what it wrote."""
    ended = done(command, **options)
    assert ended.returncode == 0, f"{' '.join(map(str, command))}\n{ended.stdout[-5000:]}"
    return ended.stdout


def pip_here(folder):
    """Write what pip is told on this machine into a pip.conf, and give a build's options for it and what it names.

    Where packages come from a mirror, or over a proxy with a certificate of its own, the build needs that too.
    """
    said = must([sys.executable, "-m", "pip", "config", "list"]).splitlines()
    settings, shown = {}, []
    for line in sorted(said, key=lambda each: each.startswith(":env:")):  # variables count more than files
        key, _, value = line.partition("=")
        name, words = key.rpartition(".")[2], ast.literal_eval(value).split()
        for path in (Path(word.removeprefix("file://")) for word in words):
            if path.is_absolute() and path.exists():
                path = path.parent if path.name == "simple" else path  # an index: its packages lie beside it
                place = CERTIFICATES if name == "cert" else path
                shown.append(f"--volume={path}:{place}:ro")
                words = [CERTIFICATES] if name == "cert" else words
        settings[name] = " ".join(words)
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    (folder / "pip.conf").write_text("".join(["[global]\n", *lines]))
    return [*dict.fromkeys(shown), f"--volume={folder}/pip.conf:/etc/pip.conf:ro"]


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    """Build the Dockerfile, and give the words that run a command in a container of its image, from its top folder."""
    if not (shutil.which("buildah") and shutil.which("mmdebstrap")):
        fail_in_ci("no container can be built on this machine: install buildah and mmdebstrap")
    if os.geteuid() != 0:
        fail_in_ci("only root can build a container here")
    folder = tmp_path_factory.mktemp("container")
    os.environ["BUILDAH_ISOLATION"] = "chroot"
    for driver in ("overlay", "vfs"):  # overlay copies nothing, but not every file system can be its lower layer
        buildah = ["buildah", f"--root={folder}/root", f"--runroot={folder}/run", f"--storage-driver={driver}"]
        if done([*buildah, "info"]).returncode == 0:
            break
    try:
        debian = ["--variant=minbase", "--include=ca-certificates,git,make,python3,python3-venv"]
        must(["mmdebstrap", *debian, FROM.rpartition("-")[2], folder / "base.tar"])
        (folder / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        must([*buildah, "bud", f"--tag=docker.io/library/{FROM}", folder])
        (folder / "base.tar").unlink()
        must([*buildah, "bud", "--pull=never", "--tag=ddp-course", *pip_here(folder), ROOT])
        name = must([*buildah, "from", "--pull=never", "ddp-course"]).split()[-1]
        yield [*PROCESSES, *buildah, "run", name, "--"]
    finally:
        done([*buildah, "rm", "--all"])
        done([*buildah, "rmi", "--all", "--force"])
        shutil.rmtree(folder)


def test_the_image_has_an_environment_of_its_own(container):
    where = must(
        [*container, ".venv/bin/python", "-c", "import sys, ddp_helpers; print(sys.base_prefix, ddp_helpers.ROOT)"]
    )
    assert where.split() == ["/usr", "/course"]
    assert done([*container, ".venv/bin/python", "-m", "ddp_helpers.upkeep.course", "99"]).returncode, (
        "the control must fail"
    )


def test_the_notebooks_run_in_the_container_beside_its_own_slurm(container):
    said = must([*container, "make", "run-all"])
    expected = {path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert {*re.findall(r"^(\d\db?_\w+) +ok ", said, re.M)} == expected
    assert "Slurm is up: partition course" in said and "Installing into .venv" not in said


@pytest.mark.timeout(LIMIT, func_only=True)  # the wait for its line has no end of its own
def test_the_images_own_command_answers_a_browser(container):
    command = json.loads(re.search(r"^CMD (.*)$", DOCKERFILE, re.M)[1])
    with subprocess.Popen([*container, *command], stdout=-1, stderr=subprocess.STDOUT, text=True) as lab:
        try:
            printed = (re.search(r"(http://127\.0\.0\.1:\d+/)\S*(\?token=\w+)", line) for line in lab.stdout)
            where = next(match.expand(r"\1api/contents/notebooks\2") for match in printed if match)

            def listed():
                # the address is printed before anybody listens there
                with suppress(urllib.error.URLError), urllib.request.urlopen(where) as answer:
                    return {entry["name"] for entry in json.load(answer)["content"]}

            assert "01_train_on_one_gpu.ipynb" in until(listed, "JupyterLab answers")
        finally:
            lab.kill()  # and with it, as Docker does, all that runs in the container
