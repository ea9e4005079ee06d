"""The network dial: run ranks on a network whose rate we can lower, or read a recorded run.

Notebook 12 calls it, in the driver process. Run as a program, it records this machine.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ddp_helpers import ROOT
from ddp_helpers.launch.launchers import LINE_PATTERNS, launch_commands, launch_environment
from ddp_helpers.launch.machine import provenance
from ddp_helpers.launch.processes import exit_text
from ddp_helpers.launch.programs import lines_of
from ddp_tools import PlainError

RANKS = Path(__file__).with_name("dial_ranks.py")
NODES = Path(__file__).with_name("dial_nodes.py")
TWO_NODES = Path(__file__).with_name("two_nodes.sh")
RECORD = ROOT / "notebooks" / "results" / "network_dial" / "two_cpu_cores.json"
RATES = (0, 3000, 1000, 300, 100)  # Mbit/s of the loopback, 0 for open
LINK = 1000  # Mbit/s of the cable between two nodes

# Its own user, network and processes: all end with the first process, and this one with
# `unshare`. New versions of ip look a process up in /proc, which must show these.
OWN = ["unshare", "-Urnp", "--mount-proc", "--kill-child", "sh"]
SBIN = ":/usr/sbin:/sbin"  # Debian's folder of tc, which is not in an ordinary user's PATH
TRIAL = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 128kb latency 50ms"
TRIAL += " && ip link add card0 type veth peer name card1"


Turned = dict[int, dict[str, float]]  # seconds of a batch, by Mbit/s (0 for open) and way


def _search_path() -> str:
    """Return the search path of programs, with the administrator's folders."""
    return os.environ["PATH"] + SBIN


def why_no_network() -> str:
    """Return a line on why no network can be turned down here; "" if one can."""
    env = os.environ | {"PATH": _search_path()}
    command = [*OWN, "-c", TRIAL]
    try:
        trial = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if trial.returncode == 0:
            return ""
        reason = (trial.stderr.strip().splitlines() or [exit_text(trial.returncode)])[-1]
    return f"no network can be turned down here ({reason}): recorded runs are drawn"


# ---- runs


def run_in_own_network(*arguments: object, timeout: float = 300) -> dict:
    """Run sh with these arguments in its own network; returns the JSON object of rank 0.

    timeout: seconds. Raises PlainError if rank 0 prints none, or the time is up.
    """
    network = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "PATH": _search_path()}
    env = launch_environment([2], network)
    lines: list[str] = []
    try:
        for line in lines_of([[*OWN, *map(str, arguments)]], env, timeout):
            if isinstance(line, str):
                of_rank = re.fullmatch(LINE_PATTERNS["torchrun"], line)
                lines.append(of_rank[2] if of_rank else line)
    except TimeoutError:
        lines.append(f"not done after {timeout:g} s")
    results = [line for line in lines if line.startswith("{")]
    if not results:
        last = lines[-1] if lines else "they printed nothing"
        raise PlainError(f"no result from the ranks: {last}")
    return json.loads(results[-1])


def time_at_rates(rates: Sequence[int] = RATES, steps: int = 5) -> Turned:
    """Start two ranks, once, and turn their network down to each rate.

    rates: Mbit/s, 0 for open; steps: of each way at each rate. Raises PlainError.
    """
    program = [str(RANKS), ",".join(map(str, rates)), str(steps)]
    with_loopback = 'ip link set lo up && exec "$@"'
    with TemporaryDirectory() as logs:
        [torchrun] = launch_commands("torchrun", program, [2], logs)
        printed = run_in_own_network("-c", with_loopback, "sh", *torchrun)
    return _by_rate(printed)


def _by_rate(printed: dict) -> Turned:
    """Turn the keys of JSON's object into numbers."""
    return {int(mbit): by_way for mbit, by_way in printed["seconds"].items()}


def time_two_nodes(mbit: int = LINK) -> dict[str, float]:
    """Start two nodes with two ranks each, and a cable of `mbit` Mbit/s between them.

    Returns the seconds of an all-reduce, by group of ranks. Raises PlainError.
    """
    return run_in_own_network(TWO_NODES, f"{mbit}mbit", sys.executable, NODES)


def read_record() -> dict:
    """Read the recorded run: `turned` and `two_nodes`, as above, and its provenance."""
    record = json.loads(RECORD.read_text())
    return record | {"turned": _by_rate(record["turned"])}


def _record() -> None:
    """Record this machine."""
    turned = {"seconds": time_at_rates()}
    record = provenance() | {"turned": turned, "two_nodes": time_two_nodes()}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    _record()
