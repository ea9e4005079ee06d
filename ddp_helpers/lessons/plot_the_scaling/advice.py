"""Write notebook 09's advice: how many GPUs to ask for, which runs it compares, which not.

The notebook calls `recommend` in its own process, on the tables of `records.scaling`.
"""

import pandas as pd

from ddp_helpers.records.scaling import counted, unit_of_ranks


def recommend(speedups: pd.DataFrame, per_run: pd.DataFrame, least: float = 0.8) -> str:
    """Write how many GPUs to ask for, and why: lines of text.

    They say what more GPUs gave, which runs were compared, which run of all was the fastest and
    which the cheapest, and which runs were left out.

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


def extremes(per_run: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the fastest and the cheapest run; of those that reached the target, if any did."""
    reached = per_run.dropna(subset=["to_target"])
    runs, time = (per_run, "seconds") if reached.empty else (reached, "to_target")
    return runs.loc[runs[time].idxmin()], runs.loc[runs["device_hours"].idxmin()]


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
        return f"{name} were no faster, for {_cost(row['device_hours'], row['unit'])}."
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
    """Name the fastest and the cheapest run, compared or not."""
    fastest, cheapest = extremes(per_run)
    unit = unit_of_ranks(per_run)
    first = f"the fastest was {_run_with_cost(fastest, unit)}"
    return f"Of all runs {first}, the cheapest was {_run_with_cost(cheapest, unit)}."


def _run_with_cost(row: pd.Series, unit: str) -> str:
    """Name a run, and in brackets its seconds to the target, if it reached it, and its cost."""
    name = f"{row['scaling']} on {counted(row['world_size'], unit)}{_cpus(row)}"
    cost = _cost(row["device_hours"], unit)
    if pd.isna(row["to_target"]):
        return f"{name} ({cost})"
    return f"{name} ({row['to_target']:.3g} s to the target, {cost})"


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
    """Write what a run held, in GPU-hours, or in GPU-seconds below a tenth of an hour."""
    if hours >= 0.1:
        return f"{hours:,.2g} {unit}-hours a run"
    return f"{3600 * hours:.0f} {unit}-seconds a run"


def _gain(row: pd.Series) -> str:
    """Write a setting's speed-up over the fewest ranks, its efficiency and its cost."""
    cost = _cost(row["device_hours"], row["unit"])
    if row["world_size"] == row["base"]:
        return cost
    speed = f"{row['speedup']:.1f} times the speed of {counted(row['base'], row['unit'])}"
    return f"{speed}, efficiency {row['efficiency']:.0%}, {cost}"
