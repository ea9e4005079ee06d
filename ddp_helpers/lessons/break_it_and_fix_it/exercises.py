"""Exercises of notebook 10: two in plain Python, and two whose answers run on real ranks."""

import json
import marshal
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from ddp_helpers.lessons.break_it_and_fix_it import clinic
from ddp_helpers.lessons.exercise import NOT_ATTEMPTED, RIGHT, Exercise

# What each rank runs: the answer, by its compiled code, once for each case; it is given its own values of the case.
SCRIPT = """
import json, marshal, types
answer = types.FunctionType(marshal.loads(bytes.fromhex("{code}")), globals())
{setup}
print("begins")
for case in {cases}:
    given = answer({given})
    print("gives", json.dumps(given.tolist() if hasattr(given, "tolist") else given))
    dist.barrier()
"""
LAYER = """
def layer(values):
    model = nn.Linear(2, 1)
    nn.utils.vector_to_parameters(torch.tensor(values), model.parameters())
    return model
"""


@dataclass(frozen=True)
class OnRanks(Exercise):
    """An exercise whose answer is called on three real ranks; a case has the values that each rank is given."""

    setup: str = ""
    given: str = "*case[rank]"

    def verdict(self, answer: Callable) -> str:
        """Return one line: right, not attempted, or what the ranks give and why that is not it."""
        found, why = self.on_ranks(answer)
        if "NotImplementedError" in why:
            return NOT_ATTEMPTED
        expected, name = self.on_ranks(self.oracle)[0], self.oracle.__name__
        if found == expected:
            return RIGHT
        hints = [told for told, trap in self.traps.items() if self.on_ranks(trap)[0] == found][:1]
        if why:
            return " ".join([f"not yet: {name} ends with {why}.", *hints])
        case, one, right = next(both for both in zip(self.cases, found, expected, strict=True) if both[1] != both[2])
        asked = f"not yet: with {', '.join(map(str, case))} on the three ranks, {name} gives {one}"
        return " ".join([f"{asked}, and should give {right}.", *hints])

    def on_ranks(self, answer: Callable) -> tuple[list, str]:
        """What the ranks give, a list for each case; and with what they ended, '' if all is well."""
        code = marshal.dumps(answer.__code__).hex()
        text = SCRIPT.format(code=code, setup=self.setup, cases=list(self.cases), given=self.given)
        run = clinic.Run(clinic.written(text, True, True), 3, limit=10)
        clinic.attend(run)
        said = [[json.loads(line[6:]) for line in run.said(rank) if line.startswith("gives ")] for rank in range(3)]
        ends = [line for rank in range(3) for line in run.said(rank) if re.match(r"[\w.]*(Error|Exception)\b", line)]
        first = min(ends, key=lambda line: "remote" in line, default="no word")  # not who complains of another
        why = "" if run.ends == [0] * 3 else "ranks that wait for each other" if None in run.ends else first
        return [list(one) for one in zip_longest(*said)], why


def killed_by(status: int) -> int:
    """The number of the signal that ended a process, from Python's status or a shell's; 0 if none did."""
    if status < 0:
        return -status
    return status - 128 if status > 128 else 0


def where_they_part(calls: list[list[str]]) -> int | None:
    """The first call, counted from 0, in which not all ranks enter the same collective; None if all agree."""
    for number, names in enumerate(zip_longest(*calls)):
        if len(set(names)) > 1:
            return number
    return None


def parted(calls: list[list[str]]) -> int | None:
    """As far as the shortest list goes."""
    return next((number for number, names in enumerate(zip(*calls, strict=False)) if len(set(names)) > 1), None)


def same_weights(model: torch.nn.Module) -> bool:
    """Whether all ranks have the same weights, to the bit; True or False on all ranks alike."""
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, src=0)
    same = torch.tensor(int(torch.equal(mine, first)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def only_sums(model: torch.nn.Module) -> bool:
    """A mistake: sums of the weights."""
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).sum().detach()
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(low == high)


def each_for_itself(model: torch.nn.Module) -> bool:
    """A mistake: the ranks that are like rank 0 do not hear of the others."""
    mine = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, src=0)
    return torch.equal(mine, first)


def stop_step(told_at: int, every: int) -> int:
    """The step before which this rank leaves its loop; it is told in step told_at. All ranks call it."""
    step = 0
    while True:
        if step % every == 0:
            stop = torch.tensor(int(step >= told_at))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop:
                return step
        step += 1


def without_a_vote(told_at: int, every: int) -> int:
    """A mistake: each rank stops by itself."""
    return -(-told_at // every) * every


def all_must_be_told(told_at: int, every: int) -> int:
    """A mistake: they go on until the last one has been told."""
    step = 0
    while True:
        stop = torch.tensor(int(step >= told_at))
        dist.all_reduce(stop, dist.ReduceOp.MIN)
        if stop:
            return step
        step += every


def votes_in_each_step(told_at: int, every: int) -> int:
    """A mistake: `every` is not heeded."""
    step = 0
    while True:
        stop = torch.tensor(int(step >= told_at))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop:
            return step
        step += 1


EXERCISES = [
    Exercise(
        killed_by,
        [(137,), (-9,), (-11,), (134,), (1,), (0,)],
        {
            "Python reports a signal as a negative number; a shell adds 128 to it.": lambda status: (
                status - 128 if status > 128 else 0
            ),
            "That is how Python tells it; a shell adds 128 to the signal's number.": lambda status: max(0, -status),
            "A small status such as 1 is the program's own, and no signal.": lambda status: abs(status) % 128,
        },
    ),
    Exercise(
        where_they_part,
        [
            ([["all_reduce", "barrier"], ["all_reduce", "barrier"]],),
            ([["all_reduce"] * 6, ["all_reduce"] * 5],),
            ([["broadcast", "all_reduce"], ["broadcast", "all_reduce"], ["broadcast", "broadcast"]],),
            ([["all_reduce", "all_gather", "barrier"], ["all_gather", "all_reduce", "barrier"]],),
        ],
        {
            "A rank that has ended enters nothing: look beyond the end of the shortest list.": parted,
            "Look at all ranks, not only at the first two.": lambda calls: where_they_part(calls[:2]),
        },
    ),
    OnRanks(
        same_weights,
        [
            ([1.0, 2.0, 3.0],) * 3,
            ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 4.0]),
            ([1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [1.0, 2.0, 3.0]),
        ],
        {
            "Different weights can have the same sum: compare all of them.": only_sums,
            "A rank that is like rank 0 must hear of those that are not: one more collective.": each_for_itself,
        },
        setup=LAYER,
        given="layer(case[rank])",
    ),
    OnRanks(
        stop_step,
        [((3, 1), (4, 1), (5, 1)), ((7, 4), (5, 4), (9, 4)), ((8, 4), (9, 4), (12, 4)), ((0, 3), (5, 3), (4, 3))],
        {
            "The ranks leave at different steps: who leaves alone is waited for.": without_a_vote,
            "One rank that was told is enough: do not wait until all are.": all_must_be_told,
            "They vote only in the steps 0, `every`, twice `every`, and so on.": votes_in_each_step,
        },
    ),
]
