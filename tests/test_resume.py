"""What --resume does, and what it refuses: with one line and exit status 2 on every rank, and nothing changed."""

import errno
import json
import os
import pickle
import re
import signal
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import coloured
import nbformat
import pytest
import torch
from faults.matrix import Matrix, events, weights
from faults.ranks import Ranks, run
from real import LIMIT, python, until
from refusals import one_line
from torch.utils.data import DistributedSampler

from ddp_helpers import ROOT
from ddp_helpers.launch import scripts
from ddp_helpers.launch.launchers import rank_environments
from ddp_helpers.rank import resume
from ddp_helpers.rank.resume import (
    RemainingSampler,
    list_checkpoints,
    load_checkpoint,
    read_checkpoint,
    read_newest_checkpoint,
    save_checkpoint,
)
from ddp_helpers.records import runs

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
    assert ended.statuses == [75, 75]
    return folder


def content(folder):
    """All files of a run, by their path."""
    return {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}


def refuses(matrix, folder, *flags, size=2, says, script=None):
    """Every rank ends with 2 and the same one line, and the folder is as it was."""
    before = content(folder)
    ended = matrix.train(folder, *flags, size=size, script=script)
    assert ended.statuses == [2] * size, ended.said
    for said in ended.said:
        lines = [
            line for line in said.splitlines() if line and not re.match(r"left: |rank \d of \d on |a step takes ", line)
        ]
        one_line("\n".join(lines), says)
    assert content(folder) == before


def test_a_checkpoint_that_is_named_starts_a_new_run_folder(matrix, told):
    path, folder = list_checkpoints(told / "run" / "checkpoints")[1], matrix.fresh("named and killed")
    # Killed before its own first checkpoint, it starts from the named one again, and not from nothing.
    matrix.train(folder, "--resume", path, fault=(1, "SIGKILL", "step", 3))
    ended = matrix.train(folder, "--resume", path)
    assert ended.statuses == [0, 0] and re.search(r"epoch 1\b.*\bstep 10\b.*\bbit\b", ended.said[0])
    assert weights(folder) == matrix.golden()
    # Told to stop in turn, it is started again by the same command: from its own checkpoint, not from the named one.
    folder = matrix.fresh("named and told")
    matrix.train(folder, "--resume", path, "--vote-every", 1, fault=(1, "SIGUSR2", "step", 5))
    ended = matrix.train(folder, "--resume", path)
    assert re.search(r"epoch 1\b.*\bstep 14\b.*\bbit\b", ended.said[0]), ended.said[0]
    assert weights(folder) == matrix.golden()


def test_a_named_checkpoint_that_is_damaged_is_refused_and_stays(matrix, told):
    path = list_checkpoints(told / "run" / "checkpoints")[0]
    copy = matrix.fresh("damaged") / path.name
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes()[:-1])
    refuses(matrix, matrix.fresh("other"), "--resume", copy, says=f"{path.name} ")
    mine = copy.with_name("mine.pt")
    refuses(matrix, matrix.fresh("other"), "--resume", mine, says=f"No such file or directory: '{mine}'")
    mine.write_bytes(path.read_bytes())
    refuses(matrix, matrix.fresh("other"), "--resume", mine, says="its content has another SHA-256 than its name says")
    assert copy.exists() and mine.exists()


