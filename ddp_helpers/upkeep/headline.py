"""Take the README's headline figure out of notebook 09, as its committed output has it."""

import base64
from pathlib import Path

import nbformat

from ddp_helpers import ROOT

NOTEBOOK = ROOT / "notebooks" / "09_plot_the_scaling.ipynb"
HEADING = "## Speed-up and efficiency"
PICTURE = ROOT / "docs" / "headline.png"


def headline(notebook: Path = NOTEBOOK) -> bytes:
    """The first figure below the heading. Raises ValueError if there is none: the notebook was not executed."""
    below = False
    for cell in nbformat.read(notebook, as_version=4).cells:
        below = below or (cell.cell_type == "markdown" and HEADING in cell.source.splitlines())
        for output in cell.get("outputs", []) if below else []:
            if picture := output.get("data", {}).get("image/png"):
                return base64.b64decode(picture)
    raise ValueError(f"{notebook.name} has no figure below {HEADING!r}: execute it first, with `make notebooks`")


if __name__ == "__main__":
    PICTURE.write_bytes(headline())
    print(f"wrote {PICTURE.relative_to(ROOT)}")
