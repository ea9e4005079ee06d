"""Show the records of runs in TensorBoard, each as a run of its folder's name.

python track_runs.py logs runs/first runs/second   # then: tensorboard --logdir logs
"""

import json
import sys
from pathlib import Path


def show(run: Path, logs: Path) -> None:
    """Write the numbers of metrics.jsonl, one line per epoch, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(logs / run.name)) as writer:
        for line in (run / "metrics.jsonl").read_text().splitlines():
            try:
                numbers = json.loads(line)
            except json.JSONDecodeError:  # a run that was killed may leave half a line
                break
            for name, value in numbers.items():
                if isinstance(value, int | float) and name != "epoch":
                    writer.add_scalar(name, value, numbers["epoch"])


def main(words: list[str]) -> None:
    """Show each run, if all can be shown."""
    if len(words) < 2:
        sys.exit("give a folder for TensorBoard, and runs: track_runs.py logs runs/first")
    logs, *runs = map(Path, words)
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            sys.exit(f"{run} has no metrics.jsonl: give the folder of a run")
        if (logs / run.name).exists():
            sys.exit(f"{logs / run.name} is there already: remove it, or give other logs")
    for run in runs:
        show(run, logs)
        print(f"wrote {logs / run.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
