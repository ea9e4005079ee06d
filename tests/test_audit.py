"""The audit: each fault planted into mnist_ddp is found in its rows and no others, and a sound script has none red."""

import json
import re
import shutil

import pytest
from real import LIMIT, THOROUGH
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.__main__ import main
from ddp_helpers.launch.launchers import free_port
from ddp_helpers.launch.scripts import Script
from ddp_helpers.lessons.run_script import Run, attend
from ddp_helpers.rank.digits import write_digits
from ddp_helpers.tools.audit.again import resumed
from ddp_helpers.tools.audit.command import RANKS, WITNESS, AuditError, begun, show
from ddp_helpers.tools.audit.judge import LOOKS, judge
from ddp_helpers.tools.audit.notes import OK, RED, STEPS, UNSEEN, of, read
from ddp_helpers.tools.audit.one import alone, compare

PAGE = (ROOT / "docs" / "audit.md").read_text()
FLAGS = ["--epochs=2", "--batch-size=32", "--precision=float32", "--num-workers=0", "--save-model"]
FLAGS += [f"--timeout={LIMIT}"]
IN_TURN = '    while rank and not Path("mnist_cnn.pt").exists():\n        time.sleep(0.1)\n'
SOUND = "none: the script as it is"
SHARE = "range(rank, len(test_set), world_size)"
PADDED = "sampler=DistributedSampler(test_set, world_size, rank, shuffle=False)"
PLANTED = {  # the fault, and what is changed in mnist_ddp
    SOUND: (),
    "no sampler": [("share, sampler=sampler", "share, shuffle=True")],
    "each rank takes share 0": [("(train_set, world_size, rank,", "(train_set, world_size, 0,")],
    "the sampler's seed differs": [("seed=args.seed)", "seed=args.seed + rank)")],
    "no `set_epoch`": [("        sampler.set_epoch(epoch)", "        sampler.set_epoch(0)")],
    "padded evaluation": [
        ("DataLoader(Subset(test_set, test_indices), args", f"DataLoader(test_set, {PADDED}, batch_size=args")
    ],
    "half of the test set": [(SHARE, SHARE.replace("range(rank", "range(0"))],
    "past the wrapper": [("one_pass(ddp_model, train", "one_pass(model, train")],
    "another learning rate on each rank": [("lr=args.lr)", "lr=args.lr * (1 + rank))")],
    "only rank 0 reduces": [("trained = over_ranks(trained)", "trained = trained if rank else over_ranks(trained)")],
    "only rank 0 in the last barrier": [("\n    dist.barrier()", "\n    rank or dist.barrier()")],
    "a rank leaves the loop early": [("if args.dry_run:", "if optimizer and dist.get_rank():")],
    "a rank fails": [("        scheduler.step()", "        scheduler.step(1 / (1 - rank))")],
    "a rank waits for a file": [("        scheduler.step()", "        while rank:\n            time.sleep(0.1)")],
    "all ranks save": [("    if args.save_model and rank == 0:", f"{IN_TURN}    if args.save_model:")],
    "the wrapper is saved": [("save_model(model,", "save_model(ddp_model,")],
    "the same dropout": [("torch.manual_seed(args.seed + rank)", "torch.manual_seed(args.seed)")],
    "a metric is not reduced": [("        tested = over_ranks(tested)\n", "")],
}
WEEKLY = {"each rank takes share 0", "the sampler's seed differs", "half of the test set", "only rank 0 reduces"}
WEEKLY |= {"another learning rate on each rank", "a rank leaves the loop early", "a metric is not reduced"}
NAMES = [name for name in PLANTED if THOROUGH or name not in WEEKLY]
HANGS, AT_ONCE = 30.0, 3  # seconds after which a run hangs that is to hang: by then it has come there; runs


def planted(changes, folder):
    text = Script("mnist_ddp").text()
    for right, wrong in changes:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    folder.mkdir()
    script = folder / "mnist_ddp.py"
    script.write_text(text)
    return script


