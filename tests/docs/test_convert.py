"""What docs/your-script.md says of converting a script is true: its diff, its proof, and each line in detail."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from changed_text import replaced
from real import LIMIT
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

from ddp_helpers import ROOT
from ddp_helpers.launch.forked_call import on_ranks
from ddp_helpers.launch.launchers import clean_environment
from ddp_helpers.rank.scripts import write_script
from ddp_tools.plan.find import kinds

PAGE = (ROOT / "docs" / "your-script.md").read_text()
NAMES = {"torch": torch, "dist": dist, "nn": nn, "F": F, "nullcontext": nullcontext}
NAMES |= {"DataLoader": DataLoader, "Subset": Subset}


def from_section(title: str) -> dict[str, Any]:
    """The names that the block of Python in a section makes."""
    text = PAGE[PAGE.index(f"# {title}\n") :]
    names = dict(NAMES)
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], names)
    return names


def sides_of_the_diff() -> tuple[str, str]:
    """The whole script before and after."""
    lines = re.search(r"```diff\n(.*?)```", PAGE, re.S)[1].splitlines(keepends=True)
    return tuple("".join(line[1:] or "\n" for line in lines if line[0] in signs) for signs in (" -\n", " +\n"))


def typed(folder: Path, commands: str) -> subprocess.CompletedProcess:
    """Type commands in a folder, as after `source .venv/bin/activate`, on CPUs."""
    env = clean_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-c", commands]
    return subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)


def commands_of(title: str) -> str:
    """The last block of commands of a section."""
    return re.findall(r"```bash\n(.*?)```", PAGE[PAGE.index(f"# {title}\n") :].partition("\n## ")[0], re.S)[-1]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's script, made plain and in float64 for the proof, and what it imports."""
    folder = tmp_path_factory.mktemp("desk")
    write_script("simple_ddp", folder / "ranks.py")
    plain = re.search(r"```python\n(def plain.*?)```", PAGE, re.S)[1]
    for_proof = [
        ("points = ", "torch.set_default_dtype(torch.float64)\npoints = "),
        ("model.to(device)\n", f"{plain}\nplain(model)\nmodel.to(device)\n"),
    ]
    before, after = sides_of_the_diff()
    (folder / "before.py").write_text(before)
    (folder / "as_it_stands.py").write_text(after)
    (folder / "train.py").write_text(proof := replaced(after, for_proof))
    wrong = proof.replace("args.batch_size // world_size", "args.batch_size")
    (folder / "wrong.py").write_text(wrong)
    return folder


def test_both_sides_of_the_diff_train(desk: Path) -> None:
    two = "torchrun --standalone --nproc-per-node 2 -- as_it_stands.py"
    for command in ("python before.py", two):
        ran = typed(desk, command)
        last = re.findall(r"epoch 2: (0\.\d+)", ran.stdout)
        assert ran.returncode == 0 and len(last) == 1 and float(last[0]) > 0.8, (command, ran)


def test_one_rank_and_two_agree_and_a_batch_of_each_rank_does_not(desk: Path) -> None:
    commands = commands_of("3 Prove")
    proof = typed(desk, commands)
    assert proof.returncode == 0 and "they agree up to rounding" in proof.stdout, proof
    control = typed(desk, commands.replace("train.py", "wrong.py"))
    assert control.returncode == 1 and "they DIFFER" in control.stdout, control


def test_the_audit_of_the_page_finds_nothing_wrong(desk: Path) -> None:
    audited = typed(desk, commands_of("4 Audit"))
    assert audited.returncode == 0 and "1-rank parity   ok" in audited.stdout, audited
    planned = typed(desk, "ddp-course plan before.py")
    assert planned.returncode == 1 and "a loader to train from" in planned.stdout


def test_plain_reaches_into_modules_of_a_library() -> None:
    plain = from_section("3 Prove")["plain"]
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.5)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)), layer, nn.Dropout(0.5))
    plain(model.train())
    assert isinstance(model[0][1], nn.GroupNorm) and model[2].p == 0
    x = torch.randn(4, 1, 8)
    assert layer(x).equal(layer(x)), "dropout is left"
    random = nn.TransformerEncoderLayer(8, 2, dropout=0.5)
    assert not random(x).equal(random(x)), "the control"


