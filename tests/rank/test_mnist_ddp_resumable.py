"""mnist_ddp_resumable, started again: to the bit what an uninterrupted run gives; what it refuses stays unchanged."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from unittest.mock import Mock

import own_parts
import pytest
import torch
from changed_text import replaced
from faults.matrix import Matrix, bits, events, steps
from faults.ranks import Ranks, run
from faults.rows import says
from notebook_texts import files
from real import LIMIT, python, until

from ddp_helpers import ROOT
from ddp_helpers.launch.launchers import free_port
from ddp_helpers.launch.processes import marked_processes
from ddp_helpers.rank import scripts
from ddp_helpers.rank.scripts import mnist_ddp_resumable as resumable
from ddp_helpers.records import runs

ELEVEN = ROOT / "notebooks" / "11_survive_preemption.ipynb"
# Runs a script, and gets the warning when Python clears its modules: it has put the handlers back before.
LATE = """
import os, runpy, signal, sys

class Late:
    def __del__(self, send=os.kill, me=os.getpid(), say=os.write, warning=signal.SIGUSR2):
        say(1, b"warned at the end")
        send(me, warning)

late = Late()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def told(matrix):
    """The folder of a run that was told to stop in the middle of epoch 1: its checkpoints are of steps 10 and 12."""
    folder = matrix.fresh("told")
    ended = matrix.train(folder, "--vote-every", 1, fault=(1, "SIGUSR2", "step", 13))
    assert ended.statuses == [75, 75] and steps(folder) == [12, 10]
    return folder


def content(folder):
    """All files of a run, by their path."""
    return {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}


def refuses(matrix, folder, *flags, words):
    """Every rank ends, not with 0, and one says why; the folder is as it was."""
    before = content(folder)
    ended = matrix.train(folder, *flags)
    assert all(ended.statuses), ended.said
    says(ended.said[0], words)
    assert content(folder) == before


def test_other_flags_are_refused_and_no_file_is_touched(matrix, told):
    refuses(matrix, told, "--seed", 2, words=r"the checkpoint is of \{'seed': 1, .*change the flags back")
    refuses(matrix, told, "--dry-run", words="change the flags back")


def test_a_run_of_the_script_without_checkpoints_is_refused(matrix):
    folder = matrix.fresh("plain")
    plain = scripts.write_script("mnist_ddp", matrix.folder / "mnist_ddp.py")
    flags = ["--data", matrix.data, "--run-dir", folder / "run", "--epochs", 1, "--no-cuda"]
    assert run(plain, *flags, folder=folder).statuses == [0, 0]
    refuses(matrix, folder, words="holds another run: choose a new folder")


def test_two_attempts_at_once_are_refused(matrix):
    folder = matrix.fresh("twice")
    with Ranks(matrix.script, matrix.flags(folder), 2, folder, (1, "SIGSTOP", "step", 9)) as first:
        until(first.note.exists, "the first attempt trains")
        refuses(matrix, folder, words="another attempt runs there")
    matrix.must_resume_equal(folder)


def test_another_network_is_no_damage(matrix, told):
    before = steps(told)
    smaller = matrix.changed(
        ("nn.Linear(9216, 128)", "nn.Linear(9216, 64)"), ("nn.Linear(128, 10)", "nn.Linear(64, 10)")
    )
    ended = matrix.train(told, script=smaller)
    assert all(ended.statuses), ended.said
    says(ended.said[0], "size mismatch for fc2.weight")
    assert steps(told) == before and not list(told.rglob("*.damaged"))
    matrix.must_resume_equal(told)


def test_a_checkpoint_that_cannot_be_read_now_is_no_damage(matrix):
    folder = matrix.fresh("unreadable")
    matrix.train(folder, fault=(1, "SIGUSR2", "step", 13))
    odd = folder / "run" / "checkpoints" / "step-99999999.pt"
    odd.mkdir()  # for reading a folder the system has an error, as for a disk that is away
    refuses(matrix, folder, words=f"Is a directory: '{odd}'")
    odd.rmdir()
    matrix.must_resume_equal(folder)


