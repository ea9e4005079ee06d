"""The network dial: run ranks where the network is ours to turn down, or read a recorded run, and draw it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, LogLocator
from scipy.optimize import nnls

from ddp_helpers import ROOT, PlainError
from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, WIDTH, rank_colour
from ddp_helpers.launch.launchers import MARKS, commands, environment
from ddp_helpers.launch.machine import provenance
from ddp_helpers.launch.processes import ended, lines_of

RANKS, NODES, TWO_NODES = (
    Path(__file__).with_name(name) for name in ("dial_ranks.py", "dial_nodes.py", "two_nodes.sh")
)
RECORD = ROOT / "notebooks" / "results" / "network_dial" / "two_cpu_cores.json"
RATES, LINK = (0, 3000, 1000, 300, 100), 1000  # Mbit/s: of the loopback, 0 for open; and of the cable between two nodes
# A user, a network and processes of one's own: all end with the first process, and that with `unshare`. New versions of
# ip look a process up in /proc, which must show these.
OWN = ["unshare", "-Urnp", "--mount-proc", "--kill-child", "sh"]
SBIN = ":/usr/sbin:/sbin"  # where Debian keeps tc, which is not in an ordinary user's PATH
TRIAL = "ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 128kb latency 50ms"
TRIAL += " && ip link add card0 type veth peer name card1"


class DialError(PlainError, RuntimeError):
    """Ranks in a network of their own that ended without a result, in a line."""


def path() -> str:
    """Return where programs are looked for, those of an administrator among them."""
    return os.environ["PATH"] + SBIN


def lacking() -> str:
    """Say in a line why no network can be turned down here; '' if one can. The learner's process calls it."""
    try:
        env = os.environ | {"PATH": path()}
        trial = subprocess.run([*OWN, "-c", TRIAL], env=env, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    else:
        why = (trial.stderr.strip().splitlines() or [ended(trial.returncode)])[-1] if trial.returncode else ""
    return why and f"no network can be turned down here ({why}): recorded runs are drawn"


def own_network(*command: object, timeout: float = 300) -> dict:
    """Run sh with these arguments in a network of its own; returns the JSON object that rank 0 printed.

    Raises DialError where there is none, or the time is up.
    """
    env = environment([2], {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "PATH": path()})
    lines: list[str] = []
    try:
        for line in lines_of([[*OWN, *map(str, command)]], env, timeout):
            if isinstance(line, str):
                of_rank = re.fullmatch(MARKS["torchrun"], line)
                lines.append(of_rank[2] if of_rank else line)
    except TimeoutError:
        lines.append(f"not done after {timeout:g} s")
    results = [line for line in lines if line.startswith("{")]
    if not results:
        raise DialError(f"no result from the ranks: {lines[-1] if lines else 'they said nothing'}")
    return json.loads(results[-1])


def two_ranks(script: Path, *words: object, timeout: float = 300) -> dict:
    """Run a script on two ranks in a network of their own; returns the JSON object that rank 0 printed."""
    with TemporaryDirectory() as logs:
        [torchrun] = commands("torchrun", [str(script), *map(str, words)], [2], logs)
        return own_network("-c", 'ip link set lo up && exec "$@"', "sh", *torchrun, timeout=timeout)


def turned(rates: Sequence[int] = RATES, steps: int = 5) -> dict[int, dict[str, float]]:
    """Start two ranks, once, and turn their network down; returns seconds a batch by Mbit/s (0: open) and way."""
    return {int(mbit): row for mbit, row in two_ranks(RANKS, ",".join(map(str, rates)), steps).items()}


def two_nodes(mbit: int = LINK) -> dict[str, float]:
    """Start two nodes with two ranks each, a cable of so many Mbit/s between them; returns seconds an all-reduce."""
    return own_network(TWO_NODES, f"{mbit}mbit", sys.executable, NODES)


def recorded() -> dict:
    """Read the recorded run: `turned` and `two_nodes` as they return them, and its provenance."""
    found = json.loads(RECORD.read_text())
    return found | {"turned": {int(mbit): row for mbit, row in found["turned"].items()}}


def fit(took: Mapping[int, float], ranks: int) -> tuple[float, float]:
    """Fit latency (s) and bus bandwidth (bytes/s) to the seconds of an all-reduce by its bytes, by relative error."""
    size, seconds = np.array(list(took)), np.array(list(took.values()))
    terms = np.stack([np.ones(len(size)), 2 * (ranks - 1) / ranks * size], axis=1) / seconds[:, None]
    latency, each = nnls(terms, np.ones(len(size)))[0]
    return float(latency), float(1 / each)


def by_size(took: Mapping[int, float], ranks: int, where: str) -> Picture:
    """Draw the time of an all-reduce and its bus bandwidth by bytes, with the fitted line."""
    (latency, bandwidth), share = fit(took, ranks), 2 * (ranks - 1) / ranks
    size, seconds = np.array(list(took)), np.array(list(took.values()))
    fine = np.geomspace(size[0], size[-1], 200)
    model = latency + share * fine / bandwidth
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.9), layout="constrained")
    left.loglog(fine, 1e3 * model, "--", color=GREY, label="latency + bytes / bandwidth, fitted")
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
    small = f"Up to {latency * bandwidth / share / 1e3:,.0f} kB an all-reduce is mostly latency, {1e3 * latency:.2g} ms"
    return captioned(figure, f"{small}; beyond, {bandwidth / 1e9:.2g} GB/s", f"{ranks} ranks, {where}")


