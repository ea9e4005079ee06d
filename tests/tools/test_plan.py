"""`plan` names the lines of a plain script that need a decision, and no other."""

import json
import re

import pytest

from ddp_helpers.cli import main
from ddp_tools.plan.find import kinds

# Each line that needs a decision ends with the kinds that it is of; a line without a mark is of none.
SCRIPT = """
import os, random, signal
import torch, torchvision, wandb
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, random_split
from sklearn.metrics import roc_auc_score
from tqdm import tqdm
from parts import Images, Net, draw

os.environ["CUDA_VISIBLE_DEVICES"] = "1"  #= which GPUs are seen
torch.manual_seed(0)  #= a seed
run_id = random.randint(0, 9999)  #= a random seed or name
device = torch.device("cuda")  #= a device by its name
dataset = torchvision.datasets.MNIST("data", download=True)  #= a download
train_set, val_set = random_split(dataset, [5, 5], generator=torch.Generator().manual_seed(0))  #= a random split
weighted = WeightedRandomSampler([1, 2], 2)  #= a sampler
train_batches = DataLoader(train_set, 32, shuffle=True)  #= a loader to train from
val_batches = DataLoader(val_set, 32)  #= a loader to test from, or in order
names = sorted(os.listdir("data"))
masks = os.listdir("masks")  #= an order that may differ by process
model = nn.DataParallel(Net().to(device))  #= several devices in one process
model.head.weight.requires_grad = False  #= frozen parameters
model = torch.compile(model)  #= torch.compile
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  #= the optimizer, and so a model to wrap
average = torch.optim.swa_utils.AveragedModel(model)  #= a moving average of the weights
steps = 3 * len(train_batches)  #= a count of batches
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)  #= a schedule of the learning rate
scaler = torch.amp.GradScaler("cuda")  #= mixed precision
writer = wandb.init(project="x")  #= a tracker
checkpoint = torch.load("last.pt")  #= files that are loaded
signal.signal(signal.SIGUSR1, print)  #= a signal, a wait, an error that is caught
best = 0.0

def evaluate():
    model.eval()  #= the test
    scores = []
    with torch.no_grad():  #= the test
        for x, y in val_batches:
            scores.append(model(x))  #= sums and lists of the test
    return roc_auc_score(scores)  #= a metric

for epoch in tqdm(range(3)):  #= prints
    total = 0.0
    for number, (x, y) in enumerate(train_batches):
        x, y = x.to(device), y.to(device)
        loss = nn.functional.nll_loss(model(x), y, reduction="sum")  #= a loss that is divided or summed by hand
        (loss / args.accumulate).backward()  #= gradient accumulation, the training step
        if number % 4 == 0:  #= gradient accumulation
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #= clipping
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()  #= sums of the training
    if (value := evaluate()) > best:  #= a decision: the best, the end
        best = value
        torch.save(model.state_dict(), "best.pt")  #= files that are written
for step in range(3):
    for piece in names:  #= gradient accumulation
        model(piece).backward()  #= the training step
    optimizer.step()
for start in range(0, 9, 3):  #= one long text, or rows cut by hand
    model(names[start : start + 3]).backward()  #= the training step
print(best)  #= prints
"""
PARTS = """
import random
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

class Images(Dataset):
    def __getitem__(self, index):
        return random.random()  #= random numbers in a dataset

class Stream(IterableDataset):  #= a stream
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)  #= BatchNorm
    def forward(self, x):
        return x + torch.randn(3)

def draw(data):
    flips = transforms.RandomCrop(3)  #= augmentation
    return data[torch.randint(len(data), (8,))]  #= samples drawn by hand

def nobody_calls_this():
    print(torch.load("x"))

if __name__ == "__main__":
    print(Net())
"""


def planned(folder, capsys, text=SCRIPT, parts=PARTS):
    """The plan of a script and a module beside it, as data, and its exit status."""
    (folder / "train.py").write_text(text)
    (folder / "parts.py").write_text(parts)
    status = main(["plan", str(folder / "train.py"), "--json"])
    return json.loads(capsys.readouterr().out), status


def marked(text):
    """The kinds with which a text's lines are marked, by line."""
    lines = enumerate(text.splitlines(), 1)
    return {(number, kind) for number, line in lines if "#= " in line for kind in split(line.partition("#= ")[2])}


def split(mark):
    """The kinds of a mark; some have a comma in their name."""
    names = sorted((kind.name for kind in kinds()), key=len, reverse=True)
    return re.findall("|".join(map(re.escape, names)), mark)


def test_it_names_each_line_that_needs_a_decision_and_no_other(tmp_path, capsys):
    plan, status = planned(tmp_path, capsys)
    for name, text in {"train.py": SCRIPT, "parts.py": PARTS}.items():
        found = {(each["line"], each["kind"]) for each in plan["decisions"] if each["file"] == name}
        assert found == marked(text), name
    assert status == 1 and plan["not looked at"] == []


def test_every_kind_is_among_these_lines():
    shown = {kind for text in (SCRIPT, PARTS) for _, kind in marked(text)}
    assert {kind.name for kind in kinds()} - shown == {"already for several ranks"}


@pytest.mark.parametrize(
    ("change", "unseen"),
    [
        ((".backward()", ".item()"), "no .backward()"),
        (("import torch, torchvision, wandb", "import lightning"), "train.py: lightning has its own training loop"),
        (("best = 0.0", 'exec(open("settings.py").read())'), "train.py:"),
    ],
)
def test_what_it_did_not_see_is_named_and_ends_with_4(tmp_path, capsys, change, unseen):
    plan, status = planned(tmp_path, capsys, SCRIPT.replace(*change))
    assert status == 4 and any(each.startswith(unseen) for each in plan["not looked at"])


def test_a_module_that_is_no_python_is_named(tmp_path, capsys):
    plan, status = planned(tmp_path, capsys, parts="print 'Python 2'")
    assert status == 4 and "parts.py: no Python 3 text" in plan["not looked at"]


def test_a_script_within_its_project_is_read_with_it(tmp_path, capsys):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "layers.py").write_text("from torch import nn\nnorm = nn.BatchNorm1d(4)\n")
    (scripts := tmp_path / "scripts").mkdir()
    plan, _ = planned(scripts, capsys, f"import net.layers\n{SCRIPT}")
    [norm] = [each for each in plan["decisions"] if each["file"].startswith("..")]
    assert (norm["file"], norm["kind"]) == ("../net/layers.py", "BatchNorm")


def test_the_plan_for_a_person_has_the_lines_below_their_kind(tmp_path, capsys):
    planned(tmp_path, capsys)
    assert main(["plan", str(tmp_path / "train.py")]) == 1
    said = capsys.readouterr().out
    assert "Step 6: batch\n  gradient accumulation\n    train.py:47            (loss / args.acc" in said
    assert "Nothing was run or changed" in said
