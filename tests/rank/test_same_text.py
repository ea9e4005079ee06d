"""What several scripts share has one text."""

import ast
from collections import defaultdict

from ddp_helpers import ROOT

SCRIPTS = [f"scripts/{name}.py" for name in ("mnist_ddp", "mnist_ddp_resumable", "mnist_fast", "simple_ddp")]
HELPERS = ["launchers.py", "device.py", "record.py", "../data/mnist_files.py"]
MAY_DIFFER = {"main", "train", "read_flags", "form_group", "one_pass", "claim"}  # what each script has of its own


def texts_by_name(texts):
    """The texts that each function, class or constant of some modules has, without comments and layout."""
    found = defaultdict(set)
    for text in texts:
        for node in ast.parse(text).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else node
            found[getattr(node, "name", None) or getattr(target, "id", "")].add(ast.unparse(node))
    return {name: found[name] for name in found.keys() - {""}}


def test_what_scripts_and_helpers_share_has_one_text():
    texts = [(ROOT / "ddp_helpers" / "rank" / name).read_text() for name in SCRIPTS + HELPERS]
    found = texts_by_name(texts)
    assert {name for name, versions in found.items() if len(versions) > 1} <= MAY_DIFFER
    changed = texts_by_name([*texts, texts[0].replace('"PMIX_NAMESPACE"', '"PMIX_ID"')])
    assert len(changed["LAUNCHERS"]) == 2, "the control"
