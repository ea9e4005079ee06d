"""Compile the simulated GPUs for the installed torch, once, into a cache. Needs g++.

CUDA is not needed: torch's own wheels include the headers of CUDA and NCCL.
"""

import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from ddp_tools import PlainError

_SOURCE = Path(__file__).parent / "source"
_MISSING = Path(__file__).parent / "missing.py"
# The wheels' headers include more than cuda_runtime_api.h, for nvcc: these guards skip it.
_CLOSED = ("CUDA_RUNTIME", "CUDA_FP16", "CUDA_BF16", "CUDA_FP8")
# The headers of torch 2.14 need C++20; the sources are C++17.
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{_SOURCE}"]
_FLAGS += [f"-D__{name}_H__" for name in _CLOSED]
# `import torch` calls the entry points of all distributions on the path under torch.backends.
_LOADER = """import torch

def load():
    if torch.__version__ != {version!r}:
        lack = f"this is torch {{torch.__version__}}, but the simulated GPUs are for {version}"
        raise RuntimeError(f"{{lack}}: start ddp-course with the Python that runs the script")
    torch.ops.load_library({library!r})
    import simulated_gpus_missing
"""
_ENTRY = "[torch.backends]\nsimulated_gpus = simulated_gpus_loader:load\n"


def build() -> Path:
    """Return the folder with the libraries; compile them if there are none for this torch yet.

    Raises PlainError, with the fix, if that fails.
    """
    torch, version = _find_torch()
    compiler = _find_compiler()
    command = [compiler, *_FLAGS, *_header_folders(torch)]
    kind = f"{version} {torch} {compiler} {_run([compiler, '--version'])}".encode()
    files = sorted(filter(Path.is_file, [*_SOURCE.rglob("*"), _MISSING, Path(__file__)]))
    checksum = hashlib.sha256(kind + b"".join(path.read_bytes() for path in files)).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp-course"
    folder = cache / f"simulated-gpus-{checksum[:16]}"
    if folder.is_dir():
        return folder
    print(f"Compiling the simulated GPUs for torch {version}, once: half a minute", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache, prefix="unfinished-"))
    try:
        _compile(made, torch, command)
        _write_loader(made, version, folder / "operators.so")
        try:
            made.rename(folder)
        except OSError:  # another process has just made the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _find_torch() -> tuple[Path, str]:
    """Return the folder of torch, and its version. Raises PlainError."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"{platform.system()} {platform.machine()}"
        raise PlainError(f"simulated GPUs need Linux on x86-64, this is {here}: use such a machine")
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise PlainError("simulated GPUs need PyTorch, which this Python lacks: pip install torch")
    torch = Path(spec.origin).parent
    about = runpy.run_path(str(torch / "version.py"))
    version = about["__version__"]
    if not about["cuda"]:
        cure = "install a build with CUDA, as pip install torch does"
        raise PlainError(f"torch {version} is built without CUDA: {cure}")
    return torch, version


def _find_compiler() -> str:
    """Return the path of the C++ compiler. Raises PlainError."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise PlainError("simulated GPUs need a C++ compiler: apt-get install g++, or set CXX")
    return compiler


def _header_folders(torch: Path) -> list[str]:
    """Return the flags for CUDA's, NCCL's and torch's headers. Raises PlainError."""
    flags = [f"-I{torch / 'include'}"]
    for header in ("cuda_runtime_api.h", "nccl.h"):
        found = sorted((torch.parent / "nvidia").glob(f"*/include/{header}"))
        if not found:
            cure = "pip install --force-reinstall torch installs it"
            raise PlainError(f"{header} is not in {torch.parent / 'nvidia'}, next to torch: {cure}")
        flags.append(f"-I{found[-1].parent}")
    return flags


def _compile(folder: Path, torch: Path, command: list[str]) -> None:
    """Compile both libraries into a folder."""
    sources = sorted(map(str, _SOURCE.glob("*.cpp")))
    operators = str(_SOURCE / "operators.cpp")
    sources.remove(operators)
    library = folder / "libcuda.so.1"
    # The functions of the driver that torch, and Triton for torch.compile, need as they are loaded.
    wanted = _run(["nm", "-D", "--undefined-only", str(torch / "lib" / "libcaffe2_nvrtc.so")])
    triton = torch.parent / "triton" / "backends" / "nvidia" / "driver.c"
    wanted += triton.read_text() if triton.is_file() else ""
    names = set(re.findall(r"\bcu[A-Z]\w+", wanted))
    defined = "".join(path.read_text() for path in _SOURCE.glob("*.cpp"))
    aliases = [
        f"-Wl,--defsym={name}=simulated_gpus_refuse"
        for name in sorted(names)
        if f" {name}(" not in defined
    ]
    soname = f"-Wl,-soname,{library.name}"
    _run([*command, *sources, "-o", str(library), soname, *aliases, "-lpthread", "-ldl"])
    (folder / "libnvidia-ml.so.1").touch()  # found before a real one, which would count real GPUs
    torch_flags = [f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", str(library)]
    _run([*command, operators, "-o", str(folder / "operators.so"), *torch_flags])


def _run(command: list[str]) -> str:
    """Run a command to its end and return its output. Raises PlainError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PlainError(f"{command[0]} cannot be run ({error.strerror}): install g++") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise PlainError(
            f"the simulated GPUs cannot be compiled by {command[0]}: {lines[0].strip()}"
        )
    return done.stdout


def _write_loader(folder: Path, version: str, library: Path) -> None:
    """Write the entry point with which `import torch` loads the operators."""
    info = folder / "python" / "simulated_gpus_loader-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: simulated-gpus-loader\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(_ENTRY)
    text = _LOADER.format(version=version, library=str(library))
    (info.parent / "simulated_gpus_loader.py").write_text(text)
    shutil.copyfile(_MISSING, info.parent / "simulated_gpus_missing.py")
