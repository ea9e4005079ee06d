"""The fault matrix on processes of this machine: each row harms a run, and says what must hold afterwards.

A row's function returns the seconds until everyone had left; it fails where what must hold does not.
"""

import re
import shutil
import socket
import time
from functools import partial
from itertools import product
from random import Random

from real import LIMIT, THOROUGH
from refusals import one_line

from ddp_helpers.rank.resume import list_checkpoints, load_checkpoint, read_checkpoint, weight_digest
from ddp_helpers.tools.explain.judge import judge
from ddp_helpers.tools.explain.lines import read_logs
from faults.matrix import GIVES_UP, saved_model
from faults.ranks import run

# A moment, and the how-manieth of its kind. Training counts one backward more than steps: DDP's sorting of buckets.
PHASES = {
    "init": ("init", 1),
    "record": ("record", 1),
    "step 1": ("step", 2),
    "mid-epoch": ("step", 13),
    "epoch boundary": ("epoch boundary", 1),
    "step": ("step", 13),
    "evaluation": ("evaluation", 1),
    "barrier": ("barrier", 1),
    "save": ("save: before rename", 2),
}


def explained(folder):
    """What `explain` makes of the logs of a run, one for each rank."""
    return judge(read_logs(sorted(folder.glob("rank*.log"))))


def killed(matrix, rank, phase):
    """Everyone leaves with an error, and the run goes on to the golden weights."""
    folder = matrix.fresh(f"kill_{rank}_{phase}")
    moment, number = PHASES.get(phase, (phase, 2))
    ended = matrix.train(folder, *GIVES_UP, fault=(rank, "SIGKILL", moment, number))
    assert ended.statuses[rank] == -9 and all(ended.statuses), f"exit statuses {ended.statuses}"
    verdict = explained(folder)
    assert verdict.known and verdict.late == [rank], f"explain: {verdict}"
    if phase.startswith("save"):
        saved_model(folder)  # all that has a checkpoint's name is whole
    matrix.must_resume_equal(folder)
    return ended.seconds


def stopped(matrix, phase):
    """The survivor leaves with an error that names the rank that hangs."""
    folder = matrix.fresh(f"stop_{phase}")
    ended = matrix.train(folder, *GIVES_UP, fault=(1, "SIGSTOP", *PHASES[phase]), but=(1,))
    assert ended.statuses == [1, None], f"exit statuses {ended.statuses}"
    verdict = explained(folder)
    assert (verdict.first, verdict.late) == (0, [1]), f"explain: {verdict}"
    assert "[Rank 0]: Ranks 1 failed to pass" in ended.said[0], ended.said[0]  # gloo's own words
    return ended.seconds


def signalled(matrix, rank, name, phase):
    """All stop after the same step, the checkpoint loads, and the run goes on to the golden weights."""
    folder = matrix.fresh(f"{name}_{phase}")
    ended = matrix.train(folder, fault=(rank, name, *PHASES[phase]))
    assert ended.statuses == [75, 75], f"exit statuses {ended.statuses}"
    words = [said.rpartition("left: ")[2] for said in ended.said]
    assert words[0] == words[1] and re.search(rf"\b{name}\b.* step \d+", words[0]), words
    saved_model(folder)
    matrix.must_resume_equal(folder)
    return ended.seconds


def not_a_number(matrix, script=None):
    """All leave together and name rank 1, and no weight was changed: they are those of the last checkpoint."""
    folder = matrix.fresh("nan")
    ended = matrix.train(folder, "--checkpoint-every", 1, fault=(1, "NaN", "step", 8), script=script)
    assert ended.statuses == [2, 2], f"exit statuses {ended.statuses}"
    assert all(re.search(r"\brank 1\b.*finite", said) for said in ended.said), ended.said
    assert all(said.strip().endswith(weight_digest(saved_model(folder))) for said in ended.said), "weights changed"
    assert explained(folder).late == [1], "explain names the rank with the NaN"
    return ended.seconds


