"""The faults of the hang lab: small changes of train.py, and data that trigger them.

`hang.py` and `evidence.py` use it, in the driver process; only `Plant.write` needs torch.
"""

import difflib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

SOUND = Path(__file__).with_name("train.py").read_text()
RANKS = 3

# A part of the rows: the one that is short, has a row that lacks a value, or has a spike, which is
# a row of high values. A fault may show only on the rank that reads it.
Part = Literal["short", "lacks", "spike"]
PARTS: tuple[Part, ...] = ("short", "lacks", "spike")


class Kind(NamedTuple):
    """What faults of one kind do, and their fix: a key of FIXES."""

    description: str
    fix: str


KINDS = {
    "early": Kind("a rank is given fewer batches or steps than the others", "agree"),
    "skips": Kind(
        "a rank leaves, or skips what the others call, in its own branch",
        "together",
    ),
    "extra": Kind("one rank calls a collective that the others do not call", "together"),
    "order": Kind("a rank calls the same collectives in a different order", "alike"),
    "size": Kind("a rank calls the same collective with a different size or type", "alike"),
    "source": Kind("a rank takes a different source for a broadcast", "alike"),
    "group": Kind("a process group is made or used by the wrong ranks", "members"),
    "unused": Kind("some weights get no gradient on one rank", "use"),
    "file": Kind("a rank waits for a file that never comes, or is never complete", "give-up"),
    "lock": Kind(
        "a thread waits for a lock that it holds itself, or that is never released",
        "release",
    ),
    "endless": Kind("a rank repeats something that never succeeds", "give-up"),
    "killed": Kind("a signal ends a process", "first"),
    "raises": Kind("an exception ends a rank", "first"),
}
_SAME_BRANCH = "let all ranks take the same branch: all-reduce what decides"
_SAME_CALLS = "make order, sizes, types and source the same on all ranks"
FIXES = {
    "agree": "let the ranks agree on the number of steps before the loop",
    "together": f"{_SAME_BRANCH}, or move the collective out of it",
    "alike": f"{_SAME_CALLS}: none may depend on the rank or its data",
    "members": "let every rank make the group with the same members, and its members use it",
    "use": "use all weights in every step, or find_unused_parameters=True",
    "give-up": "set a limit on the tries, then raise: a rank that fails is seen at once",
    "release": "take the lock once, by `with`, and call nothing inside that takes it again",
    "first": "read the first complaint and its rank's exit status, and fix what that rank did",
}


@dataclass(frozen=True)
class Mutation:
    """A change of the script: `old`, which occurs once, becomes `new`."""

    kind: str  # a key of KINDS
    culprit: int | Part  # the rank at fault, or the part of the rows that triggers it
    old: str
    new: str

    def text(self) -> str:
        """Return the script with this fault."""
        return SOUND.replace(self.old, self.new)

    def lines(self) -> set[int]:
        """Return the numbers of the changed lines; for removed lines, the two around them."""
        before, after = SOUND.splitlines(), self.text().splitlines()
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        numbers: set[int] = set()
        for tag, _, _, start, stop in matcher.get_opcodes():
            if tag == "delete":
                numbers |= {start, start + 1}
            elif tag != "equal":
                numbers |= {*range(start + 1, stop + 1)}
        return numbers


# Lines of the script that are changed, from its start to its end.
_GET_ROW = "        row = self.rows[index]\n"
_NOTE_LACK = '            note(f"row {index} lacks a value")\n'
_LACKS = "        lacks = x.isnan().any().float()\n"
_VOTE = "        dist.all_reduce(lacks, dist.ReduceOp.MAX)\n"
_LOSS = "        loss = huber_loss(ddp(x), y)\n"
_ZERO_GRAD = "        optimizer.zero_grad()\n"
_SORTED = "sorted(totals)"
_SAVE = '        torch.save(model.state_dict(), f"model{rank}.pt")\n'
_LAST_BARRIER = "    dist.barrier()  # no rank continues before both are complete\n"
_AGREE_ON_STEPS = "        dist.all_reduce(steps, dist.ReduceOp.MIN)\n"
_MEAN_LOSS = "        loss = mean(loss)\n"
_EVALUATE = "        error = evaluate(ddp.module, rows)\n"

