"""The kinds of GPU that `fits` knows, and whether so many bytes fit one.

`fits` calls it in the learner's process. Needs nothing but Python.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ddp_tools import PlainError

# What nvidia-smi reports of a card. Most are from github.com/modal-labs/modal-client/pull/2797, the
# V100-16 from 4paradigm/k8s-vgpu-scheduler issue 7; A10G, V100-32 and H200 are as many public logs
# have them.
CARDS = {
    "T4": (16, 15_360),  # sold as so many GB, MiB
    "V100-16": (16, 16_160),
    "A10": (24, 23_028),
    "A10G": (24, 23_028),
    "L4": (24, 23_034),
    "V100-32": (32, 32_510),
    "A100-40": (40, 40_960),
    "L40S": (48, 46_068),
    "H100": (80, 81_559),
    "A100-80": (80, 81_920),
    "H200": (141, 143_771),
}
# Of that the driver keeps up to 0.8 GB: in errors out of memory a T4 has 14.56 GiB
# (Zheng-Chong/CatVTON issue 133), an L40S 44.42 (stepfun-ai/Step-Video-T2V issue 8), an H100 79.11
# (vllm-project/vllm issue 27508).
DRIVER = 0.8e9
# For CUDA's context, NCCL and cuBLAS; for the allocator, and what the prediction is off: never
# measured here.
BESIDE, SLACK = 1e9, 0.05
SIZES = ("16", "24", "40", "80")  # GB as sold, of which a table tells if none is named

FITS, CLOSE, TOO_LARGE = "fits", "too close to tell", "does not fit"


class Gpu(NamedTuple):
    """A kind of GPU: its name, and in bytes what surely fits, and what torch can have at most."""

    name: str
    sure: float
    most: float

    def answer(self, need: float) -> str:
        """Whether tensors of so many bytes fit: FITS, CLOSE or TOO_LARGE."""
        if need <= self.sure:
            return FITS
        return CLOSE if need <= self.most else TOO_LARGE


def gpu_with(name: str, free: float, most: float) -> Gpu:
    """The GPU of this name, of whose memory so many bytes are free, and torch can have the most."""
    return Gpu(name, free * (1 - SLACK) - BESIDE, most)


def gpus_named(names: Sequence[str] = SIZES) -> list[Gpu]:
    """GPUs by name, the smallest first. Raises PlainError.

    names: of CARDS, or GB as sold, which stands for the least such card.
    """
    gpus = []
    for name in names:
        most = _size_of(name) - DRIVER
        label = f"type {name.upper()}" if name.upper() in CARDS else f"{name} GB"
        gpus.append(gpu_with(label, most, most))
    return sorted(gpus, key=lambda gpu: gpu.most)


def _size_of(name: str) -> float:
    """The bytes that nvidia-smi reports of a GPU of this name. Raises PlainError."""
    sizes = []
    for card, (sold, mib) in CARDS.items():
        if name.upper() in (card, str(sold)):
            sizes.append(mib * 2**20)
    try:
        size = min(sizes) if sizes else float(name) * 1e9  # no card of the table has less
    except ValueError:
        size = 0
    if not 0 < size < 1e18:
        raise PlainError(f"--gpu {name} is no number of GB, and none of {', '.join(CARDS)}")
    return size
