"""Train MNIST's network on one device at full speed: data held there, one CUDA graph per step.

python mnist_fast.py --data data --epochs 1 --bf16
"""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import Dataset
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

Step = Callable[[Tensor], dict[str, Tensor]]  # trains on the samples with these indices


def main() -> None:
    """Check the flags and the data, and train."""
    args = read_flags()
    train_set, test_set = datasets(args.data)
    device = pick_device(0, args.no_cuda)
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    here = {"local_rank": 0, "host": os.uname().nodename, "device": str(device)}
    here |= {"launcher": "single", "chip": chip or torch.cpu.get_capabilities().get("cpu_name")}
    claim(args.run_dir)
    begin_record(args, [here], train_set)
    try:
        train(args, device, train_set, test_set)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        write(args.run_dir, "status.json", {"state": "failed", "why": why})
        raise
    write(args.run_dir, "status.json", {"state": "done"})


def train(args: Namespace, device: torch.device, train_set: MNIST, test_set: MNIST) -> None:
    """Train for args.epochs epochs, and test after each."""
    images, labels = hold_on_device(train_set, device)
    test_images, test_labels = hold_on_device(test_set, device)
    torch.manual_seed(args.seed)
    model = FastNet().to(memory_format=torch.channels_last).to(device)
    on_gpu = device.type == "cuda"
    # A CUDA graph needs the learning rate on the device: a number would be recorded as a constant.
    lr = torch.tensor(args.lr, device=device) if on_gpu else args.lr
    optimizer = optim.Adadelta(model.parameters(), lr=lr, capturable=on_gpu)
    schedule = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    order = torch.Generator(device).manual_seed(args.seed)

    def step(indices: Tensor) -> dict[str, Tensor]:
        loss, sums = measure_batch(model, images[indices], labels[indices], args.bf16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return sums

    take_step = as_graph(step, args.batch_size, device) if on_gpu else step
    for epoch in range(1, args.epochs + 1):
        begin = time.perf_counter()
        model.train()
        batches = torch.randperm(len(labels), generator=order, device=device).split(args.batch_size)
        trained = sum_up(map(take_step, batches[:1] if args.dry_run else batches))
        middle = time.perf_counter()
        model.eval()
        with torch.no_grad():
            parts = zip(test_images.split(1000), test_labels.split(1000), strict=True)
            tested = sum_up(measure_batch(model, *part, args.bf16)[1] for part in parts)
        schedule.step()
        seconds = {"seconds": middle - begin, "test_seconds": time.perf_counter() - middle}
        report(args.run_dir, epoch, trained, tested, seconds)
    if args.save_model:
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        torch.save(weights, content := BytesIO())  # in memory first: it does not report a full disk
        ((args.run_dir or Path()) / "mnist_cnn.pt").write_bytes(content.getbuffer())


def read_flags() -> Namespace:
    """Read the command line; stop if it cannot be used."""
    parser = ArgumentParser(usage="%(prog)s [flags]; --help lists them", allow_abbrev=False)
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="folder of the data")
    add("--run-dir", type=Path, help="new folder for the record of the run")
    add("--epochs", type=int, default=14, help="passes over the training set")
    add("--batch-size", type=int, default=64, help="samples in a step")
    add("--lr", type=float, default=1.0, help="learning rate")
    add("--gamma", type=float, default=0.7, help="factor of it after each epoch")
    add("--seed", type=int, default=1, help="of the first weights, the order and the dropout")
    add("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    add("--no-cuda", action="store_true", help="use the CPU although there is a GPU")
    add("--dry-run", action="store_true", help="take one step of training in each epoch")
    add("--save-model", action="store_true", help="write the weights to mnist_cnn.pt")
    args = parser.parse_args()
    record = ("spec.json", "metrics.jsonl")
    if args.run_dir and any((args.run_dir / name).exists() for name in record):
        parser.error(f"--run-dir {args.run_dir} holds a run: choose a new folder")
    return args


def hold_on_device(data: MNIST, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hold all images on the device, normalised once, [n, 1, 28, 28], and all labels, [n]."""
    images = data.data.to(device).float().div_(255).sub_(0.1307).div_(0.3081).unsqueeze(1)
    return images.contiguous(memory_format=torch.channels_last), data.targets.to(device)


def measure_batch(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    bf16: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a batch's mean loss, and the sums of its samples; nothing is copied from the CPU."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        scores = model(images)
        loss = F.cross_entropy(scores, labels)
    samples = torch.full_like(loss, len(labels), dtype=torch.float64)
    right = (scores.argmax(dim=1) == labels).sum()
    return loss, {"loss": loss.detach() * samples, "accuracy": right, "samples": samples}


def sum_up(parts: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Add up by name; wait for the GPU, and stop if the loss is not finite."""
    sums: dict[str, Tensor] = {}
    for part in parts:  # new tensors: a CUDA graph overwrites its own
        sums = {name: sums.get(name, 0) + value for name, value in part.items()}
    if not sums["loss"].isfinite():
        sys.exit(f"the loss is {sums['loss'].item()}: check the data, or lower --lr")
    return {name: value.item() for name, value in sums.items()}


def as_graph(step: Step, size: int, device: torch.device) -> Step:
    """Return a step that is recorded as a CUDA graph, and replayed with one launch.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture

    Its first three batches of this size are trained on in a side stream, as a warm-up; the fourth
    is recorded. A batch of a different size is trained on without the graph.
    """
    warm_ups, stream, graph = 3, torch.cuda.Stream(), torch.cuda.CUDAGraph()
    batch, sums = torch.zeros(size, dtype=torch.int64, device=device), {}

    def take_step(indices: Tensor) -> dict[str, Tensor]:
        nonlocal warm_ups
        if len(indices) != size:
            return step(indices)  # the last, smaller batch
        if warm_ups:
            warm_ups -= 1
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                measured = step(indices)
            torch.cuda.current_stream().wait_stream(stream)
            return measured
        if not sums:
            with torch.cuda.graph(graph):  # this computes nothing
                sums.update(step(batch))
        batch.copy_(indices)
        graph.replay()
        return sums

    return take_step


class MaskedScale(torch.autograd.Function):
    """x times a mask; the gradient has the mask's memory order, as a convolution needs it."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor) -> Tensor:
        """Compute the product."""
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        """Compute the gradient of x, and none of the mask."""
        (mask,) = ctx.saved_tensors
        return mask * gradient, None


class Dropout(nn.Dropout):
    """nn.Dropout; on a CPU it draws a random byte for each number, in an eighth of a float's time.

    p is exact if it is a multiple of 1/256, as in this network.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Set a fraction p of x to zero, and scale the rest up; evaluation keeps all."""
        if not self.training or x.device.type != "cpu":
            return super().forward(x)
        integers = torch.empty(-(-x.numel() // 8), dtype=torch.int64)  # eight bytes each
        random_bytes = integers.random_(-(2**63), None).view(torch.uint8)[: x.numel()]
        keep = random_bytes >= round(256 * self.p)
        keep = keep.as_strided(x.size(), x.stride())  # in the order of x's memory
        return MaskedScale.apply(x, keep.to(x.dtype).div_(1 - self.p))


class FastNet(nn.Module):
    """The network of mnist_ddp.py, with the same weights and scores, and less work.

    Dropout is cheaper, and ReLU has a quarter of the numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = Dropout(0.25), Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Score the ten digits for each image: [n, 1, 28, 28] give [n, 10]."""
        x = F.relu(self.conv1(x))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))  # equal to pooling after ReLU
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return self.fc2(self.dropout2(x))


def datasets(folder: Path) -> tuple[Dataset, Dataset]:  # YOUR DATA
    """Open a training and a test set: the same on every rank, and prepared before the run."""
    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    try:
        train_set, test_set = MNIST(folder, True, transform), MNIST(folder, False, transform)
        if any(len(each.data) != len(each.targets) for each in (train_set, test_set)):
            raise ValueError("not as many labels as images")  # torchvision does not compare them
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        sys.exit(f"--data {folder} holds no complete MNIST ({error}): get it once, before the run")
    made_here = (folder / "MNIST/raw/MD5SUMS").exists()  # the course's digits, in MNIST's format
    train_set.name = "digits" if made_here else "MNIST"  # for the record
    return train_set, test_set


def pick_device(local_rank: int, no_cuda: bool = False) -> torch.device:
    """Claim the GPU of this local rank, or the only one that it sees; the CPU if none can be used.

    Every rank calls it. Stops if there are fewer GPUs than ranks, or the given ones cannot be used.
    """
    count = 0 if no_cuda else torch.cuda.device_count()  # includes GPUs that CUDA cannot use
    given = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("SLURM_JOB_GPUS", ""))
    # The only one may be this rank's own, as with --gpus-per-task=1; torchrun's ranks all see it.
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    may_take_it = count == 1 and (may_share or "TORCHELASTIC_RUN_ID" not in os.environ)
    if count and local_rank >= count and not may_take_it:
        cure = f"start {count} on a node, or give --no-cuda"
        sys.exit(f"local rank {local_rank} has no GPU ({count} here): {cure}")
    device = torch.device("cuda", min(local_rank, count - 1)) if count else torch.device("cpu")
    why = f"torch {torch.__version__} sees none"
    try:
        if count:
            # The older of torch's two NCCL classes: it overlaps communication with computing.
            os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
            torch.cuda.set_device(device)
            torch.zeros(1, device=device).add_(1)  # too old a driver or GPU raises here
            return device
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    if given not in ("", "-1", "NoDevFiles") and not no_cuda:
        sys.exit(f"GPU {given} is given, but {why}: see nvidia-smi, or give --no-cuda")
    if count:
        print(f"the CPU is used, and not the GPU: {why}", file=sys.stderr, flush=True)
    return torch.device("cpu")


def claim(folder: Path | None) -> None:
    """Make the folder of the record, if there is one: only rank 0 has it."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").touch(exist_ok=False)  # only one of two runs gets the folder


def begin_record(args: Namespace, ranks: list[dict], train_set: Dataset) -> None:
    """Record in args.run_dir, if there is one, the settings and where the ranks run."""
    env = {"launcher": ranks[0]["launcher"], "world_size": len(ranks), "ranks": ranks}
    env |= {"job_id": os.environ.get("SLURM_JOB_ID"), "global_batch_size": args.batch_size}
    env |= {"dataset": getattr(train_set, "name", type(train_set).__name__)}
    env |= {"train_set": len(train_set), "torch": torch.__version__}
    write(args.run_dir, "spec.json", vars(args))
    write(args.run_dir, "env.json", env)
    write(args.run_dir, "status.json", {"state": "running"})


def write(folder: Path | None, name: str, content: dict) -> None:
    """Write a file of the record, if there is one: only rank 0 has its folder."""
    if folder:
        (folder / name).write_text(json.dumps(content, indent=1, default=str))


def report(folder: Path | None, epoch: int, trained: dict, tested: dict, seconds: dict) -> None:
    """Print an epoch's means over all samples, and add them to metrics.jsonl; rank 0 calls it."""
    line = {"epoch": epoch, **seconds}
    line["images_per_second"] = trained["samples"] / seconds["seconds"]
    for part, sums in {"train": trained, "test": tested}.items():
        line[f"{part}_samples"] = samples = sums["samples"]
        means = {name: total / samples for name, total in sums.items() if name != "samples"}
        line |= {f"{part}_{name}": mean for name, mean in means.items()}
    scores = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
    print(f"epoch {epoch}: test {scores}; {line['images_per_second']:,.0f} images/s", flush=True)
    if folder:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
