"""The audit: each fault planted into spirals_ddp is found in its rows and no others; as it is, none is red."""

import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
import simulated
from audited import ON_CPU, Script, audit_all, launch, table
from changed_text import replaced
from real import LIMIT, THOROUGH, until
from refusals import refused

from ddp_helpers import ROOT
from ddp_helpers.cli import main
from ddp_helpers.data.digits import write_digits
from ddp_helpers.launch.launchers import free_port
from ddp_helpers.rank.scripts import script_text
from ddp_tools import PlainError
from ddp_tools.audit import command, mirror, one_rank
from ddp_tools.audit.command import RANKS
from ddp_tools.audit.judge import CHECKS, judge
from ddp_tools.audit.notes import FAIL, NOT_APPLICABLE, OK, UNKNOWN, PointToPoint, select
from ddp_tools.audit.restart import compare_restarted

PAGE = (ROOT / "docs" / "tools.md").read_text()
SPIRALS = (ROOT / "notebooks" / "spirals_ddp.py").read_text()
FLAGS = ["--epochs=2", "--save=spirals.pt"]
SOUND_SCHEDULE, SOUND_BY_HAND = "none: a schedule", "none: a learning rate of steps, without a loader"
SOUND_STEPS = "none: a step of four micro-batches"
SOUND, WITH_DROPOUT = "none: the script as it is", "none: dropout, each rank its own"
WITH_NOISE, SAME_NOISE = "none: noise in the loop, each rank its own", "no row: the same noise in the loop"
TESTS_BY_HAND = "no row: a test without a loader"
TESTS_OTHERS, TESTS_ONE = "no row: BatchNorm, as each rank has it", "none: BatchNorm, of rank 0 in the test"
TIME = ("import os\n", "import os\nimport time\n")
IN_TURN = "    while rank and not args.save.exists():\n        time.sleep(0.1)\n"
DROPOUT = ("nn.Sequential(*hidden, nn.Linear", "nn.Sequential(*hidden, nn.Dropout(0.1), nn.Linear")
SHARE = "range(rank, len(test_set), world_size)"
PADDED = "DataLoader(test_set, 100, sampler=DistributedSampler(test_set, shuffle=False))"
STEP, ENDS = "            optimizer.zero_grad()", "            optimizer.step()"
BATCH_NORM = ("nn.Linear(2, 64), nn.ReLU()", "nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU()")
TRAINS = "        model.train()"
WITH_DICE = f"{TRAINS}\n        dice = torch.Generator().manual_seed(epoch)"
DRAWN = "train_set[torch.randint(960, [24], generator=dice)]"
SPLIT = "torch.utils.data.random_split(spirals(960, seed=1), [720, 240], torch.Generator().manual_seed(rank))"
UNUSED = '    model.register_parameter("unused", nn.Parameter(torch.ones(1)))'
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (1 + rank))"
REDUCED = "        dist.all_reduce(right)\n"
GATHERED = "        dist.all_gather_object(everyone := [None] * world_size, PART)\n"
# What ranks of one size each find on their shares of the test set, 125 samples, comes together in these ways.
TOGETHER = {
    "a mean of each share": f"        right = right / len(test_indices) / world_size\n{REDUCED}",
    "a sum of floats": f"        right = right.float()\n{REDUCED}",
    "an mIoU, and a loss with its samples": (
        f"        dist.all_reduce(torch.tensor([9.5, 125]))\n        right = right / 250\n{REDUCED}"
    ),
    "IoUs of as many classes as samples": "        dist.all_reduce(right / torch.arange(1, 126))\n",
    "gathered means": GATHERED.replace("PART", "right.item() / len(test_indices)"),
    "gathered counts": GATHERED.replace("PART", "(right / 1, len(test_indices))"),
    "a sum, and the samples alone": f"        right = right / 1\n{REDUCED}        dist.all_reduce(torch.tensor(125))\n",
    "a sum, and the samples": f"        right = torch.stack([right, torch.tensor(125)]).float()\n{REDUCED}",
}
ON_TWO_NODES = "`local_rank` for `rank`, with `--two-nodes`"
TAKES_LOCAL_RANK = "`init_process_group` is given `local_rank`, with `--two-nodes`"
# Only points of the right half count, and their number differs from rank to rank.
RIGHT_HALF = "F.cross_entropy(ddp_model(x.to(device))[x[:, 0] > 0], y[x[:, 0] > 0].to(device))"
OPTIMIZER, SCHEDULE = "momentum=0.9)  # YOUR OPTIMIZER", "optim.lr_scheduler.OneCycleLR(optimizer, args.lr, TOTAL)"
BY_HAND = """for i in range(20):
            x, y = train_set[torch.randint(960, [48], generator=dice)[rank::world_size]]
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + COUNTED)"""


def schedule(total, steps=f"{ENDS}\n            scheduler.step()"):
    """A schedule over so many steps."""
    made = f"momentum=0.9)\n    scheduler = {SCHEDULE.replace('TOTAL', total)}"
    return [(OPTIMIZER, made), (ENDS, steps)]