def test_the_seconds_of_an_epoch_are_those_of_all_its_attempts(matrix):
    folder = matrix.fresh("seconds")
    matrix.train(folder, fault=(1, "SIGUSR2", "step", 13))
    for path in (folder / "run" / "checkpoints").glob("step-*.pt"):
        checkpoint = torch.load(path, weights_only=True)
        assert 0 < checkpoint["progress"]["seconds"] < 1000
        checkpoint["progress"]["seconds"] += 1000
        torch.save(checkpoint, path)
    assert matrix.train(folder).statuses == [0, 0]
    first, second = runs.read_run(folder / "run").epochs
    assert 1000 < first["seconds"] < 2000 and second["seconds"] < 1000
    assert first["images_per_second"] == pytest.approx(first["train_samples"] / first["seconds"])


def test_a_run_that_is_done_stays_done_and_more_epochs_go_on_from_it(matrix):
    folder, longer = matrix.fresh("done"), matrix.fresh("longer")
    assert matrix.train(folder).statuses == [0, 0]
    metrics = (folder / "run" / "metrics.jsonl").read_text()
    matrix.must_resume_equal(folder)
    assert (folder / "run" / "metrics.jsonl").read_text() == metrics
    assert json.loads((folder / "run" / "status.json").read_text())["state"] == "done"
    assert [event["event"] for event in events(folder)][-2:] == ["started", "done"]
    flags = ("--epochs", 3, "--save-model")
    for each in (folder, longer):
        assert matrix.train(each, *flags).statuses == [0, 0]
    first, second = (torch.load(each / "run" / "mnist_cnn.pt", weights_only=True) for each in (folder, longer))
    assert bits(first) == bits(second) and runs.read_run(folder / "run").problems == []
    assert [epoch["epoch"] for epoch in runs.read_run(folder / "run").epochs] == [1, 2, 3]


def test_told_twice_within_one_epoch_it_ends_as_the_run_that_nobody_stopped(matrix):
    """What is done of an epoch counts from its first step, not from the attempt's."""
    forgets = ('{"done": progress["done"] + step,', '{"done": step,')
    for script in (None, matrix.changed(forgets)):
        folder = matrix.fresh(f"twice_in_one_{script is None}")
        for step, saved in ((5, 4), (6, 9)):  # of 16; each attempt counts its own, and is told before it takes one
            ended = matrix.train(folder, "--vote-every", 1, script=script, fault=(1, "SIGUSR2", "step", step))
            assert ended.statuses == [75, 75] and steps(folder)[0] == saved, ended.said
        if script is None:
            matrix.must_resume_equal(folder)
        else:
            assert matrix.resumes(folder, script=script) != matrix.golden(), "the control"


SHOWN = ("        if heard[-1]:", '        print("tests")\n        if heard[-1]:')


def test_told_to_stop_while_it_tests_a_rank_breaks_off_and_the_next_attempt_tests_again(matrix):
    """A test may be longer than the warning; ranks may have unequally many batches; and no step is done again."""
    script, flags = matrix.changed(SHOWN), ("--test-batch-size", "1")
    for moment, epochs in ((1, 1), (2, 2)):
        folder = matrix.fresh(f"tests_{moment}")
        ended = matrix.train(folder, *flags, script=script, fault=(1, "SIGUSR2", "evaluation", moment))
        assert ended.statuses == [75, 75] and steps(folder)[0] == 16 * epochs, ended.said
        assert [said.count("tests\n") for said in ended.said] == [100 * epochs, 100 * (epochs - 1) + 1]
        matrix.must_resume_equal(folder, *flags, script=script)


