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
    "two agents say that they restart": (
        "I9 torch/distributed/elastic/a.py:525]   restart_count=0\n0: loss 2.1\n"
        + 2
        * (
            "I9 torch/distributed/elastic/a.py:899] [default] Worker group FAILED. 2/2 attempts left; "
            "will restart worker group\nI9 torch/distributed/elastic/a.py:677] [default] Rendezvous'ing worker group\n"
        )
        + 2 * "I9 torch/distributed/elastic/a.py:525]   restart_count=1\n"
        + "0: loss 2.0\n",
        ["I9 torch", "I9 torch/distributed/elastic/a.py:677"],
    ),
    "the count rises, and stays": (
        "".join(f"I9 a.py:1]   restart_count={count}\n0: loss 2\n" for count in (0, 0, 1, 1, 2)),
        ["I9", "I9 a.py:1]   restart_count=1", "I9 a.py:1]   restart_count=2"],
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


OWN = "[rank2]: acme.LimitError: shard 7 is over its limit\n"
GONE = [  # what another rank says of it, by a rule or none
    "torch.distributed.DistBackendError: NCCL error in: a.cpp:3, remote process exited or there was a network error",
    "ncclSystemError: x\n[rank1]: Last error:\n[rank1]: socketPollConnect: n2<5>: Connection refused",
    "acme.LinkError: my link: Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
]


@pytest.mark.parametrize("gone", GONE)
def test_a_rank_that_failed_by_itself_comes_before_one_that_tells_of_another(gone: str, tmp_path: Path) -> None:
    other = f"[rank1]: {gone}\n"
    for text in (OWN + other, other + OWN):
        verdict = explain(tmp_path, text)
        assert verdict.root.lines[0].text in OWN and verdict.first == 2 and not verdict.known and not verdict.others
    alone = explain(tmp_path, other + "SystemExit: 1\n")  # the control; a launcher's last word is no rank's failure
    assert alone.root.rank == 1
    server = explain(tmp_path, OWN + "[rank1]: acme.HubError: https://hub/x: Connection refused\n")
    assert server.first is None, "a server on the web is none of the ranks"


def test_what_nccl_repeats_as_its_last_error_is_the_message_of_that_rank(tmp_path: Path) -> None:
    first = WARNS.format(gpu=0, words="No ring fits") + "n1:10:20 [0] NCCL INFO x.cc:1 -> 3\n"
    repeated = WARNS.format(gpu=5, words="Cage 7 is locked").replace("10:20", "11:21")
    failed = TRACEBACK.format(rank=5, code="f()", error=UNHANDLED) + "[rank5]: Last error:\n[rank5]: Cage 7 is locked\n"
    verdict = explain(tmp_path, first + repeated + failed)
    assert "Cage" in verdict.root.lines[0].text and verdict.first == 5 and verdict.raised.own == "/home/me/train.py:40"
    space = "Error: failed to extend /dev/shm/nccl-a to 9 bytes, error: No space left on device (28)"
    verdict = explain(tmp_path, repeated.replace("Cage 7 is locked", space) + failed.replace("Cage 7 is locked", space))
    assert (answer(verdict), verdict.root.rank) == ("nccl-shm", 5), "a rule knows the warning, the exception its rank"


CAUSE = "Root Cause (first observed failure):\n  rank      : {0} (local_rank: {0})\n  exitcode  : 1 (pid: 7)\n"
TIMED = "[rank{}]: [2026-05-01 08:00:0{},123] RuntimeError: CUDA out of memory.\n"
FIRST = {  # a log, who failed first, and how that is known
    "[rank1]: KeyError: 7\n": (1, "no other rank failed by itself"),
    "[rank1]: KeyError: 7\n[rank3]: KeyError: 7\n": (None, "ranks 1, 3"),
    "[rank1]: KeyError: 7\n[rank3]: KeyError: 7\n" + CAUSE.format(1): (1, "torchrun says so"),
    "[rank1]: KeyError: 7\n" + CAUSE.format(3): (None, "rank 1, and torchrun names rank 3"),
    "[rank1]: KeyError: 7\n[rank3]: KeyError: 7\n" + FAILED.format(rank=1): (1, "its launcher"),
    TIMED.format(3, 5) + TIMED.format(1, 4): (1, "by time"),
    TIMED.format(3, 5) + "[rank1]: RuntimeError: CUDA out of memory.\n": (None, "ranks 1, 3"),
    "acme.LimitError: odd\n[rank0]: Connection reset by peer\n" + CAUSE.format(0): (None, ""),
    "acme.LimitError: odd\n" + CAUSE.format(0): (0, "torchrun says so"),
}


@pytest.mark.parametrize("text", FIRST)
def test_who_failed_first_is_said_with_evidence_alone(text: str, tmp_path: Path) -> None:
    verdict = explain(tmp_path, text)
    first, by = FIRST[text]
    assert verdict.first == first and by in verdict.by


def test_a_rank_is_read_behind_a_time_and_a_level_and_not_from_a_sentence(tmp_path: Path) -> None:
    lines = [
        *["09:10:22 INFO  rank 3: a", "2026-05-01 09:10 | rank 3 | a", "[2026-05-01] [INFO] [rank 3] a", "rank=3: a"],
        *["waiting for rank 3: it is late", "INFO loaded the table of rank 3: 7 rows"],
    ]
    (tmp_path / "job.log").write_text("\n".join(lines))
    assert [line.rank for line in read_logs([tmp_path / "job.log"]).lines] == [3, 3, 3, 3, None, None]
    hosts = "gpu-1: [rank0]: ValueError: x\ngpu-2: [rank1]: KeyError: 7\ngpu-1: srun died\n"
    (tmp_path / "job.log").write_text(hosts)
    logs = read_logs([tmp_path / "job.log"])
    assert [line.rank for line in logs.lines] == [0, 1, None] and logs.lines[2].file.endswith("(of gpu-1)")
    part = "+ pip list\n+ srun --label a\n1: KeyError: 7\n0: a\n"  # what a job file prints has no label
    (tmp_path / "job.log").write_text(part)
    assert [line.rank for line in read_logs([tmp_path / "job.log"]).lines] == [None, None, 1, 0]


def test_what_a_killed_rank_and_one_that_did_not_come_were_at_is_shown(tmp_path: Path, capsys) -> None:
    log = tmp_path / "job.log"
    log.write_text("08:00:01 INFO rank 2: packs the index\n" + CAUSE.format(2).replace(": 1 (", ": -9 ("))
    assert main(["explain", str(log)]) == 1
    assert "Its last lines:\n  | 08:00:01 INFO rank 2: packs the index" in capsys.readouterr().out
    log.write_text("epoch 1\nBus error (core dumped)\nthe trap copies logs\n")  # of no rank
    assert main(["explain", str(log)]) == 1
    said = capsys.readouterr().out
    assert "lead to it:\n  | epoch 1\n  | Bus error (core dumped)\n\n" in said and said.count("Bus error") == 2
    log.write_text("[rank1]: tunes kernel 4\n[rank0]: waits\n" + WATCHDOG.format(0, 1) + "[rank1]: ready\n")
    assert main(["explain", str(log)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 1, line 1 | tunes kernel 4 Rank 0's" in said and "rank 1 did not come to it" in said


def test_once_training_has_begun_a_store_that_does_not_answer_has_gone(tmp_path: Path) -> None:
    refused = "[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after 60000ms"
    refused += " while trying to connect to (n1, 29500).\n"
    assert answer(explain(tmp_path, refused)) == "client-socket"
    assert answer(explain(tmp_path, "[rank0]: epoch 3 step 410 loss 0.22\n" + refused)) == "store-gone"


def test_the_facts_are_those_of_the_log_and_no_advice(tmp_path: Path, capsys) -> None:
    log = tmp_path / "job.log"
    head = "torch 2.12.0+cu130\n\n+ FI_PROVIDER=efa srun --label torchrun --nnodes=2 train.py\nNCCL_DEBUG=INFO\n"
    head += "set TORCH_CPP_LOG_LEVEL=INFO for more (run with NCCL_ALGO=Ring)\n"  # advice: nobody set them
    log.write_text(head + WARNS.format(gpu=3, words=NVLS) + TRACEBACK.format(rank=3, code="f()", error=UNHANDLED))
    status = main(["explain", str(log)])
    cures = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("  fix:", "  means:"))]
    assert main(["explain", str(log), "--facts", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["versions"] == {"torch": ["2.12.0+cu130"], "NCCL": ["2.29.7"], "CUDA": ["13.0"], "Python": ["3.12"]}
    assert found["launchers"] == ["torchrun", "srun"] and found["variables"] == ["NCCL_DEBUG=INFO", "FI_PROVIDER=efa"]
    assert found["read"].endswith(f": {len(log.read_text().splitlines())} lines")
    assert found["command lines"] == ["FI_PROVIDER=efa srun --label torchrun --nnodes=2 train.py"]
    [attempt] = found["attempts"]
    assert attempt["innermost frame"].endswith("distributed_c10d.py:3033") and attempt["ranks"] == "rank 3"
    assert attempt["failed first"].startswith("rank 3") and NVLS in attempt["root"]
    main(["explain", str(log), "--facts"])
    text = capsys.readouterr().out
    assert not any(line in text for line in cures) and "fix:" not in text and NVLS in text
    job = tmp_path / "job.sbatch"
    job.write_text("#!/bin/bash\n#SBATCH --nodes=1\nsrun python train.py\n")
    with pytest.raises(SystemExit, match="2"):
        main(["explain", str(job), "--facts"])
    assert "--facts is for the log of a run" in capsys.readouterr().err


def test_in_the_facts_a_rank_that_did_not_come_is_the_root_and_not_who_waited_for_it(tmp_path: Path, capsys) -> None:
    log = tmp_path / "job.log"
    tells = "[rank1]: tunes kernel 4\n[rank0]: waits\n"
    log.write_text(tells + WATCHDOG.format(0, 1) + "[rank1]: ready\n")
    assert main(["explain", str(log), "--facts", "--json"]) == 1
    [attempt] = json.loads(capsys.readouterr().out)["attempts"]
    assert attempt["root"] == "rank 1 did not come to ALLREDUCE number 9"
    assert attempt["lines that lead to the root"] == ["rank 1, line 1: tunes kernel 4"]
    assert attempt["seen by"].startswith("rank 0, line 3: ")
    log.write_text(tells + "[rank0]: reads\n" + TRACEBACK.format(rank=1, code="f()", error=MEMORY))  # the control
    assert main(["explain", str(log), "--facts", "--json"]) == 1
    [attempt] = json.loads(capsys.readouterr().out)["attempts"]
    assert "out of memory" in attempt["root"] and "seen by" not in attempt
    assert all(line.startswith("rank 1, ") for line in attempt["lines that lead to the root"])


def test_a_source_line_of_a_traceback_is_no_failure_and_a_launchers_frames_are_no_ranks(tmp_path: Path) -> None:
    code = 'raise RuntimeError("CUDA out of memory.")'
    assert answer(explain(tmp_path, f"[rank1]: {code[6:]}")) == "cuda-oom", "the control"
    verdict = explain(tmp_path, TRACEBACK.format(rank=1, code=code, error="acme.LimitError: odd"))
    assert answer(verdict) is None and not verdict.others
    agent = 'Traceback (most recent call last):\n  File "/env/lib/python3.12/site-packages/torch/distributed/run.py", '
    agent += "line 1, in main\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    verdict = explain(tmp_path, agent + CAUSE.format(0).replace(": 1 (", ": -9 ("))
    assert answer(verdict) == "sigkill" and verdict.raised.inner == ""


UP = "n2:10:20 [0] NCCL INFO transport/x.cc:9 -> 2\n"


def test_the_first_warning_that_its_thread_hands_up_is_where_an_error_of_nccl_began(tmp_path: Path) -> None:
    harmless = "n2:10:20 [0] graph.cc:1 NCCL WARN Could not find a path, falling back\n"
    cause = "n2:10:20 [0] ib.cc:7 NCCL WARN Call to ibv_modify_qp failed with 61\n"
    follows = "n1:30:40 [0] socket.cc:71 NCCL WARN Connection closed by remote peer n2<46112>\n"
    failed = TRACEBACK.format(rank=0, code="f()", error=UNHANDLED.replace("cuda", "system"))
    root = explain(tmp_path, harmless + cause + UP + follows + UP.replace("n2:10:20", "n1:30:40") + failed).root
    assert root and "ibv_modify_qp" in root.lines[0].text
    root = explain(tmp_path, harmless + cause + follows + failed).root  # without INFO: the last that tells of no other
    assert root and "ibv_modify_qp" in root.lines[0].text


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
    raised = TRACEBACK.format(rank=0, code="f()", error="ValueError: x")
    for failed in (FAILED.format(rank=0), raised, raised.partition("[rank0]: ValueError")[0]):
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
    assert verdict.raised.own == "/home/me/train.py:3"
    worker = "Original Traceback (most recent call last):\n" + torch + "FooError: b\n"
    assert explain(tmp_path, f"{text}FooError: Caught FooError in DataLoader worker process 0.\n{worker}").raised.own
    assert explain(tmp_path, f"{inner}{begin}{torch}BarError: c\n").raised.own == "", (
        "the control: none is the reader's"
    )
