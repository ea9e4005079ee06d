"""What the hang lab plants: small changes to train.py, and the rows that bring them about on one rank."""

import difflib
import random
from dataclasses import dataclass
from pathlib import Path

SOUND = Path(__file__).with_name("train.py").read_text()
RANKS = 3
KINDS = {  # what a fault is called, what it is, and its cure
    "early": ("a rank is given fewer batches or steps than the others", "agree"),
    "skips": ("a rank leaves, or goes past what the others call, by a branch of its own", "together"),
    "extra": ("one rank calls a collective that the others do not call", "together"),
    "order": ("a rank calls the same collectives in another order", "alike"),
    "size": ("a rank calls the same collective with another size or type", "alike"),
    "source": ("a rank takes another source for a broadcast", "alike"),
    "group": ("a process group is made or used by the wrong ranks", "members"),
    "unused": ("some weights get no gradient on one rank", "use"),
    "file": ("a rank waits for a file that never comes, or is never whole", "give-up"),
    "lock": ("a thread waits for a lock that it holds itself, or that nobody gives back", "release"),
    "endless": ("a rank repeats something that never succeeds", "give-up"),
    "killed": ("a signal ends a process", "first"),
    "raises": ("an exception ends a rank", "first"),
}
CURES = {
    "agree": "let the ranks agree on the number of steps before the loop",
    "together": "let all ranks take the same branch: all-reduce what decides, or move the collective out of it",
    "alike": "make order, sizes, types and source the same on all ranks: none may depend on the rank or its data",
    "members": "let every rank make the group with the same members, and its members use it",
    "use": "use all weights in every step, or find_unused_parameters=True",
    "give-up": "set a limit on the tries, then raise: a rank that fails is seen at once",
    "release": "take the lock once, by `with`, and call nothing inside that takes it again",
    "first": "read the first complaint and its rank's exit status, and mend what that rank did",
}


@dataclass(frozen=True)
class Mutation:
    """A change of the script, its kind, and the rank at fault: a number, or whose part of the rows brings it about."""

    kind: str
    whose: int | str
    old: str
    new: str

    def text(self) -> str:
        """The script with this fault."""
        if SOUND.count(self.old) != 1:
            raise ValueError(f"{self.old!r} stands {SOUND.count(self.old)} times in train.py, not once")
        return SOUND.replace(self.old, self.new)

    def lines(self) -> set[int]:
        """The changed lines, and where a line was taken out the two around it."""
        matcher = difflib.SequenceMatcher(None, SOUND.splitlines(), self.text().splitlines(), autojunk=False)
        changed = [(first, last) for what, _, _, first, last in matcher.get_opcodes() if what != "equal"]
        return {line for first, last in changed for line in (range(first + 1, last + 1) or (first, first + 1))}


GET = "        row = self.rows[index]\n"
NOTE = '            note(f"row {index} lacks a value")\n'
LACKS = "        lacks = x.isnan().any().float()\n"
VOTE = "        dist.all_reduce(lacks, dist.ReduceOp.MAX)\n"
LOSS = "        loss = huber_loss(ddp(x), y)\n"
BACK = "        optimizer.zero_grad()\n"
STEPS = "        dist.all_reduce(steps, dist.ReduceOp.MIN)\n"
AGREED = "        loss = mean(loss)\n"
SAVED = '        torch.save(model.state_dict(), f"model{rank}.pt")\n'
WHOLE = "    dist.barrier()  # nobody goes on before they are whole\n"
EVALUATED = "        error = evaluate(ddp.module, rows)\n"
ORDER = "sorted(totals)"
HIGH = "        if loss > LIMIT:\n    "
MISSING = "        if x.isnan().any():\n    "