IN_LOOP, SEED = "train_batches:\n            loss = ", "torch.manual_seed(1 + rank)"
NOISE = ("ddp_model(x.to(device))", "ddp_model(x.to(device) + 0.1 * torch.randn(x.shape))")
ODD_NUMBER = "none: a training set that the ranks cannot divide"
NORM_ADDED = "no row: the norm of averaged gradients is added up over the ranks"
LOSS_ADDED = "none: the ranks' losses are added up before the step"
NORM = "dist.all_reduce(sum(OF.detach().square().sum() for p in model.parameters()))"
LATE, EARLY_END = "args.epochs * len(train_batches)", "lambda step: max(0.0, 1 - step / len(train_batches))"
FOUR = [
    (f"for x, y in {IN_LOOP}", f"for number, (x, y) in enumerate({IN_LOOP.replace(':', ', 1):', 1)}"),
    (
        f"{STEP}\n            loss.backward()\n{ENDS}\n",
        "            (loss / 4).backward()\n            if number % 4 == 0:\n    " + f"{ENDS}\n    {STEP}\n",
    ),
]


def drawn_by_hand(counted):
    """Batches without a loader, and a learning rate that goes by this count of steps."""
    return [(TRAINS, WITH_DICE), ("for x, y in train_batches:", BY_HAND.replace("COUNTED", counted))]


PLANTED = {  # the fault, the rows that it makes red, and the lines of spirals_ddp that are replaced
    SOUND: ("", []),
    WITH_DROPOUT: ("", [DROPOUT]),
    "no sampler": ("sharding", [("world_size, sampler=sampler", "world_size, shuffle=True")]),
    "each rank takes share 0": (
        "sharding",
        [("DistributedSampler(train_set)", "DistributedSampler(train_set, world_size, 0)")],
    ),
    "the sampler's seed differs": (
        "sharding",
        [("DistributedSampler(train_set)", "DistributedSampler(train_set, seed=rank)")],
    ),
    "four shares, two ranks": (
        "coverage",
        [("DistributedSampler(train_set)", "DistributedSampler(train_set, 4, rank)")],
    ),
    "no `set_epoch`": ("shuffle", [("        sampler.set_epoch(epoch)", "        sampler.set_epoch(0)")]),
    "padded evaluation": (
        "evaluation",
        [
            ("DataLoader(Subset(test_set, test_indices), 100)", PADDED),
            ("spirals(250,", "spirals(251,"),
        ],
    ),
    "half of the test set": ("evaluation", [(SHARE, SHARE.replace("rank", "0"))]),
    "past the wrapper": ("replicas, gradients", [("F.cross_entropy(ddp_model(", "F.cross_entropy(model(")]),
    "another learning rate on each rank": ("replicas", [("lr=args.lr,", "lr=args.lr * (1 + rank),")]),
    "only rank 0 reduces": (
        "exit, collectives",
        [("        dist.all_reduce(right)", "        rank or dist.all_reduce(right)")],
    ),
    "only rank 0 in the last barrier": (
        "exit, collectives",
        [("\n    dist.barrier()", "\n    rank or dist.barrier()")],
    ),
    "a rank leaves the loop early": (
        "exit, collectives",
        [("            optimizer.step()", "            optimizer.step()\n            if rank:\n                break")],
    ),
    "a rank fails": ("exit", [("        model.eval()", "        1 / (1 - rank)\n        model.eval()")]),
    "a rank waits for a file": (
        "exit, collectives",
        [TIME, ("        model.eval()", "        while rank:\n            time.sleep(0.1)")],
    ),
    "all ranks save": ("files", [TIME, ("    if args.save and rank == 0:", f"{IN_TURN}    if args.save:")]),
    "the wrapper is saved": (
        "checkpoint keys",
        [("torch.save(model.cpu().state_dict()", "torch.save(ddp_model.cpu().state_dict()")],
    ),
    "the same dropout": ("rng", [DROPOUT, ("torch.manual_seed(1 + rank)", "torch.manual_seed(1)")]),
    "a metric is not reduced": ("metrics", [("        dist.all_reduce(right)\n", "")]),
    "a mean of the ranks' unequal means": (
        "gradients",
        [
            ("F.cross_entropy(ddp_model(x.to(device)), y.to(device))", RIGHT_HALF),
        ],
    ),
    "NaN on one rank": ("finite", [(STEP, f"            loss = loss * (float('nan') if rank else 1)\n{STEP}")]),
    "never wrapped": ("gradients", [("    ddp_model = DDP(model)", "    ddp_model = model")]),
    "the optimizer has a copy's weights": (
        "gradients",
        [
            ("import os\n", "import copy\nimport os\n"),
            ("optim.SGD(model.parameters()", "optim.SGD(copy.deepcopy(model).parameters()"),
        ],
    ),
    "`zero_grad` after `backward`": (
        "gradients",
        [
            (f"{STEP}\n            loss.backward()\n", f"            loss.backward()\n{STEP}\n"),
        ],
    ),
    "one batch for all, drawn by hand": (
        "sharding",
        [
            (TRAINS, WITH_DICE),
            ("for x, y in train_batches:", f"for _ in range(20):\n            x, y = {DRAWN}"),
        ],
    ),
    "another split on each rank": ("sharding, evaluation", [("spirals(960, seed=1), spirals(250, seed=2)", SPLIT)]),
    "statistics of its own on each rank": (
        "replicas",
        [BATCH_NORM, ("DDP(model)", "DDP(model, broadcast_buffers=False)")],
    ),
    "only rank 0 tests, through the wrapper": (
        "exit, collectives",
        [
            BATCH_NORM,
            ("for x, y in test_batches:", "for x, y in test_batches if rank == 0 else ():"),
            ("right += (model(", "right += (ddp_model("),
        ],
    ),
    "a weight that is not used": ("exit", [("    ddp_model = DDP(model)", f"{UNUSED}\n    ddp_model = DDP(model)")]),
    "a rank clamps a weight": (
        "replicas",
        [(ENDS, f"{ENDS}\n            model[0].bias.data.clamp_(-9, 9 - 9 * rank)")],
    ),
    "each rank clips by another norm": ("replicas, gradients", [(ENDS, f"            {CLIP}\n{ENDS}")]),
    "only rank 0 steps": (
        "replicas, gradients",
        [(ENDS, "            if rank == 0:\n                optimizer.step()")],
    ),
    "a slow rank": ("straggler", [TIME, (STEP, f"            time.sleep(0.2 * rank)\n{STEP}")]),
    ON_TWO_NODES: (
        "sharding",
        [("DistributedSampler(train_set)", "DistributedSampler(train_set, world_size, local_rank)")],
    ),
    SOUND_SCHEDULE: ("", schedule("args.epochs * len(train_batches)")),
    SOUND_BY_HAND: ("", drawn_by_hand("i")),
    "a schedule over batches of each rank's size": (
        "1-rank parity",
        schedule("args.epochs * len(train_set) // (args.batch_size // world_size)"),
    ),
    "a learning rate of steps times ranks, without a loader": ("1-rank parity", drawn_by_hand("i * world_size")),
    SOUND_STEPS: ("", FOUR),
    ODD_NUMBER: ("", [("spirals(960,", "spirals(961,")]),
    WITH_NOISE: ("", [NOISE]),
    SAME_NOISE: ("", [NOISE, (SEED, "torch.manual_seed(1)")]),
    TESTS_BY_HAND: ("", [("for x, y in test_batches:", "for x, y in [test_set[[*test_indices]]]:")]),
    TESTS_OTHERS: ("", [BATCH_NORM]),
    TESTS_ONE: (
        "",
        [
            BATCH_NORM,
            (
                "        model.eval()",
                "        model.eval()\n        for b in model.buffers():\n            dist.broadcast(b, 0)",
            ),
        ],
    ),
    "a schedule that steps for each micro-batch": (
        "schedule",
        schedule(f"2 * {LATE}", f"{ENDS}\n            scheduler.step()\n            scheduler.step()"),
    ),
    "a schedule that ends after half of the steps": (
        "schedule",
        [
            (old, new.replace(SCHEDULE.replace("TOTAL", "0"), f"optim.lr_scheduler.LambdaLR(optimizer, {EARLY_END})"))
            for old, new in schedule("0")
        ],
    ),
    "averaging is turned on between forward and backward": (
        "replicas, gradients",
        [
            (
                "            loss = F.cross",
                "            ddp_model.require_backward_grad_sync = False\n            loss = F.cross",
            ),
            (STEP, f"            ddp_model.require_backward_grad_sync = True\n{STEP}"),
        ],
    ),
    NORM_ADDED: ("", [(ENDS, f"            {NORM.replace('OF', 'p.grad')}\n{ENDS}")]),
    LOSS_ADDED: ("", [(ENDS, f"            {NORM.replace('OF', 'loss')}\n{ENDS}")]),
    TAKES_LOCAL_RANK: ("launch", [('group = {"rank": rank,', 'group = {"rank": local_rank,')]),
}
ON_ONE_RANK = {SOUND_SCHEDULE, SOUND_BY_HAND, SOUND_STEPS} | {
    name for name, (reds, _) in PLANTED.items() if reds == one_rank.NAME
}
WEEKLY = {"each rank takes share 0", "the sampler's seed differs", "half of the test set", "only rank 0 reduces"}
WEEKLY |= {"one batch for all, drawn by hand", "only rank 0 tests, through the wrapper", "only rank 0 steps"}
WEEKLY |= {"statistics of its own on each rank", "each rank clips by another norm", "a rank clamps a weight"}
WEEKLY |= {"another learning rate on each rank", "a rank leaves the loop early", "a metric is not reduced"}
NAMES = [name for name in PLANTED if THOROUGH or name not in WEEKLY]
HANG = [name for name in NAMES if PLANTED[name][0] == "exit, collectives"]
HANGS = 60.0  # seconds after which a run that is to hang is ended: it comes there in one or two, and then waits


