"""The network dial: an ordinary user turns it down for real; and what is said and drawn where nobody may."""

import os
import shutil

import psutil
import pytest
from real import fail_in_ci, until

from ddp_helpers.lessons.find_the_lost_time import dial, dial_ranks, figures
from ddp_tools import PlainError

BURST = 128 * 1024  # bytes that the dial lets pass at once


@pytest.fixture
def allowed():
    """The test needs a network of its own: it fails in CI without the programs, and is skipped where they may not."""
    path = os.environ["PATH"] + dial.SBIN
    if missing := [name for name in ("unshare", "ip", "tc") if not shutil.which(name, path=path)]:
        fail_in_ci(f"no {missing[0]} on this machine: install iproute2")
    if why := dial.why_no_network():
        pytest.skip(why)


def started(what):
    """The processes with a word in their command line."""
    return [one for one in psutil.process_iter(["cmdline"]) if what in " ".join(one.info["cmdline"] or [])]


def least(size, mbit):
    """Seconds within which no link of this rate can have passed so many bytes."""
    return (size - BURST) / (mbit * 1e6 / 8)


# Notebook 12 turns it down for ranks, and sees that none is faster than the link; here what tc has counted tells.
SENDS = """
import json, socket, subprocess, sys, threading
subprocess.run(sys.argv[1:], check=True)
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    there, _ = server.accept()
    threading.Thread(target=lambda: (client.sendall(bytes(4_000_000)), client.shutdown(socket.SHUT_WR))).start()
    while there.recv(65536):
        pass
[counted] = json.loads(subprocess.check_output("tc -s -j qdisc show dev lo", shell=True))
print(json.dumps({"user": open("/proc/self/uid_map").read().split()[1]} | counted))
"""


def test_an_ordinary_user_may_turn_it(allowed, monkeypatch):
    """With a Python that everybody may run, which need not be the one that has torch."""
    user = os.geteuid() or 65534
    if user != os.geteuid():
        drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        monkeypatch.setattr(dial, "OWN", [*drop, *dial.OWN])
        assert dial.why_no_network() == ""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    words = [python, "-c", SENDS, *dial_ranks.LIMIT, "100mbit"]
    link = dial.run_in_own_network("-c", 'ip link set lo up && exec "$@"', "sh", *words)
    assert (link["user"], link["options"]["rate"]) == (str(user), 100e6 / 8)
    assert link["bytes"] > 4_000_000 and link["overlimits"] > 0, "all passed there, and some had to wait"


def test_without_tc_one_line_says_so_and_the_recorded_run_is_drawn(allowed, tmp_path, monkeypatch):
    for name in ("unshare", "sh", "ip"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(dial, "SBIN", "")
    why = dial.why_no_network()
    assert "tc" in why and "recorded" in why and "\n" not in why
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "unshare" in dial.why_no_network()


def test_the_recorded_run_is_near_what_its_bytes_predict_and_is_drawn():
    record = dial.read_record()
    seconds, bits = record["turned"], 8 * 4 * dial_ranks.LAYERS * (dial_ranks.WIDTH**2 + dial_ranks.WIDTH)
    sends = {"DDP": bits}  # of a batch; PowerSGD's time is latency and chance
    assert tuple(seconds) == dial.RATES and record["machine"]

    def predict(way, mbit):
        return seconds[0][way] + 2 * sends.get(way, 0) / (mbit * 1e6)

    for way, sent in sends.items():  # no recorded batch is faster than its bytes pass the link
        assert all(seconds[mbit][way] > least(2 * sent / 8, mbit) for mbit in dial.RATES[1:])
        assert predict(way, 100) / seconds[100][way] == pytest.approx(1, abs=0.1)
    assert 4e6 / (dial.LINK * 1e6 / 8) / record["two_nodes"]["two nodes, 1 rank each"] == pytest.approx(1, abs=0.1)
    picture = figures.draw_by_rate(seconds, predict, record["machine"])
    picture.figure.draw_without_rendering()
    slow, fast = (seconds[mbit]["DDP"] / seconds[mbit]["PowerSGD"] for mbit in (100, 0))
    assert picture.alt.startswith(f"At 100 Mbit/s DDP takes {slow:.0f} times") and f" {fast:.1f} times" in picture.alt


def test_an_all_reduce_is_drawn_with_the_size_from_which_its_bytes_count():
    took = {2**power: 2e-4 + 2**power / 7e8 for power in range(10, 25, 2)}
    picture = figures.draw_by_size(took, 2e-4, 7e8, "nowhere")
    picture.figure.draw_without_rendering()
    assert picture.alt.startswith("Up to 140 kB an all-reduce is mostly latency, 0.2 ms; beyond, 0.7 GB/s"), picture.alt


def test_ranks_that_fail_end_in_one_line(allowed):
    with pytest.raises(PlainError, match="no-such-file"):
        dial.run_in_own_network("-c", "cat no-such-file")
    with pytest.raises(PlainError, match="after 1 s"):
        dial.run_in_own_network("-c", "sleep 98765", timeout=1)
    until(lambda: not started("sleep 98765"), "no process is left")
