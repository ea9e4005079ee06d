"""The audit: each fault planted into spirals_ddp is found in its rows and no others; as it is, none is red."""

import json
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from real import LIMIT, THOROUGH, weekly
from refusals import refused

from ddp_helpers import ROOT, PlainError
from ddp_helpers.cli import main
from ddp_helpers.launch.launchers import free_port
from ddp_helpers.launch.scripts import script_text
from ddp_helpers.lessons.run_script import LearnerRun, wait_for_runs
from ddp_helpers.rank.digits import write_digits
from ddp_tools.audit.command import RANKS, WITNESS, check_started, report, show_table
from ddp_tools.audit.judge import CHECKS, judge
from ddp_tools.audit.loss_terms import divisor_of
from ddp_tools.audit.notes import (
    NONE,
    NOT_ASKED,
    OK,
    RED,
    UNSEEN,
    Collective,
    End,
    Join,
    Loss,
    Pass,
    PointToPoint,
    RandomUse,
    Row,
    Save,
    Step,
    Stopped,
    Weights,
    Wrap,
    read_notes,
    select,
)
from ddp_tools.audit.one_rank import compare_with_one_rank, one_rank_arguments
from ddp_tools.audit.restart import compare_restarted
from ddp_tools.audit.sarif import to_sarif

PAGE = (ROOT / "docs" / "tools.md").read_text()
SCRIPT = ROOT / "notebooks" / "spirals_ddp.py"
FLAGS = ["--epochs=2", "--save=spirals.pt"]
SOUND, WITH_DROPOUT = "none: the script as it is", "none: dropout, each rank its own"
TIME = ("import os\n", "import os\nimport time\n")
IN_TURN = "    while rank and not args.save.exists():\n        time.sleep(0.1)\n"
DROPOUT = ("nn.Sequential(*hidden, nn.Linear", "nn.Sequential(*hidden, nn.Dropout(0.1), nn.Linear")
SHARE = "range(rank, len(test_set), world_size)"
PADDED = "DataLoader(test_set, 100, sampler=DistributedSampler(test_set, shuffle=False))"
STEP, ENDS = "            optimizer.zero_grad()", "            optimizer.step()"
BATCH_NORM = ("nn.Linear(2, 64), nn.ReLU()", "nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU()")
DRAWN = "train_set[torch.randint(960, [24], generator=dice)]"
SPLIT = "torch.utils.data.random_split(spirals(960, seed=1), [720, 240], torch.Generator().manual_seed(rank))"
UNUSED = '    model.register_parameter("unused", nn.Parameter(torch.ones(1)))'
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (1 + rank))"
ON_TWO_NODES = "`local_rank` for `rank`, with `--two-nodes`"
TAKES_LOCAL_RANK = "`init_process_group` is given `local_rank`, with `--two-nodes`"
# Only points of the right half count, and their number differs from rank to rank.
RIGHT_HALF = "F.cross_entropy(ddp_model(x.to(device))[x[:, 0] > 0], y[x[:, 0] > 0].to(device))"
PLANTED = {  # the fault, and the lines of spirals_ddp that are replaced
    SOUND: [],
    WITH_DROPOUT: [DROPOUT],
    "no sampler": [("world_size, sampler=sampler", "world_size, shuffle=True")],
    "each rank takes share 0": [("DistributedSampler(train_set)", "DistributedSampler(train_set, world_size, 0)")],
    "the sampler's seed differs": [("DistributedSampler(train_set)", "DistributedSampler(train_set, seed=rank)")],
    "four shares, two ranks": [("DistributedSampler(train_set)", "DistributedSampler(train_set, 4, rank)")],
    "no `set_epoch`": [("        sampler.set_epoch(epoch)", "        sampler.set_epoch(0)")],
    "padded evaluation": [
        ("DataLoader(Subset(test_set, test_indices), 100)", PADDED),
        ("spirals(250,", "spirals(251,"),
    ],
    "half of the test set": [(SHARE, SHARE.replace("rank", "0"))],
    "past the wrapper": [("F.cross_entropy(ddp_model(", "F.cross_entropy(model(")],
    "another learning rate on each rank": [("lr=args.lr,", "lr=args.lr * (1 + rank),")],
    "only rank 0 reduces": [("        dist.all_reduce(right)", "        rank or dist.all_reduce(right)")],
    "only rank 0 in the last barrier": [("\n    dist.barrier()", "\n    rank or dist.barrier()")],
    "a rank leaves the loop early": [
        ("            optimizer.step()", "            optimizer.step()\n            if rank:\n                break")
    ],
    "a rank fails": [("        model.eval()", "        1 / (1 - rank)\n        model.eval()")],
    "a rank waits for a file": [TIME, ("        model.eval()", "        while rank:\n            time.sleep(0.1)")],
    "all ranks save": [TIME, ("    if args.save and rank == 0:", f"{IN_TURN}    if args.save:")],
    "the wrapper is saved": [("torch.save(model.state_dict()", "torch.save(ddp_model.state_dict()")],
    "the same dropout": [DROPOUT, ("torch.manual_seed(1 + rank)", "torch.manual_seed(1)")],
    "a metric is not reduced": [("        dist.all_reduce(right)\n", "")],
    "a mean of the ranks' unequal means": [
        ("F.cross_entropy(ddp_model(x.to(device)), y.to(device))", RIGHT_HALF),
    ],
    "NaN on one rank": [(STEP, f"            loss = loss * (float('nan') if rank else 1)\n{STEP}")],
    "never wrapped": [("    ddp_model = DDP(model)", "    ddp_model = model")],
    "the optimizer has a copy's weights": [
        ("import os\n", "import copy\nimport os\n"),
        ("optim.SGD(model.parameters()", "optim.SGD(copy.deepcopy(model).parameters()"),
    ],
    "`zero_grad` after `backward`": [
        (f"{STEP}\n            loss.backward()\n", f"            loss.backward()\n{STEP}\n"),
    ],
    "one batch for all, drawn by hand": [
        ("        model.train()", "        model.train()\n        dice = torch.Generator().manual_seed(epoch)"),
        ("for x, y in train_batches:", f"for _ in range(20):\n            x, y = {DRAWN}"),
    ],
    "another split on each rank": [("spirals(960, seed=1), spirals(250, seed=2)", SPLIT)],
    "statistics of its own on each rank": [BATCH_NORM, ("DDP(model)", "DDP(model, broadcast_buffers=False)")],
    "only rank 0 tests, through the wrapper": [
        BATCH_NORM,
        ("for x, y in test_batches:", "for x, y in test_batches if rank == 0 else ():"),
        ("right += (model(", "right += (ddp_model("),
    ],
    "a weight that is not used": [("    ddp_model = DDP(model)", f"{UNUSED}\n    ddp_model = DDP(model)")],
    "a rank clamps a weight": [(ENDS, f"{ENDS}\n            model[0].bias.data.clamp_(-9, 9 - 9 * rank)")],
    "each rank clips by another norm": [(ENDS, f"            {CLIP}\n{ENDS}")],
    "only rank 0 steps": [(ENDS, "            if rank == 0:\n                optimizer.step()")],
    "a slow rank": [TIME, (STEP, f"            time.sleep(0.2 * rank)\n{STEP}")],
    ON_TWO_NODES: [("DistributedSampler(train_set)", "DistributedSampler(train_set, world_size, local_rank)")],
    TAKES_LOCAL_RANK: [('group = {"rank": rank,', 'group = {"rank": local_rank,')],
}
WEEKLY = {"each rank takes share 0", "the sampler's seed differs", "half of the test set", "only rank 0 reduces"}
WEEKLY |= {"one batch for all, drawn by hand", "only rank 0 tests, through the wrapper", "only rank 0 steps"}
WEEKLY |= {"statistics of its own on each rank", "each rank clips by another norm", "a rank clamps a weight"}
WEEKLY |= {"another learning rate on each rank", "a rank leaves the loop early", "a metric is not reduced"}
NAMES = [name for name in PLANTED if THOROUGH or name not in WEEKLY]
ENV = {name: {"DDP_AUDIT_TWO_NODES": "1"} for name in (ON_TWO_NODES, TAKES_LOCAL_RANK)}
HANGS, AT_ONCE = 30.0, 3  # seconds after which a run hangs that is to hang: by then it has come there; runs


