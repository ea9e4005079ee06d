"""What several notebooks share, where the learner sits."""


class PlainError(Exception):
    """An error whose message says all: a traceback through the helpers would help nobody."""

    def _render_traceback_(self) -> list[str]:
        """Have IPython show the message alone."""
        return [f"{type(self).__name__}: {self}"]
