"""The network dial: turned down for real, also by an ordinary user; and what is drawn where nobody may."""

import os
import shutil

import psutil
import pytest
from real import fail_in_ci, until

from ddp_helpers import PlainError
from ddp_helpers.lessons.find_the_lost_time import dial, dial_ranks, figures

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


def measured(measure, undisturbed):
    """What was measured; again, a few times, where its control was not: a busy machine only ever adds."""
    for _ in range(5):
        if undisturbed(seconds := measure()):
            break
    return seconds


def test_the_network_is_turned_down_and_no_process_stays(allowed):
    sent = 4 * dial_ranks.LAYERS * (dial_ranks.WIDTH**2 + dial_ranks.WIDTH)  # what a rank sends in a step of DDP
    slow = least(sent, 25)  # the quiet controls take a thirtieth of that, or less

    def undisturbed(turned):
        return max(turned[0]["DDP"], turned[25]["PowerSGD"]) < slow

    turned = measured(lambda: dial.time_at_rates((0, 25), steps=2), undisturbed)
    assert undisturbed(turned), "the controls: the open network, and few bytes"
    # Both ranks send on one link, and the clock stops when both have all bytes.
    assert turned[25]["DDP"] > least(2 * sent, 25) > slow
    until(lambda: not started(dial.RANKS.name), "no process is left")


def test_two_nodes_have_a_slow_cable_between_them(allowed):
    slow = 2 * least(2e6, 200)  # half of the 4 MB to the other node, and the sum of the other half back

    def undisturbed(seconds):
        return seconds["one node, 2 ranks"] < slow

    seconds = measured(lambda: dial.time_two_nodes(mbit=200), undisturbed)
    assert undisturbed(seconds), "the control: within a node"
    assert seconds["two nodes, 1 rank each"] > slow
    until(lambda: not started(dial.NODES.name), "no process is left")


SENDS = """
import json, socket, subprocess, threading, time

def seconds():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        began = time.perf_counter()
        threading.Thread(target=lambda: (client.sendall(bytes(4_000_000)), client.shutdown(socket.SHUT_WR))).start()
        while there.recv(65536):
            pass
        return time.perf_counter() - began

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
measured = {"user": open("/proc/self/uid_map").read().split()[1], "open": seconds()}
limit = "tc qdisc replace dev lo root tbf burst 128kb latency 50ms rate 100mbit"
subprocess.run(limit.split(), check=True)
print(json.dumps(measured | {"100": seconds()}))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root is an ordinary user in every test of this file")
def test_an_ordinary_user_may_turn_it(allowed, monkeypatch):
    """With a Python that everybody may run, which need not be the one that has torch."""
    monkeypatch.setattr(dial, "OWN", ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *dial.OWN])
    assert dial.why_no_network() == ""
    python, slow = shutil.which("python3", path="/usr/bin:/usr/local/bin"), least(4e6, 100)

    def undisturbed(sent):
        return sent["open"] < slow

    sent = measured(lambda: dial.run_in_own_network("-c", 'exec "$@"', "sh", python, "-c", SENDS), undisturbed)
    assert undisturbed(sent), "the control: the open network"
    assert sent["user"] == "65534" and sent["100"] > slow


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
    sends = {"DDP": bits, "bf16 hook": bits / 2, "no_sync": bits / dial_ranks.MICRO_BATCHES}  # of a batch
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