def planted(changes, folder):
    text = SCRIPT.read_text()
    for right, wrong in changes:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    folder.mkdir()
    script = folder / SCRIPT.name
    script.write_text(text)
    return script


def start(script, *words, limit=LIMIT, ranks=RANKS, **env):
    """Start the witnesses as the command does, but on forked ranks: torch is imported once for all of them."""
    for name in ("notes", "work"):
        (script.parent / name).mkdir(exist_ok=True)
    words = (script.parent / "notes", limit, script, *words)
    return LearnerRun(WITNESS, *words, ranks=ranks, folder=script.parent / "work", limit=limit + 30, env=env)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The rows of each planted fault; several runs at a time."""
    limits = {name: HANGS if f"| {name} | end" in PAGE else LIMIT for name in NAMES}
    names = sorted(NAMES, key=limits.get)  # those that hang wait side by side
    scripts = {name: planted(PLANTED[name], tmp_path_factory.mktemp("planted") / "it") for name in names}
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        runs = [start(scripts[name], *FLAGS, limit=limits[name], **ENV.get(name, {})) for name in some]
        wait_for_runs(*runs)
    return {name: judge(read_notes(script.parent / "notes", RANKS)) for name, script in scripts.items()}


def line(name, table):
    """The line of docs/tools.md for a fault: the red rows, and what the first of them saw."""
    reds = [row for row in table if row.verdict == RED]
    return f"| {name} | {', '.join(row.name for row in reds) or '-'} |"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_is_found_of_each_planted_fault(name, tables):
    assert line(name, tables[name]) in PAGE, f"{line(name, tables[name])}\n{show_table(tables[name])}"


@pytest.mark.parametrize(("name", "rest"), [(SOUND, {"dice": NONE}), (WITH_DROPOUT, {})])
def test_of_a_sound_script_all_is_seen_and_ok(name, rest, tables):
    assert {row.name: row.verdict for row in tables[name] if row.verdict != OK} == rest


def test_each_check_finds_a_planted_fault():
    table_rows = [re.search(rf"^\| {re.escape(name)} \| ([^|]*) \|", PAGE, re.M) for name in PLANTED]
    assert {*CHECKS} == {name for row in table_rows if row and row[1] != "-" for name in row[1].split(", ")}


def test_a_run_that_did_not_end_has_no_green_row(tables):
    for name in ("a rank fails", "a rank waits for a file"):
        assert not any(row.verdict == OK for row in tables[name])
    hung = {row.name: row.seen for row in tables["a rank waits for a file"]}
    [line] = [line for line, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "model.eval()" in text]
    waits = line + 2  # behind an import, in the loop
    assert f"rank 1 at spirals_ddp.py:{waits}" in hung["end"]
    assert re.search(r"\brank 0 calls\b.*, rank 1 (?!calls\b)", hung["collectives"])
    assert "ZeroDivisionError" in tables["a rank fails"][0].seen  # and not the other rank's broken connection


STREAM = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
dist.init_process_group("gloo")
rank = dist.get_rank()
class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        share, shares = SHARE
        return (torch.tensor([float(i)]) for i in range(share, 64, shares))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
for x in DataLoader(Stream(), 4, num_workers=2, multiprocessing_context="fork"):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
SHARES = {  # of a stream, and the verdict
    "rank + 2 * worker.id, 4": (OK, "a share of its own"),
    "rank, 2": (RED, "each worker of a rank"),
    "worker.id, 2": (RED, "more than one rank"),
}
SPAWNED = """
import os, torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
def train(rank, ranks):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "PORT"
    dist.init_process_group("nccl", rank=int(os.environ["SLURM_PROCID"]), world_size=ranks)
    torch.cuda.set_device(rank)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)).to(rank)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    for _ in range(3):
        model(torch.full([1, 1], SIZE * (rank + 1), device="cuda")).mul(SIZE).sum().backward()
        optimizer.step()
    dist.recv(torch.zeros(1)) if rank else dist.send(torch.ones(1), 1)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    torch.set_default_device("cuda")
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        one = torch.ones(1, device=0).to(device=0) + torch.ones(1)
        [event.record(torch.cuda.current_stream()) for event in events]
    torch.cuda.current_stream().synchronize()
    assert int(os.environ["SLURM_STEP_NUM_TASKS"]) == one and events[0].elapsed_time(events[1]) >= 0
