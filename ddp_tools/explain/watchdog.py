"""Compare what NCCL's watchdogs say over the ranks: who waits in which call, and who is behind.

`judge` calls it, with all lines of the logs, where a watchdog's timeout is the root.
"""

import re
from collections.abc import Iterable, Sequence

from ddp_tools.explain.lines import Line

_CALL = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
_COMPLETED = re.compile(r"last completed (?:NCCL )?work: (-?\d+)")
_GROUP = re.compile(r"\[PG (?:ID )?(\d+)")


def compare(lines: Iterable[Line], ranks: Sequence[int]) -> tuple[str, str, list[int]] | None:
    """Return what the numbers mean, the cure, and the ranks that are behind; None if unknown.

    They can be compared only where each rank of the log (`ranks`) says its call in one group.
    """
    calls: dict[int, tuple[int, str]] = {}
    completed: dict[int, int] = {}
    groups = set()
    for line in lines:
        if line.rank is None:
            continue
        if match := _CALL.search(line.text):
            calls.setdefault(line.rank, (int(match[1]), match[2]))
            group = _GROUP.search(line.text)
            groups.add(group[1] if group else "")
        if match := _COMPLETED.search(line.text):
            completed.setdefault(line.rank, int(match[1]))
    if len(calls) < 2 or set(calls) != set(ranks) or len(groups) > 1:
        return None
    low, high = min(calls.values()), max(calls.values())
    early = sorted(rank for rank, call in calls.items() if call == low)
    if low[1] != high[1]:
        late = sorted(rank for rank, call in calls.items() if call == high)
        return (
            f"the ranks make different calls: {_names(early)} in {low[1]}, number {low[0]}; "
            f"{_names(late)} in {high[1]}, number {high[0]}",
            "look for the place before these calls where the ranks go different ways: a branch on "
            "the rank or on a rank's own data, or one rank that evaluates or saves alone",
            [],
        )
    if low != high:
        return (
            f"{_names(early)} made fewer calls than the others: number {low[0]} against {high[0]}",
            "look in its code and its data for a call that it skips, or a loop that is shorter",
            early,
        )
    if set(completed) == set(calls) and max(completed.values()) <= 0:
        return (
            f"all ranks of this log wait in the same call, {low[1]}, number {low[0]}, and none "
            "was ever completed: nothing goes through between the GPUs",
            "it is the network or the way between the GPUs, not the program: the right "
            "NCCL_SOCKET_IFNAME, and a trial with NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1; "
            "NCCL_DEBUG=INFO says which way is taken",
            [],
        )
    if set(completed) == set(calls):
        return (
            f"all ranks of this log wait in the same call, {low[1]}, number {low[0]}, after "
            "others went through: a rank that is not in this log, or the network, has gone",
            "look for a rank whose lines are not here and for a node that failed; then at the "
            "network (link errors, NCCL_DEBUG=WARN)",
            [],
        )
    return None


def _names(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
