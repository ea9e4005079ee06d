"""What the steps of the first GPU run share: how they start programs, and what they note."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from ddp_helpers.rank.launchers import cpus_of_rank

PROGRAM = Path(sys.argv[0]).resolve()  # gpu_first_run.py, written out
HERE = PROGRAM.parent
COURSE = HERE.parents[1]  # where it stands in the course's slurm/scripts, as it is committed
if not (COURSE / "notebooks" / "spirals.py").exists():
    COURSE = HERE
SIMULATED = "SIMULATED_GPUS" in os.environ  # by `ddp-course gpus`
MNIST = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
COUNTER = itertools.count()


class Step:
    """What a step runs with: the flags, its folder, the number of ranks, their environment."""

    def __init__(self, args: Namespace, work: Path) -> None:
        self.args, self.work, self.data = args, work, Path(args.data)
        self.cpu, self.size = args.cpu, args.ranks
        share = max(1, cpus_of_rank() // max(2, self.size))
        self.env = {**os.environ, "OMP_NUM_THREADS": str(share)}
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        self.env |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        # So that time-outs end a minute sooner, and leave the recorders' files.
        self.env |= {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # its old name
            self.env[name] = str(work / "recorder_rank_")
        if args.gpus == 1:
            self.env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # two ranks share it, since NCCL 2.30

    def note(self, **facts: object) -> None:
        """Write down at once what was seen."""
        with (self.work / "notes").open("a") as file:
            print(json.dumps(facts, default=str), file=file, flush=True)

    def start(self, command: list, name: str, **env: object) -> subprocess.Popen:
        """Start a command, whose output goes to a file of this name."""
        said = (self.work / name).open("wb")
        words = {word: str(text) for word, text in env.items()}
        argv = list(map(str, command))
        return subprocess.Popen(argv, stdout=said, stderr=said, env=self.env | words, cwd=self.work)

    def run(self, *program: object, ranks: int = 0, grace: float = 15, **env: object) -> list:
        """Run Python with a program, or a program on several ranks, to its end.

        Returns of each rank its status, its seconds, and what it said; grace: as in `wait_for`.
        """
        command = [sys.executable, *program]
        self.note(command=f"{f'{ranks} ranks: ' if ranks else ''}{' '.join(map(str, command))}")
        # As long as the ranks live, a socket that is bound and does not listen keeps their port.
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": held.getsockname()[1]}
            if sys.platform != "linux":  # elsewhere nobody could listen beside it
                held.close()
            group |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            number = next(COUNTER)
            names = [f"said-{number}-{rank}" for rank in range(max(1, ranks))]
            begin, started = time.monotonic(), []
            for rank, name in enumerate(names):
                mine = group | {"RANK": rank, "LOCAL_RANK": rank} if ranks else {}
                started.append(self.start(command, name, **mine, **env))
            seconds = wait_for(started, begin, grace)
        texts = [(self.work / name).read_text(errors="replace") for name in names]
        for rank, text in enumerate(texts):
            print(f"---- {' '.join(map(str, program))}, rank {rank}\n{text}", flush=True)
        ended = zip(started, seconds, texts, strict=True)
        return [(each.returncode, took, text) for each, took, text in ended]

    def probe(self, name: str, *words: object, ranks: int = 0, **env: object) -> list:
        """Run one of PROBES as `run` runs a program."""
        return self.run(PROGRAM, "--probe", name, *words, ranks=ranks, **env)

    def torchrun(self, *program: object, restarts: int = 0) -> list:
        """Return the command of torchrun with all ranks; what it starts ends with it."""
        options = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={self.size}"]
        return ["-m", "torch.distributed.run", *options, f"--max-restarts={restarts}", *program]

    def small(self) -> Path:
        """Cut MNIST to its first 512 training and 256 test images."""
        target = self.work / "small"
        raw_file(target, "").parent.mkdir(parents=True, exist_ok=True)
        for name, most in zip(MNIST, (512, 512, 256, 256), strict=True):
            content = raw_file(self.data, name).read_bytes()
            head, size = (16, 28 * 28) if "images" in name else (8, 1)
            count = min(most, int.from_bytes(content[4:8], "big"))
            text = content[:4] + count.to_bytes(4, "big") + content[8:head]
            raw_file(target, name).write_bytes(text + content[head : head + count * size])
        return target


def wait_for(started: list[subprocess.Popen], begin: float, grace: float) -> list[float]:
    """Wait for ranks, and return when each ended, in seconds since `begin`.

    Once one has failed, the others have `grace` seconds; then they are killed.
    """
    seconds = dict.fromkeys(started, 0.0)
    patience = float("inf")
    while running := [each for each in started if not seconds[each]]:
        for each in running:
            if each.poll() is not None:
                seconds[each] = time.monotonic() - begin
                if each.returncode:
                    patience = min(patience, time.monotonic() + grace)
            elif time.monotonic() > patience:
                each.kill()
        time.sleep(0.02)
    return list(seconds.values())


def raw_file(data: Path, name: str) -> Path:
    """Return the path of one of MNIST's files."""
    return data / "MNIST" / "raw" / f"{name}-ubyte"


def found(ranks: list) -> dict[str, Any]:
    """Return what a probe told on its first rank; ends the step where it told nothing."""
    status, _, text = ranks[0]
    if not (told := re.findall(r"^SEEN (.*)$", text, re.M)):
        sys.exit(f"status {status}: {' '.join(text.splitlines()[-1:])}")
    return json.loads(told[-1])


def tell(**facts: object) -> None:
    """Print, in a probe, what its step reads by `found`."""
    print("SEEN", json.dumps(facts), flush=True)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the epochs of a run's record."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of two files of weights."""
    import torch

    both = [torch.load(path, map_location="cpu", weights_only=True) for path in (one, other)]
    return max((both[0][name] - both[1][name]).abs().max().item() for name in both[0])
