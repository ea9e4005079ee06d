"""Run an unchanged script on this rank and write notes; the audit starts it on each rank:

instrument.py NOTES LIMIT SCRIPT ITS_ARGUMENTS writes NOTES/rankN.jsonl. Needs torch.
"""

import dataclasses
import os
import re
import runpy
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

# ddp_tools need not be installed; the script's import path lacks this folder.
sys.path.append(str(Path(__file__).resolve().parents[2]))
from ddp_tools.audit import cpu_shim, notes
from ddp_tools.audit.digests import is_library
from ddp_tools.audit.observer import Observer
from ddp_tools.rendezvous import listen_narrowly

sys.path.pop()


# Errors under --on-cpu that the stand-in for CUDA may have caused.
_OF_STAND_IN = re.compile(r"cuda|nvidia|nccl|SimpleNamespace|'Moment'", re.IGNORECASE)
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b: ")  # as Python prints one


def testify(folder: Path, limit: float, script: str, arguments: list[str]) -> None:
    """Run the script under an observer; every rank calls it. Raises the script's exception.

    folder: for the notes; limit: seconds after which this rank is ended.
    """
    listen_narrowly()
    if os.environ.get("DDP_AUDIT_TWO_NODES"):
        cpu_shim.on_two_nodes()
    cpu_shim.as_launched()
    if os.environ.get("DDP_AUDIT_ON_CPU"):
        cpu_shim.without_gpus()
    observer = Observer(folder, sys._getframe())
    writer, last_line = observer.writer, _LastLine()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    writer.write(notes.Start(time=time.time()))
    writer.end_at(limit)
    end = notes.End(status=0)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        end = _end_by(error, last_line.text)
        raise
    finally:
        observer.note_end()
        last = dataclasses.replace(end, time=time.time(), steps=writer.steps)
        writer.write(last)


class _LastLine:
    """Keeps the script's last line on stderr, or the last line with an error if there is one."""

    def __init__(self) -> None:
        self.text = ""
        write = sys.stderr.write

        def kept(text: str) -> int:
            for line in filter(None, text.splitlines()):
                if _ERROR.match(line) or not _ERROR.match(self.text):
                    self.text = line
            return write(text)

        with suppress(AttributeError):  # a replaced stderr may not allow it
            sys.stderr.write = kept  # type: ignore[method-assign]


def _end_by(error: BaseException, last_line: str) -> notes.End:
    """The note on an error or a SystemExit that ended the script, with the line that raised it.

    last_line: the script's last line on stderr, for an exit with a number and no message.
    """
    why: object = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        why = error.code or ""
    status = why if isinstance(why, int) else int(bool(why))
    first_line = last_line if isinstance(why, int) else str(why).partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    script_frames = [frame for frame in frames if not is_library(frame.filename)]
    last = script_frames[-1:]
    at = f"{last[0].filename}:{last[0].lineno}" if last else ""
    by_stand_in = bool(os.environ.get("DDP_AUDIT_ON_CPU") and _OF_STAND_IN.search(first_line))
    by_stand_in = by_stand_in and notes.NO_SUCH_DEVICE not in first_line
    raised = not isinstance(error, SystemExit)
    return notes.End(at=at, status=status, why=first_line, by_stand_in=by_stand_in, raised=raised)


if __name__ == "__main__":
    testify(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
