"""The fault matrix on processes of this machine: each row harms a run, and says what must hold afterwards.

A row's function returns the seconds until everyone had left; it fails where what must hold does not.

To add one: the harm is a row of HARMS in inject.py, called on the rank that is to be harmed, and its moment a row of
MOMENTS; PHASES says at the how-manieth call. (A row that harms files between two starts needs no harm.) Then a function
here that takes the matrix, and a row of ROWS: `matrix.fresh(NAME)` gives a folder, `matrix.train(folder, fault=(rank,
HARM, moment, number))` two epochs on two ranks, with statuses and what was said, and `matrix.must_resume_equal(folder)`
holds that the same command goes on to the weights of an unharmed run. `PYTHONPATH=tests python -m faults "part of its
name"` runs it; rows of slurm_rows.py need `slurm/cluster with env` before it. A row that proves another equality than
those of CONTROLS needs a control of its own.
"""

import json
import re
import shutil
import socket
import time
from functools import partial
from itertools import product
from random import Random

import torch
from real import THOROUGH

from faults.matrix import GIVES_UP, checkpoints, events, saved_model, steps
from faults.ranks import run

# A moment, and the how-manieth of its kind. Training counts one backward more than steps: the one that is thrown away.
PHASES = {
    "init": ("init", 1),
    "record": ("record", 1),
    "step 1": ("step", 2),
    "mid-epoch": ("step", 13),
    "last of an epoch": ("step", 17),
    "last of all": ("step", 33),
    "epoch boundary": ("epoch boundary", 1),
    "step": ("step", 13),
    "evaluation": ("evaluation", 1),
    "last evaluation": ("evaluation", 2),
    "barrier": ("barrier", 1),
    "save": ("save: before rename", 2),
    "metrics are written": ("save: before", 4),  # three saves in the epoch, and now that of its end
}


def says(said, words, lines=3):
    """The cause stands within the last lines that a rank has printed; what C++ adds to them does not count."""
    noise = re.compile(r"\[[WE]\d|Exception raised|frame #|<omit|\s*$")
    last = [line for line in said.splitlines() if not noise.match(line)][-lines:]
    assert re.search(words, "\n".join(last)), f"{words!r} is not in the last lines: {last}"


def killed(matrix, rank, phase):
    """Everyone leaves with an error, and the run goes on to the golden weights."""
    folder = matrix.fresh(f"kill_{rank}_{phase}")
    moment, number = PHASES.get(phase, (phase, 2))
    ended = matrix.train(folder, *GIVES_UP, fault=(rank, "SIGKILL", moment, number))
    assert ended.statuses[rank] == -9 and all(ended.statuses), f"exit statuses {ended.statuses}"
    if phase.startswith("save"):
        saved_model(folder)  # all that has a checkpoint's name is whole
    matrix.must_resume_equal(folder)
    return ended.seconds


def stopped(matrix, phase):
    """The survivor leaves with an error that says so, and the run goes on to the golden weights."""
    folder = matrix.fresh(f"stop_{phase}")
    ended = matrix.train(folder, *GIVES_UP, fault=(1, "SIGSTOP", *PHASES[phase]), but=(1,))
    assert ended.statuses[0] and ended.statuses[1] is None, f"exit statuses {ended.statuses}"
    says(ended.said[0], "Timed out|[Tt]imeout")
    matrix.must_resume_equal(folder)
    return ended.seconds


def signalled(matrix, rank, name, phase):
    """All save after the same step, and the run goes on to the golden weights; told while it tests, it tests again."""
    folder = matrix.fresh(f"{name}_{phase}")
    ended = matrix.train(folder, fault=(rank, name, *PHASES[phase]))
    assert ended.statuses == [75, 75], f"exit statuses {ended.statuses}"
    for number, said in enumerate(ended.said):
        says(said, f"rank {number} is stopped by {name}, and saved")
    status = json.loads((folder / "run" / "status.json").read_text())["state"]
    assert status == events(folder)[-1]["event"] == "preempted", status
    saved_model(folder)
    last = steps(folder)[0]
    matrix.must_resume_equal(folder)
    begun = [event["step"] for event in events(folder) if event["event"] == "started"]
    assert begun == [0, last], f"no step is lost: it was saved after {last}, and began after {begun}"
    return ended.seconds