torch.multiprocessing.spawn(train, (torch.cuda.device_count(),), torch.cuda.device_count() + MORE)
"""


def test_shares_of_a_stream_and_a_script_for_cuda(tmp_path):
    """Workers times ranks; spirals_ddp, made to insist on CUDA; mp.spawn, srun's names, ZeRO, and gradients of zero."""
    runs, scripts = [], {share: STREAM.replace("SHARE", share) for share in SHARES}
    spirals = (ROOT / "notebooks" / "spirals_ddp.py").read_text()
    scripts["cuda"] = re.sub(r"gpus = torch.*", "gpus = 2", spirals)
    assert scripts["cuda"] != spirals
    other = spirals.replace("spirals(960, seed=1)", "spirals(960, seed=rank)")
    changes = [("1.0", "0"), ("0.0", "0"), ("1.0", "1")]
    spawned = [SPAWNED.replace("SIZE", size).replace("MORE", more) for size, more in changes]
    spawned = [text.replace("PORT", str(free_port())) for text in spawned]
    for number, text in enumerate([*scripts.values(), *spawned, other]):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "it.py").write_text(text)
        cuda = "set_device" in text
        words = ["--epochs=2", "--save=it.pt"] if text in (scripts["cuda"], other) else []
        runs.append(start(folder / "it.py", *words, DDP_AUDIT_ON_CPU="1" if cuda else ""))
    wait_for_runs(*runs)
    notes = [read_notes(tmp_path / str(n) / "notes", RANKS) for n in range(len(runs))]
    tables = [{row.name: row for row in judge(ranks)} for ranks in notes]
    for table, (verdict, seen) in zip(tables, SHARES.values(), strict=False):
        assert table["samples"].verdict == verdict and seen in table["samples"].seen, table["samples"]
    other = {name: row.verdict for name, row in tables[3].items() if row.verdict != OK}
    assert other == {"dice": NONE}, tables[3]
    assert tables[4]["gradients"].verdict == OK and "3 steps" in tables[4]["gradients"].seen, tables[4]
    assert [[note.name for note in select(ranks, PointToPoint)] for ranks in notes[4]] == [["send"], ["recv"]]
    assert (tables[4]["end"].verdict, tables[4]["collectives"].verdict) == (OK, OK), tables[4]
    with pytest.raises(PlainError, match=r"\b3 ranks.*\b2\b"):
        check_started(notes[6], tmp_path)
    assert check_started(notes[4], tmp_path) is None
    assert tables[7]["samples"].verdict == RED and "datasets" in tables[7]["samples"].seen
    assert tables[5]["end"].verdict == OK and "zero" in tables[5]["gradients"].seen