# What is put into it.
_IF_LACKS = "        if x.isnan().any():\n"
_IF_ANY_LACKS = "        if lacks:\n"
_IF_HIGH = "        if loss > LIMIT:\n"
_CONTINUE = "            continue\n"
_BREAK = "            break\n"
_KILL = "            os.kill(os.getpid(), 9)\n"

MUTATIONS = [
    Mutation("early", "short", _AGREE_ON_STEPS, ""),
    Mutation("early", "short", "ReduceOp.MIN", "ReduceOp.MAX"),
    Mutation("early", "short", "zip(range(steps), batches, strict=False)", "enumerate(batches)"),
    Mutation("skips", "lacks", _VOTE, ""),
    Mutation("skips", "lacks", _LACKS + _VOTE, _IF_LACKS + _CONTINUE + _LACKS + _VOTE),
    Mutation("skips", "lacks", _LACKS + _VOTE, _IF_LACKS + _BREAK + _LACKS + _VOTE),
    Mutation("skips", "spike", _LOSS, _LOSS + _IF_HIGH + _CONTINUE),
    Mutation("skips", "spike", _LOSS, _LOSS + _IF_HIGH + _BREAK),
    Mutation("skips", "spike", _MEAN_LOSS, ""),
    Mutation("skips", 0, _SAVE, f"{_SAVE}        if not rank:\n            return\n"),
    Mutation("skips", 0, "    dist.broadcast(seed", "    if rank:\n        dist.broadcast(seed"),
    Mutation(
        "skips",
        "short",
        '    totals = {"rows"',
        '    if len(rows) % BATCH:\n        return misses.abs()\n    totals = {"rows"',
    ),
    Mutation(
        "skips",
        "spike",
        "huber_loss(ddp(x), y)",
        "huber_loss((ddp if x.max() < LIMIT else ddp.module)(x), y)",
    ),
    Mutation("extra", 0, _LAST_BARRIER, f"    if rank == 0:\n    {_LAST_BARRIER}"),
    Mutation("extra", 0, _EVALUATE, _EVALUATE.replace("\n", " if rank == 0 else loss\n")),
    Mutation(
        "extra",
        0,
        "        save(ddp",
        (
            "        if rank == 0:\n"
            '            note(f"loss of all {mean(loss):.2f}")\n'
            "        save(ddp"
        ),
    ),
    Mutation("extra", "lacks", _LACKS, f"{_LACKS}{_IF_ANY_LACKS}            dist.barrier()\n"),
    Mutation(
        "extra",
        "spike",
        _ZERO_GRAD,
        _IF_HIGH + '            note(f"a high loss, {mean(loss.detach()):.2f}")\n' + _ZERO_GRAD,
    ),
    Mutation("order", "spike", _SORTED, "sorted(totals, key=lambda name: totals[name].sum())"),
    Mutation("order", "short", _SORTED, "sorted(totals, reverse=len(rows) % BATCH > 0)"),
    Mutation("size", "short", "torch.tensor([float(len(rows))])", "torch.ones(len(rows))"),
    Mutation(
        "size",
        "lacks",
        "x.isnan().any().float()",
        "torch.tensor(1.0 if x.isnan().any() else 0)",
    ),
    Mutation("source", 1, "seed, src=0", "seed, src=rank % 2"),
    Mutation("source", 2, "seed, src=0", "seed, src=rank // 2"),
    Mutation("group", 1, "new_group([0, 1]", "new_group([0, 2]"),
    Mutation("group", 0, "new_group([0, 1]", "new_group([1, 2]"),
    Mutation("group", 2, "rank in (0, 1)", "rank in (0, 2)"),
    Mutation(
        "unused",
        "spike",
        "        return self.wide(x) +",
        (
            "        if x.max() > LIMIT:\n"
            "            return self.wide(x)\n"
            "        return self.wide(x) +"
        ),
    ),
    Mutation("file", 2, "(rank + epoch) % size", "rank + epoch"),
    Mutation("file", 2, "(rank + epoch) % size", "(rank + epoch) % size + 1"),
    Mutation(
        "file",
        "short",
        "while not path.exists():",
        "while not path.exists() or path.stat().st_size < 2600:",
    ),
    Mutation("lock", "lacks", _NOTE_LACK, f"            with LOCK:\n    {_NOTE_LACK}"),
    Mutation(
        "lock",
        "spike",
        _ZERO_GRAD,
        (
            "        if loss > LIMIT:\n"
            "            with LOCK:\n"
            f'                note("a high loss")\n{_ZERO_GRAD}'
        ),
    ),
    Mutation("lock", "lacks", _LACKS, f"{_IF_LACKS}            LOCK.acquire()\n{_LACKS}"),
    Mutation(
        "endless",
        "lacks",
        _GET_ROW,
        f"{_GET_ROW}        while row.isnan().any():\n            time.sleep(0.1)\n    {_GET_ROW}",
    ),
    Mutation(
        "endless",
        "spike",
        _ZERO_GRAD,
        (
            "        while loss > LIMIT:\n"
            f"            loss = huber_loss(ddp.module(x), y)\n{_ZERO_GRAD}"
        ),
    ),
    Mutation("killed", "lacks", _NOTE_LACK, _NOTE_LACK + _KILL),
    Mutation("killed", "spike", _ZERO_GRAD, _IF_HIGH + _KILL + _ZERO_GRAD),
    Mutation("killed", "lacks", _LACKS, f"{_LACKS}{_IF_ANY_LACKS}            os.abort()\n"),
    Mutation(
        "raises",
        "lacks",
        _NOTE_LACK,
        '            raise ValueError(f"row {index} lacks a value")\n',
    ),
    Mutation("raises", "spike", _ZERO_GRAD, f"        assert loss < LIMIT\n{_ZERO_GRAD}"),
    Mutation("raises", "lacks", _LACKS, f"{_IF_LACKS}            breakpoint()\n{_LACKS}"),
    Mutation("raises", "short", _LOSS, "        loss = huber_loss(ddp(x.view(BATCH, 8)), y)\n"),
]


