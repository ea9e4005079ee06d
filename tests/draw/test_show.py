"""Source as notebooks show it: some functions of a script, the rest folded, and what differs between two."""

import re

import pytest

from ddp_helpers.draw import show

OLD = "import os\n\n\ndef more():\n    return os.sep\n\n\n"
OLD += "def train():\n    step(1)\n    test()\n\n\nmain = train\n"
NEW = OLD.replace("step(1)", "step(2 < 3)").replace("os.sep", "os.name")


@pytest.fixture
def two(tmp_path):
    """Two scripts."""
    paths = tmp_path / "<old>.py", tmp_path / "new.py"
    for path, text in zip(paths, (OLD, NEW), strict=True):
        path.write_text(text)
    return paths


def test_the_functions_are_shown_and_the_whole_file_is_folded_below_them(two):
    opening = show.source(two[1], ["train"])
    assert repr(opening) == "def train():\n    step(2 < 3)\n    test()"
    shown, folded = opening._repr_html_().split("<details>")
    plain = [re.sub(r"<[^>]*>", "", part) for part in (shown, folded)]
    assert "2 &lt; 3" in plain[0] and "os.name" not in plain[0] and "os.name" in plain[1] and "13 lines" in plain[1]
    assert folded.count("</details>") == 1 and "&lt;old&gt;.py" in show.source(two[0], ["train"])._repr_html_()


def test_the_diff_is_of_the_functions_that_are_named(two):
    assert show.hunks(*two, ["train"]) == [" def train():\n-    step(1)\n+    step(2 < 3)\n     test()"]
    assert len(show.hunks(*two)) == 2, "the control: os.name is in another function"
