"""What `.ci/packages` says of what it installs: before, and where something cannot be had."""

import os
import subprocess

import pytest
from real import LIMIT

from ddp_helpers import ROOT

NEED = ["sh:dash", "no-such-command:no-such-package,nor-this-one"]
LACKED = "no-such-package nor-this-one"
ADVICE = f"apt-get install {LACKED}\n"


def packages(*words, prefix=(), **env):
    """Run the script from its text, which any user can read, wherever the checkout lies."""
    text = (ROOT / ".ci" / "packages").read_text()
    command, env = [*prefix, "sh", "-c", text, "packages", *words], {**os.environ, "CI": "", **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_nothing_is_said_where_all_commands_are_there():
    done = packages("sh:dash", "cat:coreutils")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_who_may_not_install_is_told_what_is_left_out(ci, status):
    user = ("--reuid=65534", "--regid=65534", "--clear-groups") if os.getuid() == 0 else ()
    done = packages(*NEED, prefix=("setpriv", "--no-new-privs", *user), CI=ci)  # and sudo has no effect
    assert (done.returncode, done.stderr) == (status, "")
    first, last = done.stdout.splitlines(keepends=True)
    assert first.endswith(f": {LACKED}\n") and last.endswith(ADVICE)


def test_packages_are_named_before_they_are_installed_and_one_that_is_unknown_is_left_out():
    if os.getuid() != 0:
        pytest.skip("only root may install")
    first, *rest = packages(*NEED).stdout.splitlines(keepends=True)
    assert first.endswith(f": {LACKED}\n") and rest[-1].endswith(ADVICE)
