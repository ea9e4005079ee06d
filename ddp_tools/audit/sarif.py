"""The red rows of an audit as SARIF, the format in which code hosts take what tools find.

The command calls it in the learner's process, after the audit. Needs no torch.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_tools.audit.notes import FAIL, Row


def to_sarif(script: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The red rows as a SARIF 2.1.0 log, each at the first line of a file that it names.

    Paths are those below the folder in which this is called, as code hosts want them.
    """
    results = []
    for row in rows:
        if row.verdict != FAIL:
            continue
        name, line = (re.findall(r"([^\s/:]+\.py):(\d+)", row.seen + row.cure) or [("", "1")])[0]
        path = script.resolve().with_name(name or script.name)
        uri = Path(os.path.relpath(path if path.exists() else script)).as_posix()
        place = {"artifactLocation": {"uri": uri}, "region": {"startLine": int(line)}}
        text = f"{row.seen}; fix: {row.cure}"
        result = {"ruleId": row.name, "level": "error", "message": {"text": text}}
        results.append(result | {"locations": [{"physicalLocation": place}]})
    driver = {"name": "ddp-course audit", "rules": [{"id": row.name} for row in rows]}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
