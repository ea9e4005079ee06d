"""Split a shell script into its commands. No shell runs.

In a command's words a `\\0` stands for a dollar that the batch shell leaves alone, in single quotes
or behind a backslash: the shells of the tasks fill it in. `\\1` and `\\2` stand for a blank and for
a line's end in quotes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HEREDOC = re.compile(r"(?ms)(?<!<)<<-?[ \t]*['\"\\]?(\w+)['\"]?([^\n]*)\n.*?^[ \t]*\1[ \t]*$")
_TOKEN = re.compile(
    r"""\\\n | \\. | '[^']*' | "(?:\\.|[^"\\])*" | `[^`]*` | (?<![^\s;&|(])\#[^\n]*
    | [<>]& | &> | &&|\|\|?|;|\n|& | . """,
    re.VERBOSE | re.DOTALL,
)
_ENDS = ("\n", ";", "&", "&&", "|", "||")
_OPENS = re.compile(
    r"\s*(?:(?:then|do|else|!|time)\s+)*(?:(for|while|until|select|if|case|\{)(?=\s|$)"
    r"|function\s+([\w-]+)[\s()]*\{|([\w-]+)\s*\(\s*\)\s*\{)"
)
_CLOSES = re.compile(r"\s*(?:done|fi|esac|\})(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the batch script: its first line, and its words (a quoted blank is `\\1`)."""

    line: int
    raw: str
    nounset: bool  # `set -u` holds
    end: str  # what stands behind it: a line's end, ;, &, or | and the like
    background: bool = False  # it, or the pipe that it begins, ends with &

    @property
    def text(self) -> str:
        """The command as one reads it."""
        return spaced(self.raw)


@dataclass(frozen=True, slots=True)
class Block:
    """A loop, a condition, a group in braces or a function: the numbers of its commands.

    opens: the word that begins it; function: its name, if it is one.
    """

    opens: str
    function: str
    first: int
    last: int


def read_blocks(commands: Sequence[Command]) -> Iterator[Block]:
    """Yield the blocks of a script, the inner ones first."""
    open_: list[tuple[str, str, int]] = []
    for number, command in enumerate(commands):
        place = 0
        while opens := _OPENS.match(command.text, place):
            open_.append((opens[1] or "", opens[2] or opens[3] or "", number))
            place = opens.end()
        if open_ and _CLOSES.match(command.text):
            yield Block(*open_.pop(), number)


def spaced(raw: str, line_end: str = " ") -> str:
    """Return a command's words as one reads them."""
    return raw.replace("\1", " ").replace("\2", line_end)


def read_commands(text: str) -> Iterator[Command]:
    """Yield the commands of a shell script, split where no quote and no bracket is open."""
    line, first, depth, nounset = 1, 1, 0, False
    words: list[str] = []
    for token in (match[0] for match in _TOKEN.finditer(text + "\n")):
        if not words:
            first = line
        line += token.count("\n")
        if depth == 0 and token in _ENDS:
            if words:
                raw = "".join(words)
                if option := re.match(r"set\s+([-+])(?:\w*u|o\s+nounset)", raw):
                    nounset = option[1] == "-"
                yield Command(first, raw, nounset, token)
            words = []
        elif (token[0] != "#" or len(token) == 1) and (words or token.strip(" \t\n\\")):
            depth = max(0, depth + (token == "(") - (token == ")"))
            words.append(_plain(token, depth > 0))


def _plain(token: str, inside: bool) -> str:
    """Take the quotes from a token; a blank in them, or in brackets, ends no word."""
    if token == "\\\n":
        return " "
    if token[0] == "\\":
        return token[1].replace("$", "\0")
    if token[0] == "'" and len(token) > 1:
        token = token[1:-1].replace("\\\n", " ").replace("$", "\0")
    elif token[0] == '"' and len(token) > 1:
        token = token[1:-1].replace("\\$", "\0").replace("\\\n", " ").replace('\\"', '"')
    elif not (inside or token[0] == "`"):
        return token
    if not inside:
        token = token.replace("\n", "\2")
    return re.sub(r"[ \t\n]", "\1", token)