def not_a_number(matrix, script=None):
    """All leave together and say why, no checkpoint has such a weight, and the run goes on to the golden weights."""
    folder = matrix.fresh("nan")
    ended = matrix.train(folder, fault=(1, "NaN", "step", 8), script=script)
    assert ended.statuses == [1, 1], f"exit statuses {ended.statuses}"
    for said in ended.said:
        says(said, "not finite")
    assert all(weight.isfinite().all() for weight in saved_model(folder).parameters()) and steps(folder) == [5]
    matrix.must_resume_equal(folder)
    return ended.seconds


def damaged(matrix, how):
    """The newest checkpoint is set aside by name, and the one before leads to the golden weights."""
    folder = matrix.fresh(f"damaged_{how}")
    matrix.train(folder, fault=(1, "SIGUSR2", *PHASES["step"]))
    newest, before = checkpoints(folder)
    content = bytearray(newest.read_bytes())
    weight = torch.load(newest, weights_only=True)["model"]["fc1.weight"]
    content[content.index(weight.numpy().tobytes()) + 3] ^= 1
    newest.write_bytes({"cut": content[: len(content) // 2], "flipped": content, "empty": b""}[how])
    if how == "flipped":
        torch.load(newest, weights_only=True)  # the control: it does not notice
    ended = matrix.train(folder)
    assert ended.statuses == [0, 0] and f"{newest} is damaged" in ended.said[0], ended.said[0]
    assert f" after step {int(before.stem[5:])}" in ended.said[0] and newest.with_suffix(".damaged").exists()
    matrix.must_resume_equal(folder)
    return ended.seconds


def disk_full(matrix):
    """The old checkpoint stays whole, all leave, and with room again the run goes on to the golden weights."""
    folder = matrix.fresh("disk_full")
    ended = matrix.train(folder, fault=(0, "disk full", "save: before", 2))
    assert all(ended.statuses), f"exit statuses {ended.statuses}"
    says(ended.said[0], "File too large")
    assert "and saved" not in "".join(ended.said)
    saved_model(folder)
    assert steps(folder) == [5]
    matrix.must_resume_equal(folder)
    return ended.seconds


def no_room(matrix):
    """A start on a disk without any room takes nothing from what is there."""
    folder = matrix.fresh("no_room")
    assert matrix.train(folder, fault=(1, "SIGUSR2", "step", 20)).statuses == [75, 75]
    ended = matrix.train(folder, fault=(0, "no room", *PHASES["init"]))
    assert all(ended.statuses), f"exit statuses {ended.statuses}"
    matrix.must_resume_equal(folder)
    return ended.seconds


def moved(matrix):
    """All leave; what was moved goes on elsewhere, and a run in the old place begins anew; both have golden weights."""
    folder, elsewhere = matrix.fresh("moved"), matrix.fresh("moved_elsewhere")
    ended = matrix.train(folder, fault=(0, "run folder moved", *PHASES["mid-epoch"]))
    assert all(ended.statuses), f"exit statuses {ended.statuses}"
    elsewhere.mkdir()
    (folder / "moved").rename(elsewhere / "run")
    assert steps(elsewhere) == [10, 5]
    matrix.must_resume_equal(elsewhere)
    matrix.must_resume_equal(folder)
    return ended.seconds


def refused(matrix, name, env=None, data=None, words=""):
    """It ends, with a status that is not 0 and the cause within its last lines, and has written nothing."""
    folder = matrix.fresh(f"refused_{name}")
    flags = ["--data", data or matrix.data, "--run-dir", folder / "run", *GIVES_UP, "--no-cuda"]
    ended = run(matrix.script, *flags, size=1, folder=folder, env=env)
    assert ended.statuses != [0], ended.said[0]
    says(ended.said[0], words)
    assert not (folder / "run").exists()
    return ended.seconds


def bad_data(matrix, how):
    """The same, for files that are not there or not whole."""
    root, name = matrix.fresh(f"data_{how}"), "train-labels-idx1-ubyte"
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in (matrix.data / "MNIST" / "raw").iterdir():
        (raw / path.name).write_bytes(path.read_bytes())
    content = (raw / name).read_bytes()
    (raw / name).unlink() if how == "missing" else (raw / name).write_bytes(content[:100])
    return refused(matrix, how, data=root, words=re.escape(f"--data {root} "))


def port_busy(matrix):
    """The same, for a port that another program holds."""
    with socket.create_server(("0.0.0.0", 0)) as stranger:
        port = stranger.getsockname()[1]
        return refused(matrix, "port", env={"MASTER_PORT": port, "WORLD_SIZE": 2}, words="EADDRINUSE|address")


def other_world(matrix, size):
    """The same samples on another number of ranks, without dropout: weights that are close.

    One epoch, in double precision: sums that are rounded otherwise move a ReLU's zero sooner or later, and from there
    the runs part, on some processors in the first epoch of float32. A step left out moves the weights by 4e-2.
    """
    without = ("nn.Dropout(0.25), nn.Dropout(0.5)", "nn.Identity(), nn.Identity()")
    double = ("(0.3081,))])", "(0.3081,)), torch.Tensor.double])"), ("Net().to(device)", "Net().to(device).double()")
    plain = matrix.changed(without, *double)
    folder, reference = matrix.fresh(f"world_{size}"), matrix.fresh("without_dropout")
    matrix.train(reference, "--epochs", 1, script=plain)
    ended = matrix.train(folder, "--epochs", 1, script=plain, fault=(1, "SIGUSR2", "step", 7))
    assert ended.statuses == [75, 75], ended.said
    again = matrix.train(folder, "--epochs", 1, script=plain, size=size)
    assert again.statuses == [0] * size and steps(folder)[0] == 16, again.said
    assert json.loads((folder / "run" / "metrics.jsonl").read_text())["train_samples"] == 512
    ours, theirs = (saved_model(one).double().state_dict() for one in (folder, reference))
    worst = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    assert worst < 1e-6, f"weights differ by {worst:.1e}"
    return ended.seconds


def killed_anywhere(matrix, times):
    """SIGKILL to a rank, or to all, at so many random moments: each ends golden."""
    seed = time.time_ns() if THOROUGH else 0
    random, began = Random(seed), time.monotonic()
    matrix.golden()
    matrix.train(matrix.fresh("length"))
    length, worst = time.monotonic() - began, 0.0
    for number in range(times):
        folder, moment = matrix.fresh(f"random_{number}"), random.uniform(0, length)
        ranks = random.choice([[0], [1], [0, 1]])
        case = f"seed {seed}, kill {number}: ranks {ranks} after {moment:.3f} s"
        ended = matrix.train(folder, *GIVES_UP, kill=(moment, ranks))
        assert None not in ended.statuses, f"{case}: a rank is still there"
        try:
            matrix.must_resume_equal(folder)
        except AssertionError as error:
            raise AssertionError(case) from error
        worst = max(worst, ended.seconds)
        shutil.rmtree(folder)
    return worst


# What is left out: the pieces of the script and what takes their places; how the run is started; on how many ranks.
CONTROLS = {
    "optimizer": (
        [("part.load_state_dict(newest[name])", 'name == "optimizer" or part.load_state_dict(newest[name])')],
        2,
    ),
    "random numbers": ([("torch.manual_seed(args.seed + step *", "int(args.seed + step *")], 2),
    "sampler": ([('[progress["done"] * share :]', '[: len(sampler) - progress["done"] * share]')], 2),
    "generator": ([('"generator": generator}', '"generator": None}')], 2),
    "bucket order": (
        [("    warm_up(ddp_model, DataLoader(Subset(train_set, range(share)), share), args)\n", "")],
        4,
    ),
}


def control(matrix, part):
    """Without this part the resumed run must differ from one that nobody harmed; with it, it is equal."""
    changes, size = CONTROLS[part]
    script, folder = matrix.changed(*changes), matrix.fresh(f"without_{part}")
    ended = matrix.train(folder, size=size, script=script, fault=(1, "SIGUSR2", "step", 7))
    assert set(ended.statuses) == {75}, ended.said
    differs = matrix.resumes(folder, size=size, script=script) != matrix.golden(size=size, script=script)
    assert differs, f"without {part} the resumed run is equal, so the comparison proves nothing"
    if size > 2:  # the rows above have the plain run on two ranks
        matrix.train(whole := matrix.fresh(f"with_{part}"), size=size, fault=(1, "SIGUSR2", "step", 7))
        matrix.must_resume_equal(whole, size=size)
    return ended.seconds


def control_vote(matrix):
    """Without the vote and the sum the weights become NaN: the row above can fail."""
    without = ("if is_lost:", "if False:"), ('if not math.isfinite(totals["loss"]):', "if False:")
    folder, script = matrix.fresh("no_vote"), matrix.changed(*without)
    ended = matrix.train(folder, "--epochs", 1, fault=(1, "NaN", "step", 8), script=script)
    assert ended.statuses == [0, 0], ended.said
    spoilt = any(not weight.isfinite().all() for weight in saved_model(folder).parameters())
    assert spoilt, "without the vote all is well, so the row proves nothing"
    return ended.seconds


NOBODY = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))  # as a script alone
VARIABLES = {
    "RANK=x": ({"RANK": "x"}, "'x'"),
    "MASTER_PORT=99999": ({"MASTER_PORT": 99999, "WORLD_SIZE": 2}, "99999"),
    "MASTER_ADDR unset": ({"WORLD_SIZE": 2, "MASTER_ADDR": None}, "MASTER_ADDR"),
    "srun forgotten": (NOBODY | {"SLURM_NTASKS": 4, "SLURM_JOB_ID": 1}, "SLURM_NTASKS=4, but no launcher"),
}

ROWS = [
    *(
        ("SIGKILL rank", f"{phase}, rank {rank}", partial(killed, rank=rank, phase=phase))
        for phase, rank in product(("mid-epoch", "init", "step 1", "epoch boundary"), (1, 0))
    ),
    *(
        ("SIGKILL rank 0", phase, partial(killed, rank=0, phase=phase))
        for phase in (
            "record",
            "save: before",
            "save: mid-write",
            "save: before rename",
            "save: after",
            "metrics are written",
        )
    ),
    *(("SIGSTOP rank 1", phase, partial(stopped, phase=phase)) for phase in ("step", "evaluation", "barrier")),
    *(
        (f"{name} to rank {rank}", phase, partial(signalled, rank=rank, name=name, phase=phase))
        for name, (phase, rank) in product(
            ("SIGTERM", "SIGUSR2"),
            (
                ("step", 1),
                ("evaluation", 1),
                ("save", 0),
                ("last of an epoch", 0),
                ("last of all", 1),
                ("last evaluation", 0),
            ),
        )
    ),
    ("SIGKILL, random moments", "any", partial(killed_anywhere, times=5 if THOROUGH else 2)),
    ("NaN on rank 1", "step", not_a_number),
    *((f"checkpoint {how}", "load", partial(damaged, how=how)) for how in ("flipped", "cut", "empty")),
    ("disk full", "save", disk_full),
    ("disk full", "init", no_room),
    ("run folder moved", "mid-epoch", moved),
    *((f"data {how}", "init", partial(bad_data, how=how)) for how in ("missing", "cut")),
    *((name, "init", partial(refused, name=name, env=env, words=words)) for name, (env, words) in VARIABLES.items()),
    ("port busy", "init", port_busy),
    *((f"world 2 to {size}", "mid-epoch", partial(other_world, size=size)) for size in (1, 4)),
    *((f"control: without {part}", "resume", partial(control, part=part)) for part in CONTROLS),
    ("control: without the vote", "step", control_vote),
]
