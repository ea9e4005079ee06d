"""The audit: each fault planted into mnist_ddp is found in its rows and no others, and a sound script has none red."""

import json
import shutil

import pytest
from real import THOROUGH

from ddp_helpers import ROOT
from ddp_helpers.__main__ import main
from ddp_helpers.lessons.run_script import Run, attend
from ddp_helpers.notebook.audit.again import resumed
from ddp_helpers.notebook.audit.command import RANKS, WITNESS, show
from ddp_helpers.notebook.audit.judge import judge
from ddp_helpers.notebook.audit.notes import OK, RED, UNSEEN, read
from ddp_helpers.notebook.audit.one import alone, compare
from ddp_helpers.notebook.launchers import free_port
from ddp_helpers.notebook.scripts import Script
from ddp_helpers.rank.digits import write_digits

PAGE = (ROOT / "docs" / "audit.md").read_text()
FLAGS = ["--epochs=2", "--batch-size=32", "--precision=float32", "--num-workers=0", "--save-model", "--timeout=30"]
SOUND = "none: the script as it is"
SHARE = "Subset(test_set, range(rank, len(test_set), world_size))"
PADDED = "sampler=DistributedSampler(test_set, world_size, rank, shuffle=False)"
PLANTED = {  # the fault, and what is changed in mnist_ddp
    SOUND: (),
    "no sampler": [("args.batch_size, sampler=sampler", "args.batch_size, shuffle=True")],
    "each rank takes share 0": [("(train_set, world_size, rank,", "(train_set, world_size, 0,")],
    "the sampler's seed differs": [("seed=args.seed)", "seed=args.seed + rank)")],
    "no `set_epoch`": [("        sampler.set_epoch(epoch)", "        sampler.set_epoch(0)")],
    "padded evaluation": [
        ("DataLoader(test_share, args.test_batch_size,", f"DataLoader(test_set, args.test_batch_size, {PADDED},")
    ],
    "half of the test set": [(SHARE, SHARE.replace("range(rank", "range(0"))],
    "past the wrapper": [("one_pass(ddp_model, train", "one_pass(model, train")],
    "another learning rate on each rank": [("lr=args.lr)", "lr=args.lr * (1 + rank))")],
    "only rank 0 reduces": [("        dist.all_reduce(trained)", "        rank or dist.all_reduce(trained)")],
    "only rank 0 in the last barrier": [("    dist.barrier()", "    rank or dist.barrier()")],
    "a rank leaves the loop early": [("if args.dry_run:", "if optimizer and dist.get_rank():")],
    "a rank fails": [("        scheduler.step()", "        scheduler.step(1 / (1 - rank))")],
    "a rank waits for a file": [("        scheduler.step()", "        while rank:\n            time.sleep(0.1)")],
    "all ranks save": [("if args.save_model and rank == 0:", "if args.save_model:")],
    "the wrapper is saved": [("torch.save(model.state_dict()", "torch.save(ddp_model.state_dict()")],
    "the same dropout": [("torch.manual_seed(args.seed + rank)", "torch.manual_seed(args.seed)")],
    "a metric is not reduced": [("        dist.all_reduce(tested)\n", "")],
}
WEEKLY = {"each rank takes share 0", "the sampler's seed differs", "half of the test set", "only rank 0 reduces"}
WEEKLY |= {"another learning rate on each rank", "a rank leaves the loop early", "a metric is not reduced"}
NAMES = [name for name in PLANTED if THOROUGH or name not in WEEKLY]
LIMIT, AT_ONCE = 8.0, 3  # seconds, within which a sound run ends here; runs


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
    scripts = {name: planted(PLANTED[name], tmp_path_factory.mktemp("planted") / "it") for name in NAMES}
    for first in range(0, len(scripts), AT_ONCE):
        some = [*scripts.items()][first : first + AT_ONCE]
        limits = [LIMIT if f"| {name} | end" in PAGE else 60.0 for name, _ in some]  # short where it may hang
        words = ["--data", data, *FLAGS]
        attend(*(start(script, *words, limit=limit) for (_, script), limit in zip(some, limits, strict=True)))
    return {name: judge(read(script.parent / "notes", RANKS)) for name, script in scripts.items()}


