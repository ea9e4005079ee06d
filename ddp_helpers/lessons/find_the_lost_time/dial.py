"""The network dial: run ranks where the network is ours to turn down, or read a recorded run.

Notebook 12 calls it, in the learner's process, and draws the times. Run as a program, it records
this machine.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, LogLocator
from scipy.optimize import nnls

from ddp_helpers import ROOT, PlainError
from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, WIDTH, rank_colour
from ddp_helpers.launch.launchers import LINE_PATTERNS, launch_commands, launch_environment
from ddp_helpers.launch.machine import provenance
from ddp_helpers.launch.processes import exit_text
from ddp_helpers.launch.programs import lines_of

RANKS = Path(__file__).with_name("dial_ranks.py")
NODES = Path(__file__).with_name("dial_nodes.py")
TWO_NODES = Path(__file__).with_name("two_nodes.sh")
RECORD = ROOT / "notebooks" / "results" / "network_dial" / "two_cpu_cores.json"
RATES = (0, 3000, 1000, 300, 100)  # Mbit/s of the loopback, 0 for open
LINK = 1000  # Mbit/s of the cable between two nodes

# A user, a network and processes of one's own: all end with the first process, and that with
# `unshare`. New versions of ip look a process up in /proc, which must show these.
OWN = ["unshare", "-Urnp", "--mount-proc", "--kill-child", "sh"]
SBIN = ":/usr/sbin:/sbin"  # where Debian keeps tc, which is not in an ordinary user's PATH
TRIAL = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 128kb latency 50ms"
TRIAL += " && ip link add card0 type veth peer name card1"


class Turned(NamedTuple):
    """What two ranks measured of each way of training a batch, on a network that is turned down."""

    seconds: dict[int, dict[str, float]]  # of a batch, by Mbit/s (0 for open) and way
    sent: dict[str, float]  # bytes of a step, of both ranks together, by way


def _search_path() -> str:
    """Return where programs are looked for, those of an administrator among them."""
    return os.environ["PATH"] + SBIN


def why_no_network() -> str:
    """Say in a line why no network can be turned down here; "" if one can."""
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
    """Run sh with these arguments in a network of its own; returns the JSON object of rank 0.

    timeout: seconds. Raises PlainError where rank 0 prints none, or the time is up.
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
        last = lines[-1] if lines else "they said nothing"
        raise PlainError(f"no result from the ranks: {last}")
    return json.loads(results[-1])


def run_two_ranks(script: Path, *arguments: object, timeout: float = 300) -> dict:
    """Run a script on two ranks in a network of their own; returns the JSON object of rank 0.

    timeout: seconds. Raises PlainError.
    """
    program = [str(script), *map(str, arguments)]
    with_loopback = 'ip link set lo up && exec "$@"'
    with TemporaryDirectory() as logs:
        [torchrun] = launch_commands("torchrun", program, [2], logs)
        return run_in_own_network("-c", with_loopback, "sh", *torchrun, timeout=timeout)


def time_at_rates(rates: Sequence[int] = RATES, steps: int = 5) -> Turned:
    """Start two ranks, once, and turn their network down to each rate.

    rates: Mbit/s, 0 for open; steps: of each way at each rate. Raises PlainError.
    """
    return _as_turned(run_two_ranks(RANKS, ",".join(map(str, rates)), steps))


def _as_turned(printed: Mapping) -> Turned:
    """Give what the ranks printed its type: JSON has no numbers as keys."""
    seconds = {int(mbit): by_way for mbit, by_way in printed["seconds"].items()}
    return Turned(seconds, dict(printed["sent"]))


def time_two_nodes(mbit: int = LINK) -> dict[str, float]:
    """Start two nodes with two ranks each, and a cable of so many Mbit/s between them.

    Returns the seconds of an all-reduce, by group of ranks. Raises PlainError.
    """
    return run_in_own_network(TWO_NODES, f"{mbit}mbit", sys.executable, NODES)


def read_record() -> dict:
    """Read the recorded run: `turned` and `two_nodes` as they return them, and its provenance."""
    record = json.loads(RECORD.read_text())
    return record | {"turned": _as_turned(record["turned"])}


# ---- figures


def _sent_share(ranks: int) -> float:
    """Return how many times its bytes each rank of an all-reduce sends, in a ring."""
    return 2 * (ranks - 1) / ranks


def fit_line(took: Mapping[int, float], ranks: int) -> tuple[float, float]:
    """Fit latency (s) and bus bandwidth (bytes/s), by relative error.

    took: the seconds of an all-reduce by its bytes; ranks: how many took part.
    """
    size, seconds = np.array(list(took)), np.array(list(took.values()))
    columns = [np.ones(len(size)), _sent_share(ranks) * size]
    terms = np.stack(columns, axis=1) / seconds[:, None]
    latency, seconds_a_byte = nnls(terms, np.ones(len(size)))[0]
    return float(latency), float(1 / seconds_a_byte)


