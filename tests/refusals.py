"""What is bad is refused: exit status 2 and one line that names it and its cure, nothing on stdout, no traceback."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from ddp_tools import PlainError


def one_line(text, *named):
    """The one line that this text is, in which each of these stands."""
    line = text.removesuffix("\n")
    assert line.strip() and len(line.splitlines()) == 1 and "Traceback" not in line, f"not one line: {text!r}"
    missing = [part for part in named if part not in line]
    assert not missing, f"{missing} not in: {line}"
    return line


def ended(status, out, err, *named):
    """The one line with which a process or a call ended, given its exit status, stdout and stderr."""
    assert (status, out) == (2, ""), f"exit status {status}: {out}{err}"
    assert err.endswith("\n"), f"not a whole line: {err!r}"
    return one_line(err, *named)


def outcome(action, *args, error=PlainError, **options):
    """What an action gives, and ""; or None, and the one line with which it stops or raises."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            return action(*args, **options), ""
        except SystemExit as end:
            status = end.code
        except error as problem:
            line = one_line(str(problem))
            assert line.isprintable(), f"what a terminal would obey: {line!r}"
            return None, line
    return None, ended(status, out.getvalue(), err.getvalue())


def refused(action, *args, named=(), **options):
    """The one line with which an action is refused, in which each of these stands."""
    value, line = outcome(action, *args, **options)
    assert line, f"it is not refused, and gives {value!r}"
    return one_line(line, *named)
