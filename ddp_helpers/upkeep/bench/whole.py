"""What all of MNIST takes with the script as it is written out: seconds an epoch, and until the test goes well."""

import subprocess
import sys
from itertools import accumulate
from pathlib import Path

from ddp_helpers.notebook import runs, scripts


def epochs(folder: Path, data: Path, count: int) -> list[dict]:
    """Train so many epochs with the defaults of mnist_fast, and give their lines in the record."""
    script, run = scripts.write("mnist_fast", folder / "mnist_fast.py"), runs.fresh(folder, "whole")
    command = [sys.executable, script, "--data", data, "--epochs", str(count), "--run-dir", run]
    subprocess.run([*command, "--log-interval", "1000000"], check=True, stdout=subprocess.DEVNULL)
    return runs.read(run).epochs


def seconds_to(lines: list[dict], accuracy: float) -> list[float]:
    """Seconds of training up to the first epoch whose test is as accurate; none if no epoch is."""
    spent = accumulate(line["seconds"] for line in lines)
    reached = (took for took, line in zip(spent, lines, strict=True) if line["test_accuracy"] >= accuracy)
    return [next(reached)] if any(line["test_accuracy"] >= accuracy for line in lines) else []