def draw_by_size(took: Mapping[int, float], ranks: int, where: str) -> Picture:
    """Draw the time of an all-reduce and its bus bandwidth by bytes, with the fitted line.

    took, ranks: as in `fit`; where: the machine, for the caption.
    """
    latency, bandwidth = fit_line(took, ranks)
    share = _sent_share(ranks)
    size, seconds = np.array(list(took)), np.array(list(took.values()))
    fine = np.geomspace(size[0], size[-1], 200)
    model = latency + share * fine / bandwidth
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.9), layout="constrained")
    label = "latency + bytes / bandwidth, fitted"
    left.loglog(fine, 1e3 * model, "--", color=GREY, label=label)
    left.loglog(size, 1e3 * seconds, "o-", color=BLUE, label="measured")
    right.loglog(fine, share * fine / model / 1e9, "--", color=GREY)
    right.loglog(size, share * size / seconds / 1e9, "o-", color=BLUE)
    left.set(xlabel="bytes in the all-reduce", ylabel="time [ms]")
    right.set(xlabel="bytes in the all-reduce", ylabel="bus bandwidth [GB/s]")
    for ax in (left, right):
        ax.xaxis.set_major_formatter(EngFormatter("B", sep=""))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda *_: "")
    left.legend()
    small = f"Up to {latency * bandwidth / share / 1e3:,.0f} kB an all-reduce is mostly latency"
    large = f"{1e3 * latency:.2g} ms; beyond, {bandwidth / 1e9:.2g} GB/s"
    return captioned(figure, f"{small}, {large}", f"{ranks} ranks, {where}")


def crossing(
    low_way: str,
    high_way: str,
    predict: Callable[[str, float], float],
) -> float | None:
    """Find the Mbit/s below which one way is predicted to be faster, and above which another is.

    predict: seconds by way and Mbit/s. Returns None if there is no such rate up to 1 Tbit/s.
    """
    mbit = np.geomspace(1, 1e6, 4000)
    wins = np.array([predict(low_way, rate) < predict(high_way, rate) for rate in mbit])
    return float(mbit[wins].max()) if wins[0] and not wins[-1] else None


def draw_by_rate(
    measured: Mapping[int, Mapping[str, float]],
    predict: Callable[[str, float], float],
    where: str,
) -> Picture:
    """Draw the time of a batch by bandwidth, a line for each way, and what is predicted, dashed.

    measured: seconds by Mbit/s and way, as in `Turned`; 0, the open network, stands at
    the right. predict: seconds by way and Mbit/s. where: the machine, for the caption.
    """
    rates = sorted(filter(None, measured))
    away = 15 * rates[-1]  # where the open network stands
    fine = np.geomspace(rates[0] / 1.5, 8 * rates[-1], 200)
    figure, ax = plt.subplots(figsize=(WIDTH, 4.8), layout="constrained")
    for number, way in enumerate(measured[0]):
        colour = rank_colour(number)
        predicted = [1e3 * predict(way, rate) for rate in fine]
        ax.loglog(fine, predicted, "--", alpha=0.7, color=colour)
        taken = [1e3 * measured[rate][way] for rate in rates]
        ax.loglog(rates, taken, "o-", label=way, color=colour)
        ax.loglog(away, 1e3 * measured[0][way], "o", color=colour)
    ax.plot([], [], "--", color=GREY, label="predicted")
    ax.set(xlabel="bandwidth of the loopback device [Mbit/s]", ylabel="time of a batch [ms]")
    ax.set_xticks([*rates, away], [*(f"{rate:,}" for rate in rates), "open"])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(lambda *_: "")
    ax.legend(ncols=2)
    slowest = measured[rates[0]]
    ratio = slowest["DDP"] / slowest["PowerSGD"]
    title = f"At {rates[0]} Mbit/s DDP takes {ratio:.0f} times PowerSGD's time"
    if equal := crossing("PowerSGD", "DDP", predict):
        ax.axvline(equal, color=GREY, linewidth=1, linestyle=":")
        title += f"; above about {equal / 1e3:.1f} Gbit/s, less"
    note = "With no_sync four batches share an all-reduce"
    return captioned(figure, title, f"2 ranks, {where}", note)


def _record() -> None:
    """Record this machine."""
    turned = time_at_rates()._asdict()
    record = provenance() | {"turned": turned, "two_nodes": time_two_nodes()}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    _record()
