"""The doctor's table, read; and single rows of it, from ranks that are told what they see."""

import os
import socket
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist

from ddp_helpers.rank.doctor import checks
from ddp_helpers.rank.doctor.arrival import arrive
from ddp_helpers.rank.doctor.case import Case
from ddp_helpers.rank.doctor.checks import CHECKS
from ddp_helpers.rank.launchers import stop
from ddp_helpers.rank.scripts.doctor import judge_check, run_check

GREEN = f"all {len(CHECKS)} checks green"


def rows_of(lines):
    """A printed table as {check: (state, what was seen, cure)}, and its last line. The order and the number count."""
    header, *lines, last = lines
    assert header.split() == ["check", "what", "was", "seen"]
    rows = {}
    for line in lines:
        name, state, seen = line[:11].strip(), line[12:15].strip(), line[16:]
        if name:
            assert state in ("ok", "RED") and name not in rows and seen
            rows[name] = (state, seen, "")
        else:
            name = list(rows)[-1]
            assert rows[name][0] == "RED" and seen.startswith("cure: ")
            rows[name] = (*rows[name][:2], seen.removeprefix("cure: "))
    assert all(bool(cure) == (state == "RED") for state, _, cure in rows.values())
    return rows, last


def red(text):
    """The red rows of a whole table, all checks of which are there."""
    rows, last = rows_of(text.splitlines())
    assert list(rows) == list(CHECKS)
    red_rows = {name: row[1:] for name, row in rows.items() if row[0] == "RED"}
    assert last == (f"{len(red_rows)} of {len(rows)} checks RED" if red_rows else GREEN)
    return red_rows


def seen_by(name, *ranks, **common):
    """The row of a check, from so many ranks: each a dict of what is changed for it."""
    store, cases, told = dist.HashStore(), [], {}
    for rank, change in enumerate(ranks):
        told_it = (
            {"host": "here", "cpus": 1, "first": rank, "local_rank": rank, "launcher": "torchrun"} | common | change
        )
        args = Namespace(
            num_workers=told_it.get("workers", 0), data=Path("no"), run_dir=Path("runs"), no_cuda=False, timeout=1
        )
        case = Case(told_it["launcher"], rank, told_it["local_rank"], len(ranks), args, store, told_it["host"])
        cases.append((case, told_it))
    for doing in ("arrive", "check"):
        for case, told_it in cases:
            cpus = range(told_it["first"], told_it["first"] + told_it["cpus"])
            gpus = told_it.get("gpus", [])
            some = [SimpleNamespace(uuid=one, name="V100", major=its[0], minor=its[1]) for one, *its in gpus]
            with (
                patch.dict(os.environ, told_it.get("env", {})),
                patch("os.sched_getaffinity", lambda _, cpus=cpus: cpus, create=True),
                patch("os.cpu_count", lambda: 8),
                patch("torch.cuda.device_count", lambda some=some: len(some)),
                patch("torch.cuda.set_device"),
                patch("torch.cuda.init", side_effect=told_it.get("trouble")),
                patch("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_80", "sm_86", "sm_90"]),
                patch("torch.cuda.get_device_properties", lambda name, some=some: some[int(str(name)[-1])]),
                patch("shutil.disk_usage", lambda _, t=told_it: SimpleNamespace(free=t.get("free", 2**40))),
                patch("socket.gethostname", lambda t=told_it: t["host"]),
                patch("socket.getaddrinfo", lambda *_, t=told_it, **__: resolve(t.get("address"))),
                patch("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")]),
                patch.object(checks.torchvision, "__version__", told_it.get("version", "1")),
                patch.object(checks, "check_data", lambda _, t=told_it: t.get("data", "MNIST") or stop("Get it.")),
            ):
                if doing == "arrive":
                    arrive(case)
                else:
                    told[case.rank] = run_check(case, name)
    return judge_check(name, told)


def resolve(address):
    """What the resolver says of a name with this address, or without one."""
    if not address:
        raise socket.gaierror("unknown")
    return [(None, None, None, "", (address, 0))]