def line(name, table):
    """The line of docs/audit.md for a fault: the red rows, and what the first of them saw."""
    reds = [row for row in table if row.verdict == RED]
    return f"| {name} | {', '.join(row.name for row in reds) or '-'} |"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_is_found_of_each_planted_fault(name, tables):
    assert line(name, tables[name]) in PAGE, f"{line(name, tables[name])}\n{show(tables[name])}"


def test_a_run_that_did_not_end_has_no_green_row(tables):
    for name in ("a rank fails", "a rank waits for a file"):
        assert not any(row.verdict == OK for row in tables[name])
    hung = {row.name: row.seen for row in tables["a rank waits for a file"]}
    text = [line for line, text in enumerate(Script("mnist_ddp").text().splitlines(), 1) if "scheduler.step()" in text]
    assert f"rank 1 at mnist_ddp.py:{text[0] + 1}" in hung["end"] and "rank 1 does not come" in hung["collectives"]
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
torch.multiprocessing.spawn(train, (torch.cuda.device_count(),), torch.cuda.device_count())
"""


def test_shares_of_a_stream_and_a_script_for_cuda(tmp_path):
    """Workers times ranks; spirals_ddp, made to insist on CUDA; mp.spawn, srun's names, ZeRO, and gradients of zero."""
    runs, scripts = [], {share: STREAM.replace("SHARE", share) for share in SHARES}
    spirals = (ROOT / "notebooks" / "spirals_ddp.py").read_text()
    scripts["cuda"] = spirals.replace("if torch.cuda.is_available():", "if True:")
    assert scripts["cuda"] != spirals
    other = spirals.replace("spirals(960, seed=1)", "spirals(960, seed=rank)")
    spawned = {size: SPAWNED.replace("SIZE", size).replace("PORT", str(free_port())) for size in ("1.0", "0.0")}
    for number, text in enumerate([*scripts.values(), *spawned.values(), other]):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "it.py").write_text(text)
        cuda = "set_device" in text
        words = ["--epochs=2"] * (text in (scripts["cuda"], other))
        runs.append(start(folder / "it.py", *words, DDP_AUDIT_ON_CPU="1" if cuda else ""))
    attend(*runs)
    tables = [{row.name: row for row in judge(read(tmp_path / str(n) / "notes", RANKS))} for n in range(len(runs))]
    for table, (verdict, seen) in zip(tables, SHARES.values(), strict=False):
        assert table["samples"].verdict == verdict and seen in table["samples"].seen, table["samples"]
    verdicts = [row.verdict for row in tables[3].values()]
    assert verdicts == [OK] * 9 + [UNSEEN] * 2, tables[3]
    assert tables[4]["gradients"].seen == "equal on all ranks at the first 3 steps", tables[4]
    assert tables[6]["samples"].verdict == RED and "datasets that differ" in tables[6]["samples"].seen
    assert tables[5]["end"].verdict == OK and "all are zero" in tables[5]["gradients"].seen


