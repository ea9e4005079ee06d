"""Write all scripts to slurm/scripts, where they are read without the course.

`make scripts` runs it, with any Python, in one process.
"""

from ddp_helpers import ROOT
from ddp_helpers.rank.scripts import NAMES, script_text

FOLDER = ROOT / "slurm" / "scripts"

if __name__ == "__main__":
    for script in FOLDER.glob("*.py"):
        script.unlink()
    for name in NAMES:
        (FOLDER / f"{name}.py").write_text(script_text(name))
    print(f"wrote {FOLDER.relative_to(ROOT)}: {', '.join(NAMES)}")
