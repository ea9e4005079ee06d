"""Everything that a run needs to go on as if it had never stopped: gathered from all ranks, and put back."""

import hashlib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler
from torchvision.datasets import MNIST

from ddp_helpers.rank.checkpoint import CheckpointError, content_of, newest, unpack
from ddp_helpers.rank.chip import chip
from ddp_helpers.rank.topology import Topology, stop


def add_resume_flags(parser: ArgumentParser) -> ArgumentParser:
    """The flags of a script that can go on where it stopped; every rank calls it."""
    parser.add_argument("--checkpoint-every", type=int, help="steps from one checkpoint to the next; else each epoch")
    parser.add_argument(
        "--resume", default="auto", help="auto: from the run folder; the path of a checkpoint; or never"
    )
    next(action for action in parser._actions if action.dest == "run_dir").required = True
    return parser


class Rest(Sampler):
    """What is left of a sampler's epoch: its first `done` samples were trained on before the run was interrupted."""

    def __init__(self, whole: DistributedSampler) -> None:
        self.whole, self.done = whole, 0

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.whole)[self.done :])

    def __len__(self) -> int:
        return len(self.whole) - self.done

    def set_epoch(self, epoch: int) -> None:
        """As DistributedSampler has it."""
        self.whole.set_epoch(epoch)


@dataclass
class Progress:
    """How far a run is: the epoch it is in, and what it has of that already."""

    epoch: int = 1
    samples: int = 0  # of this epoch, over all ranks, in the epoch's order
    step: int = 0  # optimizer steps since the run began
    sums: list[float] = field(default_factory=lambda: [0.0] * 3)  # loss, correct, samples of this epoch, over all ranks
    took: float = 0.0  # seconds of training in this epoch, and of waiting for data
    waited: float = 0.0


def setting(args: Namespace, me: Topology, device: torch.device, data: MNIST) -> tuple[dict, dict]:
    """What must be the same for the run to go on, and what else for it to go on to the bit; every rank calls it."""
    content = hashlib.sha256(data.data.numpy()).hexdigest()[:16]
    needed = {name: vars(args)[name] for name in ("seed", "lr", "gamma", "precision")} | {"training images": content}
    exact = {"world_size": me.world_size, "batch_size": args.batch_size, "num_workers": args.num_workers}
    exact["compile"] = args.compile
    # NCCL may add up in another order where the ranks lie otherwise on the nodes.
    place = f"{chip(device)}, {torch.get_num_threads()} threads, node {me.node if device.type == 'cuda' else 'any'}"
    places = [place] * me.world_size
    dist.all_gather_object(places, place)
    return needed, exact | {"device": device.type, "places": places, "torch": str(torch.__version__)}


def random_state(device: torch.device) -> dict:
    """Where this rank's random numbers are, from which dropout draws."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: dict, device: torch.device) -> None:
    """Go on with random numbers from there."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def choose(resume: str, again: bool, folder: Path) -> dict:
    """The state to go on from, the same on all ranks; {} for none. Every rank calls it, rank 0 chooses.

    again: whether the run folder has had an attempt, whose own checkpoints in `folder` then come first. The bytes go to
    all ranks, so that all start from one file, and none needs to see rank 0's folder. Stops on all ranks if the file
    that was asked for is not whole.
    """
    said, content = "", b""
    if dist.get_rank() == 0:
        try:
            if resume == "auto" or again:
                content, refused = newest(folder)
                for line in refused:
                    print(line, flush=True)
            if not content and resume not in ("auto", "never"):
                content = content_of(Path(resume))
            if content:
                unpack(content)
        except (CheckpointError, OSError) as error:
            said = f"--resume {resume}: {error}"
    chosen = [said, content]
    dist.broadcast_object_list(chosen)
    if chosen[0]:
        stop(chosen[0])
    return unpack(chosen[1]) if chosen[1] else {}
