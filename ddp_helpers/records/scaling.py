"""What a scaling study says, from the table of runs.table: speed-up with its spread, where the time goes, the cost."""

import numpy as np
import pandas as pd

from ddp_helpers import PlainError

DONE = "done"
SETTING = ["run", "dataset", "train_set", "machine", "site", "job_id", "launcher", "world_size", "nodes"]
SETTING += ["cpus_per_task", "batch_per_rank", "global_batch", "scaling", "asked", "seed", "job_seconds"]
MEASURED = ["epoch", "images_per_second", "seconds", "data_seconds", "test_seconds", "test_loss", "test_accuracy"]
# What the course's records count and time; any other number of an epoch is a metric.
COUNTED = {"state", "number", "train_samples", "test_samples", "exposed_seconds", *SETTING, *MEASURED}
COUNTED -= {"test_loss", "test_accuracy"}
STILL = {"running": "running or killed", "unknown": "of unknown end"}


class ScalingError(PlainError, ValueError):
    """Runs that cannot be compared; one line with what was found, and what to do."""


def finished(table: pd.DataFrame) -> pd.DataFrame:
    """The epochs of the runs that ended well, with `number`, which counts the runs of the table from 0."""
    table = numbered(table)
    table = table[(table["state"] == DONE) & table[["epoch", "world_size"]].notna().all(axis=1)]
    return table.astype({"epoch": int, "world_size": int, **dict.fromkeys(MEASURED[1:], float)})


def numbered(table: pd.DataFrame) -> pd.DataFrame:
    """The table with all columns that are used here, and the number of each run; a name may stand in two folders."""
    columns = dict.fromkeys(["state", *SETTING, *MEASURED, *table.columns])
    table = table.reindex(columns=list(columns)).fillna({"asked": ""})
    return table.assign(number=table.groupby(SETTING, dropna=False, sort=False).ngroup())


def metrics(table: pd.DataFrame) -> list[str]:
    """The columns that say how well a run learns, loss and accuracy first.

    These are the numbers of its epochs, but for what COUNTED names, and for a training metric that the test has, too.
    """
    flags = {flag.partition("=")[0] for asked in table["asked"].dropna().unique() for flag in asked.split(", ")}
    numbers = table.select_dtypes("number").dropna(axis=1, how="all").columns
    names = [name for name in numbers if name not in COUNTED | flags]
    tested = {name.removeprefix(start) for name in names for start in ("test_", "val_") if name.startswith(start)}
    names = [name for name in names if not (name.startswith("train_") and name.removeprefix("train_") in tested)]
    return sorted(names, key=lambda name: (not name.endswith("loss"), not name.endswith("accuracy"), name))


def left_out(table: pd.DataFrame) -> str:
    """For a caption: how many runs are in no fit and no median, and why; '' if none."""
    table, used = numbered(table).drop_duplicates("number"), finished(table)["number"]
    states = table.loc[~table["number"].isin(used), "state"].replace(STILL | {DONE: "without an epoch"})
    told = ", ".join(f"{count} {state}" for state, count in states.value_counts().items())
    return f"{many(len(states), 'run')} left out: {told}" if told else ""


def lacks(table: pd.DataFrame) -> str:
    """Say in a line what keeps runs from being a scaling study of three sizes or more; '' if nothing does."""
    done = finished(table)
    if done.empty:
        return "no run there has finished"
    if len(asked := sorted(done["asked"].unique())) > 1:
        return f"they were asked for different things ({' and '.join(asked)}); give each a folder of its own"
    for name in ("images_per_second", "seconds"):
        if done[name].isna().any():
            return f"there are epochs without {name}"
    cpus = done["cpus_per_task"].fillna(0)
    strong = done[(done["scaling"] == "strong") & (cpus == cpus.min())]
    if strong["global_batch"].isna().any():
        return "there are runs without a global batch: batch_size in spec.json, or global_batch_size in env.json"
    if (sizes := strong["world_size"].nunique()) < 3:
        return f"{many(sizes, 'number')} of ranks with the same global batch and CPUs for each: three are needed"
    return ""


def time_to_accuracy(table: pd.DataFrame, target: float) -> float | None:
    """Seconds of training and test until one run first reached a test accuracy (0 to 1); None if it never did.

    table: the rows of that run alone. Its start-up is not in it.
    """
    reached = np.flatnonzero(table["test_accuracy"].to_numpy() >= target)
    took = np.cumsum(np.nan_to_num(table["seconds"].to_numpy() + np.nan_to_num(table["test_seconds"].to_numpy())))
    return float(took[reached[0]]) if len(reached) else None


