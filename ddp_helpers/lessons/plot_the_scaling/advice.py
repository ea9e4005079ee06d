"""Write notebook 09's advice: how many GPUs to ask for, which runs it compares, which not.

The notebook calls `recommend` in its own process, on the tables of `records.scaling`.
"""

import math

import numpy as np
import pandas as pd

from ddp_helpers.records.scaling import counted, unit_of_price, unit_of_ranks

# Runs that differ in none of these repeat a job: on one rank strong and weak do.
EQUAL = ["cpus_per_task", "global_batch", "world_size"]


def recommend(speedups: pd.DataFrame, per_run: pd.DataFrame, least: float = 0.8) -> str:
    """Write how many GPUs to ask for, and why: lines of text.

    They say what more GPUs gave, which runs were compared, which setting of all is the fastest and
    which the cheapest, and which runs were left out. All numbers are medians of equal jobs.

    Compared are runs that differ in the number of ranks alone: of one scaling, strong if any is,
    and with the same CPUs for each rank. Of these, the advice is the fastest setting whose
    efficiency is at least `least` (0 to 1).

    speedups: what scaling.speedup gives; per_run: what scaling.per_run gives.
    """
    rows = _comparable(speedups)
    efficient = rows[(rows["efficiency"] >= least) | (rows["world_size"] == rows["base"])]
    best = efficient.loc[efficient["images_per_second"].idxmax()]
    larger = rows[rows["world_size"] > best["world_size"]]

    sentences = [f"Ask for {counted(best['world_size'], best['unit'])} ({_gain(best)})."]
    sentences += [_verdict(row, best, least) for _, row in larger.iterrows()]
    if larger.empty:
        advice = "measure the next size before you ask for it"
        sentences.append(f"No run like it used more, so {advice}.")

    lines = [" ".join(sentences), _compared(rows), _fastest_and_cheapest(per_run)]
    if others := _not_compared(speedups.drop(rows.index), best):
        lines.append(f"Not compared: {others}.")
    return "\n".join(lines)


def noise(per_run: pd.DataFrame) -> float:
    """Compute how far equal jobs lie apart in speed: 0.3 is 30 %; NaN if none is repeated."""
    rates = per_run.groupby(EQUAL, dropna=False)["images_per_second"]
    ratios = (rates.max() / rates.min())[rates.size() > 1]
    return float(ratios.max()) - 1 if len(ratios) else math.nan