def test_a_draw_for_all_ranks_is_that_of_one_rank_dealt_out() -> None:
    places = from_section("A loader of your own")["places_of_step"]

    def draws() -> tuple[list, list]:
        shared, own = (torch.Generator().manual_seed(1) for _ in range(2))
        return places(shared, 100, 8).tolist(), torch.randint(100, (4,), generator=own).tolist()

    [(whole, _)] = on_ranks(1, draws, patience=LIMIT)
    (first, same), (second, same_again) = on_ranks(2, draws, patience=LIMIT)
    assert first + second == whole and first != second
    assert same == same_again  # the control: without it


def test_augmentation_depends_on_epoch_and_sample_alone() -> None:
    augmented = from_section("Augmentation, and a stop within an epoch")["Augmented"]
    points = TensorDataset(torch.zeros(6, 3), torch.zeros(6))
    dataset = augmented(points, lambda x: x + torch.rand(3))

    def epoch(number: int, workers: int, skip: int = 0) -> list:
        dataset.epoch = number
        part = Subset(dataset, range(skip, 6))
        return [x.tolist() for x, _ in DataLoader(part, 1, num_workers=workers)]

    whole = epoch(1, 0)
    assert epoch(1, 2, skip=4) == whole[4:] and epoch(2, 0) != whole
    state = torch.get_rng_state()
    dataset[0]
    assert torch.get_rng_state().equal(state), "the numbers of the training are others now"


def network(kind: torch.dtype = torch.float64) -> nn.Module:
    """A network, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(kind)


def test_micro_batches_of_two_ranks_make_the_step_of_one() -> None:
    names = from_section("Gradient accumulation")
    x, y = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 9, torch.arange(8) % 2

    def step() -> tuple[list, int]:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ddp_model = DDP(network())
        sent = []
        ddp_model.register_comm_hook(None, lambda _, bucket: sent.append(1) or averaging(bucket))
        pieces = [*zip(x.split(1), y.split(1), strict=True)][rank::world_size]
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.5)
        names["accumulated_step"](ddp_model, optimizer, pieces)
        return [weights.tolist() for weights in ddp_model.parameters()], len(sent)

    def averaging(bucket: dist.GradBucket) -> torch.futures.Future:
        tensor = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])

    [(one, _)] = on_ranks(1, step, patience=LIMIT)
    for weights, sent in on_ranks(2, step, patience=LIMIT):
        assert sent == 1, "DDP averages once, after the last"
        for tensor, expected in zip(weights, one, strict=True):
            assert torch.tensor(tensor).allclose(torch.tensor(expected), atol=1e-12)


def test_a_ratio_over_all_ranks_has_the_gradient_of_one_process() -> None:
    dice = from_section("A loss over unequal counts")["dice_loss"]
    data = torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, wanted = data[0], (data[1, :, :2] > 0.4).double()

    def gradients(loss_of: Any) -> list:
        part = slice(dist.get_rank(), None, dist.get_world_size())
        ddp_model = DDP(network())
        loss_of(ddp_model(x[part]).sigmoid(), wanted[part]).backward()
        return [weights.grad.flatten().tolist() for weights in ddp_model.parameters()]

    def own(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return 1 - 2 * (predicted * wanted).sum() / (predicted.sum() + wanted.sum())

    [one] = on_ranks(1, lambda: gradients(own), patience=LIMIT)
    for found, of_shares in on_ranks(2, lambda: (gradients(dice), gradients(own)), patience=LIMIT):
        for tensor, expected, mean in zip(found, one, of_shares, strict=True):
            assert tensor == pytest.approx(expected, abs=1e-12) and mean != pytest.approx(expected, abs=1e-12)


def test_the_test_counts_each_sample_once_on_any_number_of_ranks() -> None:
    test = from_section("The test")["test"]
    points = TensorDataset(torch.randn(101, 3, generator=torch.Generator().manual_seed(1)), torch.arange(101) % 2)
    model = network(torch.float32)
    scores = model(points.tensors[0])
    loss = F.cross_entropy(scores, points.tensors[1]).item()
    right = (scores.argmax(1) == points.tensors[1]).float().mean().item()
    for found in on_ranks(2, lambda: test(model, points, torch.device("cpu")), patience=LIMIT):
        assert found == pytest.approx((loss, right), abs=1e-6)
    mean_of_means = sum(F.cross_entropy(scores[rank::2], points.tensors[1][rank::2]).item() for rank in (0, 1)) / 2
    assert mean_of_means != pytest.approx(loss, abs=1e-6)  # the control


def test_each_cure_of_plan_leads_to_a_heading() -> None:
    for kind in kinds():
        page, _, anchor = kind.more.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.M) if anchor else []
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert (ROOT / "docs" / page).exists() and (not anchor or anchor in anchors), kind.more
