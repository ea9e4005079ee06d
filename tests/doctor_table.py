"""The doctor's table, read; and single rows of it, from ranks that are told what they see."""

import os
import socket
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from ddp_helpers.rank.doctor import checks
from ddp_helpers.rank.doctor.case import Case
from ddp_helpers.rank.doctor.checks import CHECKS, judge, look
from ddp_helpers.rank.launchers import stop

GREEN = f"all {len(CHECKS)} checks ok"


def rows_of(lines):
    """A printed table as {check: (state, what was seen, cure)}, and its last line. The order and the number count."""
    header, *lines, last = lines
    assert header.split() == ["check", "finding"]
    rows = {}
    for line in lines:
        name, state, seen = line[:11].strip(), line[12:16].strip(), line[17:]
        if name:
            assert state in ("ok", "FAIL") and name not in rows and seen
            rows[name] = (state, seen, "")
        else:
            name = list(rows)[-1]
            assert rows[name][0] == "FAIL" and seen.startswith("fix: ")
            rows[name] = (*rows[name][:2], seen.removeprefix("fix: "))
    assert all(bool(cure) == (state == "FAIL") for state, _, cure in rows.values())
    return rows, last


def red(text):
    """The red rows of a whole table, all checks of which are there."""
    rows, last = rows_of(text.splitlines())
    assert list(rows) == list(CHECKS)
    red_rows = {name: row[1:] for name, row in rows.items() if row[0] == "FAIL"}
    assert last == (f"{len(rows)} checks: {len(red_rows)} failed" if red_rows else GREEN)
    return red_rows


def seen_by(name, *ranks, **common):
    """The row of a check, from so many ranks: each a dict of what is changed for it."""
    found = {}
    for rank, change in enumerate(ranks):
        told = {"host": "here", "cpus": 1, "first": rank, "local_rank": rank, "launcher": "env"} | common | change
        args = Namespace(num_workers=told.get("workers", 0), data=Path("no"), run_dir=Path("runs"), no_cuda=False)
        case = Case(told["launcher"], rank, told["local_rank"], len(ranks), args, host=told["host"])
        case.plan = {"file": "", "trouble": "is full" if told.get("full") else ""}
        cpus = range(told["first"], told["first"] + told["cpus"])
        gpus = [SimpleNamespace(uuid=uuid) for uuid in told.get("gpus", "")]
        with (
            patch.dict(os.environ, told.get("env", {})),
            patch("os.sched_getaffinity", lambda _, cpus=cpus: cpus, create=True),
            patch("os.cpu_count", lambda: 8),
            patch("torch.cuda.device_count", lambda some=gpus: len(some)),
            patch("torch.cuda.set_device"),
            patch("torch.zeros", side_effect=told.get("trouble")),  # by which a device is tried
            patch("torch.cuda.get_device_properties", lambda device, some=gpus: some[device.index]),
            patch("shutil.disk_usage", lambda _, t=told: SimpleNamespace(free=t.get("free", 2**40))),
            patch("socket.gethostname", lambda t=told: t["host"]),
            patch("socket.getaddrinfo", lambda *_, t=told: resolve(t.get("address"))),
            patch.object(checks.hashlib, "md5", lambda text: SimpleNamespace(hexdigest=lambda: "0")),
            patch.object(Path, "read_bytes", lambda path: b""),
            patch.object(checks, "check_data", lambda _, t=told: t.get("data", "MNIST") or stop("Get it.")),
        ):
            found[rank] = look(case, {"devices": 0, name: 0})
    return judge(name, found)


def resolve(address):
    """What the resolver says of a name with this address, or without one."""
    if not address:
        raise socket.gaierror("unknown")
    return [(None, None, None, "", (address, 0))]
