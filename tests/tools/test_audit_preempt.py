"""audit --preempt: one rank is told to stop twice in an epoch, and a kill leaves half a checkpoint."""

import json

import pytest
from audited import launch
from changed_text import replaced

from ddp_helpers.cli import main
from ddp_tools.audit import command
from ddp_tools.audit.notes import FAIL, NOT_APPLICABLE, OK, UNKNOWN

STEP = """
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
"""
VOTE = "        dist.all_reduce(told, dist.ReduceOp.MAX)\n"
SAVE = "            save(epoch, done)\n"
LOOK = f"""
        done += 1
        told = torch.tensor(len(HEARD))
{VOTE}        if told:
{SAVE}            dist.barrier()
            sys.exit(75)
"""
ASIDE = """
        torch.save(state, "latest.part")
        os.replace("latest.part", "latest.pt")
"""
IGNORE = ", worker_init_fn=ignore"
HANDLER = "signal.signal(signal.SIGTERM, lambda number, frame: HEARD.append(number))"
EACH_EPOCH = "    save(epoch + 1, 0)\n"
SOUND = f"""
import os, signal, sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
HEARD = []
{HANDLER}

def ignore(worker):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def save(epoch, done):
    if rank == 0:
        state = (epoch, done, model.module.state_dict(), optimizer.state_dict())
{ASIDE}
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sampler, first, done = DistributedSampler(data), 0, 0
if os.path.exists("latest.pt"):
    first, done, weights, state = torch.load("latest.pt")
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(state)
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    rest = [*sampler][2 * done :]
    for x, y in DataLoader(data, 2, sampler=rest, num_workers=1{IGNORE}):
{STEP}{LOOK}
    done = 0
{EACH_EPOCH}
dist.destroy_process_group()
"""
EQUAL = "it reached the same weights, to the bit"


@pytest.mark.parametrize(
    ("changes", "preempt", "torn"),
    [
        pytest.param([], (OK, EQUAL), (OK, EQUAL), id="sound"),
        pytest.param([(VOTE, "")], (FAIL, "all_reduce, MAX"), (OK, EQUAL), id="no vote"),
        pytest.param([(IGNORE, "")], (FAIL, "worker_init_fn"), (OK, EQUAL), id="the workers die"),
        pytest.param([(STEP + LOOK, LOOK + STEP)], (FAIL, "batches were lost"), (OK, EQUAL), id="a batch is lost"),
        pytest.param(
            [(ASIDE, '\n        torch.save(state, "latest.pt")\n')],
            (OK, EQUAL),
            (FAIL, "os.replace"),
            id="latest is half written",
        ),
        pytest.param([(SAVE, "")], (FAIL, "none saved"), (OK, EQUAL), id="it leaves without a checkpoint"),
        pytest.param([(HANDLER, "")], (NOT_APPLICABLE, "no handler"), (OK, EQUAL), id="no handler"),
        pytest.param([(EACH_EPOCH, "")], (OK, EQUAL), (UNKNOWN, "no torch.save"), id="it saves only when told"),
    ],
)
def test_told_to_stop_and_killed_in_torch_save(changes, preempt, torn, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "launch", launch)
    (script := tmp_path / "mine.py").write_text(replaced(SOUND, changes))
    table = tmp_path / "table.json"
    main(["audit", str(script), "--folder", str(tmp_path / "its"), "--json", str(table), "--preempt"])
    rows = {row["name"]: row for row in json.loads(table.read_text())["rows"]}
    for name, (verdict, words) in {"preempt": preempt, "torn save": torn}.items():
        assert rows[name]["verdict"] == verdict, rows[name]
        assert words in rows[name]["seen"] + rows[name]["cure"], rows[name]


def test_an_audit_replaces_one_that_had_more_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "launch", launch)
    (script := tmp_path / "mine.py").write_text(replaced(SOUND, [(HANDLER, "")]))
    words = ["audit", str(script), "--folder", str(tmp_path / "its")]
    main([*words, "--preempt"])
    assert len([*(tmp_path / "its").iterdir()]) > 2, "the control: it made more than work and notes"
    (tmp_path / "its" / "notes" / "output.log").touch()  # which ranks that are forked do not write
    assert main(words) != 2