@dataclass(frozen=True)
class Plant:
    """The fault that a seed plants."""

    mutation: Mutation
    rank: int  # at fault
    parts: dict[Part, int]  # the rank that reads each part in the first epoch
    step: int  # in which the rows show the fault, if they do

    def write(self, folder: Path) -> None:
        """Write the script and the parts of the rows into a folder that has none yet."""
        import torch  # here, so that --look does not wait for it

        (folder / "parts").mkdir(parents=True)
        (folder / "train.py").write_text(self.mutation.text())
        generator = torch.Generator().manual_seed(self.step)
        for part in range(RANKS):
            count = 19 if part == self.parts["short"] else 24
            rows = torch.randn(count, 8, generator=generator) / 10
            targets = torch.randn(count, 2, generator=generator) / 100
            if part == self.parts["lacks"]:
                rows[4 * self.step + 1, 3] = torch.nan
            if part == self.parts["spike"]:
                rows[4 * self.step + 6] = 3000.0  # not in the step that all leave out
            torch.save((rows, targets), folder / "parts" / f"part{part}.pt")


def choose_plant(seed: int) -> Plant:
    """Choose a mutation, the rank at fault and the step by a seed."""
    dice = random.Random(seed)
    mutation = dice.choice(MUTATIONS)
    step = dice.randrange(4)
    ranks = [*range(RANKS)]
    dice.shuffle(ranks)
    parts = dict(zip(PARTS, ranks, strict=True))
    culprit = mutation.culprit
    rank = culprit if isinstance(culprit, int) else parts[culprit]
    return Plant(mutation, rank, parts, step)
