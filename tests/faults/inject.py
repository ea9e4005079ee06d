"""Harm this rank at a chosen moment: what it calls there is wrapped, and at the n-th call the harm is done."""

import io
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

PART = re.compile(r".*/checkpoints/\w+\.part")  # the path of a checkpoint that is being written


def on_call(owner, name, number, harm, after=False, only=lambda *args, **kwargs: True):
    """At the number-th call of owner.name that `only` counts, do the harm: before it, or after."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        calls[0] += counted if (counted := only(*args, **kwargs)) else 0
        now = counted and calls[0] == number
        if now and not after:
            harm()
        result = original(*args, **kwargs)
        if now and after:
            harm()
        return result

    setattr(owner, name, wrapped)


def half_written(number, harm):
    """Do the harm when half of the number-th checkpoint is in its file."""
    original, calls = io.open, [0]

    def opened(file, mode="r", *args, **kwargs):
        stream = original(file, mode, *args, **kwargs)
        if PART.fullmatch(str(file)) and "w" in mode:
            calls[0] += 1
            if calls[0] == number:
                write = stream.write

                class Half:
                    def __enter__(self):
                        return self

                    def __exit__(self, *_):
                        stream.close()

                    def __getattr__(self, name):
                        return getattr(stream, name)

                    def write(self, content):
                        write(content[: len(content) // 2])
                        stream.flush()
                        harm()
                        write(content[len(content) // 2 :])

                return Half()
        return stream

    io.open = opened


def is_checkpoint(path, *_, **__):
    return PART.fullmatch(str(path)) is not None


def is_state(state, *_, **__):
    return isinstance(state, dict) and "progress" in state


# The moments, and how to be there: each takes a count and the harm.
MOMENTS = {
    "init": lambda n, harm: on_call(dist, "init_process_group", n, harm),
    "step": lambda n, harm: on_call(torch.Tensor, "backward", n, harm),
    "evaluation": lambda n, harm: on_call(nn.Module, "eval", n, harm, after=True),
    # StepLR takes one step of its own when it is made.
    "epoch boundary": lambda n, harm: on_call(StepLR, "step", n + 1, harm, after=True),
    "barrier": lambda n, harm: on_call(dist, "barrier", n, harm),
    "record": lambda n, harm: on_call(Path, "write_text", n, harm, only=lambda path, _: path.name == "spec.json"),
    "save: before": lambda n, harm: on_call(torch, "save", n, harm, only=is_state),
    "save: mid-write": half_written,
    "save: before rename": lambda n, harm: on_call(Path, "replace", n, harm, only=is_checkpoint),
    "save: after": lambda n, harm: on_call(Path, "replace", n, harm, after=True, only=is_checkpoint),
}


def send(number):
    """Send this process a signal."""
    os.kill(os.getpid(), number)


def poison(number):
    """From the number-th call on, this rank's losses are not numbers."""
    original, calls = F.cross_entropy, [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        return original(*args, **kwargs) * (float("nan") if calls[0] >= number else 1)

    F.cross_entropy = wrapped


def move_run_folder():
    """Move the run's folder away, as somebody's `mv` does while the job runs."""
    folder = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    folder.rename(folder.with_name("moved"))


HARMS = {
    "SIGKILL": lambda: send(signal.SIGKILL),
    "SIGSTOP": lambda: send(signal.SIGSTOP),
    "SIGTERM": lambda: send(signal.SIGTERM),
    "SIGUSR2": lambda: send(signal.SIGUSR2),
    "run folder moved": move_run_folder,
    "exit 7": lambda: os._exit(7),
    # A disk that is full: no file of this process may grow beyond 1 MB.
    "disk full": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY)),
    "no room": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)),
}


def inject(fault, moment, number, note):
    """Arm this process: at the number-th moment, write the time into `note` and do the harm."""

    def harm():
        Path(note).write_text(str(time.time()))
        print(f"harm: {fault} at {moment} {number}", file=sys.stderr, flush=True)
        HARMS[fault]()

    if fault == "NaN":
        poison(number)
    else:
        MOMENTS[moment](number, harm)