def test_the_command_writes_a_table_and_nothing_beside_the_script(tmp_path, capsys):
    (home := tmp_path / "home").mkdir()
    text = (ROOT / "notebooks" / "spirals_ddp.py").read_text()
    assert text.count("if args.save and rank == 0:") == 1
    (home / "mine.py").write_text(text.replace("if args.save and rank == 0:", "if args.save:"))
    words = ["audit", str(home / "mine.py"), "--folder", str(tmp_path / "its"), "--json", str(tmp_path / "table.json")]
    words += ["--batch-size-flag=--batch-size", "--", "--epochs=2", "--batch-size=48", "--save=spirals.pt"]
    assert main(words) == 1
    table = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    said = capsys.readouterr().out
    assert table["files"]["verdict"] == RED and "cure: " in said
    assert f"1 of {len(table)} checks" in said and [row["verdict"] for row in table.values()].count(RED) == 1
    assert table["one rank"]["verdict"] == OK
    left = [[path.name for path in folder.iterdir()] for folder in (home, tmp_path / "its" / "work")]
    assert left == [["mine.py"], ["spirals.pt"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none.py"], "none.py"),
        (["docs/tools.md"], "tools.md"),
        (["notebooks/spirals_ddp.py", "--limit", "0"], "--limit 0"),
        (["notebooks/spirals_ddp.py", "--folder", "docs"], "docs"),
        (["notebooks/spirals_ddp.py", "--cwd", "none"], "--cwd none"),
        (["notebooks/spirals_ddp.py", "--resume-with=--resume 'last.pt"], "No closing quotation"),
        (["notebooks/spirals_ddp.py", "--epochs", "2"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_audited_is_one_line(words, told, monkeypatch):
    monkeypatch.chdir(ROOT)
    refused(main, ["audit", *words], named=[told])


@pytest.mark.parametrize(
    ("right", "wrong", "verdict", "told"),
    [
        ("", "", OK, "after 40 steps with the same samples (48 in each, 24 on a rank)"),
        ("args.batch_size // world_size", "args.batch_size", OK, "(48 in each, 24 on a rank)"),
        ("loss.backward()", "(loss * world_size).backward()", RED, "of their way apart"),
        ("torch.manual_seed(1)", "torch.seed()", UNSEEN, "set the seed"),
        ("*hidden, nn.Linear(64, 3)", "*hidden, nn.Dropout(0.1), nn.Linear(64, 3)", UNSEEN, "dropout"),
    ],
)
def test_one_rank_and_two_reach_one_model(right, wrong, verdict, told, tmp_path):
    text = (ROOT / "notebooks" / "spirals_ddp.py").read_text()
    assert right in text
    whole, runs = ["--epochs", "2", "--batch-size", "48"], []
    given = [*whole[:-1], "24"] if wrong == "args.batch_size" else whole  # this flag is that of each rank
    for ranks, words in ((1, whole), (RANKS, given)):
        (folder := tmp_path / str(ranks)).mkdir()
        (folder / "it.py").write_text(text.replace(right, wrong) if right else text)
        runs.append(start(folder / "it.py", *words, ranks=ranks))
    wait_for_runs(*runs)
    [single], both = (read_notes(tmp_path / str(ranks) / "notes", ranks) for ranks in (1, RANKS))
    row = compare_with_one_rank(single, both)
    assert row.verdict == verdict and told in row.seen, row
    assert one_rank_arguments(given, "--batch-size", both) == whole
    flag = "--batch-size-per-rank"
    assert one_rank_arguments([f"{flag}=24"], flag, both) == [f"{flag}=48"]
    default = one_rank_arguments(["--epochs=2"], "--batch", both)
    assert default == ["--epochs=2", "--batch=48"]
    for words in (["--batch=7"], ["--batch=24", "--batch", "24"], ["--batch", "x"]):
        with pytest.raises(ValueError, match=r"--batch\b.*\b24 or 48\b"):
            one_rank_arguments(words, "--batch", both)


FLAGS_OF_MNIST = ["--epochs=2", "--batch-size=32", "--num-workers=0", "--save-model"]
FLAGS_OF_MNIST += [f"--timeout={LIMIT}"]
RESTORED = "            part.load_state_dict(newest[name])"


@pytest.mark.parametrize("on_cpu", ["1"] + [""] * THOROUGH)
def test_a_run_that_is_ended_and_started_again(on_cpu, tmp_path):
    """mnist_ddp_resumable goes on to the bit; without its optimizer's state, or from the first epoch, it does not."""
    data = write_digits(tmp_path / "data", train=192, test=64)
    text, progress = script_text("mnist_ddp_resumable"), 'progress = newest["progress"]'
    faults = {
        "whole": text,
        "stopped": text,
        "right": text,
        "optimizer": text.replace(RESTORED, f'            name == "optimizer" or {RESTORED.strip()}'),
        "epoch": text.replace(progress, f"_ {progress[9:]}"),
    }
    assert len({*faults.values()}) == 3 and text.count(RESTORED) == text.count(progress) == 1
    attempts = ["right", "optimizer"] + ["epoch"] * THOROUGH
    notes = {}
    for several in (["whole", "stopped"], attempts):
        runs = []
        for name in several:
            (folder := tmp_path / name).mkdir()
            (folder / "it.py").write_text(faults[name])
            words = ["--data", data, "--run-dir=mine", *FLAGS_OF_MNIST]
            if name in attempts:
                shutil.copytree(tmp_path / "stopped" / "work", folder / "work")
            env = {"DDP_AUDIT_STOP": "0" if name == "stopped" else "", "DDP_AUDIT_ON_CPU": on_cpu}
            runs.append(start(folder / "it.py", *words, **env))
        wait_for_runs(*runs)
        notes |= {name: read_notes(tmp_path / name / "notes", RANKS) for name in several}
    [samples] = [row for row in judge(notes["whole"]) if row.name == "samples"]
    assert samples.verdict == OK, "the step that only warms DDP up is none, and all ranks take it with the same samples"
    whole, stopped = notes["whole"][0], notes["stopped"][0]
    rows = {name: compare_restarted(whole, stopped, notes[name]) for name in attempts}
    assert (rows["right"].verdict, rows["right"].seen.endswith("bit")) == (OK, True), rows["right"]
    assert rows["optimizer"].verdict == RED and "same samples" in rows["optimizer"].seen, rows["optimizer"]
    if THOROUGH:
        assert rows["epoch"].verdict == RED and "other samples" in rows["epoch"].seen, rows["epoch"]
    for row, told in (
        (compare_restarted(whole, whole, notes["right"]), "torch.save wrote nothing"),
        (compare_restarted(whole, stopped, notes["whole"]), "from the beginning"),
    ):
        assert row.verdict == UNSEEN and told in row.seen


SCORES, CLASSES = torch.zeros(6, 5, requires_grad=True), torch.tensor([0, 1, 2, -100, 3, -100])
TERMS = F.cross_entropy(SCORES, CLASSES, reduction="none")


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        (F.cross_entropy(SCORES, CLASSES), 4),  # two do not count
        (TERMS[CLASSES >= 0].mean(), 4),
        (TERMS.sum() / (CLASSES >= 0).sum(), 4),
        (TERMS.mean() * torch.tensor(3.0) / 2, 4),
        (TERMS.sum() * 2 / torch.tensor(109), 54.5),  # right: times the ranks, by the terms of all
        (F.mse_loss(SCORES, torch.ones(6, 5)), 30),
        (F.mse_loss(SCORES, torch.ones(6, 5), reduction="sum"), 1),
        (F.cross_entropy(SCORES, CLASSES, weight=torch.arange(5.0)), None),
        (TERMS.sum() / 4 + SCORES.mean(), None),
        (TERMS.sum() / SCORES.exp().sum(), None),
        (2 / TERMS.sum(), None),
        (SCORES[0, 0], None),
    ],
)
def test_the_number_by_which_a_loss_divides_is_read_from_its_graph(loss, divisor):
    assert divisor_of(loss) == divisor


@pytest.mark.parametrize(
    ("divisors", "verdict"),
    [([(4, 4)] * 3, OK), ([(4, 5)] * 2 + [(4, 4)], RED), ([(4, 4)] * 2 + [(4, 3)], UNSEEN), ([(54.5, 54.5000001)], OK)],
)
def test_a_loss_that_ranks_divide_by_other_numbers_is_red_and_a_last_batch_is_not(divisors, verdict):
    ranks = []
    for rank in range(RANKS):
        losses = [Loss(divisor=each[rank], at="it.py:5") for each in divisors]
        steps = [Wrap(), Step(sums=[[1.0, 1.0]], wrapped_parameters=1), *losses, End(status=0)]
        ranks.append(steps)
    row = rows_of(*ranks)["gradients"]
    assert row.verdict == verdict and ("mean of unequal means" in row.seen) == (verdict != OK), row


@pytest.mark.parametrize(("batches", "dataset", "verdict"), [(1, 1, NONE), (2, 1, UNSEEN), (1, 2, UNSEEN)])
def test_a_look_at_one_batch_of_the_training_set_is_no_test(batches, dataset, verdict):
    trained = Pass(steps=4, samples=[0, 1, 2, 3], batches=4, dataset=1, complete=True)
    look = Pass(samples=[0], batches=batches, dataset=dataset, complete=False)
    row = rows_of(*([look, trained, End(status=0)] for _ in range(RANKS)))["evaluation"]
    assert row.verdict == verdict, row


STEPPED = Step(sums=[[1.0, 1.0]])


def told(first, last, *more):
    """The notes of a rank with one weight: its first gradient, its last weight, and what else was noted between."""
    begin = Wrap(), Weights(when="begin", names=["w"], sums=[[0.0, 0.0]], bits=["0"])
    end = Weights(when="end", names=["w"], sums=[[last, last]], bits=[str(last)])
    return [*begin, Step(sums=[[first, abs(first)]]), *more, end, End(status=0, time=9)]


@pytest.mark.parametrize(
    ("before", "again", "verdict", "seen"),
    [
        ("a s b", told(1 + 1e-7, 1.0001), UNSEEN, "from the beginning"),  # another order of sums, another rounding
        ("a s b", told(2.0, 1.0001), OK, "close, not equal"),
        ("a s b", told(2.0, 2.0, RandomUse(state="b")), RED, "apart"),
        ("a s b", told(2.0, 2.0, RandomUse(state="c")), UNSEEN, "with other random numbers: restore"),
        ("a s b", told(2.0, 2.0, RandomUse(state="a"), STEPPED), UNSEEN, "with other random numbers"),
        ("a s", told(2.0, 2.0, RandomUse(state="b")), UNSEEN, "cannot be compared"),
    ],
)
def test_a_restart_is_known_by_its_gradients_and_its_random_numbers(before, again, verdict, seen):
    notes = [Save() if word == "s" else RandomUse(state=word) for word in before.split()] + [STEPPED]
    row = compare_restarted(told(1.0, 1.0, *notes), told(1.0, 0.5, *notes[:2], Stopped()), [again] * RANKS)
    assert row.verdict == verdict and seen in row.seen, row


@pytest.mark.parametrize(
    ("again", "verdict", "seen"),
    [
        ("bcd", UNSEEN, "trained on where the whole run ends"),  # so many epochs more each time, which may be meant
        ("abc", RED, "other samples"),  # the epoch was not restored
        ("dbc", RED, "other samples"),
        ("bc", RED, "same samples"),
        ("", RED, "other samples"),  # none
    ],
)
def test_a_restart_that_trains_longer_is_not_compared(again, verdict, seen):
    passes = {name: Pass(steps=1, samples=[ord(name), 0], batch_size=2) for name in "abcd"}
    whole, stopped = (told(1.0, end, *(passes[name] for name in names)) for end, names in ((1.0, "abc"), (0.5, "a")))
    restarted = told(2.0, 2.0, *(passes[name] for name in again))
    row = compare_restarted(whole, [*stopped, Save(), Stopped()], [restarted] * RANKS)
    assert row.verdict == verdict and seen in row.seen, row


@pytest.mark.parametrize(("last", "verdict", "seen"), [(0.0, UNSEEN, "did not move"), (1.0, OK, "after 1 steps")])
def test_weights_that_do_not_move_are_not_compared(last, verdict, seen):
    shares = [[0, 1, 2, 3], [0, 2], [1, 3]]
    passes = [Pass(steps=1, samples=share, batch_size=len(share)) for share in shares]
    single, *both = (told(1.0, last, one_pass) for one_pass in passes)
    row = compare_with_one_rank(single, both)
    assert row.verdict == verdict and seen in row.seen, row


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (Collective(name="barrier", time=3), RED),
        (Collective(name="all_reduce", time=3), OK),
        (Collective(name="broadcast", time=3), UNSEEN),
        (PointToPoint(name="isend", time=3), UNSEEN),
    ],
)
def test_a_share_of_the_test_set_that_is_brought_together_somehow_is_not_red(call, verdict):
    tests = {"time": 2, "since": 1, "begun": "it.py:1", "dataset_size": 4, "batches": 1, "complete": True}
    shares = [Pass(samples=[rank, rank + 2], **tests) for rank in range(RANKS)]
    rows = {row.name: row for row in judge([[share, call, End(status=0, time=4)] for share in shares])}
    assert (rows["metrics"].verdict, rows["end"].verdict) == (verdict, OK), rows


