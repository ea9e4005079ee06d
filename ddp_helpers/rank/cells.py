"""Run a notebook's cells on one rank, one after the other.

`ddp_helpers.launch.resident` starts each rank of the notebook as a process that calls it.
"""

import ast
import faulthandler
import json
import linecache
import os
import signal
import sys
import traceback
from contextlib import suppress
from types import ModuleType

import torch
import torch.distributed as dist

from ddp_helpers.rank.device import pick_device
from ddp_helpers.rank.threads import wait_before_fork_and_exit
from ddp_tools.rendezvous import listen_narrowly


def _run(cell: str, name: str, variables: dict[str, object]) -> str:
    """Run a cell on the variables of earlier cells, and print the value of its last expression.

    Returns the traceback, without this function's own line; "" if the cell raised nothing.
    """
    lines = cell.splitlines(keepends=True)
    linecache.cache[name] = (len(cell), None, lines, name)  # for tracebacks and inspect
    try:
        tree = ast.parse(cell, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        exec(compile(tree, name, "exec"), variables)
        if isinstance(last, ast.Expr):
            expression = ast.Expression(last.value)
            sys.displayhook(eval(compile(expression, name, "eval"), variables))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a hang on a GPU shows in this cell, not in a later one
    except BaseException as error:  # even SystemExit: the rank stays
        below = error.__traceback__ and error.__traceback__.tb_next
        return "".join(traceback.format_exception(error.with_traceback(below)))
    return ""


def _reopen_output(spare: int) -> None:
    """Reopen stdout, stderr and their descriptors if the cell has closed them, and print that.

    Otherwise each later cell that prints would fail. spare: a descriptor of the output.
    """
    closed = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(spare, number)
            closed.append(f"descriptor {number}")
        stream = getattr(sys, name, None)
        if stream is None or getattr(stream, "closed", False):
            stream = os.fdopen(number, "w", buffering=1, errors="replace", closefd=False)
            setattr(sys, name, stream)
            closed.append(f"sys.{name}")
    if closed:
        names = " and ".join(closed)
        print(f"this cell closed {names}: open again for the next one", flush=True)


def _join(meeting: str) -> None:
    """Join the group of all ranks through a file: with NCCL if there is a GPU, else gloo."""
    listen_narrowly()
    wait_before_fork_and_exit()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = pick_device(rank)  # if there are too few GPUs, they were hidden before
    on_cpu = device.type == "cpu"
    dist.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=dist.FileStore(meeting, size),
        rank=rank,
        world_size=size,
        device_id=None if on_cpu else device,
    )


def serve() -> None:
    """Join the group of all ranks, then run each cell that comes on stdin.

    The first line is a mark, the second the rendezvous file of the ranks. The mark ends the output
    of the start and of each cell; a traceback follows it, which is empty if the cell succeeded.
    """
    # Copies, since a cell may close or redirect its own; and its input() must not read the cells.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    mark, meeting = (requests.readline().rstrip("\n") for _ in range(2))
    process_id, stderr_copy = os.getpid(), os.dup(2)
    # As in a new Python, unseeded numbers differ on each rank: all are forked from one process.
    torch.default_generator.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    _join(meeting)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module  # pickle finds the classes of a cell there
    failure = ""
    while True:
        forked = os.getpid() != process_id  # a forked child that reached the end of the cell
        if not forked:
            _reopen_output(stderr_copy)
        with suppress(Exception):  # a cell may have replaced it
            sys.stdout.flush()
            sys.stderr.flush()
        if forked:
            os._exit(bool(failure))
        if not dist.is_initialized():
            cure = "no destroy_process_group() in a cell"
            sys.exit(f"this rank has left the group, and cannot continue: {cure}")
        answers.write(f"{mark}{json.dumps(failure)}\n".encode())
        answers.flush()
        request = requests.readline()
        if not request:
            return
        # At this signal the rank writes its stack.
        faulthandler.register(signal.SIGUSR1, stderr_copy, all_threads=False)
        failure = _run(**json.loads(request), variables=vars(module))
