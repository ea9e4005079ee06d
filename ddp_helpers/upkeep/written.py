"""Write all scripts to slurm/scripts, where they are read without the course; any Python does: make scripts."""

from ddp_helpers import ROOT
from ddp_helpers.launch.scripts import NAMES, write

FOLDER = ROOT / "slurm" / "scripts"

if __name__ == "__main__":
    for old in FOLDER.glob("*.py"):
        if old.stem not in NAMES:
            old.unlink()
    for name in NAMES:
        write(name, FOLDER / f"{name}.py", force=True)
    print(f"wrote {FOLDER.relative_to(ROOT)}: {', '.join(NAMES)}")
