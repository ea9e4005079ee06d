"""Find the relative paths of a script that mean something different in its job.

`project` calls it on the login node, with texts and arguments: nothing is imported or run. It names
a path if it exists relative to the given folders.
"""

import ast
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from ddp_tools.beside import called, nodes_of

# A name without a slash and a suffix, such as `data`, counts if a word like these is next to it,
_PATH = re.compile(r"path|dir|folder|file|root|data|config|checkpoint|ckpt", re.IGNORECASE)
# or if it is the first argument of such a call: Path, ImageFolder, open, listdir.
_OPENS = re.compile(r"^[A-Z]|open|load|read|dir|walk|glob")


def in_words(words: Sequence[str], folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name the relative paths among a script's arguments, each with the full path of its target."""
    before = ""
    for word in words:
        flag, equals, name = word.rpartition("=")
        if _is_path(name, bool(_PATH.search(flag if equals else before))):
            yield from ((name, whole) for whole in _wholes(name, folders))
        before = word if word.startswith("-") else ""


def in_text(
    text: str, words: Sequence[str], folders: Sequence[str]
) -> Iterator[tuple[int, str, str]]:
    """Name the relative paths in a text, by line, each with the full path of its target.

    words: the script's arguments; the default of an option that they give does not count.
    """
    nodes = list(nodes_of(text))
    given = {word.partition("=")[0] for word in words}
    paths: set[ast.AST | None] = set()
    others: set[ast.AST] = set()
    for node in nodes:
        match node:
            case ast.BinOp(op=ast.Div(), right=right):  # folder / "name"
                others.add(right)
            case ast.JoinedStr(values=[_, *rest]):
                others.update(rest)
            case ast.Call():
                paths.update(_paths_of(node))
                others.update(_others_of(node, given))
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if _PATH.search(name):
                paths.add(value)
    constants = (node for node in nodes if _is_text(node) and node not in others)
    for node in sorted(constants, key=lambda node: node.lineno):
        if _is_path(node.value, node in paths):
            yield from ((node.lineno, node.value, whole) for whole in _wholes(node.value, folders))


def _paths_of(call: ast.Call) -> Iterator[ast.AST]:
    """The arguments of a call that are always paths."""
    if _OPENS.search(called(call)):
        yield from call.args[:1]
    options = " ".join(_options_of(call))
    for keyword in call.keywords:
        if _PATH.search(options if keyword.arg == "default" else keyword.arg or ""):
            yield keyword.value


def _others_of(call: ast.Call, given: set[str]) -> Iterator[ast.AST]:
    """The arguments of a call that are not paths relative to the script's start folder."""
    if "join" in called(call):
        yield from call.args[called(call) == "join" :]
    if not given.isdisjoint(_options_of(call)):
        for keyword in call.keywords:
            yield from ast.walk(keyword.value)


def _options_of(call: ast.Call) -> list[str]:
    """The names, such as --data, of the option that a call of argparse or click adds."""
    return [node.value for node in call.args if _is_text(node) and node.value.startswith("-")]


class _Text(ast.Constant):
    value: str


def _is_text(node: ast.AST) -> TypeGuard[_Text]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_path(name: str, is_named_so: bool) -> bool:
    """Whether a text is a relative path by its form, or by a word next to it."""
    looks_so = is_named_so or "/" in name or bool(Path(name).suffix)
    return looks_so and bool(name.strip("./")) and not Path(name).is_absolute()


def _wholes(name: str, folders: Sequence[str]) -> list[str]:
    """The full path of a name in the first folder that has it, if one does."""
    paths = (Path(folder, name) for folder in folders)
    return [os.path.normpath(path) for path in paths if os.path.lexists(path)][:1]
