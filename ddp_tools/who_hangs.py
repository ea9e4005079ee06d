"""Find which rank missed which collective: python who_hangs.py recorder_rank*.json

Give it the flight recorder of every rank, as watched.py writes it, with NCCL's records; or only
gloo's, as torch._C._distributed_c10d._dump_fr_trace_json() returns it. This file needs only
Python: copy it to your cluster. It reads JSON only, since a pickled dump could run any code.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_EMPTY = "no collective yet, or a backend that keeps no record, or TORCH_FR_BUFFER_SIZE=0"
# gloo's record does not tell a call that ended from one that failed.
SAME = "all ranks made the same calls, which ended or failed: read the exit statuses"
_WORLD = "0"  # a dump's name for the group of all ranks

Dump = Mapping[str, Any]  # a rank's flight recorder
# By group, and by number of the collective: its name, sizes and types.
Calls = dict[str, dict[int, str]]


def calls(dump: Dump) -> Calls:
    """List a rank's collectives by group. The recorder names the groups; "0" is all ranks."""
    calls_of_groups: Calls = {}
    for entry in dump.get("entries", []):
        if not entry["is_p2p"]:
            name = entry["profiling_name"].split(":")[-1]
            call = " ".join([name, *map(str, entry["input_sizes"]), *entry["input_dtypes"]])
            group = calls_of_groups.setdefault(entry["process_group"][0], {})
            group[entry["collective_seq_id"]] = call
    return calls_of_groups


def who_hangs(dumps: Mapping[int, Dump]) -> list[str]:
    """Make a line for each rank without a dump, and for each group where ranks wait.

    dumps: by rank. A group's line shows the first call that differs between ranks or did not end.
    """
    dumps = dict(sorted(dumps.items()))
    sizes = [dump.get("world_size", 0) for dump in dumps.values()]
    size = max([rank + 1 for rank in dumps] + sizes)
    missing = [rank for rank in range(size) if rank not in dumps]
    lost = [f"rank {rank} left no dump: was it killed?" for rank in missing]
    calls_of_ranks = {rank: calls(dump) for rank, dump in dumps.items()}
    groups = sorted({group for groups in calls_of_ranks.values() for group in groups})
    lines = [_group_line(group, calls_of_ranks, dumps) for group in groups]
    waiting = [line for line in lines if line]
    empty = [rank for rank, dump in dumps.items() if not dump.get("entries")]
    silent = [f"rank {rank}'s recorder is empty: {_EMPTY}" for rank in empty]
    if lost or waiting:
        return lost + (waiting or silent)
    return silent or [SAME]


def _group_line(
    group: str,
    calls_of_ranks: Mapping[int, Calls],
    dumps: Mapping[int, Dump],
) -> str | None:
    """The line on a group's first call that differs between ranks or did not end, if any."""
    of_world = group.split()[0] == _WORLD  # it includes ranks without a call yet
    calls_of_members: dict[int, dict[int, str]] = {}
    for rank, groups in calls_of_ranks.items():
        if of_world or group in groups:
            calls_of_members[rank] = groups.get(group, {})
    # A recorder keeps only the last calls.
    first = max(min(numbers, default=0) for numbers in calls_of_members.values())
    numbers = {number for numbers in calls_of_members.values() for number in numbers}
    for number in sorted(number for number in numbers if number >= first):
        called = {rank: calls.get(number, "") for rank, calls in calls_of_members.items()}
        all_ended = all(_has_ended(dumps[rank], group, number) for rank in called)
        if len(set(called.values())) > 1 or not all_ended:
            return f"group {group}, collective {number}: {_describe(called)}"
    return None


def _has_ended(dump: Dump, group: str, number: int) -> bool:
    """Whether a rank's collective of this number has ended, according to the dump."""
    status = dump["pg_status"].get(group, {})
    return int(status.get("last_completed_collective", number)) >= number


def _describe(called: Mapping[int, str]) -> str:
    """Describe which ranks made which call, the rarest call first; "" means no call."""
    callers: dict[str, list[int]] = {}
    for rank, call in called.items():
        callers.setdefault(call, []).append(rank)
    parts = []
    for call, ranks in sorted(callers.items(), key=lambda item: len(item[1])):
        plural = "s" if len(ranks) > 1 else ""
        numbers = " and ".join(map(str, ranks))
        parts.append(f"rank{plural} {numbers} {f'called {call}' if call else 'did not come'}")
    end = "" if len(parts) > 1 else ", and it does not end"
    return "; ".join(parts) + end


def read_dumps(paths: Iterable[Path | str]) -> dict[int, dict]:
    """Read the dumps, by the rank in each file's name. Raises ValueError."""
    dumps = {}
    for path in map(Path, paths):
        try:
            dump = json.loads(path.read_text())
            rank = int("".join(filter(str.isdecimal, path.stem)))
            calls(dump), dump["pg_status"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            cure = "give recorder_rank*.json"
            raise ValueError(f"{path} is not a rank's dump ({error!r:.80}): {cure}") from None
        dumps[rank] = dump
    if not dumps:
        raise ValueError("no dump is given: python who_hangs.py recorder_rank*.json")
    return dumps


if __name__ == "__main__":
    try:
        print("\n".join(who_hangs(read_dumps(sys.argv[1:]))))
    except ValueError as error:
        sys.exit(str(error))
