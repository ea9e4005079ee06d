"""README, docs/ and the notebooks: every link leads to a file, and every anchor is there."""

from pathlib import Path

import pytest
from links import dead, loaded_from_elsewhere

from ddp_helpers import ROOT

PATTERNS = [
    "*.md",
    "docs/*.md",
    "notebooks/*/*.md",
    "notebooks/[0-9]*.ipynb",
    "notebooks/solutions/*.ipynb",
    "slurm/*.ipynb",
]
WRITTEN = [path for pattern in PATTERNS for path in ROOT.glob(pattern)]


def test_no_link_is_dead() -> None:
    assert len(WRITTEN) > 20
    assert dead(WRITTEN) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.md", "# A\n\n[there](#a) [here](b.md) <https://pytorch.org> [b]\n\n[b]: c.md#gone", ["b.md", "c.md#gone"]),
        ("a.md", "![](gone.png) [x](http://a.org) [x](https://nodots) `[x](code.md)`", ["gone.png", "http", "nodots"]),
        ("a.ipynb", '<a id=\\"here\\"></a>[x](#here) [x](#there)', ["#there"]),
        ("a.html", '<h1 id="x"><a href="#x"></a></h1><a href="c.html">c</a><img src="c.md">', ["c.html"]),
    ],
)
def test_dead_links_are_found(name: str, text: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "c.md").write_text("# C")
    cells = f'{{"cells": [{{"cell_type": "markdown", "source": ["{text}"]}}]}}'
    (tmp_path / name).write_text(cells if name.endswith("ipynb") else text)
    problems = sorted(dead([tmp_path / name]))
    assert len(problems) == len(found) and all(map(lambda one, word: word in one, problems, found)), problems


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example.org/x.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example.org/x.css">'),
        ("a.html", '<p style="background: url(https://example.org/x.png)">'),
        ("a.css", '@import "https://example.org/x.css";'),
        ("a.js", 'fetch("https://example.org/x.json")'),
    ],
)
def test_what_another_host_would_send_is_found(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "sound.html").write_text('<a href="https://pytorch.org">out</a> <img src="data:image/png;base64,">')
    assert loaded_from_elsewhere(tmp_path) == []
    (tmp_path / name).write_text(text)
    assert len(loaded_from_elsewhere(tmp_path)) == 1
