"""Run a notebook's cells on one rank, one after the other: ddp_helpers.launch.ranks starts this for each rank."""

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

from ddp_helpers.rank.meeting import listen_narrowly


def run(cell: str, name: str, variables: dict[str, object]) -> str:
    """Run a cell where the variables of the cells before are, and print its last value; returns the traceback or ""."""
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)  # for tracebacks and inspect
    try:
        tree = ast.parse(cell, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), variables)
        if last:
            sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), variables))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what hangs on a GPU hangs in this cell, and not in a later one
    except BaseException as error:  # SystemExit, too: the rank stays
        below = error.__traceback__.tb_next  # this function
        return "".join(traceback.format_exception(error.with_traceback(below)))
    return ""


def mend_output(spare: int) -> None:
    """Open what the cell has closed of stdout, stderr and their descriptors anew, and say so.

    Without it, each later cell that prints would fail.
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
        print(f"this cell closed {' and '.join(closed)}: open again for the next one", flush=True)


def serve() -> None:
    """Join the group of all ranks, then run each cell that comes on stdin.

    The first line is a mark: with a traceback, empty if all went well, it ends the output of the start and of a cell.
    """
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb")  # a cell may close or redirect its own
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a cell's input() must not read what the notebook sends
    mark, me, stacks = requests.readline().strip(), os.getpid(), os.dup(2)
    listen_narrowly()
    if gpus := torch.cuda.device_count():  # who started this has hidden them where they are too few
        device = torch.device("cuda", min(int(os.environ["RANK"]), gpus - 1))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    module = sys.modules["__main__"] = ModuleType("__main__")  # where pickle looks for the classes of a cell
    failed = ""
    while True:
        if os.getpid() == me:
            mend_output(stacks)
        with suppress(Exception):  # a cell may have put something else there
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getpid() != me:
            os._exit(bool(failed))  # a child that the cell has forked, and that came to the cell's end
        if not dist.is_initialized():
            sys.exit("this rank has left the group, and cannot go on: no destroy_process_group() in a cell")
        answers.write(f"{mark}{json.dumps(failed)}\n".encode())
        answers.flush()
        if not (line := requests.readline()):
            return
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)  # says where this rank stands
        failed = run(**json.loads(line), variables=vars(module))


if __name__ == "__main__":
    serve()