def planted(name):
    env = {"DDP_AUDIT_TWO_NODES": "1"} if name in (ON_TWO_NODES, TAKES_LOCAL_RANK) else {}
    limit = HANGS if name in HANG else LIMIT
    return Script(replaced(SPIRALS, PLANTED[name][1]), FLAGS, limit=limit, env=env)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """The runs that hang: they wait for their limit while the others train, and the last tests read what they left."""
    scripts = {name: planted(name) for name in HANG}
    for script in scripts.values():
        script.start(tmp_path_factory.mktemp("hangs"))
    yield scripts
    for script in scripts.values():
        script.run.end()


@pytest.fixture(scope="module")
def tables(waiting, tmp_path_factory):
    """The rows of each planted fault that does not hang."""
    scripts = {name: planted(name) for name in NAMES if name not in HANG}
    scripts |= {f"one, {name}": replace(scripts[name], ranks=1) for name in ON_ONE_RANK}
    notes = audit_all(scripts, tmp_path_factory.mktemp("planted"))
    rows = {name: table(notes[name]) for name in scripts if len(notes[name]) == RANKS}
    for name in ON_ONE_RANK:
        [single] = notes[f"one, {name}"]
        rows[name][one_rank.NAME] = one_rank.compare_with_one_rank(single, notes[name])
    return rows


def check(name, rows):
    """The red rows of a fault are those that are expected, and no others."""
    reds = ", ".join(row.name for row in rows.values() if row.verdict == FAIL)
    assert reds == PLANTED[name][0], command.show_table([*rows.values()])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in HANG])