@pytest.mark.parametrize(
    ("flags", "size", "says"),
    [
        (("--seed", 2), 2, "'precision': 'float32'}, not {'seed': 2"),
        (("--resume", "never"), 2, "cannot take a run"),
        (("--batch-size", 30), 5, "5 ranks cannot share 384 samples"),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_a_run_that_cannot_go_on_so_is_refused(matrix, told, flags, size, says):
    refuses(matrix, told, *flags, size=size, says=says)


def test_another_model_and_another_kind_of_run_are_refused(matrix, told):
    smaller = matrix.changed(
        ("nn.Linear(9216, 128)", "nn.Linear(9216, 64)"), ("nn.Linear(128, 10)", "nn.Linear(64, 10)")
    )
    refuses(matrix, told, script=smaller, says="of another script or model")
    folder = matrix.fresh("plain")
    plain = scripts.write_script("mnist_ddp", matrix.folder / "mnist_ddp.py")
    flags = ["--data", matrix.data, "--run-dir", folder / "run", "--epochs", 1, "--no-cuda"]
    assert run(plain, *flags, folder=folder).statuses == [0, 0]
    refuses(matrix, folder, says="cannot take a run")


def test_of_an_epoch_that_is_done_again_the_first_line_goes(matrix):
    first = matrix.fresh("first")
    matrix.train(first, "--epochs", 1)
    folder, metrics = matrix.fresh("again"), matrix.folder / "again" / "run" / "metrics.jsonl"
    path = list_checkpoints(first / "run" / "checkpoints")[0]
    matrix.train(folder, "--resume", path, fault=(1, "SIGUSR2", "step", 5))
    assert metrics.read_text() == (first / "run" / "metrics.jsonl").read_text()
    with metrics.open("a") as file:
        file.write('{"epoch": 2}\n{"epo')  # it died between the line of epoch 2 and its checkpoint
    assert matrix.train(folder).statuses == [0, 0]
    assert [json.loads(line)["epoch"] for line in metrics.read_text().splitlines()] == [1, 2]


def test_a_dry_run_leaves_nothing_to_go_on_from(matrix):
    folder = matrix.fresh("dry")
    assert matrix.train(folder, "--dry-run").statuses == [0, 0]
    matrix.must_resume_equal(folder)


def test_what_was_inexact_once_is_never_called_exact_again(matrix, told):
    path, folder = list_checkpoints(told / "run" / "checkpoints")[1], matrix.fresh("inexact")
    matrix.train(folder, "--resume", path, size=1, fault=(0, "SIGUSR2", "step", 4))
    again = matrix.train(folder, "--resume", path, size=1)
    assert re.search(r"not equal\b.*\{'world_size': 1, 'batch_size': 32", again.said[0]), again.said[0]
    assert "'once': {'world_size': 2, 'batch_size': 32" in again.said[0], again.said[0]
    ended = matrix.train(matrix.fresh("wider"), "--resume", path, "--batch-size", 64)
    assert re.search(r"\bbatch\b.*\b64\b", ended.said[0]) and not re.search(r"\bbit\b", ended.said[0]), ended.said[0]


def test_two_attempts_at_once_are_refused(matrix):
    folder = matrix.fresh("twice")
    with Ranks(matrix.script, matrix.flags(folder), 2, folder, (1, "SIGSTOP", "step", 9)) as first:
        until(first.note.exists, "the first attempt trains")
        second = matrix.train(folder)
        assert second.statuses == [2, 2] and "another attempt" in second.said[0], second.said
    matrix.must_resume_equal(folder)


def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, 5, {"step": 5})
    monkeypatch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        read_newest_checkpoint(tmp_path)
    assert path.exists()


def test_a_run_that_is_done_stays_done(matrix):
    folder = matrix.fresh("done")
    assert matrix.train(folder).statuses == [0, 0]
    metrics = (folder / "run" / "metrics.jsonl").read_text()
    again = matrix.train(folder)
    assert again.statuses == [0, 0] and (folder / "run" / "metrics.jsonl").read_text() == metrics
    assert json.loads((folder / "run" / "status.json").read_text()) == {"state": "done"}
    assert [event["event"] for event in events(folder)][-2:] == ["started", "done"]


def warned_at_the_end(folder, *command):
    """Run a script to its end, and warn it there: its exit status."""
    (folder / "late.py").write_text(LATE)
    done = python("late.py", *command, cwd=folder)
    assert done.stdout.endswith("warned at the end"), done.stderr
    return done.returncode


def test_a_warning_that_comes_while_python_ends_does_not_kill_a_run_that_is_done(matrix, tmp_path):
    flags = ["--data", matrix.data, "--run-dir", "run", "--dry-run", "--no-cuda"]
    assert warned_at_the_end(tmp_path, matrix.script, *flags) == 0
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == {"state": "done"}
    handler = "import signal; signal.signal(signal.SIGUSR2, print)"
    (tmp_path / "handler.py").write_text(handler)
    assert warned_at_the_end(tmp_path, "handler.py") == -signal.SIGUSR2, "the control"


def test_nor_does_it_kill_the_run_of_notebook_11(tmp_path, monkeypatch):
    for cell in nbformat.read(ROOT / "notebooks" / "11_survive_preemption.ipynb", as_version=4).cells:
        if file := re.match(r"%%writefile (?:--append )?(\w+\.py)\n", cell.source):
            with (tmp_path / file[1]).open("a") as script:
                script.write(cell.source[file.end() :] + "\n")
    for name, value in rank_environments(1, {})[0].items():
        monkeypatch.setenv(name, value)
    assert warned_at_the_end(tmp_path, "resumable.py", "end.pt") == 0


def final(matrix, name, script, fault):
    """Two epochs with the learner's own parts, told to stop on the way if there is a fault: what is saved."""
    folder = matrix.fresh(name)
    flags = ["--save-model", "--timeout", LIMIT]
    if fault:
        ended = matrix.train(folder, *flags, script=script, fault=fault)
        assert ended.statuses == [75, 75], ended.said
    ended = matrix.train(folder, *flags, script=script)
    assert ended.statuses == [0, 0], ended.said
    assert bool(re.search(r"\bbit\b", ended.said[0])) == bool(fault)
    return torch.load(folder / "run" / "mnist_cnn.pt", weights_only=True)


def test_averages_of_batchnorm_go_on_to_the_bit_in_a_script_with_the_learners_own_parts(matrix):
    script = scripts.write_script("mnist_ddp_resumable", matrix.folder / "coloured.py", replace=coloured.PARTS)
    told = (1, "SIGUSR2", "step", 13)
    golden, resumed = (final(matrix, name, script, fault) for name, fault in (("golden", None), ("resumed", told)))
    assert golden.keys() == coloured.Net().state_dict().keys() == resumed.keys()
    assert golden["norm.num_batches_tracked"] == 32
    assert [name for name in golden if not torch.equal(golden[name], resumed[name])] == []
    left_out = "part.load_state_dict({k: v for k, v in state[name].items() if 'running' not in k}, strict=False)"
    text, whole = script.read_text(), "part.load_state_dict(state[name])"
    assert text.count(whole) == 1
    without = script.with_name("without.py")
    without.write_text(text.replace(whole, f"{whole} if name != 'model' else {left_out}"))
    lost = final(matrix, "without", without, told)
    assert any(not torch.equal(golden[name], lost[name]) for name in golden if "running" in name), "the control"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 2), (3, 2)])
