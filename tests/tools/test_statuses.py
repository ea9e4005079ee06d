"""What each exit status of each command means is said once: by --help, and by the page of the tools."""

import re

import pytest

from ddp_helpers import ROOT
from ddp_helpers.cli import main, make_parser

PAGE = (ROOT / "docs" / "tools.md").read_text()
[COMMANDS] = [action.choices for action in make_parser()._actions if action.dest == "command"]
SAID = re.compile(r"exit status: (.*); 2: the arguments cannot be used")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_says_of_each_exit_status_what_help_says(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert not ended.value.code and f"| `{name}` | {SAID.search(said)[1]} |" in PAGE


def test_the_page_has_no_other_command():
    table = PAGE[PAGE.index("## Exit statuses") :]
    assert {*re.findall(r"^\| `(\S+)` \|", table, re.M)} == {*COMMANDS}
