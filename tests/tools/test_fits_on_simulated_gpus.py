"""What `fits` predicts, held against the peak of CUDA's allocator, which is the real one on a simulated GPU."""

import json
import sys
from pathlib import Path

from real import THOROUGH
from simulated import run
from simulated_gpus.peaks import MODELS

PROGRAM = Path(__file__).parent / "simulated_gpus" / "peaks.py"
WITHIN = 0.05  # the allocator rounds up, and some operators take memory for themselves


def test_it_predicts_the_peak_of_the_allocator(simulated_gpus):
    names = list(MODELS) if THOROUGH else ["the MNIST Net", "letters", "GRU"]
    done = run(simulated_gpus, [sys.executable, PROGRAM, *names], gpus=1, memory_mb=1024)
    assert done.returncode == 0, done.stderr
    told = {name: (predicted, peak) for name, predicted, peak in map(json.loads, done.stdout.splitlines())}
    assert list(told) == names
    off = {name: round(predicted / peak - 1, 3) for name, (predicted, peak) in told.items()}
    assert max(map(abs, off.values())) < WITHIN, off
    peaks = [peak for _, peak in told.values()]
    assert max(peaks) > (1 + 2 * WITHIN) * min(peaks), "the control: one number would not do for all"
