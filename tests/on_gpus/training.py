"""What the steps have in common: the scripts, how they are trained, and how their weights differ."""

from functools import partial

import torch

from ddp_helpers import ROOT

NOTEBOOKS, SCRIPTS = ROOT / "notebooks", ROOT / "ddp_helpers" / "rank" / "scripts"


def source(name):
    """The path of a script, read in notebooks/ or written out."""
    return (NOTEBOOKS if name.startswith("spirals") else SCRIPTS) / f"{name}.py"


def begin(gpus, script, ranks, folder, *flags, **env):
    """Start a script in a new folder, with torchrun where there is a rank."""
    folder.mkdir()
    words = (script, *flags)
    return gpus.torchrun(ranks, folder / "log", *words, **env) if ranks else gpus.start(folder / "log", words, **env)


def trained(*programs):
    """Wait until these have ended, all well: all that they said."""
    for program in programs:
        assert program.status() == 0, program.said()
    return "".join(program.said() for program in programs)


read = partial(torch.load, map_location="cpu", weights_only=True)


def difference(first, second):
    """The largest difference of two models' weights."""
    return max((first[name] - second[name]).abs().max().item() for name in first)
