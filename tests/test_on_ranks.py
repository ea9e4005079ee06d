"""on_ranks: answers of any size, errors and deaths told, and no process left behind."""

import os
import signal
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
import torch.distributed as dist
from real import LIMIT, until

from ddp_helpers.lessons.on_ranks import on_ranks
from ddp_helpers.lessons.run_script import Run, attend

SLEEP = ["sleep", "4747"]


def gone(pid):
    """Whether this process is no more, or dead and only not yet reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_answer_may_be_larger_than_a_pipe():
    zeros, also = on_ranks(2, lambda: torch.zeros(20_000))
    assert zeros == also == [0.0] * 20_000
    assert list(map(len, on_ranks(2, lambda: "x" * (1_000_000 + dist.get_rank())))) == [1_000_000, 1_000_001]


STARTS = {
    "a command": lambda: subprocess.Popen(SLEEP).pid,
    "a command in a session of its own": lambda: subprocess.Popen(SLEEP, start_new_session=True).pid,
    "a fork": lambda: os.fork() or time.sleep(4747),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_nothing_is_left_of_what_an_answer_starts(start):
    pids = on_ranks(2, start)
    assert len({*pids}) == 2 and all(pid > 0 for pid in pids)
    until(lambda: all(map(gone, pids)), "what the ranks started is gone")


def test_nothing_is_left_of_what_a_script_starts(tmp_path):
    script = tmp_path / "starts.py"
    script.write_text(f"import subprocess\nprint(subprocess.Popen({SLEEP}, start_new_session=True).pid)")
    run = Run(script, ranks=2)
    attend(run)
    pids = [int(run.said(rank)[0]) for rank in range(2)]
    until(lambda: all(map(gone, pids)), "what the ranks started is gone")


def test_nothing_is_left_of_an_answer_that_hangs_or_of_a_notebook_that_is_killed(tmp_path):
    text = f"""
import os, pathlib, subprocess, sys
from ddp_helpers.lessons.on_ranks import dist, on_ranks

def work():
    child = subprocess.Popen({SLEEP}, start_new_session=True)
    part = pathlib.Path({str(tmp_path)!r}, f"part{{dist.get_rank()}}")
    part.write_text(f"{{os.getpid()}} {{child.pid}}")
    part.rename(part.with_name(f"pids{{dist.get_rank()}}"))
    child.wait()

on_ranks(2, work, patience={LIMIT})
"""
    for number in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL) as notebook:
            until(lambda: len([*tmp_path.glob("pids*")]) == 2, "both ranks have started a process")
            notebook.send_signal(number)
        found = [int(pid) for path in tmp_path.glob("pids*") for pid in path.read_text().split()]
        until(lambda: all(map(gone, found)), "ranks, and what they started, are gone")  # noqa: B023
        for path in tmp_path.glob("pids*"):
            path.unlink()


def dies(how):
    """An answer that ends rank 1 without one, while rank 0 waits for it."""

    def work():
        if dist.get_rank() == 1:
            how()
        dist.barrier()

    return work


def test_a_rank_that_dies_is_named():
    with pytest.raises(ChildProcessError, match=r"rank 1 .*SIGKILL"):
        on_ranks(2, dies(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    with pytest.raises(ChildProcessError, match=r"rank 1 .*exit status 3"):
        on_ranks(2, dies(lambda: sys.exit(3)))


def test_a_rank_that_is_killed_in_the_middle_of_its_answer_is_named(monkeypatch):
    def half(pipe, answer):
        os.write(pipe.fileno(), struct.pack("!i", 1000) + b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Connection, "send", half)  # the ranks, which are forked, have it too
    with pytest.raises(ChildProcessError, match=r"rank 0 .*SIGKILL"):
        on_ranks(2, lambda: 1)


def test_an_error_of_a_rank_and_an_answer_that_cannot_be_sent_are_raised():
    with pytest.raises(ZeroDivisionError):
        on_ranks(2, lambda: 1 / 0)
    with pytest.raises(Exception, match="local object"):  # its class depends on Python's version
        on_ranks(2, lambda: lambda: 0)
