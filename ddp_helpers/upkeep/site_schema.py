"""Write the JSON Schema by which editors complete a site file: keys and types of Site, words of TEMPLATE.toml."""

import json
import re
from dataclasses import fields

from ddp_helpers import ROOT
from ddp_helpers.jobs.site import SITES, Site

SCHEMA = SITES / "site.schema.json"
KEY = re.compile(r"^(?:# (?:or )?)?([a-z_]+) = ", re.M)
TEXTS = {"type": "array", "items": {"type": "string"}}
TYPES = {str: {"type": "string"}, bool: {"type": "boolean"}, int: {"type": "integer", "minimum": 1}}


def words() -> dict[str, str]:
    """What TEMPLATE.toml says of each key: the comment in front of it, which several keys may share."""
    said = {}
    for block in (SITES / "TEMPLATE.toml").read_text().split("\n\n"):
        comment = block[: KEY.search(block).start()] if KEY.search(block) else ""
        lines = [line.removeprefix("# ") for line in comment.splitlines()]
        said |= {key: " ".join(lines) for key in KEY.findall(block)}
    return said


def schema() -> str:
    """The text of the schema. Draft 4 is the one that every editor's TOML checker knows."""
    said = words()
    keys = {one.name: TYPES.get(one.type, TEXTS) | {"description": said[one.name]} for one in fields(Site)[1:]}
    top = {"$schema": "http://json-schema.org/draft-04/schema#", "title": "A site: slurm/sites/NAME.toml"}
    return (
        json.dumps(
            top | {"type": "object", "properties": keys, "additionalProperties": False}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


if __name__ == "__main__":
    SCHEMA.write_text(schema())
    print(f"wrote {SCHEMA.relative_to(ROOT)}")
