"""Judge a script that is to survive a kill: end it in the middle, start it again, compare with a run that was not."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from ddp_helpers import ROOT

RANKS, EPOCHS, KILL_AFTER = 2, 40, 5
SAVED = "spirals.pt"


def start(script: Path, folder: Path) -> subprocess.Popen:
    """Start the script on two ranks with torchrun, in a folder, where it finds and leaves its files."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    words = [*command, str(script.resolve()), f"--epochs={EPOCHS}"]
    return subprocess.Popen(words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(script: Path, folder: Path, kill_after: int = EPOCHS + 1) -> list[str]:
    """Run the script to its end, or until it has told of an epoch: then all its processes get SIGKILL.

    Returns its lines. Raises RuntimeError, with the last lines, if it fails by itself.
    """
    child, lines = start(script, folder), []
    try:
        for line in child.stdout:
            lines.append(line.rstrip())
            if line.startswith(f"epoch {kill_after}:"):
                break
        else:
            if child.wait(timeout=60):
                raise RuntimeError("it ends with an error: " + " | ".join(lines[-3:]))
    finally:
        for process in [*psutil.Process(child.pid).children(recursive=True), child] if child.poll() is None else []:
            process.kill()
        child.wait()
        child.stdout.close()
    return lines


def judge(answer: Callable[[], Path]) -> list[str]:
    """A line for each thing that a kill in the middle spoils. Prints what is found."""
    import torch  # here: other exercises do without

    script = Path(answer())
    if not script.is_file():
        return [f"there is no file {script}: return the path of your script"]
    folders = [ROOT / "build" / "survive" / name for name in ("whole", "killed")]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    try:
        run(script, folders[0])
        before = run(script, folders[1], KILL_AFTER)
        after = run(script, folders[1])
        whole, killed = (torch.load(folder / SAVED, map_location="cpu", weights_only=True) for folder in folders)
    except (RuntimeError, OSError) as error:
        return [str(error)]
    print(f"found: killed after '{before[-1]}', started again: '{next(iter(after), 'no line')}'")
    if any(line.startswith("epoch 1:") for line in after):
        return ["after the kill it began with epoch 1: save where it is after each epoch, and load that at the start"]
    far = max(float((whole[name] - killed[name]).abs().max()) for name in whole)
    if far > 0:
        return [
            f"the weights differ by {far:.0e} from a run that was not killed: what else has a state? which epoch next?"
        ]
    print("found: the weights are those of a run that was not killed, to the bit")
    return []