# Two workers come to a sample that takes hours when each has given two batches, of 16 samples, 24 or 8; before the end
# of the second the rank is told to stop. What was asked for the pass that is thrown away counts, too.
HOURS = """
import multiprocessing, os, signal, time

def late(sample, seen=[]):
    seen.append(1)
    if len(seen) == {samples}:
        os.kill(multiprocessing.parent_process().pid, signal.SIGUSR2)
    time.sleep(10_000 * (len(seen) > {samples}))
    return sample


class Late(list):
    def __getitem__(self, index):
        return late(super().__getitem__(index))


"""
BUSY = {  # of each script how its samples come late, and what it is given
    "mnist_ddp_resumable": (
        [("(0.3081,))])", "(0.3081,)), late])"), ("class Net(", HOURS.format(samples=48) + "class Net(")],
        ["--run-dir=run", "--batch-size=16", "--num-workers=2", "--vote-every=1", "--no-cuda"],
    ),
    "spirals_resumable": (
        [
            ("def spirals(", HOURS.format(samples=96) + "def spirals("),
            ("train_set, test_set = spirals(960, seed=1), ", "train_set, test_set = Late(spirals(960, seed=1)), "),
            ('loading = {"generator"', 'loading = {"num_workers": 2, "generator"'),
        ],
        ["--batch-size=32", "--run-dir=run", "--vote-every=1"],
    ),
    "resumable": (
        [
            ("path, epochs", HOURS.format(samples=16) + "data = Late(data)\npath, epochs"),
            ('workers": 0', 'workers": 2'),
        ],
        ["run.pt"],
    ),
}


def test_a_rank_that_leaves_ends_workers_that_are_busy_and_without_that_it_stays(matrix, tmp_path):
    texts = {file: text for file, text in files(ELEVEN).items() if file.endswith(".py")}
    for path in (matrix.script, ROOT / "notebooks" / "spirals_resumable.py"):
        texts[path.name] = path.read_text()
    ranks = {}
    for name, (changes, flags) in BUSY.items():
        data = [f"--data={matrix.data}"] if name == matrix.script.stem else []
        for ends, instead in ((True, "worker.kill()"), (False, "pass")):
            (folder := tmp_path / f"{name}_{ends}").mkdir()
            for file, text in texts.items():
                text = replaced(text, changes) if file == f"{name}.py" else text
                (folder / file).write_text(text.replace("worker.kill()", instead))
            env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "REQUEUE_FILE": str(folder / "requeue")}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
            with (folder / "log").open("w") as log:
                options = {"cwd": folder, "env": os.environ | env, "stdout": log, "stderr": log}
                command = [sys.executable, f"{name}.py", *data, *flags]
                ranks[name, ends, folder] = subprocess.Popen(command, start_new_session=True, **options)
    try:
        for (_, ends, folder), rank in ranks.items():
            until((folder / "requeue").exists, f"it has saved: {(folder / 'log').read_text()}")
            if ends:
                assert rank.wait(LIMIT) == 75 and "Traceback" not in (folder / "log").read_text()
                with pytest.raises(ProcessLookupError):
                    os.killpg(rank.pid, 0)  # no worker is left
        time.sleep(12)  # longer than the loader itself waits for two workers
        assert {name: rank.poll() for (name, ends, _), rank in ranks.items() if not ends} == dict.fromkeys(BUSY)
    finally:
        for rank in ranks.values():
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


# A dataset that is another one each time it is asked, from the dice of whoever loads it.
NOISE = ("(0.3081,))])", "(0.3081,)), lambda x: x + 0.1 * torch.randn_like(x)])")


@pytest.mark.parametrize(("workers", "step"), [(0, 7), (1, 17)])
def test_random_changes_to_the_data_are_the_same_after_a_resume(workers, step, matrix):
    """Also in the middle of an epoch without workers, and from its end with them; and no process is left."""
    folder, script, flags = matrix.fresh(f"noise_{workers}"), matrix.changed(NOISE), ("--num-workers", workers)
    with Ranks(script, (*matrix.flags(folder), *flags), 2, folder, (1, "SIGUSR2", "step", step)) as ranks:
        assert ranks.wait().statuses == [75, 75]
        assert marked_processes(ranks.forked.mark) == []
    matrix.must_resume_equal(folder, *flags, script=script)


