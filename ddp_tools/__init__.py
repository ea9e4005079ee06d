"""Tools for anybody's script, log, job file, model or hang, such as plan, audit and explain."""


class PlainError(Exception):
    """An error whose message says all: a traceback through the helpers would help nobody."""

    def _render_traceback_(self) -> list[str]:
        """Have IPython show the message alone."""
        return [f"{type(self).__name__}: {self}"]


def printable(text: str) -> str:
    """Replace what a terminal would obey, and not show, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
