"""Condense a rank's state for notes: digests of tensors and generators, keys, source files.

The observer calls these on every rank. Needs torch.
"""

import hashlib
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

# Files that are not part of the script.
_LIBRARIES = (
    *("<frozen", str(Path(__file__).resolve().parents[1])),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
_LETTERS = 12  # characters of a digest


def is_library(file: str) -> bool:
    """Whether a source file is one of Python's, of its packages, or of these tools."""
    return file.startswith(_LIBRARIES)


def sums_of(tensors: Iterable[torch.Tensor]) -> list[tuple[float, float]]:
    """For each tensor its sum and the sum of its absolute values, in float64."""
    doubles = (tensor.detach().double() for tensor in tensors)
    return [(float(double.sum()), float(double.abs().sum())) for double in doubles]


def digest_of(tensor: torch.Tensor) -> str:
    """Digest the bits of a tensor."""
    flat = tensor.detach().cpu().reshape(-1)
    return hashlib.sha1(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:_LETTERS]


def write_numbers(path: Path, tensors: Collection[torch.Tensor]) -> str:
    """Write all numbers of the tensors, one after the other; return the file's name.

    The file has float64 and the suffix .f64 if all tensors are float64; else float32 and .f32.
    """
    double = all(tensor.dtype == torch.float64 for tensor in tensors)
    suffix, dtype = (".f64", torch.float64) if double else (".f32", torch.float32)
    with (file := path.with_suffix(suffix)).open("wb") as stream:
        for tensor in tensors:
            stream.write(tensor.detach().cpu().to(dtype).numpy().tobytes())
    return str(file)


def rng_digest() -> str:
    """Digest the states of torch's generators, on the CPU and on this rank's GPU."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return digest_of(torch.get_rng_state()) + (
        digest_of(torch.cuda.get_rng_state()) if on_gpu else ""
    )


def sample_digests(batch: object) -> list[str]:
    """Digest each sample of a batch, in the first tensor that is found in it."""
    while isinstance(batch, list | tuple | dict) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    if not isinstance(batch, torch.Tensor) or not batch.dim():
        return []
    if batch.layout != torch.strided or batch.is_complex():
        return []
    return [digest_of(sample) for sample in batch]


def inputs_digest(arguments: Iterable[object]) -> str:
    """Digest the tensors among the arguments of a model, or in lists and dictionaries there."""
    digests = []
    waiting = [*arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        elif not isinstance(value, torch.Tensor) or value.is_complex():
            continue
        elif value.layout == torch.strided:
            digests.append(digest_of(value))
    return hashlib.sha1("".join(digests).encode()).hexdigest()[:_LETTERS]


def names_in(saved: object, depth: int = 3) -> Iterator[str]:
    """List the keys of a saved dictionary, and of the dictionaries inside it."""
    for name, value in saved.items() if isinstance(saved, dict) else ():
        yield str(name)
        if depth:
            yield from names_in(value, depth - 1)
