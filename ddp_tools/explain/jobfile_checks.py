"""Compare the parts of a job file with each other: what no pattern of a line can tell."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from ddp_tools.explain.jobfile_signal import signals
from ddp_tools.explain.jobfile_start import Start, options_of, table
from ddp_tools.explain.jobfile_steps import lost_statuses, waiting_steps
from ddp_tools.explain.jobfile_text import SRUN, JobFile

Row = tuple[str, int, dict[str, object]]  # a fault's id, the line, the values of its sentences
_FIRST_EPHEMERAL, _LAST_EPHEMERAL = 32768, 60999  # Linux gives these to outgoing connections
_LAST_JOB = 67_043_328  # the highest number that Slurm gives to a job, unless a site sets MaxJobId
_PORT_FLAG = re.compile(
    r"--(?:master|rdzv|main)[-_](?:process[-_])?(?:port|endpoint)[= ]+(?:\S*:)?(\d{4,5})\b"
)
_CONDA = re.compile(r"\b(?:conda|mamba|micromamba)\s+activate\b|\bsource\s+activate\b")


def compare(job: JobFile) -> Iterator[Row]:
    """Yield the faults that are found by comparing."""
    if not job.lines[0].startswith("#!"):
        yield "no-shebang", 1, {}
    if job.dos:
        yield "dos", 1, {}
    if job.late:
        yield "late", job.late[0], {"command": job.commands[0].line}
    if job.directives and not job.options.keys() & {"time", "test-only"}:
        yield "no-time", job.directives[0][0], {}
    yield from _folders(job)
    yield from _options(job)
    yield from ((id_, _line_of(job, "signal"), values) for id_, values in signals(job))
    yield from _one_of_many(job)
    yield from _unset(job)
    yield from _ports(job)
    yield from _status_of_another(job)
    yield from lost_statuses(job)
    yield from waiting_steps(job)
    yield from _folder_of_each_attempt(job)
    for command in job.commands:
        if command.nounset and _CONDA.search(command.text):
            yield "conda-nounset", command.line, {}
            break
    for start in job.starts:
        yield from _counts(job, start)
        yield from _not_exported(job, start)
    asked = {start.gpus for start in job.starts if start.gpus}
    for line, name, _, value in job.assigned:
        count = len(value.split(","))
        plain = name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\d+(,\d+)*", value)
        if asked and plain and count not in asked:
            by = "-srun" if "srun" in job.facts else ""
            yield f"cuda-visible{by}", line, {"count": count, "gpus": max(asked)}


def _options(job: JobFile) -> Iterator[Row]:
    """Yield options that exclude each other, that lack one, or that contradict each other."""
    for names in table()["exclude"]:
        both = [name for name in names if name in job.options][:2]
        if len(both) > 1:
            yield "excluded", _line_of(job, both[1]), {"one": both[0], "other": both[1]}
    if "gpus-per-task" in job.options and not job.options.keys() & {
        "gpus",
        *table()["set_by"]["SLURM_NTASKS"],
    }:
        yield "gpus-per-task-alone", _line_of(job, "gpus-per-task"), {}
    asked = Start(0, "", job.options)
    each, tasks = asked.number("ntasks-per-node"), asked.number("ntasks")
    if each and tasks and tasks < each * (asked.nodes or 1):
        yield "tasks-contradict", _line_of(job, "ntasks"), {"tasks": tasks, "each": each}


def _line_of(job: JobFile, option: str) -> int:
    """Return the line of the directive that has this option."""
    lines = [number for number, text in job.directives if option in options_of(text)]
    return lines[-1] if lines else 1


def _one_of_many(job: JobFile) -> Iterator[Row]:
    """Yield a job of several tasks in which each srun starts one, and none runs beside it."""
    asked = Start(0, "", job.options)
    tasks = (asked.nodes or 1) * (asked.tasks or 1)
    sruns = [command for command in job.commands if SRUN.search(command.text)]
    one = re.compile(r"\s(?:-n|--ntasks)[= ]?1(?!\S)")
    starts = [start for start in job.starts if "srun" in start.facts]
    if any("torchrun" in start.facts for start in starts):
        tasks = asked.nodes or 1  # one torchrun starts all ranks of its node
    alone = all(one.search(command.text) and not command.background for command in sruns)
    if alone and tasks > len(starts) > 0:
        yield "srun-one-task", starts[-1].line, {"tasks": tasks}


def unread(job: JobFile, options: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that no check reads, and that may change what the ranks get.

    options: the pattern of the values that are known, by the option's name.
    """
    asked = [(number, options_of(text)) for number, text in job.directives]
    asked += [(start.line, start.own) for start in job.starts]
    for line, values in asked:
        for name, value in values.items():
            if name not in options or not re.fullmatch(options[name], value):
                shown = name if name.startswith("$") else f"--{name}{'=' * bool(value)}{value}"
                yield (
                    f"what {shown} in line {line} does: it may change tasks, GPUs, memory, signals "
                    "or the environment, and no check reads it."
                )


