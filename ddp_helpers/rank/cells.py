"""Run a notebook's cells on one rank, one after the other: ddp_helpers.notebook.ranks starts this for each rank."""

import ast
import faulthandler
import json
import linecache
import os
import signal
import sys
import traceback
from types import ModuleType

import torch
import torch.distributed as dist


def run(cell: str, name: str, variables: dict[str, object]) -> str:
    """Run a cell where the variables of the cells before are, and print its last value; returns the traceback or ""."""
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)  # for tracebacks and inspect
    try:
        tree = ast.parse(cell, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), variables)
        if last:
            sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), variables))
    except BaseException as error:  # SystemExit, too: the rank stays
        own = error.__traceback__.tb_next  # below this function
        if isinstance(error, SyntaxError) and error.filename == name:
            own = None  # of the cell itself, which did not run
        return "".join(traceback.format_exception(error.with_traceback(own)))
    return ""


def serve(mark: str) -> None:
    """Join the group of all ranks, then run each cell that comes on stdin.

    A line of the mark and a traceback, empty if all went well, ends the output of each, and of the start.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # says on stderr where this rank stands
    requests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a cell's input() must not read what the notebook sends
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.device_count() >= world_size:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    else:
        dist.init_process_group("gloo")
    module = sys.modules["__main__"] = ModuleType("__main__")  # where pickle looks for the classes of a cell
    answer(mark, "")
    for line in requests:
        request = json.loads(line)
        answer(mark, run(request["cell"], request["name"], vars(module)))


def answer(mark: str, failed: str) -> None:
    """Say that this rank is done, behind all that it has printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(1, f"{mark}{json.dumps(failed)}\n".encode())


if __name__ == "__main__":
    serve(os.environ["DDP_COURSE_LAUNCH"])
