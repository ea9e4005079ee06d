"""Compute from a table of runs where the time goes, and the cost; name the hardware.

The table comes from `runs.table`; `alike` lists what runs have in common, `per_run` makes one row
per run, and `advice` recommends a number of ranks.
"""

import numpy as np
import pandas as pd

_DONE = "done"
_SETTING = [
    "run",
    "dataset",
    "train_set",
    "machine",
    "site",
    "job_id",
    "launcher",
    "world_size",
    "nodes",
    "cpus_per_rank",
    "batch_per_rank",
    "global_batch",
    "scaling",
    "asked",
    "seed",
    "job_seconds",
]
_TIMES = ["images_per_second", "seconds", "data_seconds", "test_seconds"]
_MEASURED = [*_TIMES, "test_loss", "test_accuracy"]
# Counts and times in the course's records; any other number of an epoch is a metric.
_NO_METRICS = {
    "state",
    "number",
    "train_samples",
    "test_samples",
    "exposed_seconds",
    "epoch",
    *_TIMES,
    *_SETTING,
}
# Names in captions for states in which a run is left out, if they differ from the state.
_LEFT_OUT = {
    "running": "running or killed",
    "unknown": "of unknown end",
    _DONE: "without an epoch",
}


def begun(table: pd.DataFrame) -> pd.DataFrame:
    """Return all epochs, including those of runs that still train, or have failed.

    The column `number` counts the runs of the table from 0.
    """
    table = _numbered(table)
    is_whole = table[["epoch", "world_size"]].notna().all(axis=1)
    types = {"epoch": int, "world_size": int, **dict.fromkeys(_MEASURED, float)}
    return table[is_whole].astype(types)


def finished(table: pd.DataFrame) -> pd.DataFrame:
    """Return the epochs of the runs that ended well, numbered as in `begun`."""
    epochs = begun(table)
    return epochs[epochs["state"] == _DONE]


