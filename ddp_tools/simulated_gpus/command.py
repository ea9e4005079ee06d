"""`ddp-course gpus N -- COMMAND`: run a command on simulated GPUs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ddp_tools import PlainError
from ddp_tools.simulated_gpus.build import build

_COMMANDS = Path(__file__).parent / "bin"  # nvidia-smi
_SPEED = "torch's own code for CUDA and NCCL runs, but on the CPU: speeds mean nothing"


def refuse_beside_real_gpus(devices: Path = Path("/dev")) -> None:
    """Raise PlainError if this machine has a real NVIDIA GPU, or under WSL any GPU of Windows.

    devices: the folder with device files.
    """
    for path in sorted([*devices.glob("nvidia[0-9]*"), *devices.glob("dxg")]):
        cure = "run the command without ddp-course, or give --beside-real-gpus"
        raise PlainError(f"this machine has a real GPU ({path}): {cure}")


def run(count: int, memory_mb: int, command: list[str], beside_real_gpus: bool) -> int:
    """Run a command and its child processes with simulated GPUs; return its exit status.

    memory_mb: of each GPU. Raises PlainError if they cannot be built, or there is a real GPU.
    """
    if not command:
        raise PlainError("gpus needs a command, as in: ddp-course gpus 2 -- python train.py")
    if count < 1 or memory_mb < 1:
        raise PlainError(f"{count} GPUs of {memory_mb} MB each: both numbers must be 1 or more")
    if not beside_real_gpus:
        refuse_beside_real_gpus()
    if shutil.which(command[0], path=f"{_COMMANDS}{os.pathsep}{os.environ['PATH']}") is None:
        raise PlainError(f"{command[0]} is not a program here: give one, as in: python train.py")
    libraries = build()
    gpus = f"{count} simulated GPU{'s' if count > 1 else ''}"
    print(f"{gpus}: {_SPEED}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="simulated-gpus-") as folder:
        if re.search(r"[\s:;]", folder):  # separators in the loader's lists of paths
            raise PlainError(f"a library in {folder!r} cannot be preloaded: export TMPDIR=/tmp")
        for name, target in {"libraries": libraries, "bin": _COMMANDS}.items():
            Path(folder, name).symlink_to(target)
        return _run(command, environment(Path(folder), count, memory_mb))


def environment(folder: Path, count: int, memory_mb: int) -> dict[str, str]:
    """Return the environment of processes that see simulated GPUs.

    folder: through which ranks exchange tensors. `libraries` in it is a link to the folder of
    `build`, since a home directory may contain a space, which ends a path in LD_PRELOAD.
    """
    env, libraries = dict(os.environ), folder / "libraries"
    first = {
        "LD_PRELOAD": libraries / "libcuda.so.1",
        "LD_LIBRARY_PATH": libraries,
        "PYTHONPATH": libraries / "python",
        "PATH": folder / "bin",
    }
    for name, path in first.items():
        env[name] = f"{path}:{env[name]}" if env.get(name) else str(path)
    env |= {"SIMULATED_GPUS": str(count), "SIMULATED_GPUS_MEMORY_MB": str(memory_mb)}
    env["TORCH_DISABLE_NATIVE_JIT"] = "1"  # else some operators use Triton, outside the simulation
    return env | {"SIMULATED_GPUS_FOLDER": str(folder)}


def _run(command: list[str], env: dict[str, str]) -> int:
    """Run a command to its end; forward signals to it."""
    process = subprocess.Popen(command, env=env)
    # The terminal sends Ctrl-C to both processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    status = process.wait()
    return status if status >= 0 else 128 - status  # as in a shell
