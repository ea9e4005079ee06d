"""The hang lab: start a script with one planted fault, sell its evidence by the minute, and judge what it comes to."""

import json
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ddp_helpers import ROOT, PlainError
from ddp_helpers.launch.processes import ended
from ddp_helpers.lessons.break_it_and_fix_it.mutations import CURES, KINDS, RANKS, Plant, plant
from ddp_helpers.lessons.run_script import WIDTH, Run, attend
from ddp_helpers.rank.files import write_whole
from ddp_helpers.tools import watched, who_hangs

PRICES = {"exits": 1, "log R": 2, "logs": 5, "who_hangs": 5, "recorder R": 5, "stack R": 8, "lines N": 3, "script": 15}
WRONG = 10  # minutes for a wrong answer
# Seconds without a word after which a run hangs, and until it is ended; gloo's timeout in train.py is 8.
QUIET, LIMIT = 4.0, 16.0
FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)')
OWN = re.compile(r'\s+File "[^"]*\btrain\.py"')


class LabError(PlainError, ValueError):
    """What cannot be looked at, or is no answer; its message is one line."""


class Work(Run):
    """The run of a planted script, which is asked for stacks and recorders while it hangs."""

    def __init__(self, planted: Plant, folder: Path) -> None:
        if any(folder.glob("*")) and not (folder / "parts").is_dir():
            raise LabError(f"{folder} holds something else than a run of the lab: give another folder")
        shutil.rmtree(folder, ignore_errors=True)
        planted.write(folder)
        self.heard, self.asked, self.spoke, self.since = [], False, 0.0, time.monotonic()
        super().__init__(Path(watched.__file__), "train.py", ranks=RANKS, limit=LIMIT, folder=folder)

    def over(self) -> bool:
        """Whether all ranks have ended, and their evidence is kept."""
        heard = [log.stat().st_size for log in self.logs]
        if heard != self.heard:
            self.heard, self.since = heard, time.monotonic()
        if all(heard) and not self.spoke:
            self.spoke = self.since
        if not super().over():
            if not self.asked and all(heard) and (any(self.ends) or time.monotonic() > self.since + QUIET):
                self.asked = True
                self.ask()
            return False
        (self.folder / "exits.json").write_text(json.dumps(self.ends))
        for rank in range(RANKS):
            (self.folder / f"log_rank{rank}.txt").write_text("\n".join([*self.said(rank), ""]))
        return True

    def ask(self) -> None:
        """Ask each rank that is there for its stacks, those of its loader worker, and its recorder."""
        for rank in self.processes:
            with suppress(psutil.Error):
                process = psutil.Process(rank.pid)
                for one in (process, *process.children(recursive=True)):
                    one.send_signal(signal.SIGUSR1)
                    time.sleep(0.05)  # they write into one file
                process.send_signal(signal.SIGUSR2)


