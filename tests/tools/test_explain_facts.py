"""`explain`: attempts of one log, NCCL's own words before a general rule, when a message comes; and `--facts`."""

import json
from pathlib import Path

import pytest
from explained import answer, explain

from ddp_helpers.cli import main
from ddp_tools.explain.attempts import split
from ddp_tools.explain.lines import read_logs

TRACEBACK = """[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/me/train.py", line 40, in <module>
[rank{rank}]:     {code}
[rank{rank}]:   File "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3033, in all_reduce
[rank{rank}]:     work = group.allreduce([tensor], opts)
[rank{rank}]: {error}
"""
FAILED = "srun: error: n1: task {rank}: Exited with exit code 1\n"
MEMORY = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
REQUEUED = f"""job 7 on n[1-2]: 2 ranks, meeting at 10.0.0.1:11000
0: step 20 loss 1.7
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/data.py", line 9, in load
[rank1]: ValueError: no such sample
{FAILED.format(rank=1)}job 7 is requeued
slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-05-01T08:00:00 DUE TO JOB REQUEUE ***
job 7 on n[1-2]: 2 ranks, meeting at 10.0.0.1:11001
{TRACEBACK.format(rank=0, code="g()", error=MEMORY)}
"""
AGENT = (
    "W0501 08:00:00.1 9 torch/distributed/run.py:774] "
    "Setting OMP_NUM_THREADS environment variable for each process to be 1\n"
)
LOGS = {  # a log, and with which lines its attempts begin
    "requeued by its own job file": (REQUEUED, ["job 7 on", "job 7 on"]),
    "two agents of one start": (AGENT + AGENT + FAILED.format(rank=0), ["W0501"]),
    "started again by hand": (AGENT + FAILED.format(rank=0) + AGENT + AGENT + "0: epoch 1\n", ["W0501", "W0501"]),
    "restarted by torchrun": (
        "0: loss 2.1\nE0501 08:00:00.1 9 api.py:882] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python\n"
        "I0501 08:00:00.2 9 api.py:912] [default] Worker group FAILED. 1/3 attempts left; will restart worker group\n"
        "I0501 08:00:00.3 9 api.py:716] [default] Restarting worker group\n0: loss 2.0\n",
        ["0: loss 2.1", "I0501 08:00:00.3"],
    ),
    "a word of a user": ("0: restarting the schedule, restarts=0\n0: loss 2.0\n", ["restarting"]),
}


def begins(tmp_path: Path, text: str) -> list[str]:
    """The first line of each attempt."""
    (tmp_path / "job.log").write_text(text)
    return [attempt[0].text for attempt in split(read_logs([tmp_path / "job.log"]).lines)]


@pytest.mark.parametrize("case", LOGS)
def test_a_log_is_cut_where_an_attempt_begins(case: str, tmp_path: Path) -> None:
    text, expected = LOGS[case]
    found = begins(tmp_path, text)
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found


def test_each_attempt_is_answered_and_one_that_is_not_known_decides(tmp_path: Path, capsys) -> None:
    log = tmp_path / "job.log"
    log.write_text(REQUEUED)
    assert main(["explain", str(log)]) == 1
    said = capsys.readouterr().out
    first, second = said.split("== Attempt 2 of 2")
    assert "Your own line in its traceback: /home/me/data.py:9" in first and "no room for a tensor" not in first
    assert "Raised in torch, reached from your line /home/me/train.py:40" in second and "no room for a tensor" in second
    log.write_text(REQUEUED.replace("torch.cuda.OutOfMemoryError: CUDA out of memory.", "AssertionError: metadata"))
    assert main(["explain", str(log), "--json"]) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "not known" and len(data["before"]) == 1


UNHANDLED = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.29.7"
)
WARNS = "n1:10:20 [{gpu}] transport/x.cc:25 NCCL WARN {words}\n"
NVLS = "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401"
FABRIC = "This is usually caused by a system or configuration error in the Fabric Manager or NVSwitches."


