"""How many GPUs to ask for, from the tables of scaling: the advice, what it rests on, and what is left out."""

import pandas as pd

from ddp_helpers.records.scaling import counted, unit_of_ranks


def recommend(speedups: pd.DataFrame, per_run: pd.DataFrame, least: float = 0.8) -> str:
    """How many GPUs to ask for, and what more of them gave; the runs compared; the cheapest and the fastest; the rest.

    It compares runs that differ in the number of ranks alone: of one scaling, strong if any is, and with the same CPUs
    for each rank. Of these it takes the fastest setting whose efficiency is at least `least`.
    """
    rows = comparable(speedups)
    good = rows[(rows["efficiency"] >= least) | (rows["world_size"] == rows["base"])]
    best = good.loc[good["images_per_second"].idxmax()]
    larger = rows[rows["world_size"] > best["world_size"]]
    told = [f"Ask for {counted(best['world_size'], best['unit'])} ({gain(best)})."]
    told += [verdict(row, best, least) for _, row in larger.iterrows()]
    if larger.empty:
        told.append("No run like it used more, so measure the next size before you ask for it.")
    lines = [" ".join(told), rests_on(rows), named(per_run)]
    if others := left_out(speedups.drop(rows.index), best):
        lines.append(f"Not compared: {others}.")
    return "\n".join(lines)


def comparable(speedups: pd.DataFrame) -> pd.DataFrame:
    """The settings that differ in ranks alone: the CPUs with most sizes measured, then most runs, then the fastest."""
    rows = speedups[speedups["scaling"] == "strong"] if "strong" in set(speedups["scaling"]) else speedups
    alike = [group for _, group in rows.groupby("cpus_per_task", dropna=False)]
    return max(alike, key=lambda one: (len(one), one["repeats"].sum(), one["images_per_second"].max()))


def verdict(row: pd.Series, best: pd.Series, least: float) -> str:
    """Why not this larger setting: it was no faster, or it is not efficient enough."""
    name = counted(row["world_size"], row["unit"])
    if row["images_per_second"] <= best["images_per_second"]:
        return f"{name} were no faster, for {cost(row['device_hours'], row['unit'])}."
    return f"{name} gave {gain(row)}: below your bar of {least:.0%}."


def rests_on(rows: pd.DataFrame) -> str:
    """Name the runs that were compared, and the number of repeats of each size."""
    *fewer, most = rows["world_size"]
    sizes = f"{', '.join(map(str, fewer))}{' and ' if fewer else ''}{counted(most, rows['unit'].iloc[0])}"
    counts = " and ".join(map(str, sorted(set(rows["repeats"]))))
    noun = "run" if counts == "1" else "runs"
    return f"Compared: {rows['scaling'].iloc[0]} runs{cpus(rows.iloc[0])}, on {sizes}, {counts} {noun} of each."


def extremes(per_run: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The fastest and the cheapest of all runs; of those that reached the target, if any did."""
    reached = per_run.dropna(subset=["to_target"])
    runs = per_run if reached.empty else reached
    fastest = runs["seconds"].idxmin() if reached.empty else runs["to_target"].idxmin()
    return runs.loc[fastest], runs.loc[runs["device_hours"].idxmin()]


def named(per_run: pd.DataFrame) -> str:
    """Name the fastest and the cheapest run, compared or not."""
    said = []
    for what, row in zip(("fastest", "cheapest"), extremes(per_run), strict=True):
        took = "" if pd.isna(row["to_target"]) else f"{row['to_target']:.3g} s to the target, "
        name = f"{row['scaling']} on {counted(row['world_size'], unit_of_ranks(per_run))}{cpus(row)}"
        said.append(f"the {what} was {name} ({took}{cost(row['device_hours'], unit_of_ranks(per_run))})")
    return f"Of all runs {', '.join(said)}."


def left_out(others: pd.DataFrame, best: pd.Series) -> str:
    """The runs that are in no comparison, and why; '' if there are none."""
    told = []
    for (scaling, _), group in others.groupby(["scaling", "cpus_per_task"], dropna=False):
        why = "another base" if scaling == best["scaling"] else "more ranks train another model"
        told.append(f"{counted(int(group['repeats'].sum()), f'{scaling} run')}{cpus(group.iloc[0])} ({why})")
    return ", ".join(told)


def cpus(row: pd.Series) -> str:
    """The CPUs of each rank, as in ` with 2 CPUs a rank`; '' where no record says."""
    return "" if pd.isna(row["cpus_per_task"]) else f" with {counted(int(row['cpus_per_task']), 'CPU')} a rank"


def cost(hours: float, unit: str) -> str:
    """What a run held, in GPU-hours, or in GPU-seconds where it is little."""
    return f"{hours:,.2g} {unit}-hours a run" if hours >= 0.1 else f"{3600 * hours:.0f} {unit}-seconds a run"


def gain(row: pd.Series) -> str:
    """Describe a setting's speed-up over the fewest ranks, its efficiency and its cost."""
    if row["world_size"] == row["base"]:
        return cost(row["device_hours"], row["unit"])
    speed = f"{row['speedup']:.1f} times the speed of {counted(row['base'], row['unit'])}"
    return f"{speed}, efficiency {row['efficiency']:.0%}, {cost(row['device_hours'], row['unit'])}"
