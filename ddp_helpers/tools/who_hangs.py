"""Say which rank missed which collective: python who_hangs.py recorder_rank*.json

Give it the flight recorder of every rank, as watched.py writes it, with what NCCL recorded, too; or gloo's alone, as
torch._C._distributed_c10d._dump_fr_trace_json() gives it.
The file needs nothing but Python, and reads JSON only: a pickled dump could run what it likes.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

EMPTY = "no collective yet, or a backend that keeps no record, or TORCH_FR_BUFFER_SIZE=0"
SAME = "all ranks called the same, and it ended, or failed: read the exit statuses"  # gloo tells no difference


def calls(dump: Mapping) -> dict[str, dict[int, str]]:
    """What a rank called: for each group ("0" is all ranks) the number of a collective -> its name, sizes, types."""
    told = {}
    for entry in dump.get("entries", []):
        if not entry["is_p2p"]:
            words = [entry["profiling_name"].split(":")[-1], *map(str, entry["input_sizes"]), *entry["input_dtypes"]]
            told.setdefault(entry["process_group"][0], {})[entry["collective_seq_id"]] = " ".join(words)
    return told


def who_hangs(dumps: Mapping[int, Mapping]) -> list[str]:
    """A line for each rank without a dump, and for the first call of each group that ranks differ in, or do not end."""
    size = max([rank + 1 for rank in dumps] + [dump.get("world_size", 0) for dump in dumps.values()])
    lost = [rank for rank in range(size) if rank not in dumps]
    missing = [f"rank {rank} left no dump: was it killed?" for rank in lost]
    empty = [rank for rank, dump in sorted(dumps.items()) if not dump.get("entries")]
    silent = [f"rank {rank}'s recorder is empty: {EMPTY}" for rank in empty]
    told, lines = {rank: calls(dump) for rank, dump in sorted(dumps.items())}, []
    for group in sorted({group for mine in told.values() for group in mine}):
        if group.split()[0] == "0":  # all ranks are in it, also one that called nothing yet
            told = {rank: {group: {}} | mine for rank, mine in told.items()}
        inside = {rank: mine[group] for rank, mine in told.items() if group in mine}
        first = max(min(mine, default=0) for mine in inside.values())  # a recorder keeps the last calls only
        for number in sorted({number for mine in inside.values() for number in mine if number >= first}):
            called = {rank: mine.get(number, "") for rank, mine in inside.items()}
            if len(set(called.values())) > 1 or not all(ended(dumps[rank], group, number) for rank in inside):
                lines.append(f"group {group}, collective {number}: {described(called)}")
                break
    return missing + (lines or silent or [SAME] * (not missing))


def ended(dump: Mapping, group: str, number: int) -> bool:
    """Whether a rank's collective of this number has ended, as far as the dump says."""
    return int(dump["pg_status"].get(group, {}).get("last_completed_collective", number)) >= number


def described(called: Mapping[int, str]) -> str:
    """Say who called what, the fewest first."""
    ranks = {what: [rank for rank in called if called[rank] == what] for what in called.values()}
    said = [
        f"rank{'s' * (len(who) > 1)} {' and '.join(map(str, who))} {f'called {what}' if what else 'did not come'}"
        for what, who in sorted(ranks.items(), key=lambda one: len(one[1]))
    ]
    return "; ".join(said) + ("" if len(said) > 1 else ", and it does not end")


def read(paths: Iterable[Path | str]) -> dict[int, dict]:
    """The dumps by rank, which is the number in the name of a file. Raises ValueError for what is none."""
    found = {}
    for path in map(Path, paths):
        try:
            dump = json.loads(path.read_text())
            found[int("".join(filter(str.isdecimal, path.stem)))] = dump
            calls(dump), dump["pg_status"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no rank's dump ({error!r:.80}): give recorder_rank*.json") from None
    if not found:
        raise ValueError("no dump is given: python who_hangs.py recorder_rank*.json")
    return found


if __name__ == "__main__":
    try:
        print("\n".join(who_hangs(read(sys.argv[1:]))))
    except ValueError as error:
        sys.exit(str(error))
