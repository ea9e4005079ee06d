"""Notebook 11: the attempts of a run read from its record, its figures, and its exercises."""

import json
import math
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch.utils.data import DistributedSampler

from ddp_helpers.draw.drawing import Picture
from ddp_helpers.draw.labels import captioned
from ddp_helpers.draw.style import BLUE, GREY, INK, ORANGE, RED, WIDTH, rank_colour
from ddp_helpers.lessons.exercise import Exercise
from ddp_helpers.lessons.on_ranks import OnRanks, on_ranks
from ddp_helpers.records.scaling import many

ENDS = {"done", "preempted", "failed"}


def events(folder: str | Path) -> pd.DataFrame:
    """A row for each line of a run's attempts.jsonl: attempt, from 1; seconds since the first start; what; step."""
    found = []
    for line in (Path(folder) / "attempts.jsonl").read_text(errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a line that was cut off when its process died
            one = json.loads(line)
            found.append((float(one["time"]), str(one["event"]), int(one["step"])))
    table = pd.DataFrame(found, columns=["seconds", "event", "step"])
    table["seconds"] -= table["seconds"].min()
    table.insert(0, "attempt", (table["event"] == "started").cumsum().clip(lower=1))
    return table


def attempts(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each attempt: from which second and step to which, how it ended, steps saved, and steps lost.

    Lost are the steps done after its last checkpoint: the next attempt does them again. An attempt without a word on
    its end has the end "unknown", and the second and step at which it was last heard of.
    """
    rows = []
    for number, mine in table.groupby("attempt"):
        ends, saved = mine[mine["event"].isin(ENDS)], mine[mine["event"] == "saved"]
        first, last = mine.iloc[0], ends.iloc[0] if len(ends) else mine.iloc[-1]
        row = {"attempt": number, "begin": first["seconds"], "end": last["seconds"]}
        row |= {"from_step": first["step"], "to_step": last["step"], "saves": len(saved)}
        row |= {"lost_steps": last["step"] - (saved["step"].max() if len(saved) else first["step"])}
        rows.append(row | {"ended": last["event"] if last["event"] in ENDS else "unknown"})
    return pd.DataFrame(rows)


def attempts_timeline(runs: Mapping[str, pd.DataFrame]) -> Picture:
    """A lane for each run, its attempts one after the other. runs: what `events` gives, by the run's name."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.6 + 0.75 * len(runs)), layout="constrained")
    labels, said = [], []
    for lane, (name, table) in enumerate(runs.items()):
        found = attempts(table)
        labels.append(f"{name}\n{many(int(found['lost_steps'].sum()), 'step')} lost")
        said += [labels[-1].replace("\n", ": ")] if len(found) > 1 else []
        for one in found.itertuples():
            draw_attempt(ax, lane, one, table[table["attempt"] == one.attempt])
        for before, after in zip(found.itertuples(), found.iloc[1:].itertuples(), strict=False):
            ax.annotate("", (after.begin, lane), (before.end, lane), arrowprops={"arrowstyle": "->", "color": GREY})
            middle = (before.end + after.begin) / 2
            ax.text(middle, lane - 0.2, f"{after.begin - before.end:.1f} s", ha="center", color=GREY)
    ax.set_yticks(range(len(runs)), labels)
    ax.set(ylim=(len(runs) - 0.5, -0.6), xlabel="seconds since the run first started", xlim=(0, None))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    said = "; ".join(said)
    about = "numbers are attempts, ticks checkpoints; hatched is work that was lost, and done again"
    return captioned(figure, said[:1].upper() + said[1:], about)


def draw_attempt(ax: Axes, lane: int, one: object, mine: pd.DataFrame) -> None:
    """One attempt in its lane: a bar with a tick for each checkpoint."""
    ax.barh(lane, one.end - one.begin, 0.5, one.begin, color=rank_colour(one.attempt - 1), alpha=0.3)
    saved = mine.loc[mine["event"] == "saved", "seconds"]
    ax.vlines(saved, lane - 0.25, lane + 0.25, color=rank_colour(one.attempt - 1), linewidth=1.8, zorder=4)
    if one.lost_steps:
        since = saved.max() if len(saved) else one.begin
        ax.barh(lane, one.end - since, 0.5, since, facecolor="white", edgecolor=RED, hatch="////", zorder=3)
    ax.text((one.begin + one.end) / 2, lane - 0.32, str(one.attempt), ha="center", va="bottom", color=INK)


def survival(gpu_hours: float, days: int = 7) -> Picture:
    """The share of jobs that meet no failure. gpu_hours: from one failure to the next, of one GPU."""

    def share(gpus: float) -> float:
        return math.exp(-days * 24 * gpus / gpu_hours)

    figure, ax = plt.subplots(figsize=(WIDTH, 3.8), layout="constrained")
    gpus = np.geomspace(1, 16_384, 200)
    ax.plot(gpus, [share(n) for n in gpus], color=BLUE, linewidth=2)
    for n in (8, 64, 256, 1024, 16_384):
        hours = gpu_hours / n
        often = f"{hours / 24:,.0f} days" if hours > 48 else f"{hours:,.0f} hours"
        look = {"ha": "center", "xytext": (0, 8)} if n > 1024 else {"xytext": (7, 4)}
        ax.plot(n, share(n), "o", color=BLUE, clip_on=False)
        text = f"{n:,}: {share(n):.0%}\na failure every\n{often}"
        ax.annotate(text, (n, share(n)), textcoords="offset points", **look)
    ax.set_xscale("log", base=2)
    ax.set_xticks([2**k for k in range(0, 15, 2)], [f"{2**k:,}" for k in range(0, 15, 2)])
    ax.set(xlabel="GPUs", ylabel=f"{days} days without a failure", ylim=(0, 1.25), yticks=[0, 0.5, 1])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    title = f"A job of {days} days gets through on 64 GPUs with {share(64):.0%}, on 1,024 with {share(1024):.0%}"
    about = f"one failure in {gpu_hours:,.0f} hours of a GPU, as in Llama 3's training; failures at random"
    return captioned(figure, title, about)


def u_curve(cost: float, between: Mapping[str, float], where: str) -> Picture:
    """What saving each so many seconds costs.

    cost: seconds of a checkpoint. between: seconds from one failure to the next, by the name of that time.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    interval, said = np.geomspace(1, 7200, 300), []
    for (name, seconds), colour in zip(between.items(), (RED, BLUE, ORANGE), strict=False):
        share, best = cost / interval + interval / (2 * seconds), math.sqrt(2 * cost * seconds)
        least = cost / best + best / (2 * seconds)
        ax.plot(interval, share, color=colour, linewidth=2)
        ax.plot(best, least, "o", color=colour)
        ax.annotate(f"{best:.0f} s", (best, least), (0, 8), textcoords="offset points", ha="center")
        ax.text(interval[-1] * 1.1, share[-1], f"one failure\neach {name}", va="center")
        said.append(f"One failure each {name}: save every {best:.0f} s, and lose {least:.2%} of the time")
    ax.set(xscale="log", yscale="log", xlabel="seconds between checkpoints", ylabel="share of the time lost")
    ax.set(xlim=(1, 3e4), ylim=(ax.get_ylim()[0], 1.3), xticks=[1, 10, 60, 600, 3600])
    ax.set_xticklabels(["1 s", "10 s", "1 min", "10 min", "1 h"])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.2%}" if value < 0.01 else f"{value:.0%}")
    about = f"a checkpoint takes {cost:.3f} s here: {where}"
    return captioned(figure, said[0], about, "lost is the saving, and half an interval a failure")


class Ranks(int):
    """A number of ranks, the first argument of a case."""

    def __repr__(self) -> str:
        return f"{int(self)} ranks"


OLD, NEW, ROOM = b"old" * 1000, b"new" * 1000, 1024  # bytes that a full disk has room for


def saving(answer: Callable, size: int, disk: str) -> dict:
    """What each rank returns, and what the checkpoint holds then; there was an old one before."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        path.write_bytes(OLD)

        def work() -> object:
            if disk == "full disk" and dist.get_rank() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
            return answer(str(path), NEW)

        try:
            returned = on_ranks(size, work)
        except NotImplementedError:
            raise
        except (OSError, RuntimeError) as error:
            returned = f"{type(error).__name__}: {error}"
        holds = path.read_bytes() if path.exists() else b""
        return {"returned": returned, "checkpoint": {OLD: "old", NEW: "new"}.get(holds, "damaged")}


def save(path: str, content: bytes, straight: bool = False) -> bool:
    """Whether rank 0 could write the checkpoint; every rank calls it, and every rank knows."""
    saved = torch.tensor(1)
    if dist.get_rank() == 0:
        try:
            save_alone(path, content, straight)
        except OSError:
            saved = torch.tensor(0)
    dist.broadcast(saved, src=0)
    return bool(saved)


def save_alone(path: str, content: bytes, straight: bool = False) -> bool:
    """Write under another name, and rename; each rank that calls it does."""
    written = Path(path if straight else f"{path}.{dist.get_rank()}")
    written.write_bytes(content)
    written.replace(path)
    return True


def save_untold(path: str, content: bytes, everyone: bool = False) -> bool:
    """A mistake: whoever writes does not say how it went."""
    if everyone or dist.get_rank() == 0:
        try:
            return save_alone(path, content)
        except OSError:
            return False
    return True


def save_uncaught(path: str, content: bytes) -> bool:
    """A mistake: where the disk is full, rank 0 leaves, and the others wait for it."""
    if dist.get_rank() == 0:
        save_alone(path, content)
    dist.barrier()
    return True


SAVE_TRAPS = {
    "The one before is lost: write to another name, and rename at the end.": partial(save, straight=True),
    "Only rank 0 knows how it went: let it tell the others, with a collective.": save_untold,
    "Rank 0 leaves with an error, and the others wait for it: catch OSError, and tell them.": save_uncaught,
    "Every rank writes: one is enough, and they may write over each other.": partial(save_untold, everyone=True),
}


def sharing(answer: Callable, size: int, epoch: int, done: int) -> list:
    """What is left for each rank, of an epoch of 24 samples."""
    return on_ranks(size, lambda: list(answer(DistributedSampler(range(24)), epoch, done)))


def rest(sampler: DistributedSampler, epoch: int, done: int) -> list[int]:
    """The samples that this rank has still to do, after all ranks together have done the first `done` of the epoch."""
    sampler.set_epoch(epoch)
    return list(sampler)[done // dist.get_world_size() :]


REST_TRAPS = {
    "`done` counts the samples of all ranks: each has done its share of it.": (
        lambda sampler, epoch, done: sampler.set_epoch(epoch) or list(sampler)[done:]
    ),
    "That is the order of another epoch: `set_epoch` comes first.": (
        lambda sampler, epoch, done: list(sampler)[done // dist.get_world_size() :]
    ),
    "That is what is done already; asked is what is left.": (
        lambda sampler, epoch, done: sampler.set_epoch(epoch) or list(sampler)[: done // dist.get_world_size()]
    ),
}


def attempts_needed(work: float, limit: float, start: float, grace: float) -> int:
    """The number of attempts, if the warning always comes in time and nothing else goes wrong."""
    return math.ceil(work / (limit - start - grace))


NEEDED_TRAPS = {
    "Start and warning are lost to the work, in each attempt.": lambda work, limit, *lost: math.ceil(work / limit),
    "A part of an attempt is an attempt: round up.": lambda work, limit, *lost: round(work / (limit - sum(lost))),
    "If the work fits exactly, no further attempt is needed: round up, instead of adding one.": (
        lambda work, limit, *lost: int(work / (limit - sum(lost))) + 1
    ),
}


def steps_between_saves(cost: float, between: float, step: float) -> int:
    """The best value of --checkpoint-every, at least 1. All arguments are in seconds."""
    return max(1, round(math.sqrt(2 * cost * between) / step))


BETWEEN_TRAPS = {
    "That is the interval in seconds; divide it by the seconds of a step.": (
        lambda cost, between, step: round(math.sqrt(2 * cost * between))
    ),
    "The formula has a 2 under the root: half an interval is lost on average.": (
        lambda cost, between, step: max(1, round(math.sqrt(cost * between) / step))
    ),
    "No less than one step: nothing can be saved in the middle of one.": (
        lambda cost, between, step: round(math.sqrt(2 * cost * between) / step)
    ),
}

SAVES = [(Ranks(2), "room on the disk"), (Ranks(2), "full disk"), (Ranks(3), "full disk")]
NEEDED = [(24, 4, 0.25, 0.25), (3, 4, 0.25, 0.25), (3.75, 4, 0.25, 0.25), (7, 4, 0.25, 0.25), (24, 2, 0.5, 0.25)]
EXERCISES = [
    OnRanks(save, SAVES, SAVE_TRAPS, saving),
    OnRanks(rest, [(Ranks(2), 1, 8), (Ranks(2), 3, 0), (Ranks(3), 2, 12)], REST_TRAPS, sharing),
    Exercise(attempts_needed, NEEDED, NEEDED_TRAPS),
    Exercise(steps_between_saves, [(2.0, 86_400.0, 0.5), (30.0, 3600.0, 1.5), (0.1, 3600.0, 60.0)], BETWEEN_TRAPS),
]