def start(script, *words, limit=LIMIT, ranks=RANKS, **env):
    """Start the witnesses as the command does, but on forked ranks: torch is imported once for all of them."""
    for name in ("notes", "work"):
        (script.parent / name).mkdir(exist_ok=True)
    words = (script.parent / "notes", limit, script, *words)
    return Run(WITNESS, *words, ranks=ranks, folder=script.parent / "work", limit=limit + 30, env=env)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The rows of each planted fault; several runs at a time."""
    data = write_digits(tmp_path_factory.mktemp("data"), train=192, test=201)
    limits = {name: HANGS if f"| {name} | end" in PAGE else LIMIT for name in NAMES}
    names = sorted(NAMES, key=limits.get)  # those that hang wait side by side
    scripts = {name: planted(PLANTED[name], tmp_path_factory.mktemp("planted") / "it") for name in names}
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        attend(*(start(scripts[name], "--data", data, *FLAGS, limit=limits[name]) for name in some))
    return {name: judge(read(script.parent / "notes", RANKS)) for name, script in scripts.items()}


def line(name, table):
    """The line of docs/audit.md for a fault: the red rows, and what the first of them saw."""
    reds = [row for row in table if row.verdict == RED]
    return f"| {name} | {', '.join(row.name for row in reds) or '-'} |"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_is_found_of_each_planted_fault(name, tables):
    assert line(name, tables[name]) in PAGE, f"{line(name, tables[name])}\n{show(tables[name])}"


def test_each_check_finds_a_planted_fault():
    found = [re.search(rf"^\| {re.escape(name)} \| ([^|]*) \|", PAGE, re.M) for name in PLANTED]
    assert {*LOOKS} == {name for row in found if row and row[1] != "-" for name in row[1].split(", ")}


def test_a_run_that_did_not_end_has_no_green_row(tables):
    for name in ("a rank fails", "a rank waits for a file"):
        assert not any(row.verdict == OK for row in tables[name])
    hung = {row.name: row.seen for row in tables["a rank waits for a file"]}
    text = [line for line, text in enumerate(Script("mnist_ddp").text().splitlines(), 1) if "scheduler.step()" in text]
    assert f"rank 1 at mnist_ddp.py:{text[0] + 1}" in hung["end"]
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
    scripts["cuda"] = spirals.replace("gpus = torch.cuda.device_count()", "gpus = 2")
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
    attend(*runs)
    notes = [read(tmp_path / str(n) / "notes", RANKS) for n in range(len(runs))]
    tables = [{row.name: row for row in judge(ranks)} for ranks in notes]
    for table, (verdict, seen) in zip(tables, SHARES.values(), strict=False):
        assert table["samples"].verdict == verdict and seen in table["samples"].seen, table["samples"]
    other = {name: row.verdict for name, row in tables[3].items() if row.verdict != OK}
    assert other == {"dice": UNSEEN, "metrics": UNSEEN}, tables[3]
    assert tables[4]["gradients"].verdict == OK and "3 steps" in tables[4]["gradients"].seen, tables[4]
    assert [[n["name"] for n in of(ranks, "pair")] for ranks in notes[4]] == [["send"], ["recv"]]
    assert (tables[4]["end"].verdict, tables[4]["collectives"].verdict) == (OK, OK), tables[4]
    with pytest.raises(AuditError, match=r"\b3 ranks.*\b2\b"):
        begun(notes[6], tmp_path)
    assert begun(notes[4], tmp_path) is None
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
    table = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())}
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
        (["docs/audit.md"], "audit.md"),
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
    attend(*runs)
    [single], both = (read(tmp_path / str(ranks) / "notes", ranks) for ranks in (1, RANKS))
    row = compare(single, both)
    assert row.verdict == verdict and told in row.seen, row
    assert alone(given, "--batch-size", both) == whole
    assert alone(["--batch-size-per-rank=24"], "--batch-size-per-rank", both) == ["--batch-size-per-rank=48"]
    assert alone(["--epochs=2"], "--batch", both) == ["--epochs=2", "--batch=48"]  # the script's default was taken
    for words in (["--batch=7"], ["--batch=24", "--batch", "24"], ["--batch", "x"]):
        with pytest.raises(ValueError, match=r"--batch\b.*\b24 or 48\b"):
            alone(words, "--batch", both)


RESTORED = "            part.load_state_dict(state[name])"


@pytest.mark.parametrize("on_cpu", ["1"] + [""] * THOROUGH)
def test_a_run_that_is_ended_and_started_again(on_cpu, tmp_path):
    """mnist_ddp_resumable goes on to the bit; without its optimizer's state, or from the first epoch, it does not."""
    data = write_digits(tmp_path / "data", train=192, test=64)
    text, progress = Script("mnist_ddp_resumable").text(), "self.progress = Progress("
    faults = {
        "whole": text,
        "stopped": text,
        "right": text,
        "optimizer": text.replace(RESTORED, f'            name == "optimizer" or {RESTORED.strip()}'),
        "epoch": text.replace(progress, progress.replace("self.progress", "_")),
    }
    assert len({*faults.values()}) == 3
    attempts = ["right", "optimizer"] + ["epoch"] * THOROUGH
    notes = {}
    for several in (["whole", "stopped"], attempts):
        runs = []
        for name in several:
            (folder := tmp_path / name).mkdir()
            (folder / "it.py").write_text(faults[name])
            words = ["--data", data, "--run-dir=mine", *FLAGS]
            if name in attempts:
                shutil.copytree(tmp_path / "stopped" / "work", folder / "work")
            env = {"DDP_AUDIT_STOP": "0" if name == "stopped" else "", "DDP_AUDIT_ON_CPU": on_cpu}
            runs.append(start(folder / "it.py", *words, **env))
        attend(*runs)
        notes |= {name: read(tmp_path / name / "notes", RANKS) for name in several}
    whole, stopped = notes["whole"][0], notes["stopped"][0]
    rows = {name: resumed(whole, stopped, notes[name]) for name in attempts}
    assert (rows["right"].verdict, rows["right"].seen.endswith("bit")) == (OK, True), rows["right"]
    assert rows["optimizer"].verdict == RED and "same samples" in rows["optimizer"].seen, rows["optimizer"]
    if THOROUGH:
        assert rows["epoch"].verdict == RED and "other samples" in rows["epoch"].seen, rows["epoch"]
    for row, told in (
        (resumed(whole, whole, notes["right"]), "torch.save wrote nothing"),
        (resumed(whole, stopped, notes["whole"]), "from the beginning"),
    ):
        assert row.verdict == UNSEEN and told in row.seen


