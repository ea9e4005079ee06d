"""The command `explain`: read logs, judge them, print the report, return an exit status for CI."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_tools import PlainError
from ddp_tools.explain.jobfile import explain_job, is_job_file
from ddp_tools.explain.judge import judge
from ddp_tools.explain.lines import STDIN, read_logs
from ddp_tools.explain.report import as_data, as_text

_ENDED_WELL, _EXPLAINED, _NOT_KNOWN, _NOTHING_SEEN = 0, 1, 3, 4  # 2 is a wrong use


def explain(paths: Sequence[Path], as_json: bool = False) -> int:
    """Explain logs, and return the exit status; raises PlainError at what cannot be read."""
    if not paths:
        if sys.stdin.isatty():
            raise PlainError(
                "no log is given: name a file or a run folder, or give - and paste lines"
            )
        paths = [Path(STDIN)]
    elif Path(STDIN) in paths and sys.stdin.isatty():
        print("Paste the lines, then press Enter and Ctrl+D.", file=sys.stderr)
    if any(map(is_job_file, paths)):
        if len(paths) > 1:
            raise PlainError("a job file is among the files: explain it alone")
        return explain_job(paths[0], as_json)
    logs = read_logs(paths)
    verdict = judge(logs)
    if as_json:
        print(json.dumps(as_data(verdict, logs), indent=1, ensure_ascii=False))
    else:
        print(as_text(verdict, logs))
    if verdict.root is None:
        return _ENDED_WELL if verdict.well else _NOTHING_SEEN
    return _EXPLAINED if verdict.known else _NOT_KNOWN