def _folders(job: JobFile) -> Iterator[Row]:
    """Yield logs that go into a folder that is not there.

    A relative one may be where sbatch is called; for certain it lacks where the job makes it.
    """
    made = any("mkdir" in command.text for command in job.commands)
    for number, line in job.directives:
        for name in ("output", "error"):
            match = re.search(rf"(?:--{name[:3]}\w*|\s-{name[0]})[= ]*(\S*)/", line)
            folder = match[1].replace("%x", job.options.get("job-name", "%x")) if match else ""
            if not folder or "$" in folder:
                continue
            never = re.search(r"%\d*[jJAa]", folder)  # a number that no folder has before the job
            root = job.options.get("chdir", "")
            places = [base / root / folder for base in (Path.cwd(), job.path.parent)]
            unseen = folder.startswith("/") and not Path(folder).parent.is_dir()  # another machine
            if never or not (unseen or "%" in folder or any(place.is_dir() for place in places)):
                sure = never or made or folder.startswith("/")
                yield "output-folder" if sure else "output-folder-here", number, {"folder": folder}


def _unset(job: JobFile) -> Iterator[Row]:
    """Yield variables that are used, though nothing that was asked for sets them."""
    asked = set(job.options).union(*(start.options for start in job.starts))
    ours = {name for _, name, _, _ in job.assigned}
    for name, options in table()["set_by"].items():
        leaves = re.search(rf'-z\s+"?\$\{{?{name}\b(?:(?!\bfi\b).)*?\bexit\b', job.bare, re.S)
        tested = re.search(rf'-[nzv]\s+"?\$?\{{?{name}\b|\$\{{{name}:?[-+=]', job.bare)
        if asked & set(options) or name in ours or (tested and not leaves):
            continue
        in_task = "" if name in ("SLURM_NTASKS", "SLURM_NPROCS") else "\0"
        used = re.compile(rf"(?:[${in_task}]\{{?|\(\((?:[^)]*\W)?){name}\b")
        for command in job.commands:
            says = re.match(r"\s*(?:echo|printf)\b", command.raw) and not command.nounset
            if not says and used.search(command.text):
                flag = " or ".join(f"--{option}" for option in options[:2])
                yield "unset-variable", command.line, {"name": name, "flag": flag}
                break


def _status_of_another(job: JobFile) -> Iterator[Row]:
    """Yield a status that is asked for after a command that only says something."""
    begun = min((start.line for start in job.starts), default=0)
    for above, command in pairwise(job.commands):
        asks = begun and command.line > begun and re.search(r"=\"?\$\?|\s\$\?\s", command.text)
        says = re.match(r"\s*(echo|printf|date|sleep|sync)\b", above.text)
        if asks and says:
            yield "status-of-another", command.line, {"command": says[1], "above": above.line}
            return


def _folder_of_each_attempt(job: JobFile) -> Iterator[Row]:
    """Yield a run's folder that has the time in its name, in a job that may begin again."""
    if "requeue" not in job.options and "scontrol requeue" not in job.bare:
        return
    for start in job.starts:
        if re.search(r"[$\0]\(date\b|`date\b", start.text):
            lines = [line for line, _, _, value in job.assigned if re.search(r"\bdate\b", value)]
            yield "folder-of-each-attempt", (lines or [start.line])[0], {}
            return


