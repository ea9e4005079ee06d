"""Tools for anybody's script, log, job file, model or hang, such as plan, audit and explain."""


class PlainError(Exception):
    """An error whose message is complete: a traceback through the helpers would add nothing."""

    def _render_traceback_(self) -> list[str]:
        """Make IPython show only the message."""
        return [f"{type(self).__name__}: {self}"]


def printable(text: str) -> str:
    """Replace control characters, which a terminal would act on, with spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
