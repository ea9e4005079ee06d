"""Write all scripts to slurm/scripts, where they are read without the course.

`make scripts` runs it, with any Python, in one process.
"""

from ddp_helpers import ROOT
from ddp_helpers.launch.scripts import NAMES, write_script

FOLDER = ROOT / "slurm" / "scripts"

if __name__ == "__main__":
    for script in FOLDER.glob("*.py"):
        if script.stem not in NAMES:
            script.unlink()
    for name in NAMES:
        write_script(name, FOLDER / f"{name}.py")
    print(f"wrote {FOLDER.relative_to(ROOT)}: {', '.join(NAMES)}")
