"""What a scaling study says: speed-up and efficiency with their spread, where the time goes, what it costs.

Every function takes the table of runs.table, or what another function here made of it, and changes nothing.
"""

import numpy as np
import pandas as pd

from ddp_helpers.notebook.runs import DONE

SETTING = ["run", "dataset", "machine", "site", "job_id", "launcher", "world_size", "nodes", "cpus_per_task"]
SETTING += ["batch_size", "global_batch", "scaling", "seed", "job_seconds"]
MEASURED = ["epoch", "images_per_second", "seconds", "data_seconds", "exposed_seconds", "test_seconds", "test_accuracy"]
SHARES = ["data", "compute", "communication"]
STILL = {"running": "running or killed", "unknown": "of unknown end"}


class ScalingError(ValueError):
    """Runs that cannot be compared; one line with what was found, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the line, without the frames that lead to it."""
        return [f"{type(self).__name__}: {self}"]


def finished(table: pd.DataFrame) -> pd.DataFrame:
    """The epochs of the runs that ended well, with `number`, which counts these runs from 0."""
    table = table.reindex(columns=[*SETTING, "state", *dict.fromkeys([*MEASURED, *table.columns.difference(SETTING)])])
    table = table.loc[:, ~table.columns.duplicated()]
    table = table[(table["state"] == DONE) & table["epoch"].notna() & table["images_per_second"].notna()]
    number = table.groupby(SETTING, dropna=False, sort=False).ngroup()  # a name alone may stand in two folders
    return table.assign(number=number).astype({"epoch": int, "world_size": int, **dict.fromkeys(MEASURED[1:], float)})


def left_out(table: pd.DataFrame) -> str:
    """For a caption: how many runs are in no fit and no median, and why; '' if none.

    A run counts if it ended well and has recorded an epoch.
    """
    if table.empty:
        return ""
    used = set(finished(table).index)
    rest = table[~table.index.isin(used)].drop_duplicates(subset=[name for name in SETTING if name in table])
    rest = rest[~rest["run"].isin(table.loc[list(used), "run"]) | (rest["state"] != DONE)]
    why = rest["state"].map(lambda state: "without an epoch" if state == DONE else STILL.get(state, state))
    told = ", ".join(f"{count} {reason}" for reason, count in why.value_counts().items())
    return f"{len(rest)} {'run' if len(rest) == 1 else 'runs'} left out: {told}" if len(rest) else ""


def time_to_accuracy(table: pd.DataFrame, target: float) -> float | None:
    """Seconds of training and test until one run first reached a test accuracy (0 to 1); None if it never did.

    table: the rows of that run alone. Its start-up is not in it.
    """
    reached = np.flatnonzero(table["test_accuracy"].to_numpy() >= target)
    took = np.cumsum(np.nan_to_num(table["seconds"].to_numpy() + np.nan_to_num(table["test_seconds"].to_numpy())))
    return float(took[reached[0]]) if len(reached) else None


def per_run(table: pd.DataFrame, target: float = 0.95) -> pd.DataFrame:
    """One row a finished run: its setting, its speed, where its time went, and its cost.

    images_per_second and seconds are those of the median epoch. The first epoch is not in it if there are others: it
    also pays for what is done once, such as choosing kernels and making buffers. data, compute and communication
    are shares of the training time, 0 to 1. to_target: seconds to the target accuracy. device_hours: GPUs (or ranks)
    held, times the hours of the job, or of its epochs where no job is recorded.
    """
    epochs = finished(table)
    once = epochs.groupby("number").cumcount().eq(0) & epochs.groupby("number")["epoch"].transform("size").gt(1)
    steady, runs = epochs[~once].groupby("number"), epochs.groupby("number")
    found = runs[SETTING].first()
    found = found.assign(epochs=runs.size(), **steady[["images_per_second", "seconds"]].median())
    sums = steady[["seconds", "data_seconds", "exposed_seconds"]].sum(min_count=1)
    data, waits = (sums[name] / sums["seconds"] for name in ("data_seconds", "exposed_seconds"))
    found = found.assign(data=data, compute=(1 - data - waits).clip(lower=0), communication=waits)
    reached = {number: time_to_accuracy(rows, target) for number, rows in runs}
    found["to_target"] = pd.Series(reached, dtype=float)
    took = epochs["seconds"] + epochs["test_seconds"].fillna(0)
    held = pd.to_numeric(found["job_seconds"]).fillna(took.groupby(epochs["number"]).sum())
    return found.assign(device_hours=found["world_size"] * held / 3600).reset_index(drop=True)


