"""How long a learner waits for Slurm, and for the records of many runs."""

import io
import json
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from ddp_helpers.lessons.plot_the_scaling.figures import shares, speedup
from ddp_helpers.notebook import runs, scaling, scripts, slurm
from ddp_helpers.notebook.curves import curves
from ddp_helpers.rank.digits import write_digits


def submit_to_step(folder: Path) -> list[float]:
    """Seconds from submitting a job of 4 ranks on 2 nodes to its first training step; none without Slurm."""
    if not slurm.available():
        return []
    data, site, waited = write_digits(folder / "digits", train=3072, test=256), slurm.Site.load("local"), []
    arguments = (
        "--data",
        str(data),
        "--epochs",
        "1",
        "--log-interval",
        "1",
        "--run-dir",
        "{run_dir}",
        *site.script_args,
    )
    for number in range(3):
        run = folder / f"job{number}"
        job = slurm.Job("bench", ("mnist_ddp.py", *arguments), nodes=2, tasks_per_node=2, gpus_per_node=2)
        slurm.write(job, site, run)
        scripts.write("mnist_ddp", run / "mnist_ddp.py")
        begin = time.monotonic()
        with redirect_stdout(io.StringIO()):
            slurm.submit(run)
            while not any("1/12" in line for line in slurm.said(run, 0)) and time.monotonic() < begin + 120:
                time.sleep(0.05)
            waited.append(time.monotonic() - begin)
            slurm.watch(run)
    return waited


def records(folder: Path, count: int) -> Path:
    """A folder with so many run records of three epochs each."""
    target = folder / "records"
    if target.exists():
        return target
    for number in range(count):
        ranks, run = 2 ** (number % 3), target / f"run{number:04}"
        run.mkdir(parents=True)
        spec = {"batch_size": 256 // ranks, "global_batch_size": 256, "seed": number}
        where = [{"rank": rank, "node": 0, "host": "node", "device": "cpu", "chip": "a CPU"} for rank in range(ranks)]
        env = {"dataset": "digits", "launcher": "slurm", "world_size": ranks, "cpus_per_rank": 1, "ranks": where}
        for name, content in {"spec": spec, "env": env, "status": {"state": "done"}}.items():
            (run / f"{name}.json").write_text(json.dumps(content))
        took = {"seconds": 8 / ranks, "data_seconds": 0.1, "exposed_seconds": 0.1, "test_seconds": 0.5}
        took |= {"images_per_second": 1000 * ranks + number % 7, "train_samples": 8192, "test_samples": 2048}
        scores = {"train_loss": 0.5, "train_accuracy": 0.8, "test_loss": 0.4, "test_accuracy": 0.9}
        lines = [json.dumps({"epoch": epoch} | scores | took) for epoch in (1, 2, 3)]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return target


def timed(work: Callable[[], object]) -> list[float]:
    """Seconds that the work takes, three times."""
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return seconds


def collecting(folder: Path) -> list[float]:
    """Seconds to read the records as one table."""
    return timed(lambda: runs.table(folder))


def plotting(folder: Path) -> list[float]:
    """Seconds to draw them: the curves of every run, the speed-up, and where the time goes."""
    table = runs.table(folder)
    speedups = scaling.speedup(scaling.per_run(table))
    drawn = folder.with_suffix(".png")
    return timed(lambda: [figure.save(drawn) for figure in (curves(table), speedup(speedups), shares(speedups))])
