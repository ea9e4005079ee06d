"""The command `plan`: read a script and its project's files, and list the decisions to make.

Nothing is imported, run or changed, and torch is not needed.
"""

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from ddp_tools import PlainError, printable
from ddp_tools.beside import imported_names, texts_beside
from ddp_tools.plan.find import Kind, find, kinds

_LISTED, _NOT_ALL_SEEN = 1, 4  # 2 is wrong usage
_SHOWN = 4  # lines of a kind; for the others only their numbers
_WIDTH = 72  # characters of a line
# Imports of packages with their own training loop.
_LOOPS = re.compile(
    r"(lightning|pytorch_lightning|accelerate|ignite|fastai|deepspeed|keras|tensorflow|torchtitan"
    r"|composer|ray|horovod|jax|mmengine|ultralytics)\b|transformers\.\w*Trainer$"
)
# Kinds of which a training script has at least one, and the message if none was seen.
_DATA = {"a loader to train from", "a loader to test from, or in order", "a stream"}
_EXPECTED = {
    "no .backward() in these files: the training was not seen": {"the training step"},
    "no loader and no draw was seen: how does a rank get its own part of each batch?": (
        _DATA | {"samples drawn by hand", "one long text, or rows cut by hand"}
    ),
    "no device was seen: for GPUs, step 3 is needed all the same": {"a device by its name"},
}
_BY_NAME = {"importlib.import_module", "import_module", "__import__", "exec"}
_PAGE = "docs/your-script.md"
_NO_LINE = """Steps 1, 2, 4, 10: launch, rank and world size, group, end
  these have no lines yet: `ddp-course script simple_ddp ranks.py` writes who_am_i, pick_device and
  form_group into a file to import; at the end dist.barrier() and dist.destroy_process_group()"""


@dataclass(frozen=True)
class Line:
    """A line that needs a decision: its kind, file, number and text."""

    kind: Kind
    file: str
    number: int
    text: str


def plan(script: Path, as_json: bool = False) -> int:
    """List the decisions of a script and return the exit status; raises PlainError.

    1: they are listed; 4: they are listed, but code that may need more was not read.
    """
    texts = _read(script)
    order = {kind: number for number, kind in enumerate(kinds())}
    trees: dict[str, ast.Module] = {}
    lines, unread = [], []
    whole_text = "\n".join(texts.values())
    for name, text in texts.items():
        try:
            tree = ast.parse(text if name.endswith(".py") else "?")  # not a compiled module
            tree.body = [
                each for each in tree.body if not _never_runs(each, whole_text, bool(trees))
            ]
            found = [*find(tree, list(order))]
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            unread.append(f"{name}: no Python 3 text")
            continue
        trees[name], rows = tree, text.splitlines()
        lines += [Line(each.kind, name, each.line, rows[each.line - 1].strip()) for each in found]
    lines.sort(key=lambda line: order[line.kind])
    unseen = [*unread, *_not_looked_at(trees, lines)]
    if as_json:
        print(json.dumps(_as_data(texts, lines, unseen), indent=1, ensure_ascii=False))
    else:
        print("\n".join(map(printable, _report([*texts], lines, unseen))))
    return _NOT_ALL_SEEN if unseen else _LISTED


def _read(script: Path) -> dict[str, str]:
    """Map the names of a script, and of its project's files that it imports, to their texts."""
    try:
        path = script.expanduser().resolve()
        text = path.read_text()
        ast.parse(text)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlainError(f"{script} cannot be read ({reason}): give a Python script") from None
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise PlainError(f"{script} is not valid Python 3 ({error}): fix it first") from None
    texts = {path: text}
    for folder in [path.parent, *path.parents[1:3]]:  # a script may be in a subfolder
        for each in [*texts.values()]:
            for file, own in sorted(texts_beside(each, folder).items()):
                texts.setdefault(file, own)
    return {os.path.relpath(file, path.parent): own for file, own in texts.items()}


def _never_runs(node: ast.stmt, whole_text: str, imported: bool) -> bool:
    """Whether a statement is a function that is never used, or the main block of a module."""
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        return len(re.findall(rf"\b{node.name}\b", whole_text)) == 1
    return imported and isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)


def _not_looked_at(trees: Mapping[str, ast.Module], lines: Sequence[Line]) -> Iterator[str]:
    """List code that was not read and may need decisions."""
    names = {line.kind.name for line in lines}
    yield from (lack for lack, expected in _EXPECTED.items() if not names & expected)
    for name, tree in trees.items():
        imported = map(".".join, imported_names(ast.walk(tree)))
        for package in filter(_LOOPS.match, imported):
            yield f"{name}: {package} has its own training loop, and does part of this itself"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _BY_NAME:
                yield f"{name}:{node.lineno}: {ast.unparse(node)[:_WIDTH]}"


def _report(files: Sequence[str], lines: Sequence[Line], unseen: Sequence[str]) -> Iterator[str]:
    """The lines of the plan, by step and kind."""
    beside = f" and {len(files) - 1} files of its project that it imports" if files[1:] else ""
    yield f"Read {files[0]}{beside}. Nothing was run or changed."
    for step, of_step in groupby(lines, lambda line: line.kind.step):
        yield from ["", f"Step {step.replace(' ', ': ', 1)}"]
        for kind, group in groupby(of_step, lambda line: line.kind):
            several = [*group]
            yield f"  {kind.name}"
            for line in several[:_SHOWN]:
                yield f"    {f'{line.file}:{line.number}':<22} {line.text[:_WIDTH]}"
            yield from _others(several[_SHOWN:])
            yield from wrap(kind.cure, 100, initial_indent="    -> ", subsequent_indent="       ")
            yield f"       {kind.more}"
    count = len({line.kind for line in lines if not line.kind.cure.startswith("stays")})
    yield from ["", *_NO_LINE.splitlines(), ""]
    yield f"{count} decisions, at {len(lines)} lines. The page in the order of work: {_PAGE}"
    yield from ["Not seen, or not checked:", *(f"  {each}" for each in unseen)] if unseen else ()


def _others(lines: Sequence[Line]) -> Iterator[str]:
    """A line with the numbers of further lines of a kind, if there are any."""
    if not lines:
        return
    files: dict[str, list[str]] = {}
    for line in lines:
        files.setdefault(line.file, []).append(str(line.number))
    parts = [f"{file}:{', '.join(numbers)}" for file, numbers in files.items()]
    places = "; ".join(parts)
    more = f"in {len(files)} files: --json lists them" if len(places) > _WIDTH else places
    yield f"    and {len(lines)} more, {more}"


def _as_data(
    texts: Mapping[str, str], lines: Sequence[Line], unseen: Sequence[str]
) -> dict[str, Any]:
    """The plan as data."""
    decisions = [
        {
            "step": line.kind.step,
            "kind": line.kind.name,
            "file": line.file,
            "line": line.number,
            "text": line.text,
            "cure": line.kind.cure,
            "more": line.kind.more,
        }
        for line in lines
    ]
    return {"files": [*texts], "decisions": decisions, "not looked at": [*unseen]}