def told(first, last, *more):
    """The notes of a rank with one weight: its first gradient, its last weight, and what else was noted between."""
    weights = {"kind": "weights", "model": 0, "names": ["w"]}
    return [
        weights | {"when": "begin", "sums": [[0.0, 0.0]], "bits": ["0"]},
        {"kind": "step", "sums": [[first, abs(first)]]},
        *more,
        weights | {"when": "end", "sums": [[last, last]], "bits": [str(last)]},
        {"kind": "ends", "status": 0, "time": 9},
    ]


@pytest.mark.parametrize(
    ("before", "again", "verdict", "seen"),
    [
        ("a s b", told(1 + 1e-7, 1.0001), UNSEEN, "from the beginning"),  # another order of sums, another rounding
        ("a s b", told(2.0, 1.0001), OK, "close, not equal"),
        ("a s b", told(2.0, 2.0, {"kind": "random", "state": "b"}), RED, "apart"),
        ("a s b", told(2.0, 2.0, {"kind": "random", "state": "c"}), UNSEEN, "with other random numbers: restore"),
        ("a s", told(2.0, 2.0, {"kind": "random", "state": "b"}), UNSEEN, "cannot be compared"),
    ],
)
def test_a_restart_is_known_by_its_gradients_and_its_random_numbers(before, again, verdict, seen):
    notes = [{"kind": "saved"} if word == "s" else {"kind": "random", "state": word} for word in before.split()]
    row = resumed(told(1.0, 1.0, *notes), told(1.0, 0.5, *notes[:2], {"kind": "stopped"}), [again] * RANKS)
    assert row.verdict == verdict and seen in row.seen, row


@pytest.mark.parametrize(("last", "verdict", "seen"), [(0.0, UNSEEN, "did not move"), (1.0, OK, "after 1 steps")])
def test_weights_that_do_not_move_are_not_compared(last, verdict, seen):
    whole = {"kind": "pass", "steps": 1, "iterable": False}
    shares = [[0, 1, 2, 3], [0, 2], [1, 3]]
    single, *both = (told(1.0, last, whole | {"samples": each, "batch": len(each)}) for each in shares)
    row = compare(single, both)
    assert row.verdict == verdict and seen in row.seen, row


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        ({"kind": "collective", "name": "barrier"}, RED),
        ({"kind": "collective", "name": "all_reduce"}, UNSEEN),
        ({"kind": "collective", "name": "broadcast"}, UNSEEN),
        ({"kind": "pair", "name": "isend"}, UNSEEN),
    ],
)
def test_a_share_of_the_test_set_that_is_brought_together_somehow_is_not_red(call, verdict):
    tests = {"kind": "pass", "time": 2, "steps": 0, "batches": 1, "whole": 4, "iterable": False, "since": 1}
    tests |= {"begun": "it.py:1", "complete": True}
    call = call | {"size": [1], "time": 3, "at": "it.py:2"}
    shares = [tests | {"samples": [rank, rank + 2]} for rank in range(RANKS)]
    rows = {
        row.name: row for row in judge([[share, call, {"kind": "ends", "status": 0, "time": 4}] for share in shares])
    }
    assert (rows["metrics"].verdict, rows["end"].verdict) == (verdict, OK), rows


def test_the_witness_digests_as_many_batches_as_its_notes_say():
    assert re.findall(r"^STEPS = (\d+)", WITNESS.read_text(), re.M) == [str(STEPS)]


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


def test_the_command_ends_a_script_and_starts_it_again(tmp_path):
    (script := tmp_path / "mine.py").write_text(RESUMED)
    words = ["audit", str(script), "--folder", str(tmp_path / "its"), "--json", str(tmp_path / "table.json")]
    assert main([*words, "--resume-with=--from 'my last.pt'"]) == 0
    table = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())}
    assert table["resume"]["verdict"] == OK and table["resume"]["seen"].endswith("bit"), table
    assert (tmp_path / "its" / "work_stopped" / "my last.pt").exists()