def crossing(one: str, other: str, predict: Callable[[str, float], float]) -> float | None:
    """Find the Mbit/s below which one way is predicted to be faster than another, which wins above; None if neither."""
    mbit = np.geomspace(1, 1e6, 4000)
    wins = np.array([predict(one, rate) < predict(other, rate) for rate in mbit])
    return float(mbit[wins].max()) if wins[0] and not wins[-1] else None


def lines(found: Mapping[int, Mapping[str, float]], predict: Callable[[str, float], float], where: str) -> Picture:
    """Draw the time of a batch by bandwidth, a line a way; predict: seconds by way and Mbit/s, drawn dashed.

    found: seconds by Mbit/s and way, as `turned` gives them; 0 stands at the right.
    """
    rates = sorted(filter(None, found))
    away, fine = 15 * rates[-1], np.geomspace(rates[0] / 1.5, 8 * rates[-1], 200)
    figure, ax = plt.subplots(figsize=(WIDTH, 4.8), layout="constrained")
    for number, name in enumerate(found[0]):
        look = {"color": rank_colour(number)}
        ax.loglog(fine, [1e3 * predict(name, rate) for rate in fine], "--", alpha=0.7, **look)
        ax.loglog(rates, [1e3 * found[rate][name] for rate in rates], "o-", label=name, **look)
        ax.loglog(away, 1e3 * found[0][name], "o", **look)
    ax.plot([], [], "--", color=GREY, label="predicted")
    ax.set(xlabel="bandwidth of the loopback device [Mbit/s]", ylabel="time of a batch [ms]")
    ax.set_xticks([*rates, away], [*(f"{rate:,}" for rate in rates), "open"])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(lambda *_: "")
    ax.legend(ncols=2)
    slowest = found[rates[0]]
    title = f"At {rates[0]} Mbit/s DDP takes {slowest['DDP'] / slowest['PowerSGD']:.0f} times PowerSGD's time"
    if equal := crossing("PowerSGD", "DDP", predict):
        ax.axvline(equal, color=GREY, linewidth=1, linestyle=":")
        title += f"; above {equal / 1e3:.1f} Gbit/s DDP should win"
    return captioned(figure, title, f"2 ranks, {where}", "With no_sync four batches share an all-reduce")


if __name__ == "__main__":  # record this machine
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(provenance() | {"turned": turned(), "two_nodes": two_nodes()}, indent=1) + "\n")