class Lab:
    """A run with a planted fault, the minutes spent on its evidence, and the checker."""

    def __init__(self, seed: int, folder: Path | None = None, go_on: bool = False) -> None:
        """Run what a seed plants to its end, up to 20 s. go_on: look further at a run that is in the folder."""
        if not 0 <= seed < 2**31:
            raise LabError(f"the seed is {seed}: give a number from 0 to {2**31 - 1}")
        self.seed, self.plant = seed, plant(seed)
        self.folder = folder or folder_of(seed)
        self.paid = self.folder / "minutes.json"
        if not go_on:
            attend(Work(self.plant, self.folder))
        elif not (self.folder / "exits.json").exists():
            raise LabError(f"seed {seed} has not been run: python -m ddp_helpers hang --seed {seed}")
        self.spent = json.loads(self.paid.read_text()) if self.paid.exists() else {}
        self.source = (self.folder / "train.py").read_text().splitlines()

    @property
    def minutes(self) -> int:
        """What has been spent."""
        return sum(self.spent.values())

    @property
    def par(self) -> int:
        """What the usual way costs: exits, then a log and some lines, or who_hangs, a stack and some lines."""
        return 6 if self.plant.mutation.kind in ("killed", "raises") else 17

    def pay(self, what: str, price: int) -> None:
        """Note the price of a look; a second one at the same is free."""
        self.spent.setdefault(what, price)
        write_whole(self.paid, json.dumps(self.spent).encode())

    def look(self, what: str) -> str:
        """What a piece of evidence says, and the minutes until now. Raises LabError for what there is not."""
        words = what.split()
        asked = next((name for name in PRICES if name.split()[0] == (words or [""])[0]), "")
        if not asked or len(words) != len(asked.split()) or not re.fullmatch(r"\d{0,4}", "".join(words[1:]), re.A):
            raise LabError(f"no evidence is called {what!r}: choose one of {', '.join(PRICES)} (R a rank, N a line)")
        number = int("".join(words[1:]) or 0)
        if asked.endswith("R") and number >= RANKS:
            raise LabError(f"there is no rank {number}: the ranks are 0 to {RANKS - 1}")
        if asked.endswith("N") and not 1 <= number <= len(self.source):
            raise LabError(f"there is no line {number}: the script has {len(self.source)}")
        self.pay(" ".join(words), PRICES[asked])
        return f"{getattr(self, words[0])(*[number][: len(words) - 1])}\n[{self.minutes} minutes so far]"

    def exits(self) -> str:
        """How each rank ended."""
        statuses = json.loads((self.folder / "exits.json").read_text())
        return "\n".join(f"rank {rank}: {ended(status)}" for rank, status in enumerate(statuses))

    def log(self, rank: int) -> str:
        """What a rank said; of a traceback, the lines of the script."""
        lines, kept = (self.folder / f"log_rank{rank}.txt").read_text().splitlines(), []
        for before, line in zip(["", *lines], lines, strict=False):
            if line and (not line[0].isspace() or OWN.match(line) or OWN.match(before) or "what():" in line):
                kept.append(line if len(line) <= WIDTH else f"{line[:WIDTH]} …")
        return "\n".join(f"rank {rank}: {line}" for line in kept)

    def logs(self) -> str:
        """What all ranks said."""
        return "\n".join(map(self.log, range(RANKS)))

    def who_hangs(self) -> str:
        """What the recorders of all ranks come to."""
        paths = [*self.folder.glob("recorder_rank*.json")]
        return "\n".join(who_hangs.who_hangs(who_hangs.read(paths)) if paths else ["no rank left a dump"])

    def recorder(self, rank: int) -> str:
        """The last calls in a rank's recorder."""
        path = self.folder / f"recorder_rank{rank}.json"
        if not path.exists():
            return f"rank {rank} left no dump"
        calls = who_hangs.calls(json.loads(path.read_text()))
        told = [f"group {group}, collective {at}: {call}" for group in calls for at, call in calls[group].items()]
        return "\n".join(told[-8:])

    def stack(self, rank: int) -> str:
        """Where a rank stood, the innermost call first: the lines of the script, and those of its loader worker."""
        told = []
        for thread in re.split(r"\n\s*\n", (self.folder / f"stacks_rank{rank}.txt").read_text()):
            frames = FRAME.findall(thread.partition("in _worker_loop")[0])
            own = [(int(line), name) for file, line, name in frames if Path(file).name == "train.py"]
            if own or "in _worker_loop" in thread:
                told.append(f"rank {rank}{', its loader worker' if 'in _worker_loop' in thread else ''}:")
                told += [f"  line {line} in {name}: {self.source[line - 1].strip()}" for line, name in own]
                told += [] if own else [f"  in {frames[0][2]} of {Path(frames[0][0]).name}"]
        return "\n".join(told) or f"rank {rank} had ended before anybody could look"

    def lines(self, number: int) -> str:
        """Eleven lines of the script, this one in the middle."""
        around = range(max(1, number - 5), min(len(self.source), number + 5) + 1)
        return "\n".join(f"{at:3} {self.source[at - 1]}" for at in around)

    def script(self) -> str:
        """The whole script."""
        return "\n".join(f"{at:3} {line}" for at, line in enumerate(self.source, 1))

    def answer(self, rank: int, line: int, kind: str, cure: str) -> str:
        """Judge an answer, in one line; a line beside the fault is right, too. Raises LabError for an unknown word."""
        for word, known in ((kind, KINDS), (cure, CURES)):
            if word not in known:
                raise LabError(f"{word!r} is not known: choose one of {', '.join(known)}")
        fault = self.plant.mutation
        if rank != self.plant.rank:
            wrong = f"rank {rank} is not at fault: it waits for another, or was ended by what another did"
        elif not any(abs(line - own) <= 1 for own in fault.lines()):
            wrong = f"the rank is right, but line {line} is not what makes it part from the others: what leads there?"
        elif kind != fault.kind:
            wrong = f"rank and line are right, but not that {KINDS[kind][0]}"
        elif cure != KINDS[kind][1]:
            wrong = f"all but the cure is right: {CURES[cure]} would not help"
        else:
            return f"right, in {self.minutes} minutes; par is {self.par}"
        self.pay(f"{len(self.spent)}: rank {rank}, line {line}, {kind}, {cure}", WRONG)
        return f"not yet: {wrong} [{self.minutes} minutes so far]"


def folder_of(seed: int) -> Path:
    """Where the run of a seed lies."""
    return ROOT / "build" / "hang" / f"seed{seed}"


def was_run(seed: int) -> bool:
    """Whether the folder of a seed holds a run of what it plants."""
    folder = folder_of(seed)
    with suppress(OSError):
        return (folder / "exits.json").exists() and (folder / "train.py").read_text() == plant(seed).mutation.text()
    return False


def play(seed: int, what: list[str], answer: list[str]) -> int:
    """Run a seed, or look at a piece of its evidence, or answer: the exit status, 1 if wrong. Raises LabError."""
    lab = Lab(seed, go_on=bool(what or answer) or was_run(seed))
    if what:
        print(lab.look(" ".join(what)))
    elif answer:
        given = dict(word.partition("=")[::2] for word in answer)
        numbers = [given.get(name, "") for name in ("rank", "line")]
        if given.keys() != {"rank", "line", "kind", "cure"} or not all(map(str.isdecimal, numbers)):
            raise LabError(f"the answer {' '.join(answer)!r} is not rank=… line=… kind=… cure=…")
        said = lab.answer(*map(int, numbers), given["kind"], given["cure"])
        print(said)
        return int(not said.startswith("right"))
    else:
        where = lab.folder.relative_to(ROOT)
        print(f"three ranks ran {where}/train.py, which one fault was planted into; the evidence, in minutes:")
        print("  " + ", ".join(f"{name} {price}" for name, price in PRICES.items()) + f"; a wrong answer {WRONG}")
        for title, known in (("kinds", {kind: told for kind, (told, _) in KINDS.items()}), ("cures", CURES)):
            print("\n".join([f"{title}:", *(f"  {name:9} {told}" for name, told in known.items())]))
        print(f"then: hang --seed {seed} --look log 1; hang --seed {seed} --answer rank=0 line=1 kind=… cure=…")
        print("line: where the rank takes another way than the others, such as an if; a line beside it counts, too")
        print(f"{lab.minutes} minutes so far; remove {where} to begin anew")
    return 0
