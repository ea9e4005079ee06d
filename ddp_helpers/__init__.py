"""The helpers of the course: `rank` runs on every rank, `notebook` where the learner sits."""

from pathlib import Path

__version__ = "0.1.0"
ROOT = Path(__file__).resolve().parents[1]