def test_the_command_writes_a_table_and_nothing_beside_the_script(tmp_path, capsys):
    (home := tmp_path / "home").mkdir()
    text = (ROOT / "notebooks" / "spirals_ddp.py").read_text()
    assert text.count("if rank == 0:\n        torch.save(") == 1
    (home / "mine.py").write_text(text.replace("if rank == 0:\n        torch.save(", "if True:\n        torch.save("))
    words = ["audit", str(home / "mine.py"), "--folder", str(tmp_path / "its"), "--json", str(tmp_path / "table.json")]
    assert main([*words, "--batch-size-flag=--batch-size", "--", "--epochs", "2", "--batch-size=48"]) == 1
    table = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())}
    said = capsys.readouterr().out
    assert table["files"]["verdict"] == RED and "cure: let one rank do it" in said and "1 of 12 checks RED" in said
    assert table["one rank"]["verdict"] == OK
    left = [[path.name for path in folder.iterdir()] for folder in (home, tmp_path / "its" / "work")]
    assert left == [["mine.py"], ["spirals.pt"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none.py"], "cannot be read"),
        (["docs/audit.md"], "is no Python"),
        (["notebooks/spirals_ddp.py", "--limit", "0"], "--limit 0 is out of range"),
        (["notebooks/spirals_ddp.py", "--folder", "docs"], "holds something else"),
        (["notebooks/spirals_ddp.py", "--cwd", "none"], "is no folder"),
        (["notebooks/spirals_ddp.py", "--epochs", "2"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_audited_is_one_line(words, told, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as left:
        main(["audit", *words])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("right", "wrong", "verdict", "told"),
    [
        ("", "", OK, "after 40 steps"),
        ("loss.backward()", "(loss * world_size).backward()", RED, "of their way apart"),
        ("torch.manual_seed(1)", "torch.seed()", UNSEEN, "set the seed"),
        ("nn.ReLU(), nn.Linear(64, 3)", "nn.Dropout(0.1), nn.Linear(64, 3)", UNSEEN, "dropout"),
    ],
)
def test_one_rank_and_two_reach_one_model(right, wrong, verdict, told, tmp_path):
    text = (ROOT / "notebooks" / "spirals_ddp.py").read_text()
    assert right in text
    runs, words = [], ["--epochs", "2", "--batch-size", "48"]
    for ranks in (1, RANKS):
        (folder := tmp_path / str(ranks)).mkdir()
        (folder / "it.py").write_text(text.replace(right, wrong) if right else text)
        runs.append(start(folder / "it.py", *words, ranks=ranks))
    attend(*runs)
    [single], both = (read(tmp_path / str(ranks) / "notes", ranks) for ranks in (1, RANKS))
    row = compare(single, both)
    assert row.verdict == verdict and told in row.seen, row
    assert alone(words, "--batch-size", both) == words  # this flag is that of all ranks
    assert alone(["--batch=24"], "--batch", both) == ["--batch=48"]
    with pytest.raises(ValueError, match="neither"):
        alone(["--batch=7"], "--batch", both)


RESTORED = "            part.load_state_dict(state[name])"


def test_a_run_that_is_ended_and_started_again(tmp_path):
    """mnist_ddp_resumable goes on to the bit; without its optimizer's state, or from the first epoch, it does not."""
    data = write_digits(tmp_path / "data", train=192, test=64)
    text, progress = Script("mnist_ddp_resumable").text(), "self.progress, setting, shape, random ="
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
            runs.append(start(folder / "it.py", *words, limit=60, DDP_AUDIT_STOP="0" if name == "stopped" else ""))
        attend(*runs)
        notes |= {name: read(tmp_path / name / "notes", RANKS) for name in several}
    whole, stopped = notes["whole"][0], notes["stopped"][0]
    rows = {name: resumed(whole, stopped, notes[name]) for name in attempts}
    assert (rows["right"].verdict, rows["right"].seen.endswith("to the bit")) == (OK, True), rows["right"]
    assert rows["optimizer"].verdict == RED and "with the same samples" in rows["optimizer"].seen, rows["optimizer"]
    if THOROUGH:
        assert rows["epoch"].verdict == RED and "trained on other samples" in rows["epoch"].seen, rows["epoch"]
    for row, told in (
        (resumed(whole, whole, notes["right"]), "torch.save wrote nothing"),
        (resumed(whole, stopped, notes["whole"]), "from the beginning"),
    ):
        assert row.verdict == UNSEEN and told in row.seen