def per_run(table: pd.DataFrame, target: float = 0.95) -> pd.DataFrame:
    """One row a finished run: its setting, its speed, where its time went, and its cost.

    images_per_second and seconds are those of the median epoch. The first epoch is not in it if there are others:
    it also pays for what is done once, such as choosing kernels and making buffers. data: the share of the
    training time that waited for data, 0 to 1. accuracy: the best of the test, if recorded. to_target: seconds to
    the target accuracy. device_hours: GPUs (or ranks) held, times the hours of the job, or of its epochs where no
    job is recorded.
    """
    epochs = finished(table).dropna(subset="images_per_second")
    once = epochs.groupby("number").cumcount().eq(0) & epochs.groupby("number")["epoch"].transform("size").gt(1)
    steady, runs = epochs[~once].groupby("number"), epochs.groupby("number")
    found = runs[SETTING].first().assign(epochs=runs.size(), **steady[["images_per_second", "seconds"]].median())
    sums = steady[["seconds", "data_seconds"]].sum(min_count=1)
    found["data"] = sums["data_seconds"] / sums["seconds"]
    found["accuracy"] = runs["test_accuracy"].max()
    found["to_target"] = pd.Series({number: time_to_accuracy(rows, target) for number, rows in runs}, dtype=float)
    took = epochs["seconds"] + epochs["test_seconds"].fillna(0)
    held = pd.to_numeric(found["job_seconds"]).fillna(took.groupby(epochs["number"]).sum())
    return found.assign(device_hours=found["world_size"] * held / 3600).reset_index(drop=True)


def check_comparable(runs: pd.DataFrame) -> None:
    """Stop unless these runs differ in the number of ranks, CPUs and repeats alone. Raises ScalingError."""
    if runs.empty:
        raise ScalingError("no finished run to compare: run some first, or look at the column `state` of the table")
    strong = runs["scaling"] == "strong"
    same = [("machine", runs), ("site", runs.dropna(subset=["site"])), ("dataset", runs), ("asked", runs)]
    same.append(("train_set", runs.dropna(subset=["train_set"])))
    same += [("global_batch", runs[strong]), ("batch_per_rank", runs[~strong])]
    for what, rows in same:
        if len(found := sorted({str(one).removesuffix(".0") for one in rows[what]})) > 1:
            raise ScalingError(f"runs of more than one {what} compared ({' and '.join(found)}): keep one of them")


def speedup(per_run: pd.DataFrame) -> pd.DataFrame:
    """Speed-up and efficiency against the fewest ranks of the same scaling and CPUs per task, a row a setting.

    strong: the same global batch; weak: the same batch per rank. Over the repeats, images_per_second is the median,
    lowest and highest the extremes; the columns ending in _low and _high carry them on. Raises ScalingError if the
    runs are of two machines, sites, datasets or batch sizes, or were asked for something else with two values.
    """
    check_comparable(per_run)
    keys = ["scaling", "cpus_per_task"]
    rates = per_run.groupby([*keys, "world_size"], dropna=False)  # sorted, so the fewest ranks come first
    found = rates["images_per_second"].agg(repeats="size", images_per_second="median", lowest="min", highest="max")
    found = found.join(rates[["seconds", "data", "device_hours"]].median()).reset_index()
    base = found.groupby(keys, dropna=False)[["world_size", "images_per_second"]].transform("first")
    found["base"] = base["world_size"]
    for end, rate in (("", "images_per_second"), ("_low", "lowest"), ("_high", "highest")):
        found[f"speedup{end}"] = found[rate] / base["images_per_second"]
        found[f"efficiency{end}"] = found[f"speedup{end}"] * found["base"] / found["world_size"]
    return found.assign(unit=unit(per_run), where=where(per_run))


def unit(runs: pd.DataFrame) -> str:
    """Name the unit of these runs: GPU, or rank on CPUs and where no machine is recorded."""
    return "rank" if runs["machine"].fillna("CPU").astype(str).str.startswith("CPU").any() else "GPU"


def where(runs: pd.DataFrame) -> str:
    """The dataset and the machine, for a title."""
    data, machine = (" and ".join(map(str, runs[name].dropna().unique())) for name in ("dataset", "machine"))
    return f"{data or 'unnamed data'} on {machine or 'an unnamed machine'}"


def many(count: int, unit: str) -> str:
    """A count with its unit, as in 1 GPU, 4 GPUs."""
    return f"{count} {unit}{'' if count == 1 else 's'}"
