"""Take the steps of the first GPU run, each in a process of its own with a limit of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_helpers.rank.gpu.harm import full, killed, restart, resume, timeout
from ddp_helpers.rank.gpu.step import COURSE, HERE, PROGRAM, Step
from ddp_helpers.rank.gpu.train import equal, facts, graph, memory, overlap, scaling, scripts, speed
from ddp_helpers.rank.launchers import LAUNCHERS

# Each step with its limit in seconds, of 600. What can be spared comes last.
STEPS: dict[str, tuple[Callable[[Step], None], float]] = {
    "facts": (facts, 40),
    "scripts": (scripts, 90),
    "equal": (equal, 60),
    "graph": (graph, 40),
    "speed": (speed, 120),
    "resume": (resume, 150),
    "memory": (memory, 40),
    "overlap": (overlap, 60),
    "timeout": (timeout, 60),
    "restart": (restart, 100),
    "killed": (killed, 60),
    "full": (full, 60),
    "scaling": (scaling, 200),
}

NEED_TWO_RANKS = ("overlap", "timeout", "restart", "killed")
SAY_MORE_OF_TWO = ("equal", "resume", "memory", "full")  # what a page claims is of several
NO_TIME = "no time left"

# By these a rank would take itself for one of the launcher that started this program.
KNOWN_BY = {name for names in LAUNCHERS.values() for name in names}
FAMILIES = re.compile(r"(SLURM|PMIX?|PMI2|OMPI|PALS|TORCHELASTIC|MASTER)_|LOCAL_WORLD_SIZE$")


def take_step(name: str, args: Namespace, work: Path, end: float) -> dict[str, Any]:
    """Run a step within its share of the time, and return its line of the record."""
    share, left = STEPS[name][1] * args.seconds / 600, end - time.monotonic()
    limit = min(share, left)
    line = {"step": name, "ok": None, "ended": NO_TIME, "limit_s": round(limit, 1)}
    line |= {"seconds": 0.0, "found": "", "seen": {}, "commands": [], "said": []}
    if name in NEED_TWO_RANKS and args.ranks == 1:
        return line | {"ended": "left out: one GPU, which two ranks can share from NCCL 2.30 on"}
    if limit < 1:
        return line
    mark = f"{os.getpid()}-{name}"
    command = [sys.executable, PROGRAM, "--step", name, json.dumps(vars(args), default=str), work]
    env = environment(args) | {"GPU_FIRST_RUN": mark}
    print(f"{name:<9}", end=" ", flush=True)
    begin = time.monotonic()
    with (work / "said").open("wb") as said, suppress(OSError):
        step = subprocess.Popen(command, stdout=said, stderr=said, env=env, start_new_session=True)
        try:
            status = step.wait(limit)
            line["ended"] = "by itself" if status == 0 else f"died: status {status}"
        except subprocess.TimeoutExpired:
            # It may have hung, or been slow.
            line["ended"] = f"ended at its limit of {limit:.0f} s" if limit == share else NO_TIME
        except KeyboardInterrupt:
            line["ended"] = "interrupted"
        end_all(step, mark)
    line["seconds"] = round(time.monotonic() - begin, 1)
    text = (work / "said").read_text(errors="replace") if (work / "said").exists() else ""
    line["said"] = as_elsewhere(text[-50_000:], args, work).splitlines()
    for note in read_notes(work / "notes", args, work):
        line["commands"] += [note.pop("command")] if "command" in note else []
        line |= {key: note.pop(key) for key in ("ok", "found") if key in note}
        line["seen"] |= note
    if line["ended"] != "by itself":
        line["ok"] = None if line["ended"] == NO_TIME else False
    elif line["ok"] and args.ranks == 1 and name in SAY_MORE_OF_TWO:
        line |= {"ok": None, "found": f"{line['found']}; on one rank only"}
    print(f"{line['seconds']:5.1f} s  {verdict(line)}", flush=True)
    return line


def environment(args: Namespace) -> dict[str, str]:
    """Make the environment of a step: of no launcher, with the GPUs that it shall use by name."""
    inherited = {word for word in os.environ if word in KNOWN_BY or FAMILIES.match(word)}
    env = {word: text for word, text in os.environ.items() if word not in inherited}
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if args.cpu or args.visible:  # named, so that a script without its GPU stops
        env["CUDA_VISIBLE_DEVICES"] = "" if args.cpu else args.visible
    return env


def end_all(step: subprocess.Popen, mark: str) -> None:
    """End a step and all that it has started, also what has left its session, as torchrun's do."""
    with suppress(ProcessLookupError):
        os.killpg(step.pid, signal.SIGKILL)
    for environ in Path("/proc").glob("[0-9]*/environ"):  # on Linux
        with suppress(OSError):
            if f"GPU_FIRST_RUN={mark}".encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        step.wait(10)  # one that a broken disk or driver holds is left behind


def as_elsewhere(text: str, args: Namespace, work: Path) -> str:
    """Take this machine's name and its paths out of a text."""
    known = {COURSE: "course", HERE: "scripts", args.data: "DATA", work: "WORK"}
    known |= {Path(sys.executable): "python", Path(sys.prefix): "PYTHON", Path.home(): "~"}
    for place in sorted(known, key=lambda place: len(str(place)), reverse=True):
        text = text.replace(str(place), known[place])
    name = os.uname().nodename
    for host in (name, name.partition(".")[0]):
        text = re.sub(rf"\b{re.escape(host)}\b", "HOST", text)
    return text


def read_notes(path: Path, args: Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Read what a step has noted; a last line may be cut off."""
    if path.exists():
        for text in as_elsewhere(path.read_text(), args, work).splitlines():
            with suppress(ValueError):
                yield json.loads(text)


def verdict(line: dict[str, Any]) -> str:
    """Say in a line what a step has shown."""
    word = {True: "ok", False: "NOT OK", None: "seen"}[line["ok"]]
    told = line["found"] or ": ".join(filter(None, [line["ended"], *line["said"][-1:]]))
    return f"{word:<6}  {told}"
