"""What each exit status of each command means is said once: by --help, and by the page of the tools."""

import re
from pathlib import Path

import pytest

from ddp_helpers.cli import main, make_parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tools.md").read_text()
[COMMANDS] = [action.choices for action in make_parser()._actions if action.dest == "command"]
SAID = re.compile(r"exit status: (.*); 2: what was given cannot be used")


def help_of(name, capsys):
    """What --help prints; the doctor has a parser of its own."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert not ended.value.code
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_says_of_each_exit_status_what_help_says(name, capsys):
    assert f"| `{name}` | {SAID.search(help_of(name, capsys))[1]} |" in PAGE


def test_the_page_has_no_other_command():
    table = PAGE[PAGE.index("## Exit statuses") :]
    assert {*re.findall(r"^\| `(\S+)` \|", table, re.M)} == {*COMMANDS}
