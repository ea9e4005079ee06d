"""Compare what NCCL's watchdogs say over the ranks: who waits in which call, and who is behind.

`judge` calls it, with all lines of the logs, where a watchdog's timeout is the root.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from ddp_tools.explain.lines import Line

_CALL = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?")
_COMPLETED = re.compile(r"last completed (?:NCCL )?work: (-?\d+)")
# One rank writes "[PG GUID 0(default_pg)" and "[PG ID 0 PG GUID 0(default_pg)"; older ones "[PG 0".
_GROUP = re.compile(r"\[PG (?:ID \d+ PG )?(?:GUID |ID )?(\w+)")
_APART = (
    "look for the place before these calls where the ranks go different ways: a branch on the rank "
    "or on a rank's own data, one rank that evaluates or saves alone, or uneven batches "
    "(faults 9, 10, 11 and 27)"
)
_BARRIER = " (NCCL's barrier is an ALLREDUCE of 1 number)"


def compare(
    lines: Iterable[Line], ranks: Sequence[int], late: Sequence[int]
) -> tuple[str, str, Sequence[int]] | None:
    """Return what the numbers mean, the fix, and the ranks that are behind; None if unknown.

    They can be compared only where each rank of the log (`ranks`) says its call in one group, but
    for those that complain of nothing (`late`).
    """
    calls: dict[int, tuple[int, str, str]] = {}
    completed: dict[int, int] = {}
    groups = set()
    for line in lines:
        if line.rank is None:
            continue
        if match := _CALL.search(line.text):
            calls.setdefault(line.rank, (int(match[1]), match[2], match[3] or "?"))
            group = _GROUP.search(line.text)
            groups |= {group[1]} if group else set()
        if match := _COMPLETED.search(line.text):
            completed.setdefault(line.rank, int(match[1]))
    late = [rank for rank in late if rank not in calls]
    if len(calls) + len(late) < 2 or {*calls, *late} != set(ranks) or len(groups) > 1:
        return None
    number, kind, _ = min(calls.values())
    last = max(calls.values())[0]
    if len({call[1] for call in calls.values()}) > 1:
        return f"the ranks make different calls: {_who(calls)}", _APART, []
    if number != last:
        early = sorted(rank for rank, call in calls.items() if call[0] == number)
        return (
            f"{name_ranks(early)} made fewer calls than the others: number {number} against {last}",
            "look in its code and its data for a call that it skips, or a loop that is shorter",
            early,
        )
    if len({call[2] for call in calls.values()}) > 1:
        return f"the ranks make the same call with different sizes: {_who(calls)}", _APART, []
    if late:
        return (
            f"{_alike(kind, number)}, and {name_ranks(late)} did not come to it",
            "the last lines of each of these say what it did instead. If it was still at work "
            "(compiling, loading, evaluating or saving alone), let all ranks do that first, with a "
            "barrier behind, or give init_process_group a longer timeout; if it went another way, "
            "see faults 9 and 27",
            late,
        )
    silent = sorted(set(range(max(calls))) - set(calls))
    if 0 < len(silent) < len(calls):
        return (
            f"{_alike(kind, number)}, and {name_ranks(silent)} did not come to it, or "
            f"{'has' if len(silent) == 1 else 'have'} no lines here",
            "look for what was done there instead: it evaluates, saves or prepares data alone "
            "(fault 27), or has fewer batches (fault 9); or it has gone, or the way to it",
            silent,
        )
    if set(completed) == set(calls) and max(completed.values()) <= 0:
        return (
            f"{_alike(kind, number)}, and none was ever completed: nothing goes through between "
            "the GPUs",
            "it is the network or the way between the GPUs, not the program: the right "
            "NCCL_SOCKET_IFNAME, and a trial with NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1; "
            "NCCL_DEBUG=INFO says which way is taken",
            [],
        )
    if set(completed) == set(calls):
        return (
            f"{_alike(kind, number)}, after others went through: a rank that is not in this log, "
            "or the network, has gone",
            "look for a rank whose lines are not here and for a node that failed; then at the "
            "network (link errors, NCCL_DEBUG=WARN)",
            [],
        )
    return None


def _alike(kind: str, number: int) -> str:
    return f"all ranks that complain wait in the same call, {kind}, number {number}"


def _who(calls: Mapping[int, tuple[int, str, str]]) -> str:
    """Say which ranks are in which call."""
    ranks: dict[tuple[int, str, str], list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks.setdefault(call, []).append(rank)
    parts = []
    for (number, kind, size), group in ranks.items():
        of = "" if size == "?" else f" of {int(size):,} number{'s' * (size != '1')}"
        parts.append(f"{name_ranks(group)} in {kind}{of}, number {number}")
    barrier = any((kind, size) == ("ALLREDUCE", "1") for _, kind, size in ranks)
    return "; ".join(parts) + _BARRIER * barrier


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence, three or more in a row as a span: "ranks 0 to 20, 22"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = [f"{s[0]} to {s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in spans]
    return f"rank{'s' * (sum(map(len, spans)) > 1)} {', '.join(parts)}"
