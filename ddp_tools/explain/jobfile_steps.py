"""Look at what a job file does with the status of a pipe, and at steps that run at once."""

import re
from collections.abc import Container, Iterator, Sequence

from ddp_tools.explain.jobfile_shell import Block, Command, spaced
from ddp_tools.explain.jobfile_start import srun_options
from ddp_tools.explain.jobfile_text import JobFile

Row = tuple[str, int, dict[str, object]]  # a fault's id, the line, the values of its sentences
_PIPEFAIL = re.compile(r"(?:^|\s)set\s(?:.*\s)?([-+])\w*o\s+pipefail\b")
_CONDITION = re.compile(r"\s*(?:(?:then|do|else)\s+)?(?:if|elif|while|until|!)\s")
_ANSWERS = re.compile(r"\s*[ef]?grep\s")  # its own status is the one that is meant
_CLOSES = re.compile(r"\s*(?:fi|done|esac|\}|;;)?\s*")
_USES = re.compile(r"\$\?|\$\{\?|^\s*(?:exit|return)\s*$")
_SAYS = re.compile(r"\s*(?:echo|printf)\b")
_STEP = re.compile(
    r"\s*\(?\s*(?:(?:then|do|else|if|!|\{|time|exec|nohup|timeout\s+\S+|\w+=\S*)\s+)*(?:\S*/)?srun\s"
)
_ENDED = re.compile(r"\s*(?:(?:then|do)\s+)?(?:wait|kill|scancel|else|elif|;;)\b")
_WORDS = re.compile(r"\s*for\s+\w+\s+in\s+([^$`*?{]*)$")
_PLACES = ("nodelist", "relative", "r")  # two that differ are other nodes
_OWN_CPUS = {"exact", "exclusive", "cpus-per-task"}  # without these a step takes its nodes whole
_GPUS = {"gres", "gpus", "gpus-per-node", "gpus-per-task", "tres-per-task"}


def _run_by(job: JobFile, number: int, found: Container[int]) -> list[int]:
    """Return those of some commands that this one is, or that its block or its function holds."""
    word = "".join(job.commands[number].text.split()[:1])
    held = [
        within
        for block in job.blocks
        if block.last == number or (block.function and block.function == word)
        for within in range(block.first, block.last)
    ]
    return [one for one in (*held, number) if one in found]


# ---- the status of a pipe


def lost_statuses(job: JobFile) -> Iterator[Row]:
    """Yield the pipes behind ranks of which the status is that of another program."""
    begun = {(start.line, start.text) for start in job.starts}
    ranks = {
        number
        for number, command in enumerate(job.commands)
        if (command.line, spaced(job.filled(command.raw))) in begun
    }
    pipefail = "pipefail" in job.lines[0]
    first: Command | None = None  # what starts the ranks, in the pipe that is read
    for number, command in enumerate(job.commands):
        if option := _PIPEFAIL.search(command.text):
            pipefail = option[1] == "-"
        if command.end == "|":
            runs = [] if pipefail or first else _run_by(job, number, ranks)
            first = job.commands[runs[-1]] if runs else first
            continue
        if first:
            rest = job.commands[number + 1 :]
            id_, line = _lost(first, command, rest)
            if id_:
                by = " ".join(command.text.split())[:40]
                yield id_, line, {"start": first.line, "command": by}
                return
        first = None


def _lost(first: Command, last: Command, rest: Sequence[Command]) -> tuple[str, int]:
    """Say what becomes of a pipe's status, and in which line; no fault if each part is asked."""
    if any("PIPESTATUS" in command.text for command in rest) or _ANSWERS.match(last.text):
        return "", 0
    if last.end in ("&&", "||") or _CONDITION.match(first.text):
        return "status-of-pipe", first.line
    if last.end == "&":  # its status is that of `wait` for it
        waits = [n for n, it in enumerate(rest) if re.match(r"\s*wait\s+\S", it.text)]
        if not waits:
            return "status-of-pipe-unused", first.line
        last, rest = rest[waits[0]], rest[waits[0] + 1 :]
        if last.end in ("&&", "||"):
            return "status-of-pipe", last.line
    if rest and _USES.search(rest[0].text):
        return "status-of-pipe", rest[0].line
    if all(_CLOSES.fullmatch(command.text) for command in rest):
        return "status-of-pipe", first.line  # the job's own status
    return "status-of-pipe-unused", first.line