@pytest.mark.parametrize(
    ("taken", "sampler", "verdict"),
    [
        (8, "DistributedSampler", OK),
        (6, "DistributedSampler", OK),  # drop_last of the loader
        (4, "DistributedSampler", RED),  # as if there were four ranks
        (4, "SubsetRandomSampler", NONE),
    ],
)
def test_samples_that_no_rank_takes_are_red_where_a_distributed_sampler_deals(taken, sampler, verdict):
    common = {"steps": 1, "dataset_size": 16, "own_size": 16, "sampler": sampler, "batch_size": 3, "complete": True}
    shares = [Pass(samples=[*range(rank, 16, RANKS)][:taken], **common) for rank in range(RANKS)]
    rows = {row.name: row for row in judge([[share, End(status=0)] for share in shares])}
    assert (rows["coverage"].verdict, rows["samples"].verdict) == (verdict, OK), rows
    assert ("left out" in rows["coverage"].seen) == (taken == 6)


RESUMED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0
if sys.argv[1:] == ["--from", "my last.pt"]:
    step, weights, state = torch.load("my last.pt")
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(state)
while step < 12:
    optimizer.zero_grad()
    model(torch.full([1, 2], step + 1.0 + dist.get_rank())).sum().div(10).backward()
    optimizer.step()
    step += 1
    if step == 4 and dist.get_rank() == 0:
        torch.save((step, model.module.state_dict(), optimizer.state_dict()), "my last.pt")
