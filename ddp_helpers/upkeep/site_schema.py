"""Write the JSON Schema by which editors complete a site file: keys and types of `Site`.

A maintainer runs it after a change of `Site`, in one process. Keys are described by TEMPLATE.toml.
"""

import json
import re
from dataclasses import fields

from ddp_helpers import ROOT
from ddp_helpers.jobs.site import SITES, Site

SCHEMA = SITES / "site.schema.json"
_KEY = re.compile(r"^(?:# (?:or )?)?([a-z_]+) = ", re.M)
_Type = dict[str, object]


def descriptions() -> dict[str, str]:
    """Return by key what TEMPLATE.toml says in the comment above it; keys may share a comment."""
    descriptions: dict[str, str] = {}
    for block in (SITES / "TEMPLATE.toml").read_text().split("\n\n"):
        first_key = _KEY.search(block)
        if not first_key:
            continue
        comment = block[: first_key.start()].splitlines()
        description = " ".join(line.removeprefix("# ") for line in comment)
        for key in _KEY.findall(block):
            descriptions[key] = description
    return descriptions


def _type_of(default: object) -> _Type:
    """Return the JSON type of a key that has this value where it is not given."""
    if isinstance(default, bool):
        return {"type": "boolean"}
    if isinstance(default, int):
        return {"type": "integer", "minimum": 1}
    if isinstance(default, tuple):
        return {"type": "array", "items": {"type": "string"}}
    return {"type": "string"}


def schema() -> str:
    """Return the text of the schema, in draft 4, which every editor's TOML checker knows."""
    by_key = descriptions()
    keys: dict[str, _Type] = {}
    for field in fields(Site):
        if field.name != "name":
            description = by_key[field.name]
            keys[field.name] = _type_of(field.default) | {"description": description}
    content = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "title": "A site: slurm/sites/NAME.toml",
        "type": "object",
        "properties": keys,
        "additionalProperties": False,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema())
    print(f"wrote {SCHEMA.relative_to(ROOT)}")