def test_each_planted_fault_is_found_and_no_other_row_is_red(name, tables):
    check(name, tables[name])


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        (SOUND, {"rng": NOT_APPLICABLE, "schedule": NOT_APPLICABLE}),
        (SOUND_STEPS, {"rng": NOT_APPLICABLE, "schedule": NOT_APPLICABLE}),
        (SOUND_SCHEDULE, {"rng": NOT_APPLICABLE}),
        (ODD_NUMBER, {"rng": NOT_APPLICABLE, "schedule": NOT_APPLICABLE}),
        (WITH_DROPOUT, {"schedule": NOT_APPLICABLE}),
        (WITH_NOISE, {"schedule": NOT_APPLICABLE}),
        (SAME_NOISE, {"schedule": NOT_APPLICABLE, "rng": UNKNOWN}),
        (NORM_ADDED, {"schedule": NOT_APPLICABLE, "rng": NOT_APPLICABLE, "gradients": UNKNOWN}),
        (LOSS_ADDED, {"schedule": NOT_APPLICABLE, "rng": NOT_APPLICABLE}),
        (TESTS_OTHERS, {"schedule": NOT_APPLICABLE, "rng": NOT_APPLICABLE, "evaluation": UNKNOWN}),
        (TESTS_ONE, {"schedule": NOT_APPLICABLE, "rng": NOT_APPLICABLE}),
        (
            TESTS_BY_HAND,
            {"schedule": NOT_APPLICABLE, "rng": NOT_APPLICABLE, "evaluation": UNKNOWN, "metrics": NOT_APPLICABLE},
        ),
    ],
)
def test_of_a_sound_script_all_is_seen_and_ok(name, rest, tables):
    assert {row.name: row.verdict for row in tables[name].values() if row.verdict != OK} == rest


def test_without_a_loader_one_rank_and_two_are_compared(tables):
    row = tables[SOUND_BY_HAND][one_rank.NAME]
    assert row.verdict == OK and "after 40 steps, on samples from no loader" in row.seen, row


def test_a_sync_that_was_changed_too_late_is_named_in_the_cure(tables):
    row = tables["averaging is turned on between forward and backward"]["gradients"]
    assert "require_backward_grad_sync was changed" in row.seen and "before the forward pass" in row.cure


def test_each_check_finds_a_planted_fault():
    assert {*CHECKS, one_rank.NAME} == {row for reds, _ in PLANTED.values() for row in reds.split(", ") if row}


def test_the_page_says_how_many_faults_are_planted_and_has_a_row_for_each_check():
    faults = [name for name, (reds, _) in PLANTED.items() if reds]
    assert f"{len(faults)} faults" in PAGE
    assert {*CHECKS} <= {*re.findall(r"^\| \*([a-z ]+)\* \|", PAGE, re.M)}


def test_a_run_that_failed_has_no_green_row_and_names_the_error_that_came_first(tables):
    rows = tables["a rank fails"]
    assert not any(row.verdict == OK for row in rows.values())
    assert "ZeroDivisionError" in rows["exit"].seen  # and not the other rank's broken connection


# ---- other scripts

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
    "rank + 2 * worker.id, 4": (OK, "its own shard"),
    "rank, 2": (FAIL, "each worker of a rank"),
    "worker.id, 2": (FAIL, "more than one rank"),
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


