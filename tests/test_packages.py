"""`.ci/packages`: what it installs is said before; what cannot be had stops CI alone."""

import os
import subprocess

import pytest
from real import LIMIT

from ddp_helpers import ROOT

NEED = ["sh:dash", "no-command:a-package,no-such-package", "nor-this:another"]
# In place of these commands: a user who may install, or who may not; and Debian, without one package.
MAY = {"id": "echo 1000", "sudo": 'shift; exec "$@"'}
MAY_NOT = MAY | {"sudo": "exit 1"}
APT = 'case "$*" in *install*) case "$*" in *no-such*) exit 100 ;; esac; echo "${@:4}" >>installed ;; esac'


def packages(folder, *words, user=MAY, ci=""):
    """Run the script where these commands stand in for the machine's: its exit status and what it says."""
    for name, text in {**user, "apt-get": APT}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "CI": ci, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["sh", ROOT / ".ci" / "packages", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_nothing_is_said_where_all_commands_are_there(tmp_path):
    assert packages(tmp_path, "sh:dash", "cat:coreutils") == (0, "")


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_who_may_not_install_is_told_what_is_left_out(ci, status, tmp_path):
    ended, said = packages(tmp_path, *NEED, user=MAY_NOT, ci=ci)
    assert ended == status and not (tmp_path / "installed").exists()
    first, last = said.splitlines()
    lacked = "a-package no-such-package another"
    assert first.endswith(f": {lacked}") and last.endswith(f"apt-get install {lacked}")


def test_packages_are_named_and_one_that_is_unknown_is_left_out(tmp_path):
    ended, said = packages(tmp_path, *NEED)
    first, *_, last = said.splitlines()
    assert ended == 0 and first.endswith(": a-package no-such-package another")
    assert (tmp_path / "installed").read_text().split() == ["a-package", "another"]
    assert last.endswith("apt-get install no-such-package")