def drifted(matrix):
    """Weights that one rank alone changes are found before they reach a checkpoint."""
    folder = matrix.fresh("drift")
    ended = matrix.train(folder, fault=(1, "weights change", "step", 5))
    assert ended.statuses == [2, 2], f"exit statuses {ended.statuses}"
    assert all(re.search(r"step 5\b.*rank \[1\].*weights", said) for said in ended.said), ended.said
    assert not (folder / "run" / "checkpoints").exists()
    assert explained(folder).late == [1], "explain names the rank whose weights changed"
    matrix.must_resume_equal(folder)
    return ended.seconds


def damaged(matrix, how):
    """The newest checkpoint is refused by name, the one before is used, and leads to the golden weights."""
    folder = matrix.fresh(f"damaged_{how}")
    matrix.train(folder, fault=(1, "SIGUSR2", *PHASES["step"]))
    newest, before = list_checkpoints(folder / "run" / "checkpoints")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes({"cut": content[: len(content) // 2], "flipped": content, "empty": b""}[how])
    ended = matrix.train(folder)
    assert ended.statuses == [0, 0] and newest.name in ended.said[0], ended.said[0]
    assert re.search(rf"step {int(before.name[5:13])}, .*\bbit\b", ended.said[0]), ended.said[0]
    matrix.must_resume_equal(folder)
    return ended.seconds


def disk_full(matrix):
    """The old checkpoint stays whole, every rank is told, and with room again the run goes on to the golden weights."""
    folder = matrix.fresh("disk_full")
    ended = matrix.train(folder, fault=(0, "disk full", "save: before", 2))
    assert ended.statuses == [2, 2], f"exit statuses {ended.statuses}"
    assert all("step 10" in said and "File too large" in said for said in ended.said), ended.said
    saved_model(folder)
    assert [int(path.name[5:13]) for path in list_checkpoints(folder / "run" / "checkpoints")] == [5]
    assert not list(folder.rglob(".part-*"))
    matrix.must_resume_equal(folder)
    return ended.seconds


def moved(matrix):
    """The run goes on in a new folder of the old name; what was moved goes on elsewhere; both have golden weights."""
    folder, elsewhere = matrix.fresh("moved"), matrix.fresh("moved_elsewhere")
    ended = matrix.train(folder, fault=(0, "run folder moved", *PHASES["mid-epoch"]))
    assert ended.statuses == [0, 0], ended.said
    assert weight_digest(saved_model(folder)) == matrix.golden(), "the run that went on differs"
    elsewhere.mkdir()
    (folder / "moved").rename(elsewhere / "run")
    assert [int(path.name[5:13]) for path in list_checkpoints(elsewhere / "run" / "checkpoints")] == [10, 5]
    matrix.must_resume_equal(elsewhere)
    return ended.seconds


def refused(matrix, name, env=None, data=None, says=""):
    """Exit status 2, and one line that names what is wrong."""
    folder = matrix.fresh(f"refused_{name}")
    flags = ["--data", data or matrix.data, "--run-dir", folder / "run", "--timeout", LIMIT, "--no-cuda"]
    flags += ["--precision", "float32"]
    ended = run(matrix.script, *flags, size=1, folder=folder, env=env)
    # What this test says, what a rank says of itself, and torch's remarks.
    own = re.compile(r"left: |rank \d+ of \d+ on |\[W|\[E|Exception raised|frame #|<omit")
    lines = [line for line in ended.said[0].splitlines() if line and not own.match(line)]
    assert ended.statuses == [2], f"{ended.statuses}: {ended.said[0]}"
    one_line("\n".join(lines), says or name)
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
    return refused(matrix, how, data=root, says=f"--data {root} ")


def port_busy(matrix):
    """The same, for a port that another program holds."""
    with socket.create_server(("0.0.0.0", 0)) as stranger:
        port = stranger.getsockname()[1]
        return refused(matrix, "port", env={"MASTER_PORT": port, "WORLD_SIZE": 2}, says="EADDRINUSE")


def other_world(matrix, size):
    """The same samples on another number of ranks, without dropout: weights that are close, and said to be no more.

    One epoch, in double precision: sums that are rounded otherwise move a ReLU's zero sooner or later, and from there
    the runs part, on some processors in the first epoch of float32. A step left out moves the weights by 4e-2.
    """
    without = ("nn.Dropout(0.25)", "nn.Identity()"), ("nn.Dropout(0.5)", "nn.Identity()")
    double = ("(0.3081,))]", "(0.3081,)), torch.Tensor.double]"), ("Net().to(device)", "Net().to(device).double()")
    plain = matrix.changed(*without, *double)
    folder, reference = matrix.fresh(f"world_{size}"), matrix.fresh("without_dropout")
    matrix.train(reference, "--epochs", 1, script=plain)
    ended = matrix.train(folder, "--epochs", 1, script=plain, fault=(1, "SIGUSR2", "step", 7))
    assert ended.statuses == [75, 75], ended.said
    again = matrix.train(folder, "--epochs", 1, script=plain, size=size)
    assert re.search(r"\bclose\b.*\bnot equal\b", again.said[0]), again.said[0]
    ours, theirs = (saved_model(one).state_dict() for one in (folder, reference))
    worst = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    assert worst < 1e-6, f"weights differ by {worst:.1e}"
    return ended.seconds


def killed_anywhere(matrix, times):
    """SIGKILL to a rank, or to all, at so many random moments: no folder is unreadable, each ends golden."""
    seed, golden = time.time_ns() if THOROUGH else 0, matrix.golden()
    random, began = Random(seed), time.monotonic()
    matrix.train(matrix.fresh("length"))
    length, worst = time.monotonic() - began, 0.0
    for number in range(times):
        folder, moment = matrix.fresh(f"random_{number}"), random.uniform(0, length)
        ranks = random.choice([[0], [1], [0, 1]])
        case = f"seed {seed}, kill {number}: ranks {ranks} after {moment:.3f} s"
        ended = matrix.train(folder, *GIVES_UP, kill=(moment, ranks))
        assert None not in ended.statuses, f"{case}: a rank is still there"
        for path in list_checkpoints(folder / "run" / "checkpoints"):
            load_checkpoint(read_checkpoint(path))
        assert matrix.resumes(folder) == golden, f"{case}: the resumed run differs"
        worst = max(worst, ended.seconds)
        shutil.rmtree(folder)
    return worst


# What is left out: the pieces of the script and what takes their places; how the run is started; on how many ranks.
CONTROLS = {
    "optimizer": (
        [("part.load_state_dict(state[name])", 'name == "optimizer" or part.load_state_dict(state[name])')],
        (),
        2,
    ),
    "random numbers": ([("torch.set_rng_state(cpu)", "pass")], (), 2),
    "sampler": ([("list(self.sampler)[self.done :]", "list(self.sampler)[: len(self)]")], (), 2),
    "generator": (
        [
            ('"generator": generator,', '"generator": None,'),
            ("generator.manual_seed((args.seed + epoch) * world_size + rank)", "pass"),
        ],
        ("--num-workers", 0),
        2,
    ),
    "bucket order": (
        [("    loss.backward()\n    model.load_state_dict(first)", "    model.load_state_dict(first)")],
        (),
        4,
    ),
}


def control(matrix, part):
    """Without this part the resumed run must differ from one that nobody harmed; with it, it is equal."""
    changes, flags, size = CONTROLS[part]
    script, folder = matrix.changed(*changes), matrix.fresh(f"without_{part}")
    ended = matrix.train(folder, *flags, size=size, script=script, fault=(1, "SIGUSR2", *PHASES["step"]))
    assert set(ended.statuses) == {75}, ended.said
    differs = matrix.resumes(folder, *flags, size=size, script=script) != matrix.golden(
        *flags, size=size, script=script
    )
    assert differs, f"without {part} the resumed run is equal, so the comparison proves nothing"
    if flags or size > 2:  # the rows above have the plain run on two ranks
        matrix.train(whole := matrix.fresh(f"with_{part}"), *flags, size=size, fault=(1, "SIGUSR2", *PHASES["step"]))
        matrix.must_resume_equal(whole, *flags, size=size)
    return ended.seconds


def control_vote(matrix):
    """Without the vote the weights become NaN: the row above can fail."""
    without = ("if bad_loss or spoilt:", "if False:"), ("gradient.masked_fill_(spoilt, 0)", "pass")
    folder, script = matrix.fresh("no_vote"), matrix.changed(*without)
    ended = matrix.train(folder, "--epochs", 1, fault=(1, "NaN", "step", 8), script=script)
    assert ended.statuses == [0, 0], ended.said
    spoilt = any(not weight.isfinite().all() for weight in saved_model(folder).parameters())
    assert spoilt, "without the vote all is well, so the row proves nothing"
    return ended.seconds


VARIABLES = {
    "RANK=x": ({"RANK": "x"}, "['x', '0', '1']"),
    "RANK=7": ({"RANK": 7}, "['7', '0', '1']"),
    "WORLD_SIZE=two": ({"WORLD_SIZE": "two"}, "['0', '0', 'two']"),
    "LOCAL_RANK=-1": ({"LOCAL_RANK": -1}, "['0', '-1', '1']"),
    "LOCAL_RANK=3": ({"LOCAL_RANK": 3}, "['0', '3', '1']"),
    "MASTER_PORT=99999": ({"MASTER_PORT": 99999, "WORLD_SIZE": 2}, "from 0 to 65535 but was 99999"),
    "MASTER_PORT=http": ({"MASTER_PORT": "http", "WORLD_SIZE": 2}, "'http'; export MASTER_ADDR and MASTER_PORT"),
    "MASTER_ADDR unset": ({"WORLD_SIZE": 2, "MASTER_ADDR": None}, "MASTER_ADDR expected, but not set"),
    "Slurm says another": ({"SLURM_STEP_NUM_TASKS": 3, "SLURM_PROCID": 0, "SLURM_LOCALID": 0}, "SIZE ['0', '0', '1']"),
}

ROWS = [
    *(
        ("SIGKILL rank", f"{phase}, rank {rank}", partial(killed, rank=rank, phase=phase))
        for phase, rank in product(("mid-epoch", "init", "step 1", "epoch boundary"), (1, 0))
    ),
    *(
        ("SIGKILL rank 0", phase, partial(killed, rank=0, phase=phase))
        for phase in ("record", "save: before", "save: mid-write", "save: before rename", "save: after")
    ),
    *(("SIGSTOP rank 1", phase, partial(stopped, phase=phase)) for phase in ("step", "evaluation", "barrier")),
    *(
        (f"{name} to rank {rank}", phase, partial(signalled, rank=rank, name=name, phase=phase))
        for name, (phase, rank) in product(("SIGTERM", "SIGUSR2"), (("step", 1), ("evaluation", 1), ("save", 0)))
    ),
    ("SIGKILL, random moments", "any", partial(killed_anywhere, times=5 if THOROUGH else 2)),
    ("NaN on rank 1", "step", not_a_number),
    ("weights of rank 1 change", "step", drifted),
    *((f"checkpoint {how}", "load", partial(damaged, how=how)) for how in ("cut", "flipped", "empty")),
    ("disk full", "save", disk_full),
    ("run folder moved", "mid-epoch", moved),
    *((f"data {how}", "init", partial(bad_data, how=how)) for how in ("missing", "cut")),
    *((name, "init", partial(refused, name=name, env=env, says=says)) for name, (env, says) in VARIABLES.items()),
    ("port busy", "init", port_busy),
    *((f"world 2 to {size}", "mid-epoch", partial(other_world, size=size)) for size in (1, 4)),
    *((f"control: without {part}", "resume", partial(control, part=part)) for part in CONTROLS),
    ("control: without the vote", "step", control_vote),
]
