"""Cut a log into attempts: a run that is requeued, restarted or launched again starts one.

`command` calls it. Each attempt has a failure of its own, and is judged by itself.
"""

import re
from collections.abc import Sequence

from ddp_tools.explain.endings import read_endings
from ddp_tools.explain.lines import TASK, Line

# The last line of an attempt, and the first one of the next.
_ENDS = re.compile(
    r"DUE TO (?:JOB )?REQUEUE|DUE TO NODE FAILURE, SEE|^job \d+ is requeued|^Requeu\w+ (?:job )?\d+"
    r"|; will restart worker group"
)
_BEGINS = re.compile(
    r"(?i)^\W*requeued\b|^\W*(?:restart|attempt)(?:ing)?\W{0,2}(?:count|number)?\W{0,2}[1-9]\d*\b"
    r"|^\W*\w*RESTART_COUNT\W{1,2}[1-9]|^\W*job \d+\b.*\(restart [1-9]\d*\)"
)
_OF_SLURM = re.compile(r"(?:srun|slurmstepd\S*|scontrol): ")
# What launchers write when they start ranks: a new start only if ranks have ended before it.
_STARTS = re.compile(
    r"Restarting worker group|Rendezvous'ing worker group|Starting elastic_operator"
    r"|Setting OMP_NUM_THREADS environment variable for each process"
    r"|^job \d+ on \S+: \d+ ranks, meeting at "
)
_RESTARTS = re.compile(r"\brestart_count=(\d+)")
_WORLD = re.compile(
    r"\b[Ww](?i:orld(?:[_ ]?size)?)(?:\W{1,3}| of )(\d+)\b|\bglobal_world_sizes=\[(\d+)"
    r"|\bnranks (\d+)\b|: (\d+) ranks, meeting at|Starting with (\d+) processes"
)


def world_sizes(lines: Sequence[Line]) -> list[str]:
    """List the world sizes that lines tell, in their order."""
    sizes = _WORLD.finditer("\n".join(line.text for line in lines))
    return list(dict.fromkeys(next(filter(None, match.groups())) for match in sizes))


def split(lines: Sequence[Line]) -> list[Sequence[Line]]:
    """Return the lines of each attempt, in the order of the log; all in one if it has one only.

    Lines of several files are not cut: nothing tells which parts of them belong together.
    """
    if len({line.file.partition(TASK)[0] for line in lines}) != 1:
        return [lines]
    ended = {id(ending.line) for ending in read_endings(lines)}
    cuts, restarts, is_over, requeued, fresh = [0], 0, False, False, True
    for place, line in enumerate(lines):
        starts = is_over and _STARTS.search(line.text)
        anew = requeued and not _OF_SLURM.match(line.text)
        count = "restart_count" in line.text and _RESTARTS.search(line.text)
        rises = count and int(count[1]) > restarts
        restarts = int(count[1]) if count else restarts
        begins = bool(_BEGINS.search(line.text) or starts or anew or rises)
        if begins and not fresh:
            cuts.append(place)
        if begins:
            is_over, requeued, fresh = False, False, True
        elif _ENDS.search(line.text):
            is_over = True
            requeued |= line.text.startswith("slurmstepd")
        else:
            is_over |= id(line) in ended
            # What several agents say of one restart is no attempt of its own.
            fresh = fresh and len(cuts) > 1 and "torch/distributed/elastic" in line.text
    ends = [*cuts[1:], len(lines)]
    return [lines[begin:end] for begin, end in zip(cuts, ends, strict=True)]