def test_what_nccl_warned_of_stands_before_its_general_error(tmp_path: Path) -> None:
    failed = TRACEBACK.format(rank=3, code="dist.all_reduce(x)", error=UNHANDLED)
    other = WARNS.format(gpu=0, words="something of another GPU")
    verdict = explain(tmp_path, WARNS.format(gpu=3, words=NVLS) + FABRIC + "\n" + other + failed)
    assert verdict.root and NVLS in verdict.root.lines[0].text and verdict.first == 3
    assert verdict.said == [FABRIC] and verdict.known
    silent = explain(tmp_path, WARNS.format(gpu=3, words=NVLS) + failed)
    assert silent.root and silent.root.rule is None and not silent.known, "no cause is made up"
    assert answer(explain(tmp_path, failed)) == "nccl-cuda", "where NCCL says no more of it"
    behind = failed + f"[rank3]: Last error:\n[rank3]: {NVLS}\n[rank3]: {FABRIC}\n"
    assert explain(tmp_path, behind).said == [FABRIC]


def test_a_message_that_says_its_cure_is_heard_and_pytorchs_usual_last_sentences_are_not(tmp_path: Path) -> None:
    says = "RuntimeError: FooPlugin: flash kernels are off. Set FOO_ATTN_BACKEND=eager to go on."
    verdict = explain(
        tmp_path, f'Traceback (most recent call last):\n  File "/env/site-packages/foo/a.py", line 3\n{says}\n'
    )
    assert verdict.said == ["Set FOO_ATTN_BACKEND=eager to go on."] and verdict.known
    usual = (
        "RuntimeError: FooPlugin: kernel failed. Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    )
    verdict = explain(
        tmp_path, f'Traceback (most recent call last):\n  File "/env/site-packages/foo/a.py", line 3\n{usual}\n'
    )
    assert not verdict.said and not verdict.known


def test_once_training_has_begun_a_store_that_does_not_answer_has_gone(tmp_path: Path) -> None:
    refused = "[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms"
    refused += " while trying to connect to (n1, 29500).\n"
    assert answer(explain(tmp_path, refused)) == "client-socket"
    assert answer(explain(tmp_path, "[rank0]: epoch 3 step 410 loss 0.22\n" + refused)) == "store-gone"


def test_the_facts_are_those_of_the_log_and_no_advice(tmp_path: Path, capsys) -> None:
    log = tmp_path / "job.log"
    head = "torch 2.12.0+cu130\n+ srun --label torchrun --nnodes=2 --nproc-per-node=4 train.py\nNCCL_DEBUG=INFO\n"
    log.write_text(head + WARNS.format(gpu=3, words=NVLS) + TRACEBACK.format(rank=3, code="f()", error=UNHANDLED))
    status = main(["explain", str(log)])
    cures = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("  cure:", "  means:"))]
    assert main(["explain", str(log), "--facts", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["versions"] == {"torch": ["2.12.0+cu130"], "NCCL": ["2.29.7"], "CUDA": ["130"], "Python": ["3.12"]}
    assert found["launchers"] == ["torchrun", "srun"] and found["variables"] == ["NCCL_DEBUG=INFO"]
    assert found["command lines"] == ["srun --label torchrun --nnodes=2 --nproc-per-node=4 train.py"]
    [attempt] = found["attempts"]
    assert attempt["failed first"].startswith("rank 3") and NVLS in attempt["root"]
    main(["explain", str(log), "--facts"])
    text = capsys.readouterr().out
    assert not any(line in text for line in cures) and "cure" not in text and NVLS in text
    job = tmp_path / "job.sbatch"
    job.write_text("#!/bin/bash\n#SBATCH --nodes=1\nsrun python train.py\n")
    with pytest.raises(SystemExit, match="2"):
        main(["explain", str(job), "--facts"])
    assert "--facts is for the log of a run" in capsys.readouterr().err


UP = "n2:10:20 [0] NCCL INFO transport/x.cc:9 -> 2\n"


def test_the_first_warning_that_its_thread_hands_up_is_where_an_error_of_nccl_began(tmp_path: Path) -> None:
    harmless = "n2:10:20 [0] graph.cc:1 NCCL WARN Could not find a path, falling back\n"
    cause = "n2:10:20 [0] ib.cc:7 NCCL WARN Call to ibv_modify_qp failed with 61\n"
    follows = "n1:30:40 [0] socket.cc:71 NCCL WARN Connection closed by remote peer n2<46112>\n"
    failed = TRACEBACK.format(rank=0, code="f()", error=UNHANDLED.replace("cuda", "system"))
    root = explain(tmp_path, harmless + cause + UP + follows + UP.replace("n2:10:20", "n1:30:40") + failed).root
    assert root and "ibv_modify_qp" in root.lines[0].text
    root = explain(tmp_path, harmless + cause + follows + failed).root  # without INFO nobody knows: the last
    assert root and "remote peer" in root.lines[0].text


LABELS = """0: W0618 10:41:02.117000 81077 torch/distributed/run.py:766] Setting OMP_NUM_THREADS environment variable
1: n2:10:20 [0] ib.cc:7 NCCL WARN Call to ibv_modify_qp failed with 61
0: [rank0]: RuntimeError: it fails
1: [rank4]: RuntimeError: it fails
srun: error: n2: task 1: Exited with exit code 1
"""


def test_a_task_that_starts_a_torchrun_is_no_rank(tmp_path: Path) -> None:
    assert explain(tmp_path, LABELS).seen.ranks == [0, 4]
    assert [ending.rank for ending in explain(tmp_path, LABELS).seen.endings] == [None]
    plain = explain(tmp_path, LABELS.replace("torch/distributed/run.py:766]", "train.py"))  # the control
    assert plain.seen.ranks == [0, 1, 4] and [ending.rank for ending in plain.seen.endings] == [1]


WATCHDOG = (
    "[rank{0}]:[E302 14:21:37.1 ProcessGroupNCCL.cpp:688] [Rank {0}] Watchdog caught collective operation timeout: "
)
WATCHDOG += (
    "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn={1}, NumelOut={1}, Timeout(ms)=30000) ran for 30010 milliseconds\n"
)


def test_who_is_killed_when_others_have_waited_in_vain_was_ended_by_the_launcher(tmp_path: Path) -> None:
    waits = WATCHDOG.format(0, 1) + WATCHDOG.format(1, 650)
    root = explain(tmp_path, waits + "Killed\n").root
    assert root and root.rule and "different sizes" in root.rule.meaning
    assert answer(explain(tmp_path, "Killed\n" + waits)) == "sigkill", "one that came before is the cause"


def test_a_name_without_an_address_is_why_a_rank_waits_for_it(tmp_path: Path) -> None:
    warned = "[W408 07:13:02.5 socket.cpp:759] [c10d] The IPv4 network addresses of (head, 41237) cannot be retrieved "
    warned += "(gai error: -2 - Name or service not known).\n"
    waits = (
        "[rank5]: torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to "
    )
    assert answer(explain(tmp_path, warned + waits + "connect to (head, 41237).\n")) == "name-not-resolved"
    assert answer(explain(tmp_path, warned + waits + "connect to (other, 41237).\n")) == "client-socket"


def test_what_a_run_met_on_its_way_to_a_good_end_is_no_failure(tmp_path: Path, capsys) -> None:
    log = tmp_path / "job.log"
    met = "rank 0 | ERROR: could not import flash_attn (No module named 'flash_attn'), using sdpa\nstep 9 loss 0.1\n"
    end = "55190         COMPLETED      0:0   00:35:41\n"
    log.write_text(met + end)
    assert main(["explain", str(log)]) == 0 and "What it met on its way:" in capsys.readouterr().out
    for failed in (FAILED.format(rank=0), TRACEBACK.format(rank=0, code="f()", error="ValueError: x")):
        log.write_text(met + failed + end)  # a job file may lose the status of its ranks
        assert main(["explain", str(log)]) == 1 or main(["explain", str(log)]) == 3


def test_a_workers_traceback_and_a_chained_one_lead_to_the_readers_line(tmp_path: Path) -> None:
    frame = '  File "/home/me/{name}.py", line {line}, in f\n'
    torch = '  File "/env/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 741, in __next__\n'
    begin = "Traceback (most recent call last):\n"
    text = begin + frame.format(name="train", line=3) + torch
    chained = "\nDuring handling of the above exception, another exception occurred:\n\n"
    inner = begin + '  File "/env/lib/python3.12/site-packages/torch/x.py", line 1, in g\nFooError: b\n'
    verdict = explain(tmp_path, f"{text}FooError: a\n{chained}{inner}")
    assert verdict.place == "/home/me/train.py:3"
    worker = "Original Traceback (most recent call last):\n" + torch + "FooError: b\n"
    assert explain(tmp_path, f"{text}FooError: Caught FooError in DataLoader worker process 0.\n{worker}").place
    assert explain(tmp_path, f"{inner}{begin}{torch}BarError: c\n").place == "", "the control: none is the reader's"
