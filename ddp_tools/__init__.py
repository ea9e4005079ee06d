"""Tools for anybody's script, log, job file, model or hang: audit, explain, fits, who-hangs."""


def printable(text: str) -> str:
    """Replace what a terminal would obey, and not show, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