LOCAL = 'import os, torch\ntorch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
ON_TWO = ON_CPU | {"DDP_AUDIT_TWO_NODES": "1"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
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


@pytest.fixture(scope="module")
def noted(tmp_path_factory):
    """The notes of scripts of all kinds."""
    sizes = {"mp.spawn": ("1.0", "0"), "gradients of zero": ("0.0", "0"), "mp.spawn of three": ("1.0", "1")}
    scripts = {share: Script(STREAM.replace("SHARE", share)) for share in SHARES}
    for name, (size, more) in sizes.items():
        text = SPAWNED.replace("SIZE", size).replace("MORE", more).replace("PORT", str(free_port()))
        scripts[name] = Script(text, env=ON_CPU)
    insists = re.sub(r"gpus = torch.*", "gpus = 2", SPIRALS)
    assert insists != SPIRALS
    scripts |= {
        "for CUDA": Script(insists, FLAGS, env=ON_CPU),
        "datasets": Script(replaced(SPIRALS, [("spirals(960, seed=1)", "spirals(960, seed=rank)")]), FLAGS),
        "no such device": Script(LOCAL + "torch.ones(1).to(f\"cuda:{os.environ['RANK']}\")", env=ON_TWO),
        "no stand-in": Script(LOCAL + "torch.cuda.mem_get_info()", env=ON_TWO),
        "nccl": Script('import torch.distributed as dist\ndist.init_process_group("nccl")', env=NO_GPU),
        "no GPU": Script(LOCAL, env=NO_GPU),
        "demands a GPU": Script("import torch\nassert torch.cuda.is_available()", env=NO_GPU),
        "alone": Script(ALONE),
        "logs": Script(LOGS, env=ON_CPU),
        "never loads": Script(LOGS.replace("load_state_dict", "load"), env=ON_CPU),
    }
    scripts |= {name: Script(replaced(SPIRALS, [(REDUCED, how)]), FLAGS) for name, how in TOGETHER.items()}
    return audit_all(scripts, tmp_path_factory.mktemp("noted"))


@pytest.mark.parametrize("share", SHARES)
def test_of_a_stream_each_worker_of_each_rank_has_a_share_of_its_own(share, noted):
    samples, (verdict, seen) = table(noted[share])["sharding"], SHARES[share]
    assert samples.verdict == verdict and seen in samples.seen, samples


def test_a_script_for_cuda_runs_on_the_cpu(noted, tmp_path):
    """spirals_ddp, made to insist on CUDA; mp.spawn, srun's names, ZeRO."""
    rows = table(noted["for CUDA"])
    rest = {row.name: row.verdict for row in rows.values() if row.verdict != OK}
    assert rest == {"rng": NOT_APPLICABLE, "schedule": NOT_APPLICABLE}, rows
    rows = table(noted["mp.spawn"])
    assert [rows[name].verdict for name in ("exit", "collectives", "gradients")] == [OK] * 3, rows
    assert "3 steps" in rows["gradients"].seen and command.check_started(noted["mp.spawn"], tmp_path) is None
    calls = [[note.name for note in select(notes, PointToPoint)] for notes in noted["mp.spawn"]]
    assert calls == [["send"], ["recv"]]
    with pytest.raises(PlainError, match=r"\b3 ranks.*\b2\b"):
        command.check_started(noted["mp.spawn of three"], tmp_path)


FOR_GPUS = """import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 4), torch.randint(0, 3, (96,)))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
model = DDP(torch.nn.Linear(4, 3).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
"""


def test_a_script_for_gpus_runs_as_it_is_on_simulated_ones_and_a_tensor_left_on_the_cpu_is_seen(
    simulated_gpus, tmp_path
):
    changes = {"right": [], "wrong": [("y.cuda()", "y")]}
    started = {}
    for name, change in changes.items():
        (script := tmp_path / f"{name}.py").write_text(replaced(FOR_GPUS, change))
        words = [sys.executable, "-m", "ddp_helpers", "audit", script, "--folder", tmp_path / name]
        started[name] = simulated.start(simulated_gpus, [*words, "--json", tmp_path / f"{name}.json"])
    said = {name: "".join(process.communicate(timeout=LIMIT)) for name, process in started.items()}
    told = {name: json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in started}
    rows = {name: {row["name"]: row for row in each} for name, each in told.items()}
    assert {name: process.returncode for name, process in started.items()} == {"right": 0, "wrong": 1}, said
    assert all(
        rows["right"][name]["verdict"] == OK for name in ("exit", "sharding", "replicas", "gradients", "shuffle")
    )
    assert "rank 1: simulated GPU 1" in (tmp_path / "right" / "notes" / "output.log").read_text()
    end = rows["wrong"]["exit"]
    assert "wrong.py:19: RuntimeError: Expected all tensors to be on the same device" in end["seen"], end


@pytest.mark.parametrize(
    ("name", "row", "verdict", "words"),
    [
        ("gradients of zero", "exit", OK, []),
        ("gradients of zero", "gradients", FAIL, ["zero"]),
        ("datasets", "sharding", FAIL, ["datasets"]),
        ("no such device", "exit", FAIL, ["rank 1 at it.py:3", "LOCAL_RANK"]),
        ("no stand-in", "exit", UNKNOWN, ["it.py:3", "the script may be correct"]),
        *[(name, "exit", FAIL, ["it.py:2", "--on-cpu"]) for name in ("nccl", "no GPU", "demands a GPU")],
        ("alone", "gradients", FAIL, ["never communicate"]),
        ("alone", "files", NOT_APPLICABLE, []),
        ("logs", "files", UNKNOWN, ["logging"]),
        ("logs", "checkpoint keys", UNKNOWN, ["intended?"]),
        ("never loads", "checkpoint keys", FAIL, []),
        *[(name, "metrics", UNKNOWN, ["at it.py:", "is it a sum, or a mean"]) for name in [*TOGETHER][:5]],
        *[(name, "metrics", OK, []) for name in [*TOGETHER][5:]],
    ],
)
def test_a_row_says_what_is_so(name, row, verdict, words, noted):
    row = table(noted[name])[row]
    assert row.verdict == verdict and all(word in f"{row.seen} {row.cure}" for word in words), row


def test_a_script_that_wants_a_gpu_is_no_red_row_of_ci(noted):
    assert [command.report(judge(noted[name])) for name in ("nccl", "no GPU", "demands a GPU")] == [2, 2, 2]


def test_what_is_a_matter_of_taste_is_not_red(noted):
    """A log of all ranks, names with module. in a script that loads them, SyncBatchNorm."""
    reds = [[row.name for row in judge(noted[name]) if row.verdict == FAIL] for name in ("logs", "never loads")]
    assert reds == [[], ["checkpoint keys"]]


def test_one_rank_and_two_reach_one_model(tmp_path):
    """A flag counts the batch of all ranks, or of each: one rank is given that of all. The rates come first."""
    times_ranks = ("lr=args.lr,", "lr=args.lr * world_size,")
    of_each, whole = ["--epochs", "2", "--batch-size", "24"], ["--epochs", "2", "--batch-size", "48"]
    texts = {
        "sound": SPIRALS,
        "of each": replaced(SPIRALS, [("args.batch_size // world_size", "args.batch_size")]),
        "a sum": replaced(SPIRALS, [("loss.backward()", "(loss * world_size).backward()")]),
        "no seed": replaced(SPIRALS, [("torch.manual_seed(1)", "torch.seed()")]),
        "dropout": replaced(SPIRALS, [DROPOUT]),
        "rates": replaced(SPIRALS, [times_ranks]),
        "dropout, rates": replaced(SPIRALS, [DROPOUT, times_ranks]),
    }
    scripts = {name: Script(text, of_each if name == "of each" else whole) for name, text in texts.items()}
    # On one rank the first three are the same.
    scripts |= {f"one, {name}": Script(texts[name], whole, ranks=1) for name in ("sound", "no seed", "dropout")}
    scripts["one, of each"] = Script(SPIRALS, of_each, ranks=1)
    notes = audit_all(scripts, tmp_path)
    for name, alone, verdict, told in (
        ("sound", "sound", OK, "after 40 steps with the same samples (48 per step, 24 per rank)"),
        ("of each", "sound", OK, "(48 per step, 24 per rank)"),
        ("a sum", "sound", FAIL, "of the distance trained"),
        ("no seed", "no seed", UNKNOWN, "set the seed"),
        ("dropout", "dropout", UNKNOWN, "dropout"),
        ("rates", "sound", FAIL, "at step 1 the learning rate is 0.1 on one rank and 0.2 on 2"),
        ("dropout, rates", "dropout", FAIL, "at step 1 the learning rate"),
        ("rates", "of each", UNKNOWN, "in a step one rank took 24 samples, and 2 ranks 48 together"),
    ):
        [single] = notes[f"one, {alone}"]
        row = one_rank.compare_with_one_rank(single, notes[name])
        assert row.verdict == verdict and told in row.seen, row
    for name in ("sound", "of each"):
        assert one_rank.one_rank_words("--batch", notes[name]) == ["--batch=48"]
    with pytest.raises(ValueError, match="--one-rank-with"):
        one_rank.one_rank_words("--batch", [[], []])


FLAGS_OF_MNIST = ["--epochs=2", "--batch-size=32", "--num-workers=0", "--save-model", f"--timeout={LIMIT}"]
RESTORED = "            part.load_state_dict(newest[name])"


def test_the_scripts_that_people_take_home_pass(tmp_path):
    """mnist_ddp is audited here, the resumable one below, with the same control: all ranks draw the same dropout."""
    data = write_digits(tmp_path / "data", train=192, test=64)
    text, words = script_text("mnist_ddp"), ["--data", data, "--run-dir=mine", *FLAGS_OF_MNIST]
    alike = replaced(text, [("torch.manual_seed(args.seed + rank)", "torch.manual_seed(args.seed)")])
    scripts = {"as it is": Script(text, words, env=ON_CPU), "alike": Script(alike, words, env=ON_CPU)}
    rows = {name: table(notes) for name, notes in audit_all(scripts, tmp_path).items()}
    assert passes(rows["as it is"]), rows["as it is"]
    assert [row.name for row in rows["alike"].values() if row.verdict == FAIL] == ["rng"]


def passes(rows):
    """Whether no check of a table failed, and those that a wrong order or dropout would fail are ok."""
    failed = [row.name for row in rows.values() if row.verdict == FAIL]
    return not failed and all(rows[name].verdict == OK for name in ("shuffle", "rng", "schedule", "gradients"))


@pytest.mark.parametrize("on_cpu", ["1"] + [""] * THOROUGH)
def test_mnist_ddp_resumable_goes_on_to_the_bit(on_cpu, tmp_path):
    """Weekly also without its optimizer's state, and from the first epoch: then it does not."""
    data = write_digits(tmp_path / "data", train=192, test=64)
    text, progress = script_text("mnist_ddp_resumable"), 'progress = newest["progress"]'
    env, words = {"DDP_AUDIT_ON_CPU": on_cpu}, ["--data", data, "--run-dir=mine", *FLAGS_OF_MNIST]
    killed = env | {"DDP_AUDIT_INTERRUPT": "kill 0"}
    first = {"whole": Script(text, words, env=env), "stopped": Script(text, words, env=killed)}
    notes = audit_all(first, tmp_path / "first")
    again = {"right": text}
    if THOROUGH:
        again["same samples"] = replaced(text, [(RESTORED, f'            name == "optimizer" or {RESTORED.strip()}')])
        again["different samples"] = replaced(text, [(progress, f"_ {progress[9:]}")])
    for number in range(len(again)):
        shutil.copytree(tmp_path / "first" / "1" / "work", tmp_path / "again" / str(number) / "work")
    notes |= audit_all({name: Script(text, words, env=env) for name, text in again.items()}, tmp_path / "again")
    rows = table(notes["whole"])
    assert passes(rows), rows
    assert rows["sharding"].verdict == OK, "the warm-up step is none, and all ranks take it with the same samples"
    whole, stopped = notes["whole"][0], notes["stopped"][0]
    for name in again:
        row = compare_restarted(whole, stopped, notes[name])
        right = (OK, True) if name == "right" else (FAIL, False)
        assert (row.verdict, row.seen.endswith("to the bit")) == right, row
        assert name == "right" or name in row.seen, row
    for row, told in (
        (compare_restarted(whole, whole, notes["right"]), "no torch.save came"),
        (compare_restarted(whole, stopped, notes["whole"]), "from the beginning"),
    ):
        assert row.verdict == UNKNOWN and told in row.seen


# ---- the command


@pytest.fixture
def forked(monkeypatch):
    """The command's ranks are forked: that it launches them, the last test of these shows, and that of the wheel."""
    monkeypatch.setattr(command, "launch", launch)


def test_the_command_writes_a_table_and_nothing_beside_the_script(forked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (home := tmp_path / "home").mkdir()
    (home / "mine.py").write_text(replaced(SPIRALS, [("if args.save and rank == 0:", "if args.save:")]))
    words = ["audit", "home/mine.py", "--folder", "its", "--json", "table.json", "--sarif", "table.sarif"]
    words += ["--batch-size-flag=--batch-size", "--", "--epochs=2", "--batch-size=48", "--save=spirals.pt"]
    assert main(words) == 1
    rows = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    said = capsys.readouterr().out
    assert rows["files"]["verdict"] == FAIL and "fix: " in said
    assert f"{len(rows)} checks: 1 failed" in said and [row["verdict"] for row in rows.values()].count(FAIL) == 1
    assert rows["1-rank parity"]["verdict"] == OK
    left = [[path.name for path in folder.iterdir()] for folder in (home, tmp_path / "its" / "work")]
    assert left == [["mine.py"], ["spirals.pt"]]
    [sarif] = json.loads((tmp_path / "table.sarif").read_text())["runs"]
    [result] = sarif["results"]  # the red row, at the line that it names
    place = result["locations"][0]["physicalLocation"]
    assert (result["ruleId"], place["artifactLocation"]["uri"]) == ("files", "home/mine.py")
    assert f"mine.py:{place['region']['startLine']}:" in rows["files"]["seen"]
    assert [rule["id"] for rule in sarif["tool"]["driver"]["rules"]] == [*rows]


def shown_in_readme(readme):
    """The lines of the block that README shows of an audit, but for the one that stands for rows left out."""
    [block] = re.findall(r"^```text\n(check  .*?)^```$", readme, re.M | re.S)
    return [line for line in block.splitlines() if not line.startswith("[")]


def test_readme_shows_what_the_command_prints(forked, tmp_path, monkeypatch, capsys):
    """A script of three mistakes: each failed check is in README, and README has no line that is not printed."""
    monkeypatch.chdir(ROOT)
    readme, script = (ROOT / "README.md").read_text(), "tests/tools/wrong_ddp.py"
    assert f"ddp-course audit {script}\n" in readme
    assert main(["audit", script, "--folder", str(tmp_path / "its")]) == 1
    printed = capsys.readouterr().out.splitlines()
    shown = shown_in_readme(readme)
    assert shown == [line for line in printed if line in shown]
    assert [line for line in printed if " FAIL " in line and line not in shown] == []
    assert max(map(len, shown)) <= 100, "GitHub would cut them"


def test_a_folder_that_only_looks_like_an_earlier_audit_is_refused_and_kept(tmp_path):
    (kept := tmp_path / "mine" / "work" / "thesis.txt").parent.mkdir(parents=True)
    kept.write_text("years")
    refused(main, ["audit", "notebooks/spirals_ddp.py", "--folder", str(tmp_path / "mine")], named=["not an audit"])
    assert kept.read_text() == "years"


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


@pytest.mark.parametrize(
    ("changes", "verdict", "status"),
    [([], OK, 3), ([("    optimizer.load_state_dict(state)\n", "")], FAIL, 1)],  # 3: no loader, no samples are seen
)
def test_the_command_ends_a_script_and_starts_it_again(changes, verdict, status, forked, tmp_path):
    (script := tmp_path / "mine.py").write_text(replaced(RESUMED, changes))
    words = ["audit", str(script), "--folder", str(tmp_path / "its"), "--json", str(tmp_path / "table.json")]
    assert main([*words, "--resume-with=--from 'my last.pt'"]) == status
    rows = {row["name"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    assert rows["resume"]["verdict"] == verdict, rows
    assert rows["resume"]["seen"].endswith("to the bit") == (verdict == OK), rows
    assert (tmp_path / "its" / "work_stopped" / "my last.pt").exists()


DOUBLE = """
import sys, torch, torch.distributed as dist
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, ranks, batch = dist.get_rank(), dist.get_world_size(), int(sys.argv[-1])
torch.manual_seed(0)
x, y = torch.randn(64, 4), torch.randn(64, 1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    mine = slice(batch * (rank + ranks * step), batch * (rank + ranks * step + 1))
    optimizer.zero_grad()
    (model(x[mine]) - y[mine]).square().mean().mul(FACTOR).backward()
    optimizer.step()
dist.destroy_process_group()
"""
OF_EACH = ("range(4)", "range(64 // batch // 2)")


@pytest.mark.parametrize(
    ("words", "changes", "verdict", "told"),
    [
        ("16", [], OK, "e-1"),  # of float64's rounding
        ("16", [("FACTOR", "1 + 1e-4 * ranks")], UNKNOWN, "did one rank take the samples of both?"),  # float32: ok
        ("16", [OF_EACH], FAIL, "one rank made 2 steps, and 2 ranks 4, though"),
        ("8", [OF_EACH, ("range(64", "range(32 * ranks")], UNKNOWN, "did one rank take the global batch?"),
    ],
)
def test_one_rank_is_given_words_where_no_loader_says_the_batch(words, changes, verdict, told, forked, tmp_path):
    (script := tmp_path / "mine.py").write_text(replaced(DOUBLE, changes).replace("FACTOR", "1"))
    its, file = str(tmp_path / "its"), tmp_path / "table.json"
    main(["audit", str(script), "--folder", its, "--json", str(file), f"--one-rank-with={words}", "--", "8"])
    [row] = [row for row in json.loads(file.read_text())["rows"] if row["name"] == one_rank.NAME]
    assert row["verdict"] == verdict and told in row["seen"], row


# It resumes by itself, reads a file of its folder, adds to one, and writes one anew; all with relative paths.
BY_ITSELF = replaced(
    RESUMED,
    [
        ('if sys.argv[1:] == ["--from", "my last.pt"]:', 'if os.path.exists("my last.pt"):'),
        (
            "while step < 12:\n",
            "assert open('data/deep/points.txt').read() == 'points'\nwhile step < 12:\n    if dist.get_rank() == 0:\n"
            "        print(step, file=open('logs/all.txt', 'a'))\n        step > 4 and torch.save(step, 'best.pt')\n",
        ),
    ],
)


@pytest.mark.parametrize(("changes", "verdict"), [([], OK), ([("    optimizer.load_state_dict(state)\n", "")], FAIL)])
def test_each_run_begins_with_the_folder_of_cwd_as_it_was_and_changes_none_of_its_files(
    changes, verdict, forked, tmp_path, capsys
):
    """Where the first run's checkpoint stood in the next one's way, the restart was not seen, whatever it did."""
    (script := tmp_path / "mine.py").write_text(replaced(BY_ITSELF, changes))
    folder, its = tmp_path / "project", tmp_path / "project" / "its"
    files = {"data/deep/points.txt": "points", "logs/all.txt": "mine\n", "best.pt": "mine"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "far").symlink_to(tmp_path)
    main(["audit", str(script), "--folder", str(its), "--cwd", str(folder), "--resume-with="])
    said = capsys.readouterr().out
    assert re.search(rf"^resume +{verdict} ", said, re.M), said
    left = {path: path.read_text() for path in folder.rglob("*") if path.is_file() and its not in path.parents}
    assert left == {folder / name: text for name, text in files.items()}
    assert not (its / "work" / "its").exists() and (its / "work" / "far").readlink() == folder / "far"
    written = [(its / work / "logs" / "all.txt").read_text() for work in ("work", "work_stopped")]
    assert written[0].startswith("mine\n0\n1\n") and written[1].count("\n4\n") == 2, "stopped, and again from step 4"


def test_a_folder_of_too_many_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "_MOST", 2)
    for number in range(3):
        (tmp_path / str(number)).touch()
    words = ["audit", "notebooks/spirals_ddp.py", "--folder", str(tmp_path / "its"), "--cwd", str(tmp_path)]
    monkeypatch.chdir(ROOT)
    refused(main, words, named=["more than 2 files", "link"])


def test_a_script_that_fails_at_once_is_no_red_row_of_ci(tmp_path, capsys):
    text = "import sys\nsys.stderr.write('give --lr, not ' + ' '.join(sys.argv[1:]) + chr(10))\nsys.exit(2)\n"
    (script := tmp_path / "it.py").write_text(text)
    # A flag that a launcher would take for its own.
    assert main(["audit", str(script), "--folder", str(tmp_path / "its"), "--", "--n", "640"]) == 2
    said = capsys.readouterr().out
    assert "give --lr, not --n 640" in said and f"kept in {tmp_path / 'its'}" in said and "was not checked" in said


WAITS = """
import json, os, subprocess, psutil, torch.distributed as dist
dist.init_process_group("gloo")
child = subprocess.Popen(["sleep", "600"])
links = [link for link in psutil.net_connections("inet") if link.pid == os.getpid()]
listens = sorted({link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN})
with open(f"rank{os.environ['RANK']}.part", "w") as file:
    json.dump([[os.getpid(), child.pid], listens], file)
os.rename(file.name, file.name.replace("part", "json"))
child.wait()
"""


def is_alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_listen_on_this_machine_alone_and_end_with_the_audit_however_it_ends(number, tmp_path):
    (script := tmp_path / "it.py").write_text(WAITS)
    words = [sys.executable, "-m", "ddp_helpers", "audit", script, "--folder", tmp_path / "its"]
    audit = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        left = tmp_path / "its" / "work"
        until(lambda: len([*left.glob("*.json")]) == RANKS, "the ranks have begun")
        told = [json.loads((left / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
        audit.send_signal(number)
        audit.wait(LIMIT)
        pids = [pid for of_rank, _ in told for pid in of_rank]
        until(lambda: not any(map(is_alive, pids)), "all ranks, and what they started, have ended")
    finally:
        audit.kill()
    assert all(addresses == ["127.0.0.1"] for _, addresses in told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none.py"], "none.py"),
        (["docs/tools.md"], "tools.md"),
        (["notebooks/spirals_ddp.py", "--limit", "0"], "--limit 0"),
        (["notebooks/spirals_ddp.py", "--folder", "docs"], "docs"),
        (["notebooks/spirals_ddp.py", "--cwd", "none"], "--cwd none"),
        (["notebooks/spirals_ddp.py", "--batch-size-flag=--batch-size", "--one-rank-with="], "leave one out"),
        (["notebooks/spirals_ddp.py", "--resume-with=--resume 'last.pt"], "No closing quotation"),
        (["notebooks/spirals_ddp.py", "--json", "none/table.json"], "none/table.json"),
    ],
)
def test_what_cannot_be_audited_is_one_line(words, told, monkeypatch):
    monkeypatch.chdir(ROOT)
    refused(main, ["audit", *words], named=[told])


# ---- the runs that hang, at last


@pytest.mark.parametrize("name", HANG)
def test_a_run_that_hangs_is_found_and_no_row_is_green(name, waiting):
    rows = table(waiting[name].ended())
    check(name, rows)
    assert not any(row.verdict == OK for row in rows.values())
    if name == "a rank waits for a file":
        text = waiting[name].text.splitlines()
        [line] = [line for line, text in enumerate(text, 1) if "time.sleep(" in text]
        assert f"rank 1 at it.py:{line}" in rows["exit"].seen, rows
        assert re.search(r"\brank 0 calls\b.*, rank 1 (?!calls\b)", rows["collectives"].seen), rows