dist.destroy_process_group()
"""


@weekly  # daily the same is done without the command: test_a_run_that_is_ended_and_started_again
def test_the_command_ends_a_script_and_starts_it_again(tmp_path):
    (script := tmp_path / "mine.py").write_text(RESUMED)
    words = ["audit", str(script), "--folder", str(tmp_path / "its"), "--json", str(tmp_path / "table.json")]
    assert main([*words, "--resume-with=--from 'my last.pt'"]) == 3, "no loader, so that samples are not seen"
    table = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    assert table["resume"]["verdict"] == OK and table["resume"]["seen"].endswith("bit"), table
    assert (tmp_path / "its" / "work_stopped" / "my last.pt").exists()


ALONE = """
import os, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
LOGS = """
import logging, sys, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl")
logging.basicConfig(filename="all.log")
logging.warning("begun")
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).cuda()
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
model = torch.nn.parallel.DistributedDataParallel(model)
if len(sys.argv) > 1:
    model.load_state_dict(torch.load(sys.argv[1]))
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "it.pt")
dist.barrier()
"""


def test_what_is_a_matter_of_taste_is_not_red_and_who_trains_alone_is(tmp_path):
    """Ranks that never talk; a log of all ranks, names with module. in a script that loads them, SyncBatchNorm."""
    tables = []
    for number, text in enumerate((ALONE, LOGS, LOGS.replace("load_state_dict", "load"))):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "it.py").write_text(text)
        wait_for_runs(start(folder / "it.py", DDP_AUDIT_ON_CPU="1" if number else ""))
        tables.append({row.name: row for row in judge(read_notes(folder / "notes", RANKS))})
    alone, logs, never_loads = tables
    assert (alone["gradients"].verdict, alone["files"].verdict) == (RED, NONE), alone
    assert [name for name, row in logs.items() if row.verdict == RED] == [], logs
    assert "logging" in logs["files"].seen and "meant so" in logs["saved names"].seen
    assert [name for name, row in never_loads.items() if row.verdict == RED] == ["saved names"]


