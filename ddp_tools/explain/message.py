"""Find what a failure's own message says of its cause or its cure, and NCCL's own words for it.

`judge` calls it. A sentence of the library that failed comes before any rule.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from ddp_tools.explain.lines import Line, own_lines

_LONGEST = 8  # lines of a message behind the one that names the exception
_MOST = 3  # sentences
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z(])")
_SAYS = re.compile(
    r"(?i)\b(?:usually|typically|often|likely|probably|may be|might be|can be|is|was)"
    r" (?:caused by|due to|because)"
    r"|\bset(?:ting)? (?:the )?(?:environment variable )?`?'?[A-Z]\w{3,}"
    r"|\bset \S+ ?= ?\S|\bexport [A-Z_]+=|\bmutually exclusive\b|\bmake sure\b|\bensure that\b"
    r"|\b(?:please|consider|try)\b (?!report|file|contact|open an|see the log|check the log)"
    r"|\byou (?:must|need|should|can|may|have to)\b|\binstead\b"
)
# Sentences that PyTorch puts below many messages, of whatever cause.
_COMMON = re.compile(
    r"run with NCCL_DEBUG=INFO for details|might be asynchronously reported"
    r"|[Cc]heck the logs of the remote worker|TORCH_USE_CUDA_DSA|CUDA_LAUNCH_BLOCKING=1"
    r"|TORCH_SHOW_CPP_STACKTRACES|caused by a remote worker hanging or bugs in the application"
)
_ANOTHER = re.compile(
    r"^Traceback|^\s+File |^\w+(?:\.\w+)*(?:Error|Exception)\b|^[\[{]?[EWIF]\d{3,4} |^frame #"
    r"|NCCL (?:INFO|WARN)|^Exception raised from|^(?:srun|slurmstepd|sbatch): "
)
_DEVICE = re.compile(r":\d+:\d+ \[(\d+)\] ")
_THREAD = re.compile(r"\S+:\d+:\d+ \[\d+\]")
_HANDS_UP = re.compile(r"NCCL INFO \S+ -> [1-9]")


def says(lines: Sequence[Line], first: Line) -> list[str]:
    """Return the sentences of a message that name a cause or a cure; `first` is its first line."""
    own, begin = own_lines(lines, first)
    text = [first.text]
    for before, line in pairwise(own[begin : begin + 1 + _LONGEST]):
        if _ANOTHER.search(line.text) or line.number > before.number + 1:
            break
        text.append(line.text)
    sentences = [each.strip() for line in text for each in _SENTENCE.split(line)]
    told = (each for each in sentences if _SAYS.search(each) and not _COMMON.search(each))
    return list(dict.fromkeys(told))[:_MOST]


def nccl_words(lines: Sequence[Line], root: Line) -> Line | None:
    """Return the warning of NCCL that led to an exception of NCCL, or its last error behind it.

    NCCL hands an error up from call to call, and logs each as `file:line -> N`: the first warning
    that its thread follows by such a line is where it began. Without INFO it is the last one;
    a warning names the GPU of its node, and one of the root's rank is taken if there is one.
    """
    place = next(number for number, line in enumerate(lines) if line is root)
    warned = [(at, line) for at, line in enumerate(lines[:place]) if "NCCL WARN" in line.text]
    for at, line in warned:
        thread = _THREAD.search(line.text)
        behind = (it.text for it in lines[at + 1 : place] if thread and thread[0] in it.text)
        if _HANDS_UP.search(next(behind, "")):
            return line
    own = [line for _, line in warned if root.rank is not None and _gpu_of(line) == root.rank]
    if warned:
        return (own or [line for _, line in warned])[-1]
    of_rank = pairwise(line for line in lines[place:] if line.rank == root.rank)
    return next((after for line, after in of_rank if line.text.startswith("Last error:")), None)


def _gpu_of(line: Line) -> int | None:
    match = _DEVICE.search(line.text)
    return int(match[1]) if match else None
