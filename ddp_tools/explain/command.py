"""The command `explain`: read logs, judge them, print the report, return an exit status for CI."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_tools import PlainError
from ddp_tools.explain.attempts import split
from ddp_tools.explain.facts import facts, facts_as_text
from ddp_tools.explain.jobfile import explain_job, is_job_file
from ddp_tools.explain.judge import judge
from ddp_tools.explain.lines import STDIN, read_logs
from ddp_tools.explain.report import as_data, as_text

_ENDED_WELL, _EXPLAINED, _NOT_KNOWN, _NOTHING_SEEN = 0, 1, 3, 4  # 2 is a wrong use


def explain(paths: Sequence[Path], as_json: bool = False, facts_alone: bool = False) -> int:
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
        if facts_alone:
            raise PlainError(f"{paths[0]} is a job file: --facts is for the log of a run")
        return explain_job(paths[0], as_json)
    logs = read_logs(paths)
    attempts = [replace(logs, lines=list(lines)) for lines in split(logs.lines)]
    verdicts = [judge(attempt) for attempt in attempts]
    if facts_alone:
        found = facts(verdicts, logs)
        print(json.dumps(found, indent=1, ensure_ascii=False) if as_json else facts_as_text(found))
    elif as_json:
        # The last attempt is the one that counts; the others stand beside it.
        data = as_data(verdicts[-1], logs) | {"before": [as_data(v, logs) for v in verdicts[:-1]]}
        print(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        print(as_text(verdicts, logs))
    failed = [verdict for verdict in verdicts if verdict.root]
    if not failed:
        return _ENDED_WELL if verdicts[-1].well else _NOTHING_SEEN
    return _EXPLAINED if all(verdict.known for verdict in failed) else _NOT_KNOWN