# ---- steps at once


def waiting_steps(job: JobFile) -> Iterator[Row]:
    """Yield a step that waits, or may wait, for one in the background before it."""
    if "SLURM_OVERLAP" in job.bare:
        return
    closed = {block.last: block for block in job.blocks}
    steps: dict[int, dict[str, str]] = {}  # the options of each
    running: dict[int, int] = {}  # and the command that put it into the background
    chain: list[int] = []  # one after the other, joined by && or ||
    for number, command in enumerate(job.commands):
        block = closed.get(number)
        if _ENDED.match(command.text) or (block and block.function):
            running = {}
        text = spaced(job.filled(command.raw), ";")
        if (step := _STEP.match(text)) and "overlap" not in (
            own := srun_options(text[step.end() - 1 :])[0]
        ):
            steps[number] = own
        runs = _run_by(job, number, steps)
        for one in [] if block else runs:
            for other in running:
                if id_ := _meet(job, steps[other], steps[one], len(running)):
                    yield id_, command.line, {"other": job.commands[other].line}
                    return
        if block:
            for one in (one for one, at in running.items() if at >= block.first):
                if id_ := _meet_again(job, block, steps[one]):
                    line = job.commands[one].line
                    yield id_, line, {"other": f"{line}, started in the pass before,"}
                    return
        chain += [one for one in runs if one not in running]
        if command.end == "&":
            running |= dict.fromkeys(chain, number)
        if command.end not in ("|", "&&", "||"):
            chain = []


def _meet_again(job: JobFile, block: Block, step: dict[str, str]) -> str:
    """Return the fault of a step that a block leaves at work, with itself if it comes again."""
    if block.opens not in ("for", "while", "until", "select"):
        return ""
    words = _WORDS.match(job.commands[block.first].text)
    times = len(words[1].split()) if words else 1_000_000
    if times < 2:
        return ""
    nodes = job.options.get("nodes", "1")
    alone = "1" in (step.get("nodes"), step.get("ntasks")) and nodes != "1"
    id_ = _meet(job, step, step, times - 1)
    certain = block.opens == "for" and not (alone and not words)
    return id_ if certain else id_ and "step-may-wait"


def _meet(job: JobFile, one: dict[str, str], two: dict[str, str], running: int) -> str:
    """Return the fault of two steps at once, as Slurm 22.05 was seen to do with them."""
    if one is two and any("$" in one.get(at, "") for at in _PLACES):
        return ""  # each time on a node of its own
    apart = [(one.get(at, "").split(","), two.get(at, "").split(",")) for at in _PLACES]
    if any(all((*its, *others)) and not {*its} & {*others} for its, others in apart):
        return ""
    if any(a.get("nodelist", "-") == b.get("exclude") for a, b in ((one, two), (two, one))):
        return ""
    single = all("1" in (step.get("nodes"), step.get("ntasks")) for step in (one, two))
    nodes = job.options.get("nodes", "1")
    if single and nodes.isdecimal() and running < int(nodes):
        named = ["nodelist" in step for step in (one, two)]
        if not any(named):
            return ""  # Slurm gives each a node of its own
        if not all(named):
            return "step-may-wait"
    unset = any(name.startswith("$") for name in (*one, *two))
    if unset or "SRUN_CPUS_PER_TASK" in job.bare:
        return "step-may-wait"
    whole = not (one.keys() & _OWN_CPUS and two.keys() & _OWN_CPUS)
    gpus = (
        job.options.keys() & {"gres", "gpus", "gpus-per-node"}
        and not (one.keys() | two.keys()) & _GPUS
    )
    return "step-waits" if whole or gpus else "step-may-wait"
