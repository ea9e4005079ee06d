"""What each recipe is worth in accuracy: plain arithmetic, the script's own defaults, a large batch; several seeds."""

from pathlib import Path

import pandas as pd

from ddp_helpers.notebook import launch, runs, scripts

# A script and its flags. A batch four times as large takes twice the learning rate, as the ladder's last rung does.
RECIPES = {
    "plain": ("mnist_single", ["--precision", "float32"]),
    "fast": ("mnist_fast", []),
    "large": ("mnist_fast", ["--batch-size", "256", "--lr", "2"]),
}
AFTER = (1, 3, 14)  # epochs


def train(data: Path, folder: Path, seeds: int) -> None:
    """Train each recipe with each seed, 14 epochs each; runs that are done stay. The learner's process calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(1, seeds + 1):
        for recipe, (name, flags) in RECIPES.items():
            run = folder / f"{recipe}-seed{seed}"
            if run.exists() and runs.read(run).state == "done":
                continue
            script = scripts.write(name, folder / f"{name}.py")
            arguments = ["--data", data, "--epochs", max(AFTER), "--seed", seed, "--run-dir", run, *flags]
            launch.run(script, *arguments, "--log-interval", 10**9, launcher="python", timeout=36_000)


def table(folder: Path) -> pd.DataFrame:
    """Test accuracy in per cent after 1, 3 and 14 epochs, as far as the runs are: mean and spread over the seeds.

    "difference" is a recipe's mean minus the plain one's, "error" its standard error: what chance alone explains.
    """
    epochs = runs.table(folder)
    epochs = epochs[epochs["epoch"].isin(AFTER)]
    score, recipe = 100 * epochs["test_accuracy"], epochs["run"].str.partition("-")[0].rename("recipe")
    found = score.groupby([epochs["epoch"].astype(int), recipe]).agg(["mean", "std", "count"]).unstack()
    mean, error = found["mean"], found["std"] / found["count"] ** 0.5
    for name in (others := mean.columns.drop("plain")):
        found["difference", name] = mean[name] - mean["plain"]
    for name in others:
        found["error", name] = (error[name] ** 2 + error["plain"] ** 2) ** 0.5
    return found


def accuracy(data: Path, folder: Path, seeds: int = 5) -> None:
    """Train what is missing, and print the table."""
    train(data, folder, seeds)
    print(table(folder).to_string(float_format="%.2f"))
