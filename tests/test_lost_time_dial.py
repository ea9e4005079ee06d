"""The network dial: turned down for real, also by an ordinary user; and what is drawn where nobody may."""

import os
import re
import shutil

import psutil
import pytest
from real import fail_in_ci, until

from ddp_helpers import PlainError
from ddp_helpers.lessons.find_the_lost_time import dial, dial_ranks, models

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
        return max(turned.seconds[0]["DDP"], turned.seconds[25]["PowerSGD"]) < slow

    turned = measured(lambda: dial.time_at_rates((0, 25), steps=2), undisturbed)
    assert undisturbed(turned), "the controls: the open network, and few bytes"
    # Both ranks send on one link, and the clock stops when both have all bytes.
    assert turned.seconds[25]["DDP"] > least(2 * sent, 25) > slow
    assert turned.sent["DDP"] == pytest.approx(2 * sent, rel=0.01) and turned.sent["PowerSGD"] < 0.1 * sent
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


def test_the_recorded_run_is_drawn_with_its_crossing():
    record = dial.read_record()
    seconds, sends = record["turned"].seconds, {"DDP": 3.5e6, "bf16 hook": 1.8e6, "PowerSGD": 8e4, "no_sync": 9e5}
    assert tuple(seconds) == dial.RATES and record["machine"]
    wire = 2 * 4 * dial_ranks.LAYERS * (dial_ranks.WIDTH**2 + dial_ranks.WIDTH) / (100e6 / 8)
    assert (seconds[0]["DDP"] + wire) / seconds[100]["DDP"] == pytest.approx(1, abs=0.1)
    for way, size in record["turned"].sent.items():  # no recorded batch is faster than its bytes pass the link
        assert all(seconds[mbit][way] > least(size / (4 if way == "no_sync" else 1), mbit) for mbit in dial.RATES[1:])
    assert 4e6 / (dial.LINK * 1e6 / 8) / record["two_nodes"]["two nodes, 1 rank each"] == pytest.approx(1, abs=0.1)

    def predict(way, mbit):
        return seconds[0][way] + 2 * sends[way] / (mbit * 1e6 / 8)

    equal = dial.crossing("PowerSGD", "DDP", predict)
    assert predict("PowerSGD", equal) == pytest.approx(predict("DDP", equal), rel=0.02)
    assert dial.crossing("DDP", "PowerSGD", predict) is None, "the other way round"
    picture = dial.draw_by_rate(seconds, predict, record["machine"])
    picture.figure.draw_without_rendering()
    assert picture.alt.startswith("At 100 Mbit/s ") and f"above about {equal / 1e3:.1f} Gbit/s, less" in picture.alt


def test_latency_and_bandwidth_are_found_again():
    made = {2**power: 2e-4 + 1.5 * 2**power / 7e8 for power in range(10, 25, 2)}  # four ranks: 2(n-1)/n is 1.5
    latency, bandwidth = dial.fit_line(made, ranks=4)
    assert latency == pytest.approx(2e-4) and bandwidth == pytest.approx(7e8)
    picture = dial.draw_by_size(made, 4, "nowhere")
    picture.figure.draw_without_rendering()
    assert re.findall(r"[\d.]+ [kmG]\S*[sB]\b", picture.alt)[:3] == ["93 kB", "0.2 ms", "0.7 GB/s"], picture.alt


def test_ranks_that_fail_end_in_one_line(allowed):
    with pytest.raises(PlainError, match="no-such-file"):
        dial.run_in_own_network("-c", "cat no-such-file")
    with pytest.raises(PlainError, match="after 1 s"):
        dial.run_in_own_network("-c", "sleep 98765", timeout=1)
    until(lambda: not started("sleep 98765"), "no process is left")


def test_the_recorded_models_take_as_long_as_predicted_and_mnists_needs_the_faster_network():
    read = models.read_record()
    mnist, *others = map(models.needed_mbit, read.models.values())
    assert len(others) == 2 and mnist > 1.5 * max(others)
    for model in read.models.values():
        for mbit in filter(None, model.two):
            assert model.two[mbit] > least(2 * 4 * model.parameters, mbit), "faster than the wire"
            assert model.two[mbit] < 1.4 * models.step_bounds(model, mbit)[1]
    picture = models.draw_models(read)
    picture.figure.draw_without_rendering()
    assert f"needs {mnist / 1e3:.1f} Gbit/s" in picture.alt