def test_the_workers_of_two_ranks_change_the_same_sample_otherwise(matrix):
    """Else as many ranks would see as few changes as one."""
    shown = 'print("sample", next(iter(train_batches))[0].sum().item())\n        model.train()'
    same = matrix.changed(NOISE, ("sampler=rest,", "sampler=[0] * 16,"), ("model.train()", shown))
    folder = matrix.fresh("apart")
    said = matrix.train(folder, "--num-workers", 1, "--dry-run", "--epochs", 1, script=same).said
    seen = [re.findall(r"^sample (.*)$", each, re.M)[0] for each in said]
    assert seen[0] != seen[1], said


def test_with_workers_a_kill_leaves_no_process(matrix):
    folder, flags = matrix.fresh("workers"), ("--num-workers", 1)
    with Ranks(matrix.script, (*matrix.flags(folder), *flags), 2, folder, (1, "SIGKILL", "step", 9)) as ranks:
        assert all(ranks.wait().statuses)
        # A worker of a rank that was killed looks every 5 s whether it is still there.
        until(lambda: not marked_processes(ranks.forked.mark), "no process is left")
    matrix.must_resume_equal(folder, *flags)


def warned_at_the_end(folder, *command):
    """Run a script to its end, and warn it there: its exit status."""
    (folder / "late.py").write_text(LATE)
    done = python("late.py", *command, cwd=folder)
    assert done.stdout.endswith("warned at the end"), done.stderr
    return done.returncode


def test_a_warning_that_comes_while_python_ends_does_not_kill_a_run_that_is_done(matrix, tmp_path):
    flags = ["--data", matrix.data, "--run-dir", "run", "--dry-run", "--no-cuda"]
    assert warned_at_the_end(tmp_path, matrix.script, *flags) == 0
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
    handler = "import signal; signal.signal(signal.SIGUSR2, print)"
    (tmp_path / "handler.py").write_text(handler)
    assert warned_at_the_end(tmp_path, "handler.py") == -signal.SIGUSR2, "the control"


def test_nor_does_it_kill_the_run_of_notebook_11(tmp_path):
    for name, text in files(ELEVEN).items():
        (tmp_path / name).write_text(text)
    with (tmp_path / "resumable.py").open("a") as script:
        script.write('import signal\nprint("at the end", *map(signal.getsignal, (signal.SIGUSR2, signal.SIGTERM)))\n')
    ended = run(tmp_path / "resumable.py", tmp_path / "end.pt", size=1, folder=tmp_path / "logs")
    assert ended.statuses == [0] and "\nat the end 1 1\n" in ended.said[0], "it ignores both, as the one above"


def test_averages_of_batchnorm_go_on_to_the_bit_in_a_script_with_the_learners_own_parts(matrix):
    script, told = matrix.folder / "own_parts.py", (1, "SIGUSR2", "step", 13)
    scripts.write_script("mnist_ddp_resumable", script, parts=own_parts.__file__)
    folder, lost = matrix.fresh("averages"), matrix.fresh("without_averages")
    assert matrix.train(folder, script=script, fault=told).statuses == [75, 75]
    matrix.must_resume_equal(folder, script=script)
    text, whole = script.read_text(), "part.load_state_dict(newest[name])"
    assert text.count(whole) == 1
    left_out = "part.load_state_dict({k: v for k, v in newest[name].items() if 'running' not in k}, strict=False)"
    without = script.with_name("without.py")
    without.write_text(text.replace(whole, f"{whole} if name != 'model' else {left_out}"))
    assert matrix.train(lost, script=without, fault=told).statuses == [75, 75]
    assert matrix.resumes(lost, script=without) != matrix.golden(script=script), "the control"


def test_where_the_file_system_has_no_locks_one_line_says_so(tmp_path, monkeypatch, capsys):
    """As on Lustre that is mounted with noflock, where nobody could train into any folder."""
    monkeypatch.setattr(resumable.dist, "broadcast_object_list", Mock())
    monkeypatch.setattr(resumable, "held", [])
    error = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    monkeypatch.setattr(resumable.fcntl, "lockf", Mock(side_effect=error))
    resumable.claim(tmp_path / "run")
    assert f"{tmp_path / 'run'} cannot be locked" in capsys.readouterr().out
    resumable.held.pop().close()