MUTATIONS = [
    Mutation("early", "short", STEPS, ""),
    Mutation("early", "short", "ReduceOp.MIN", "ReduceOp.MAX"),
    Mutation("early", "short", "zip(range(steps), batches, strict=False)", "enumerate(batches)"),
    Mutation("skips", "lacks", VOTE, ""),
    Mutation("skips", "lacks", LACKS + VOTE, f"{MISSING}        continue\n{LACKS}{VOTE}"),
    Mutation("skips", "lacks", LACKS + VOTE, f"{MISSING}        break\n{LACKS}{VOTE}"),
    Mutation("skips", "spike", LOSS, f"{LOSS}{HIGH}        continue\n"),
    Mutation("skips", "spike", LOSS, f"{LOSS}{HIGH}        break\n"),
    Mutation("skips", "spike", AGREED, ""),
    Mutation("skips", 0, SAVED, f"{SAVED}        if not rank:\n            return\n"),
    Mutation("skips", 0, "    dist.broadcast(seed", "    if rank:\n        dist.broadcast(seed"),
    Mutation(
        "skips",
        "short",
        '    totals = {"rows"',
        '    if len(rows) % BATCH:\n        return misses.abs()\n    totals = {"rows"',
    ),
    Mutation("skips", "spike", "huber_loss(ddp(x), y)", "huber_loss((ddp if x.max() < LIMIT else ddp.module)(x), y)"),
    Mutation("extra", 0, WHOLE, f"    if rank == 0:\n    {WHOLE}"),
    Mutation("extra", 0, EVALUATED, EVALUATED.replace("\n", " if rank == 0 else loss\n")),
    Mutation(
        "extra",
        0,
        "        save(ddp",
        '        if rank == 0:\n            note(f"loss of all {mean(loss):.2f}")\n        save(ddp',
    ),
    Mutation("extra", "lacks", LACKS, f"{LACKS}        if lacks:\n            dist.barrier()\n"),
    Mutation("extra", "spike", BACK, f'{HIGH}        note(f"a high loss, {{mean(loss.detach()):.2f}}")\n{BACK}'),
    Mutation("order", "spike", ORDER, "sorted(totals, key=lambda name: totals[name].sum())"),
    Mutation("order", "short", ORDER, "sorted(totals, reverse=len(rows) % BATCH > 0)"),
    Mutation("size", "short", "torch.tensor([float(len(rows))])", "torch.ones(len(rows))"),
    Mutation("size", "lacks", "x.isnan().any().float()", "torch.tensor(1.0 if x.isnan().any() else 0)"),
    Mutation("source", 1, "seed, src=0", "seed, src=rank % 2"),
    Mutation("source", 2, "seed, src=0", "seed, src=rank // 2"),
    Mutation("group", 1, "new_group([0, 1]", "new_group([0, 2]"),
    Mutation("group", 0, "new_group([0, 1]", "new_group([1, 2]"),
    Mutation("group", 2, "rank in (0, 1)", "rank in (0, 2)"),
    Mutation(
        "unused",
        "spike",
        "        return self.wide(x) +",
        "        if x.max() > LIMIT:\n            return self.wide(x)\n        return self.wide(x) +",
    ),
    Mutation("file", 2, "(rank + epoch) % size", "rank + epoch"),
    Mutation("file", 2, "(rank + epoch) % size", "(rank + epoch) % size + 1"),
    Mutation("file", "short", "while not path.exists():", "while not path.exists() or path.stat().st_size < 2600:"),
    Mutation("lock", "lacks", NOTE, f"            with LOCK:\n    {NOTE}"),
    Mutation("lock", "spike", BACK, f'{HIGH}        with LOCK:\n                note("a high loss")\n{BACK}'),
    Mutation("lock", "lacks", LACKS, f"{MISSING}        LOCK.acquire()\n{LACKS}"),
    Mutation("endless", "lacks", GET, f"{GET}        while row.isnan().any():\n            time.sleep(0.1)\n    {GET}"),
    Mutation(
        "endless",
        "spike",
        BACK,
        f"        while loss > LIMIT:\n            loss = huber_loss(ddp.module(x), y)\n{BACK}",
    ),
    Mutation("killed", "lacks", NOTE, f"{NOTE}            os.kill(os.getpid(), 9)\n"),
    Mutation("killed", "spike", BACK, f"{HIGH}        os.kill(os.getpid(), 9)\n{BACK}"),
    Mutation("killed", "lacks", LACKS, f"{LACKS}        if lacks:\n            os.abort()\n"),
    Mutation("raises", "lacks", NOTE, '            raise ValueError(f"row {index} lacks a value")\n'),
    Mutation("raises", "spike", BACK, f"        assert loss < LIMIT\n{BACK}"),
    Mutation("raises", "lacks", LACKS, f"{MISSING}        breakpoint()\n{LACKS}"),
    Mutation("raises", "short", LOSS, "        loss = huber_loss(ddp(x.view(BATCH, 8)), y)\n"),
]


@dataclass(frozen=True)
class Plant:
    """What a seed plants: a mutation, the rank at fault, and which part of the rows is short, lacks a value, spikes."""

    mutation: Mutation
    rank: int
    parts: dict[str, int]
    step: int

    def write(self, folder: Path) -> None:
        """Write the script and three parts of rows into a folder."""
        import torch  # here, so that a look at the evidence does not wait for it

        (folder / "parts").mkdir(parents=True)
        (folder / "train.py").write_text(self.mutation.text())
        draw = torch.Generator().manual_seed(self.step)
        for part in range(RANKS):
            rows = torch.randn(19 if part == self.parts["short"] else 24, 8, generator=draw) / 10
            targets = torch.randn(len(rows), 2, generator=draw) / 100
            if part == self.parts["lacks"]:
                rows[4 * self.step + 1, 3] = torch.nan
            if part == self.parts["spike"]:
                rows[4 * self.step + 6] = 3000.0  # not in the step that all leave out
            torch.save((rows, targets), folder / "parts" / f"part{part}.pt")


def plant(seed: int) -> Plant:
    """Choose a mutation, who is at fault, and the step, by a seed."""
    draw = random.Random(seed)
    mutation, ranks, step = draw.choice(MUTATIONS), [*range(RANKS)], draw.randrange(4)
    draw.shuffle(ranks)
    parts = dict(zip(("short", "lacks", "spike"), ranks, strict=True))  # in the first epoch, a rank's part is its own
    return Plant(mutation, parts.get(mutation.whose, mutation.whose), parts, step)
