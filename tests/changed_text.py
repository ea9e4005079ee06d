"""A text with changes in it, such as a fault that is planted into a script."""

from collections.abc import Iterable


def replaced(text: str, changes: Iterable[tuple[str, str]]) -> str:
    """The text with the second of each pair in the place of the first, which must stand there once."""
    for old, new in changes:
        assert text.count(old) == 1, f"not once in the text: {old!r}"
        text = text.replace(old, new)
    return text
