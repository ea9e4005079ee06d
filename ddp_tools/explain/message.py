"""Find what a failure's own message says: a cause, a fix, another rank; and NCCL's words for it.

`judge` calls it. A sentence of the library that failed comes before any rule.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from ddp_tools.explain.lines import Line, is_next, own_lines

_WINDOW = 200
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
    r"^Traceback|^\s+File |^frame #|^(?!nccl)\w+(?:\.\w+)*(?:Error|Exception)\b"
    r"|^[\[{]?[EWIF]\d{3,4} |NCCL (?:INFO|WARN)|^Exception raised from"
    r"|^(?:srun|slurmstepd|sbatch): "
)
# Another process has gone, or was never there; a server on the web is none of the ranks.
_OF_ANOTHER = re.compile(
    r"(?i)^(?!.*https?:).*(?:remote process exited|ncclRemoteError|broken ?pipe|closed by .*peer"
    r"|\bconnection ?(?:\w+ ){0,2}(?:refused|reset|closed|aborted|lost)\b"
    r"|\bconnection(?:refused|reset|aborted)error|failed to recv\b|recvvalue failed"
    r"|\bpeer (?:\w+ ){0,2}(?:gone|exited|died|disconnected)|\bstore\b.* (?:gone|shut down))"
)
_THREAD = re.compile(r"\S+:\d+:\d+ \[\d+\]")
_HANDS_UP = re.compile(r"NCCL INFO \S+ -> [1-9]")


def message(lines: Sequence[Line], order: int) -> list[str]:
    """Return a message, which begins with the line at this place, line by line."""
    text = [lines[order].text]
    own = own_lines(lines[order : order + _WINDOW], 0)  # lines of other ranks may stand between
    for before, line in pairwise(islice(own, _LONGEST + 1)):
        if _ANOTHER.search(line.text) or not is_next(before, line):
            break
        text.append(line.text)
    return text


def says(lines: Sequence[Line], order: int) -> list[str]:
    """Return the sentences of a message that name a cause or a fix."""
    text = message(lines, order)
    sentences = [each.strip() for line in text for each in _SENTENCE.split(line)]
    told = (each for each in sentences if _SAYS.search(each) and not _COMMON.search(each))
    return list(dict.fromkeys(told))[:_MOST]


def is_of_another(lines: Sequence[Line], order: int) -> bool:
    """Say whether a message tells that another process has gone, or was not there."""
    return any(map(_OF_ANOTHER.match, message(lines, order)))


def nccl_words(lines: Sequence[Line], order: int, rank: int | None) -> Line | None:
    """Return the warning of NCCL that led to a rank's exception of NCCL, or its last error.

    It is what NCCL repeats below "Last error", if that is a warning. Else NCCL hands an error up
    from call to call, and logs each as `file:line -> N`: the first warning that its thread follows
    by such a line is where it began. Without INFO it is the last one that tells of no other
    process; a warning names the GPU of its node, and one of this rank is taken if there is one.
    """
    last = [line for line in _last_errors(lines) if line.rank == rank]

    def weight(at: int) -> tuple[bool, int, bool, bool, int]:
        text = lines[at].text
        thread = _THREAD.search(text)
        behind = (it.text for it in lines[at + 1 : order] if thread and thread[0] in it.text)
        begins = -at if _HANDS_UP.search(next(behind, "")) else -len(lines)
        repeated = any(error.text in text for error in last)
        return repeated, begins, not _OF_ANOTHER.match(text), f" [{rank}] " in text, at

    warned = [at for at in range(order) if "NCCL WARN" in lines[at].text]
    return lines[max(warned, key=weight)] if warned else next(iter(last), None)


def rank_of_warning(lines: Sequence[Line], warnings: Sequence[Line]) -> int | None:
    """Return the rank that repeats a warning of NCCL as its last error; None if none does."""
    for error in _last_errors(lines):
        if any("NCCL WARN" in line.text and error.text in line.text for line in warnings):
            return error.rank
    return None


def _last_errors(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield what NCCL repeats at the end of an exception, of each rank."""
    for order, line in enumerate(lines):
        if line.text.startswith("Last error:"):
            yield from islice(own_lines(lines, order), 1, 2)
