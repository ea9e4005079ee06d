"""The failed checks of an audit as SARIF, the format in which code hosts read tools' findings.

The command calls it in the driver process, after the audit. Needs no torch.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_tools.audit.notes import FAIL, Row


def to_sarif(script: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The failed checks as a SARIF 2.1.0 log, each at the first FILE:LINE in its texts.

    Paths are relative to the current directory, as code hosts expect.
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