def test_the_rest_of_an_epoch_is_the_same_samples_on_another_number_of_ranks(before, after):
    data, done = range(600), 240

    def seen(size, start):
        samplers = [RemainingSampler(DistributedSampler(data, size, rank, seed=1)) for rank in range(size)]
        for sampler in samplers:
            sampler.set_epoch(3, start)
        shards = [list(sampler) for sampler in samplers]
        assert [len(sampler) for sampler in samplers] == [len(shard) for shard in shards]
        return [sample for together in zip(*shards, strict=True) for sample in together]  # in the epoch's order

    first, rest = seen(before, 0)[:done], seen(after, done)
    assert rest == seen(before, done) and sorted(first + rest) == list(data)
    assert sorted(first + seen(after, done - 12)) != list(data)  # the control: 12 samples too early


def test_the_last_two_are_kept_and_what_is_damaged_does_not_count(tmp_path, capsys):
    paths = [save_checkpoint(tmp_path, step, {"step": step}) for step in (5, 10, 15)]
    assert list_checkpoints(tmp_path) == [paths[2], paths[1]]
    paths[2].write_bytes(b"")
    assert load_checkpoint(read_newest_checkpoint(tmp_path)) == {"step": 10}
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and paths[2].name in said and f"{paths[2].stem}.damaged" in said
    assert not paths[2].exists() and paths[2].with_suffix(".damaged").exists()
    save_checkpoint(tmp_path, 12, {"step": 12})
    assert [load_checkpoint(read_checkpoint(path))["step"] for path in list_checkpoints(tmp_path)] == [12, 10]
    assert read_newest_checkpoint(tmp_path / "nothing") == b""


def test_a_sound_file_that_is_no_checkpoint_is_an_error_and_not_set_aside(matrix, tmp_path):
    path = save_checkpoint(tmp_path, 5, {"step": 5})
    ended = matrix.train(matrix.fresh("no checkpoint"), "--resume", path)
    assert ended.statuses == [2, 2] and "'model'" in ended.said[1], ended.said
    assert path.exists()
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint(read_checkpoint(save_checkpoint(tmp_path, 6, {"step": Path("more than data")})))


def test_a_run_that_was_saved_and_left_is_preempted_also_where_slurm_says_failed(tmp_path):
    for name, content in {"job": {"state": "FAILED"}, "status": {"state": "preempted"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert runs.read_run(tmp_path).state == "preempted"
    (tmp_path / "status.json").write_text('{"state": "running"}')
    assert runs.read_run(tmp_path).state == "failed"


def test_where_the_file_system_has_no_locks_one_line_says_so(tmp_path, monkeypatch, capsys):
    """As on Lustre that is mounted with noflock, where nobody could train into any folder."""
    for number, said in ((errno.ENOSYS, "no locks"), (errno.ENOLCK, "no locks"), (errno.EACCES, "")):
        monkeypatch.setattr(resume.fcntl, "lockf", Mock(side_effect=OSError(number, os.strerror(number))))
        with (tmp_path / "attempts.jsonl").open("a") as file, nullcontext() if said else pytest.raises(OSError):
            resume._claim(file)
        assert said in capsys.readouterr().err


def test_the_folder_is_claimed_before_its_checkpoint_is_read(tmp_path, monkeypatch):
    """An attempt that still runs could write a newer checkpoint between the two."""
    order = []
    monkeypatch.setattr(resume, "_claim", lambda file: order.append("claim"))
    monkeypatch.setattr(resume, "read_newest_checkpoint", lambda folder: order.append("read") or b"newest")
    mine = Namespace(args=Namespace(run_dir=tmp_path / "run", resume="auto"))
    assert resume.ResumableRun._choose(mine) == (b"newest", "") and order == ["claim", "read"]
    mine.lock.close()