def _ports(job: JobFile) -> Iterator[Row]:
    """Yield meeting ports that may be taken."""
    ports = [(line, it) for line, name, _, it in job.assigned if name.upper().endswith("PORT")]
    ports += [(start.line, port) for start in job.starts for port in _PORT_FLAG.findall(start.text)]
    for line, value in ports:
        top = _highest(value)
        if top >= _FIRST_EPHEMERAL and not (value.isdecimal() and top > _LAST_EPHEMERAL):
            yield "port-ephemeral", line, {"port": value if value.isdecimal() else f"up to {top}"}
            break
    if "array" in job.options and ports and not any("$" in value for _, value in ports):
        yield "port-array", ports[0][0], {"port": ports[0][1]}


def _highest(value: str) -> int:
    """Return the highest port that a value or a sum of it can be; 0 where that is not plain."""
    if value.isdecimal():
        return int(value)
    if match := re.search(r"shuf\s.*?(\d+)-(\d+)", value):
        return int(match[2])
    if match := re.search(r"(\d+)\s*\+.*%\s*(\d+)|%\s*(\d+)\W+\+\s*(\d+)", value):
        return sum(int(part) for part in match.groups("0")) - 1
    if match := re.search(r"(\d{4,5})\s*\+.*tail\s+-c\s*-?(\d)", value):
        return int(match[1]) + 10 ** int(match[2]) - 1
    if "%" not in value and re.search(r"\+\W*SLURM_\w*JOB_?ID|SLURM_\w*JOB_?ID\W*\+", value):
        return _LAST_JOB
    return 0


def _counts(job: JobFile, start: Start) -> Iterator[Row]:
    """Yield tasks, GPUs and nodes that do not go together."""
    tasks, gpus, nodes = start.tasks, start.gpus, start.nodes
    values: dict[str, object] = {"tasks": tasks, "gpus": gpus, "nodes": nodes}
    if {"srun", "python"} <= start.facts and gpus and tasks and 1 < tasks != gpus:
        yield "tasks-gpus", start.line, values
    words = r"--(nproc[-_]per[-_]node|nnodes)[= ]+(\d+)(?![:\d])"
    said = {name[:2]: int(count) for name, count in re.findall(words, start.text)}
    told = re.search(r"(?i)nproc[-_]per[-_]node", f"{start.text} {job.bare}")
    own = not told and re.search(r"torch(?:run\b|\.distributed)", start.text)
    nproc = said.get("np", 1 if own else 0)  # torchrun starts one if nothing is said
    fewer = "background" not in start.facts and nproc * (tasks or 1) < (gpus or 0)
    if gpus and nproc and (nproc > gpus or fewer):
        yield "nproc-gpus", start.line, values | {"nproc": nproc}
    fits = [nodes, nodes * (tasks or 1)] if nodes else []
    if "background" in start.facts:  # one of several steps, each on its own node
        fits.append(Start(0, "", job.options).nodes or said.get("nn", 1))
    if nodes and "nn" in said and said["nn"] not in fits:
        yield "nnodes", start.line, values | {"nnodes": said["nn"]}


def _not_exported(job: JobFile, start: Start) -> Iterator[Row]:
    """Yield what the ranks need, and the batch script keeps for itself."""
    if not {"srun", "python"} <= start.facts or re.search(r"\bset\s+-\w*a|allexport", job.bare):
        return
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        export = rf"\b(?:export|declare\s+-x)\b[^\n;]*\b{name}\b|--export=\S*{name}"
        used = rf"(?s)^(?!\s*(?:echo|printf)\b).*\${{?{name}\b"
        if re.search(export, job.bare) or any(re.search(used, it.text) for it in job.commands):
            continue
        lines = [line for line, it, _, _ in job.assigned if it == name and line != start.line]
        if lines:
            yield "not-exported", lines[0], {"name": name}