def test_a_script_that_fails_at_once_is_no_red_row_of_ci(tmp_path, capsys):
    text = "import sys\nsys.stderr.write('give --lr, not ' + ' '.join(sys.argv[1:]) + chr(10))\nsys.exit(2)\n"
    (script := tmp_path / "it.py").write_text(text)
    # A flag that torchrun would take for its own, had the audit no -- before the script.
    assert main(["audit", str(script), "--folder", str(tmp_path / "its"), "--", "--n", "640"]) == 2
    said = capsys.readouterr().out
    assert "give --lr, not --n 640" in said and f"kept in {tmp_path / 'its'}" in said and "says nothing" in said


def rows_of(*ranks, **more):
    """The rows of notes made by hand, of ranks that came to their end."""
    end = End(status=0, time=9, **more)
    return {row.name: row for row in judge([[*notes, end] for notes in ranks])}


def shares(of_ranks, **fields):
    """The passes of ranks over these samples."""
    common = {"dataset_size": 32, "own_size": 32, "batch_size": 4, "batches": 4, "complete": True, "begun": "it.py:1"}
    return [Pass(**common | fields, samples=samples) for samples in of_ranks]


DRAWN = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
OTHERS = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5]
EVEN, ODD = [*range(0, 32, 2)], [*range(1, 32, 2)]


@pytest.mark.parametrize(
    ("of_ranks", "verdict"),
    [((DRAWN, DRAWN), RED), ((DRAWN, DRAWN[::-1]), RED), ((DRAWN, OTHERS), OK), ((DRAWN[:4], DRAWN[:4]), UNSEEN)],
)
def test_ranks_that_draw_the_same_samples_with_one_seed_are_red(of_ranks, verdict):
    samples = rows_of(*([one] for one in shares(of_ranks, steps=4, with_replacement=True)))["samples"]
    assert samples.verdict == verdict, samples


@pytest.mark.parametrize(
    ("shuffles", "second", "verdict"),
    [(True, EVEN, RED), (True, EVEN[::-1], OK), (False, EVEN, UNSEEN), (False, EVEN[::-1], OK)],
)
def test_an_order_that_comes_twice_is_red_for_any_sampler_that_promises_another(shuffles, second, verdict):
    deals = [shares([order], steps=4, sampler="Mine", shuffles=shuffles)[0] for order in (EVEN, ODD[::-1], second)]
    order = rows_of(deals, deals)["order"]
    assert order.verdict == verdict, order


@pytest.mark.parametrize(
    ("tested", "dataset", "reduced_at", "verdict"),
    [
        ((EVEN[8:], ODD[8:]), 1, (), RED),  # the other part of a random_split
        ((EVEN, ODD), 2, (), RED),  # as large as the training set
        ((EVEN, ODD), 2, (4, 8), OK),
        ((EVEN, ODD), 2, (6,), UNSEEN),  # the loss of the next epoch
        ((EVEN, ODD), 2, (4, 6), RED),  # that of the first epoch alone
        ((range(32), range(32)), 2, (), OK),
        ((EVEN[:8], ODD[:8]), 1, (), NONE),  # the training accuracy
    ],
)
def test_a_test_set_is_known_by_what_is_never_trained_on(tested, dataset, reduced_at, verdict):
    trained = [EVEN[:8], ODD[:8]]
    first, second = (shares(trained, dataset=1, steps=4, since=since, time=since + 1) for since in (1, 5))
    tests = [shares(tested, dataset=dataset, since=since, time=since + 1) for since in (3, 7)]
    calls = [Collective(name="all_reduce", time=at, at="it.py:9") for at in reduced_at]
    rows = rows_of(*([*passes, *calls] for passes in zip(first, tests[0], second, tests[1], strict=True)))
    assert (rows["metrics"].verdict, rows["evaluation"].verdict == RED) == (verdict, False), rows