def _numbered(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with all columns that are used here, and with the number of each run.

    A run's name does not identify it: two folders may have the same name.
    """
    columns = dict.fromkeys(["state", *_SETTING, "epoch", *_MEASURED, *table.columns])
    table = table.reindex(columns=list(columns)).fillna({"asked": ""})
    numbers = table.groupby(_SETTING, dropna=False, sort=False).ngroup()
    return table.assign(number=numbers)


def metrics(table: pd.DataFrame) -> list[str]:
    """List the columns that measure how well a run learns: losses first, then accuracies.

    These are all numbers of its epochs, except those in _NO_METRICS and the runs' settings, and a
    training metric that was also measured on the test set.
    """
    settings = set()
    for assignments in table["asked"].dropna().unique():
        settings |= {text.partition("=")[0] for text in assignments.split(", ")}
    numbers = table.select_dtypes("number").dropna(axis=1, how="all").columns
    names = [name for name in numbers if name not in _NO_METRICS | settings]
    tested = set()
    for name in names:
        if name.startswith(("test_", "val_")):
            tested.add(name.partition("_")[2])
    kept = []
    for name in names:
        data, _, metric = name.partition("_")
        if not (data == "train" and metric in tested):
            kept.append(name)
    kept.sort()
    kept.sort(key=lambda name: (not name.endswith("loss"), not name.endswith("accuracy")))
    return kept


def left_out(table: pd.DataFrame) -> str:
    """Describe for a caption how many runs are in no fit and no median, and why; '' if none."""
    runs = _numbered(table).drop_duplicates("number")
    others = runs[~runs["number"].isin(finished(table)["number"])]
    return f"{counted(len(others), 'run')} left out: {_states(others)}" if len(others) else ""


def not_done(table: pd.DataFrame) -> str:
    """Describe for a caption which runs are not done, and which have no epoch; '' if none."""
    runs = _numbered(table).drop_duplicates("number")
    has_epoch = runs["number"].isin(begun(table)["number"])
    drawn, without = runs[has_epoch & (runs["state"] != _DONE)], int((~has_epoch).sum())
    parts = [f"{counted(len(drawn), 'run')} not done: {_states(drawn)}"] * bool(len(drawn))
    parts += [f"{counted(without, 'run')} without an epoch left out"] * bool(without)
    return "; ".join(parts)


def _states(runs: pd.DataFrame) -> str:
    """Count the states of these runs, the most frequent first."""
    states = runs["state"].replace(_LEFT_OUT).value_counts()
    return ", ".join(f"{count} {state}" for state, count in states.items())


def _time_to_accuracy(table: pd.DataFrame, target: float) -> float | None:
    """Return the seconds until one run first reached a test accuracy; None if it never did.

    table: the rows of that run alone. target: 0 to 1. Counts training and test, not start-up.
    """
    reached = np.flatnonzero(table["test_accuracy"].to_numpy() >= target)
    test_seconds = np.nan_to_num(table["test_seconds"].to_numpy())
    epoch_seconds = np.nan_to_num(table["seconds"].to_numpy() + test_seconds)
    return float(np.cumsum(epoch_seconds)[reached[0]]) if len(reached) else None


def per_run(table: pd.DataFrame, target: float = 0.95) -> pd.DataFrame:
    """Return one row per finished run: its settings, its speed, where its time went, and its cost.

    images_per_second, seconds: of the median epoch. The first epoch is left out if there are
    others: it includes one-time work, such as choosing kernels and making buffers. data: the
    fraction of the training time that waited for data, 0 to 1. accuracy: the best test accuracy, 0
    to 1, if recorded. to_target: seconds to the target accuracy. device_hours: the devices of the
    job, in the unit of `unit_of_price`, times the hours of the job, or of its epochs if no job is
    recorded.
    """
    epochs = finished(table).dropna(subset="images_per_second")
    runs = epochs.groupby("number")
    is_first, has_others = runs.cumcount().eq(0), runs["epoch"].transform("size").gt(1)
    steady = epochs[~(is_first & has_others)].groupby("number")
    medians = steady[["images_per_second", "seconds"]].median()
    rows = runs[_SETTING].first().assign(epochs=runs.size(), **medians)
    sums = steady[["seconds", "data_seconds"]].sum(min_count=1)
    rows["data"] = sums["data_seconds"] / sums["seconds"]
    rows["accuracy"] = runs["test_accuracy"].max()
    times = {number: _time_to_accuracy(run, target) for number, run in runs}
    rows["to_target"] = pd.Series(times, dtype=float)
    epoch_seconds = epochs["seconds"] + epochs["test_seconds"].fillna(0)
    run_seconds = epoch_seconds.groupby(epochs["number"]).sum()
    held_seconds = pd.to_numeric(rows["job_seconds"]).fillna(run_seconds)
    devices = rows["world_size"]
    if unit_of_price(rows) == "CPU":
        devices = devices * rows["cpus_per_rank"].astype(float)
    rows["device_hours"] = devices * held_seconds / 3600
    return rows.reset_index(drop=True)


def alike(epochs: pd.DataFrame) -> str:
    """List what these runs have in common, one per line: all that affects speed except the ranks.

    Raises ValueError if they differ in one of them: such runs do not show the effect of ranks.
    """
    columns = {name: epochs[name] for name in ("machine", "site", "dataset", "train_set", "asked")}
    for kind, name in {"strong": "global_batch", "weak": "batch_per_rank"}.items():
        columns[f"{name}, {kind}"] = epochs.loc[epochs["scaling"] == kind, name]
    lines = []
    for name, column in columns.items():
        values = [str(value) for value in column.dropna().unique()]
        if len(values) > 1:
            raise ValueError(f"{name}: {' and '.join(values)}; keep the runs of one {name}")
        missing = "all the same" if name == "asked" else "not recorded"
        lines.append(f"{name}: {''.join(values) or missing}")
    return "\n".join(lines)


def advice(speeds: pd.Series, least: float) -> str:
    """Recommend a number of ranks: the fastest size whose efficiency is at least `least`.

    speeds: images per second of each run, by scaling, world_size, global_batch and run. Strong runs
    count, or weak ones if there are no others. The base is the median of all equal runs on the
    fewest ranks; runs are equal if ranks and global batch are, strong or weak. least: 0 to 1. The
    answer depends on the base alone: there is no answer if equal runs of the base differ by more
    than the limit, 1 / least - 1, or if the base ran only once.
    """
    equal = speeds.groupby(["world_size", "global_batch"], dropna=False)
    measures = {name: equal.transform(name) for name in ("median", "min", "max", "size")}
    kind = speeds.index.unique("scaling").sort_values()[0]
    sizes = pd.DataFrame(measures).loc[kind].groupby("world_size").first()
    fewest, base = sizes.index[0], sizes.iloc[0]
    apart = _percent(base["max"] / base["min"] - 1)
    if base["size"] == 1:
        return f"no answer: only one run of {counted(fewest, 'rank')}; repeat the base"
    if base["max"] / base["min"] * least > 1:
        bar = f"more than the {_percent(1 / least - 1)} that a bar of {_percent(least)} allows"
        return f"no answer: equal runs lie {apart} apart, {bar}; repeat the base"
    efficiency = sizes["median"] / base["median"] * fewest / sizes.index
    fastest = sizes["median"][efficiency >= least].idxmax()
    answer = f"ask for {fastest} of {counted(sizes.index[-1], 'rank')}, {kind}"
    bar = f"the fastest with an efficiency of at least {_percent(least)}"
    return f"{answer}: {bar} (equal runs of the base lie {apart} apart)"


def _percent(share: float) -> str:
    """Format a fraction in percent, as in 25 % or 5.3 %."""
    return f"{round(100 * share, 1):g} %"


def unit_of_ranks(runs: pd.DataFrame) -> str:
    """Name the device of a rank: GPU; rank on CPUs, or if no machine is recorded."""
    machines = runs["machine"].fillna("CPU").astype(str)
    return "rank" if machines.str.startswith("CPU").any() else "GPU"


def unit_of_price(runs: pd.DataFrame) -> str:
    """Name the unit that these jobs are billed for: GPU; on CPUs CPU, or rank if none is recorded.

    A rank on CPUs is billed for its `cpus_per_rank`.
    """
    unit = unit_of_ranks(runs)
    return "CPU" if unit == "rank" and runs["cpus_per_rank"].notna().all() else unit


def data_and_machine(runs: pd.DataFrame) -> str:
    """Name the dataset and the machine of these runs, for a title."""
    data = " and ".join(map(str, runs["dataset"].dropna().unique()))
    machine = " and ".join(map(str, runs["machine"].dropna().unique()))
    return f"{data or 'unnamed data'} on {machine or 'an unnamed machine'}"


def counted(count: int, unit: str) -> str:
    """Format a count with its unit, as in 1 GPU, 4 GPUs."""
    return f"{count} {unit}{'' if count == 1 else 's'}"