def extremes(per_run: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the fastest settings and the cheapest, a row each, the best first.

    A row has the medians of the equal jobs of its setting, and its name. Rows behind the first are
    within the noise of it. Of the settings that reach the target in more than half of their runs,
    if any does; else the fastest is by the seconds of an epoch.
    """
    settings = _medians(per_run)
    reached = settings[np.isfinite(settings["to_target"])]
    rows, time = (settings, "seconds") if reached.empty else (reached, "to_target")
    apart = np.nan_to_num(noise(per_run))
    return _nearly_least(rows, time, apart), _nearly_least(rows, "device_hours", apart)


def _medians(per_run: pd.DataFrame) -> pd.DataFrame:
    """Return a row a setting: its name, and the medians of its equal jobs.

    A run that never reached the target took endlessly long to it.
    """
    unit = unit_of_ranks(per_run)
    rows = per_run.assign(to_target=per_run["to_target"].fillna(math.inf))
    groups = rows.groupby(EQUAL, dropna=False)
    medians = groups[["to_target", "seconds", "device_hours"]].median()
    names = [_name_setting(jobs, unit) for _, jobs in groups]
    return medians.assign(name=names).reset_index()


def _name_setting(jobs: pd.DataFrame, unit: str) -> str:
    """Name the setting of equal jobs: its scaling, unless it is both, its ranks, their CPUs."""
    scalings = jobs["scaling"].unique()
    first = jobs.iloc[0]
    size = f"{counted(first['world_size'], unit)}{_cpus(first)}"
    return f"{scalings[0]} on {size}" if len(scalings) == 1 else size


def _nearly_least(rows: pd.DataFrame, column: str, apart: float) -> pd.DataFrame:
    """Return the row that has least of a column, and those that have at most `apart` more."""
    rows = rows.sort_values(column)
    return rows[rows[column] <= rows[column].iloc[0] * (1 + apart)]


def _comparable(speedups: pd.DataFrame) -> pd.DataFrame:
    """Return the settings that differ in ranks alone.

    Of several numbers of CPUs, that with most sizes measured, then most runs, then the fastest.
    """
    strong = speedups[speedups["scaling"] == "strong"]
    rows = speedups if strong.empty else strong
    groups = [group for _, group in rows.groupby("cpus_per_task", dropna=False)]
    return max(groups, key=_weight)


def _weight(group: pd.DataFrame) -> tuple[int, int, float]:
    """Return what a group of settings is chosen by: its sizes, its runs, its images per second."""
    return len(group), group["repeats"].sum(), group["images_per_second"].max()


def _verdict(row: pd.Series, best: pd.Series, least: float) -> str:
    """Say why not this larger setting: it was no faster, or it is not efficient enough."""
    name = counted(row["world_size"], row["unit"])
    if row["images_per_second"] <= best["images_per_second"]:
        return f"{name} were no faster, for {_cost(row['device_hours'], row['price_unit'])}."
    return f"{name} gave {_gain(row)}: below your bar of {least:.0%}."


def _compared(rows: pd.DataFrame) -> str:
    """Name the runs that were compared, and the number of repeats of each size."""
    *fewer, most = rows["world_size"]
    first = rows.iloc[0]
    sizes = counted(most, first["unit"])
    if fewer:
        sizes = f"{', '.join(map(str, fewer))} and {sizes}"
    repeats = " and ".join(map(str, sorted(set(rows["repeats"]))))
    noun = "run" if repeats == "1" else "runs"
    return f"Compared: {first['scaling']} runs{_cpus(first)}, on {sizes}, {repeats} {noun} of each."


def _fastest_and_cheapest(per_run: pd.DataFrame) -> str:
    """Name the fastest and the cheapest settings, compared or not, by the medians of their runs."""
    unit, apart = unit_of_price(per_run), noise(per_run)
    fastest, cheapest = (_first_and_near(rows, unit, apart) for rows in extremes(per_run))
    return f"Of all settings the fastest is {fastest}; the cheapest is {cheapest}."


def _first_and_near(settings: pd.DataFrame, unit: str, apart: float) -> str:
    """Name the first setting, and those that lie within the noise of it."""
    first, *near = (_setting_with_cost(row, unit) for _, row in settings.iterrows())
    if not near:
        return first
    return f"{first}, but within the noise of {apart:.0%} it may be {' or '.join(near)}"


def _setting_with_cost(row: pd.Series, unit: str) -> str:
    """Name a setting, and in brackets its seconds to the target, if it reaches it, and its cost."""
    cost = _cost(row["device_hours"], unit)
    if not math.isfinite(row["to_target"]):
        return f"{row['name']} ({cost})"
    return f"{row['name']} ({row['to_target']:.3g} s to the target, {cost})"


def _not_compared(others: pd.DataFrame, best: pd.Series) -> str:
    """Name the runs that are in no comparison, and why; an empty text if there are none."""
    parts = []
    for (scaling, _), group in others.groupby(["scaling", "cpus_per_task"], dropna=False):
        reason = "more ranks train another model"
        if scaling == best["scaling"]:
            reason = "another base"
        runs = counted(int(group["repeats"].sum()), f"{scaling} run")
        parts.append(f"{runs}{_cpus(group.iloc[0])} ({reason})")
    return ", ".join(parts)


def _cpus(row: pd.Series) -> str:
    """Write the CPUs of each rank, as in ` with 2 CPUs a rank`; empty where no record has them."""
    if pd.isna(row["cpus_per_task"]):
        return ""
    return f" with {counted(int(row['cpus_per_task']), 'CPU')} a rank"


def _cost(hours: float, unit: str) -> str:
    """Write what a run held, in GPU-hours, or in GPU-seconds below a tenth of an hour.

    unit: GPU, or CPU or rank where there are none.
    """
    if hours >= 0.1:
        return f"{hours:,.2g} {unit}-hours a run"
    return f"{3600 * hours:.0f} {unit}-seconds a run"


def _gain(row: pd.Series) -> str:
    """Write a setting's speed-up over the fewest ranks, its efficiency and its cost."""
    cost = _cost(row["device_hours"], row["price_unit"])
    if row["world_size"] == row["base"]:
        return cost
    speed = f"{row['speedup']:.1f} times the speed of {counted(row['base'], row['unit'])}"
    return f"{speed}, efficiency {row['efficiency']:.0%}, {cost}"
