"""Run a script with a small net in the place of its own, which notes every image that it is shown, and what it becomes.

torchrun --standalone --nproc-per-node 2 witness.py SCRIPT FOLDER, then the script's flags
"""

import json
import os
import sys
import zlib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_helpers.rank.data import MEAN, STD


class Witness(nn.Module):
    """A small network without dropout: several ranks and one process can then end with the same weights."""

    trained: ClassVar["Witness | None"] = None  # the one that was trained last
    passes: ClassVar[list[tuple[bool, list[int]]]] = []  # whether in training, and the images; one list for all

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, 3)
        self.fc = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the ten digits for each image; the images are noted."""
        if not Witness.passes or Witness.passes[-1][0] != self.training:
            Witness.passes.append((self.training, []))
        Witness.passes[-1][1].extend(map(digest, x.detach()))
        Witness.trained = self if self.training else Witness.trained
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)


def digest(image: Tensor) -> int:
    """A number that tells one image from another: of its bytes, as they stand in the file."""
    pixels = image.float().mul(STD).add(MEAN).mul(255).round().byte()
    return zlib.crc32(pixels.cpu().numpy().tobytes())


def imported(path: str) -> ModuleType:
    """The script as a module; its main has not run."""
    spec = spec_from_file_location("script", path)
    module = sys.modules["script"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the script, and write what this rank has seen to FOLDER/rank_R.json; every rank calls it."""
    script, folder, *flags = sys.argv[1:]
    module, sys.argv = imported(script), [script, *flags]
    module.Net = Witness
    module.main()
    seen = {"train": [images for training, images in Witness.passes if training]}
    seen["test"] = [images for training, images in Witness.passes if not training]
    weights = torch.cat([p.detach().flatten().cpu() for p in Witness.trained.parameters()]) if Witness.trained else []
    seen["weights"] = list(map(float, weights))
    Path(folder, f"rank_{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
