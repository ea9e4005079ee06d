"""on_ranks: answers of any size, errors and deaths told; and of a script, the rank that failed first."""

import os
import signal
import struct
import sys
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from real import LIMIT

from ddp_helpers.launch import forked_call
from ddp_helpers.launch.engine import Processes
from ddp_helpers.launch.forked_call import Answer, on_ranks
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs


def test_the_error_of_who_only_follows_is_not_told_as_the_cause():
    """Whichever answer comes first."""
    cause, follows = Answer(None, ValueError("my data")), Answer(None, RuntimeError("Connection closed by peer"))
    for answers in ({0: cause, 1: follows}, {1: follows, 0: cause}):
        with pytest.raises(ValueError, match="my data"):
            forked_call._values([0, 0], [0, 1], answers, 1.0)


def test_an_answer_may_be_larger_than_a_pipe():
    zeros, also = on_ranks(2, lambda: torch.zeros(20_000))
    assert zeros == also == [0.0] * 20_000
    assert list(map(len, on_ranks(2, lambda: "x" * (1_000_000 + dist.get_rank())))) == [1_000_000, 1_000_001]


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


def test_a_rank_that_is_killed_in_the_middle_of_its_answer_is_named():
    def half(pipe, answer):
        os.write(pipe.fileno(), struct.pack("!i", 1000) + b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        Connection.send = half

    with pytest.raises(ChildProcessError, match=r"rank [01] .*SIGKILL"):  # either may be the first
        on_ranks(2, work)


def test_an_error_of_a_rank_and_an_answer_that_cannot_be_sent_are_raised():
    with pytest.raises(ZeroDivisionError):
        on_ranks(2, dies(lambda: 1 / 0))  # and not rank 0's, which is that rank 1 has left
    with pytest.raises(Exception, match="local object"):  # its class depends on Python's version
        on_ranks(2, lambda: lambda: 0)


def test_ranks_that_wait_for_each_other_are_told_so_whichever_is_ended_first(monkeypatch):
    end_all = Processes.end

    def end_one_by_one(ranks):
        ranks.send_signal(1, signal.SIGKILL)
        ranks.wait(LIMIT, rank=0)  # it hears that rank 1 has gone, and answers with that error
        end_all(ranks)

    monkeypatch.setattr(Processes, "end", end_one_by_one)
    with pytest.raises(TimeoutError, match="rank 0 and 1 waited"):
        on_ranks(2, lambda: dist.recv(torch.zeros(1), 1 - dist.get_rank()), patience=1)


def test_an_error_before_the_group_is_formed_is_raised(monkeypatch):
    monkeypatch.setitem(forked_call.LOOPBACK_ONLY, "GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(Exception, match="no-such-interface"):
        on_ranks(2, lambda: 1)


FAILS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    raise ValueError("mine")
dist.barrier()
"""


def test_of_a_script_the_rank_that_failed_first_is_named(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    run = LearnerRun(tmp_path / "fails.py", ranks=2)
    wait_for_runs(run)
    assert run.exit_statuses == [1, 1], "the control: rank 0 failed, too, since rank 1 had left"
    assert run.complaint().startswith("rank 1 exit status 1:\nValueError: mine")