@pytest.mark.parametrize(("longer", "adds", "verdict"), [(1, False, UNSEEN), (1, True, OK), (0, False, OK)])
def test_a_gather_of_unequal_counts_may_be_a_mean_of_means(longer, adds, verdict):
    trained = shares([EVEN[:8], ODD[:8]], dataset=1, steps=4, since=1, time=2)
    tested = shares([EVEN[: 8 + longer], ODD[:8]], dataset=2, since=3, time=4)
    call = Collective(name="all_reduce" if adds else "all_gather", time=5, at="it.py:9", adds=adds)
    row = rows_of(*([*passes, call] for passes in zip(trained, tested, strict=True)))["metrics"]
    assert row.verdict == verdict and (verdict == OK or "rank 0 9 and rank 1 8 samples" in row.seen), row


def gathers(*lines, name="all_gather"):
    return [Collective(name=name, size=[1], at="it.py:5", callers=[f"it.py:{line}"]) for line in lines]


def test_calls_of_other_lines_that_meet_are_told_with_their_callers():
    row = rows_of(gathers(40, 41, 42), gathers(42))["collectives"]
    assert row.verdict == RED and "call 1 brings" in row.seen and "call 2: rank 0" in row.seen, row
    assert "it.py:5 (from it.py:40)" in row.seen and "rank == 0" not in row.cure
    assert rows_of(gathers(40), gathers(42))["collectives"].verdict == UNSEEN, "a wrong number, or the same by two ways"
    assert rows_of(gathers(40, name="broadcast"), gathers(42, name="broadcast"))["collectives"].verdict == OK


@pytest.mark.parametrize(("complete", "told"), [(True, "equal shares"), (False, "leave the loop early")])
def test_batches_are_counted_in_the_pass_in_which_ranks_part(complete, told):
    notes = []
    for rank, batches in enumerate((2, 3)):
        passes = [shares([EVEN], steps=1)[0], Pass(steps=1, samples=[], batches=batches, complete=complete)]
        notes.append([*passes, Pass(steps=1, samples=[], batches=9 + rank), *gathers(1)[rank:]])
    row = rows_of(*notes)["collectives"]
    assert "rank 0 had 2, rank 1 had 3 batches" in row.cure and told in row.cure, row


def test_restarted_ranks_are_compared_with_each_other():
    notes = [Save(), RandomUse(state="b"), STEPPED]
    whole, stopped = told(1.0, 1.0, *notes), told(1.0, 0.5, *notes[:2], Stopped())
    row = compare_restarted(whole, stopped, [told(2.0, 1.0), told(2.0, 1.5)])
    assert row.verdict == RED and "the ranks part" in row.seen and "all ranks load" in row.cure, row


@pytest.mark.parametrize(
    ("rank", "world_size", "verdict"),
    [(1, 2, OK), (0, 2, RED), (1, 1, RED)],
)
def test_what_init_process_group_is_given_is_held_against_the_launch(rank, world_size, verdict):
    joins = [Join(rank=0, world_size=2, at="it.py:1"), Join(rank=rank, world_size=world_size, at="it.py:1")]
    rows = rows_of(*([join] for join in joins))
    assert (rows["launch"].verdict, rows["end"].verdict) == (verdict, UNSEEN if verdict == RED else OK), rows


def test_a_device_of_no_node_is_red_and_what_has_no_stand_in_is_not_seen(tmp_path):
    begin = 'import os, torch\ntorch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
    uses = ["torch.ones(1).to(f\"cuda:{os.environ['RANK']}\")", "torch.cuda.mem_get_info()"]
    ends, runs = [], []
    for number, use in enumerate(uses):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "it.py").write_text(begin + use)
        runs.append(start(folder / "it.py", DDP_AUDIT_ON_CPU="1", DDP_AUDIT_TWO_NODES="1"))
    wait_for_runs(*runs)
    ends = [judge(read_notes(tmp_path / str(number) / "notes", RANKS))[0] for number in range(len(uses))]
    assert ends[0].verdict == RED and "rank 1 at it.py:3" in ends[0].seen and "LOCAL_RANK" in ends[0].cure, ends
    assert ends[1].verdict == UNSEEN and "it.py:3" in ends[1].seen and "no fault of the script" in ends[1].seen, ends


FAILED = Row("end", RED, "rank 0 at it.py:7: no data", "read that rank's messages")


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([Row("end", OK, ""), Row("dice", NONE, ""), Row("resume", NOT_ASKED, "")], 0),
        ([Row("end", OK, ""), FAILED._replace(name="files"), Row("order", UNSEEN, "")], 1),
        ([Row("end", OK, ""), Row("order", UNSEEN, "one epoch")], 3),
    ],
)
def test_the_status_says_whether_all_was_seen(rows, status, capsys):
    assert report(rows) == status
    assert ("could not see all: order" in capsys.readouterr().out) == (status == 3)


def test_a_red_row_is_a_result_in_sarif_at_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    (script := tmp_path / "lib" / "it.py").write_text("")
    log = to_sarif(script, [FAILED, Row("order", OK, "it.py:3")])
    [result] = log["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (result["ruleId"], place["artifactLocation"]["uri"]) == ("end", "lib/it.py")
    assert place["region"] == {"startLine": 7} and log["version"] == "2.1.0"
    assert [rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]] == ["end", "order"]
