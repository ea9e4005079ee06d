"""Run a learner's script, and note the orders that this rank's samplers give and how often it saves.

torchrun --standalone --nproc-per-node 2 witness.py SCRIPT FOLDER, then the script's flags
"""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DistributedSampler


def main() -> None:
    """Run the script in FOLDER, and write the notes to FOLDER/rank_R.json; every rank calls it."""
    script, folder, *flags = sys.argv[1:]
    notes = {"orders": [], "saves": 0}
    deal, save = DistributedSampler.__iter__, torch.save

    def noted_deal(sampler: DistributedSampler) -> Iterator[int]:
        order = list(deal(sampler))
        notes["orders"].append([len(sampler.dataset), order])
        return iter(order)

    def noted_save(*things: object, **options: object) -> None:
        notes["saves"] += 1
        save(*things, **options)

    DistributedSampler.__iter__, torch.save = noted_deal, noted_save
    os.chdir(folder)
    sys.argv = [script, *flags]
    rank = os.environ["RANK"]
    runpy.run_path(script, run_name="__main__")
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
