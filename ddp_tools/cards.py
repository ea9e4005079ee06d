"""The GPU types that `fits` knows, and whether a number of bytes fits one.

`fits` calls it in the driver process. Needs only Python.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ddp_tools import PlainError

# The memory that nvidia-smi reports. Most values are from modal-labs/modal-client pull 2797, the
# V100-16 from 4paradigm/k8s-vgpu-scheduler issue 7; A10G, V100-32 and H200 are from several public
# logs.
CARDS = {
    "T4": (16, 15_360),  # GB as sold, MiB as reported
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
# The driver keeps up to 0.8 GB of it: in out-of-memory errors a T4 has 14.56 GiB
# (Zheng-Chong/CatVTON issue 133), an L40S 44.42 (stepfun-ai/Step-Video-T2V issue 8), an H100 79.11
# (vllm-project/vllm issue 27508).
DRIVER = 0.8e9
# Bytes for CUDA's context, NCCL and cuBLAS; and the fraction for the allocator and the error of the
# prediction. Neither was measured here.
BESIDE, SLACK = 1e9, 0.05
SIZES = ("16", "24", "40", "80")  # GB as sold: the table's GPUs if none is named

FITS, CLOSE, TOO_LARGE = "fits", "too close to tell", "does not fit"


class Gpu(NamedTuple):
    """A GPU type: its name, the bytes that surely fit, and the bytes that torch can use at most."""

    name: str
    sure: float
    most: float

    def answer(self, need: float) -> str:
        """Whether tensors of `need` bytes fit: FITS, CLOSE or TOO_LARGE."""
        if need <= self.sure:
            return FITS
        return CLOSE if need <= self.most else TOO_LARGE


def gpu_with(name: str, free: float, most: float) -> Gpu:
    """A GPU with `free` bytes of free memory, of which torch can use `most` at most."""
    return Gpu(name, free * (1 - SLACK) - BESIDE, most)


def gpus_named(names: Sequence[str] = SIZES) -> list[Gpu]:
    """GPUs by name, the smallest first. Raises PlainError.

    names: keys of CARDS, or GB as sold, which means the smallest such card.
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
        raise PlainError(f"--gpu {name} is not a number of GB, nor one of {', '.join(CARDS)}")
    return size
