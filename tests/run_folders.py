"""Run folders, as scripts leave them."""

import json


def write_run(folder, epochs=({"epoch": 1},), **files):
    """Write the record of a run: a line for each epoch, and a JSON file for each that is not None."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(epoch) + "\n" for epoch in epochs))
    return folder