def check_comparable(runs: pd.DataFrame) -> None:
    """Stop unless these runs differ in the number of ranks, CPUs and repeats alone. Raises ScalingError."""
    if runs.empty:
        raise ScalingError("no finished run to compare: run some first, or look at the column `state` of the table")
    for what in ("machine", "dataset"):
        if len(names := sorted(map(str, runs[what].unique()))) > 1:
            raise ScalingError(f"runs on {' and on '.join(names)} in one comparison: keep one {what}")
    for scaling, batch in (("strong", "global_batch"), ("weak", "batch_size")):
        sizes = sorted(runs.loc[runs["scaling"] == scaling, batch].dropna().astype(int).unique())
        if len(sizes) > 1:
            raise ScalingError(f"{scaling} scaling with {batch} {' and '.join(map(str, sizes))}: keep one of them")


def speedup(per_run: pd.DataFrame) -> pd.DataFrame:
    """Speed-up and efficiency against the fewest ranks of the same scaling and CPUs per task, a row a setting.

    strong: the same global batch; weak: the same batch per rank. Over the repeats, images_per_second is the median,
    lowest and highest the extremes; the columns ending in _low and _high carry them on. Raises ScalingError if the
    runs are of two machines, datasets, or batch sizes.
    """
    check_comparable(per_run)
    keys = ["scaling", "cpus_per_task"]
    rates = per_run.groupby([*keys, "world_size"], dropna=False)
    found = rates["images_per_second"].agg(repeats="size", images_per_second="median", lowest="min", highest="max")
    found = found.join(rates[["seconds", *SHARES, "to_target", "device_hours"]].median()).reset_index()
    base = found.sort_values("world_size").groupby(keys, dropna=False)[["world_size", "images_per_second"]]
    base = base.transform("first")
    found["base"] = base["world_size"]
    for end, rate in (("", "images_per_second"), ("_low", "lowest"), ("_high", "highest")):
        found[f"speedup{end}"] = found[rate] / base["images_per_second"]
        found[f"efficiency{end}"] = found[f"speedup{end}"] * found["base"] / found["world_size"]
    return found.assign(unit=unit(per_run), where=where(per_run))


def unit(runs: pd.DataFrame) -> str:
    """What one rank of these runs holds: a GPU, or, on CPUs, no more than a rank."""
    return "rank" if runs["machine"].astype(str).str.startswith("CPU").any() else "GPU"


def where(runs: pd.DataFrame) -> str:
    """The dataset and the machine, for a title."""
    return f"{' and '.join(map(str, runs['dataset'].unique()))} on {' and '.join(map(str, runs['machine'].unique()))}"


def many(count: int, unit: str) -> str:
    """A count with its unit, as in 1 GPU, 4 GPUs."""
    return f"{count} {unit}{'s' * (count != 1)}"


def recommend(speedups: pd.DataFrame, least: float = 0.8) -> str:
    """One sentence: how many GPUs to ask for, what the next step would give, and what both cost.

    It takes the fastest setting whose efficiency is at least `least`, among runs with the same global batch if there
    are any, since those train the same.
    """
    rows = speedups[speedups["scaling"] == "strong"] if "strong" in set(speedups["scaling"]) else speedups
    good = rows[(rows["efficiency"] >= least) | (rows["world_size"] == rows["base"])]
    best = good.loc[good["images_per_second"].idxmax()]
    same = rows["cpus_per_task"].eq(best["cpus_per_task"]) | rows["cpus_per_task"].isna()
    larger = rows[same & rows["scaling"].eq(best["scaling"]) & rows["world_size"].gt(best["world_size"])]
    base, name, said = many(best["base"], best["unit"]), best["unit"], ""
    if best["world_size"] == best["base"] and larger.empty:
        return f"Ask for {base}: no run used more, so measure the next size before asking for it ({cost(best)})."
    if best["world_size"] == best["base"]:
        said = f"no larger number reached {least:.0%} efficiency"
    else:
        said = f"{best['speedup']:.1f} times the speed of {base}, efficiency {best['efficiency']:.0%}"
    if larger.empty:
        said += f" ({cost(best)}); no run used more"
    else:
        more = larger.loc[larger["world_size"].idxmin()]
        gives = f"{more['speedup']:.1f} times, efficiency {more['efficiency']:.0%}"
        said += f" ({cost(best)}); the next step, {many(more['world_size'], name)}, gives {gives} ({cost(more)})"
    return f"Ask for {many(best['world_size'], name)}{beside(best)}: {said}."


def cost(row: pd.Series) -> str:
    """What a run of this setting cost."""
    return f"{row['device_hours']:.2g} {'GPU' if row['unit'] == 'GPU' else 'device'}-hours a run"


def beside(row: pd.Series) -> str:
    """The CPUs that this setting gave each rank, if that is known."""
    cpus = row["cpus_per_task"]
    return "" if pd.isna(cpus) else f" with {many(int(cpus), 'CPU')} each"
