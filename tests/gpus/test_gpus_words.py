"""What the pages quote of PyTorch and NCCL is in the installed files, what ran on CPUs is so."""

import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from pages import DOCS, PAGES, TROUBLE, rows
from pages import prose as notebook_prose
from real import LIMIT

from ddp_helpers.upkeep.front_page import NOTEBOOKS

PACKAGES = Path(find_spec("torch").origin).parents[1]
GPUS = (DOCS / "gpus.md").read_text()


@cache
def words(library: str) -> bytes:
    """The bytes of an installed file."""
    return (PACKAGES / library).read_bytes()


def quotes(text: str) -> list[tuple[str, str]]:
    """Each quoted line of the tables, and the file that has it, for some since a release of torch."""
    table = rows(text, "its line", "who says it", "what it means")
    table += rows(text, "their message", "who says it", "cause", "cure")
    return [(quote, row[1]) for row in table for quote in re.findall(r"`([^`]+)`", row[0])]


def unsaid(text: str) -> list[str]:
    """Quotes of which a piece, between one … and the next, is not in the file that is named."""
    lost = []
    for quote, place in quotes(text):
        library, _, since = place.partition(" since ")
        pieces = [piece.strip().encode() for piece in quote.split("…")]
        assert re.search(r"\w{4}", quote), f"too little to look up: {quote}"
        if not (PACKAGES / library).exists() or (since and torch.__version__ < since):
            continue  # a torch for CPUs has neither CUDA nor NCCL beside it
        if not all(piece in words(library) for piece in pieces):
            lost.append(quote)
    return lost


def test_the_libraries_have_the_lines_of_the_page_for_gpus() -> None:
    assert len(quotes(GPUS)) >= 10 and len(quotes(TROUBLE)) >= 40
    assert unsaid(GPUS) == unsaid(TROUBLE) == []


@pytest.mark.parametrize(
    ("true", "false"),
    [("`Received a dump", "`Received a jump"), ("`Bootstrap: ", "`Bootstrip: "), ("`Process … has", "`Proxess … has")],
)
def test_a_line_that_nobody_says_is_noticed(true: str, false: str) -> None:
    lost = unsaid(GPUS.replace(true, false))
    assert all(quote.startswith(false[1:]) for quote in lost) and len(lost) == 1


OLD_CLAIMS = (
    r"cannot share a GPU|share one, and NCCL refuses\.",
    r"without a backend takes gloo",
    r"With a core to spare, or a GPU",
    r"Equal to the bit\.",
)


def prose() -> dict[str, str]:
    """Every page, and every notebook's text, by name."""
    pages = {path.name: path.read_text() for path in PAGES}
    return pages | {number: notebook_prose(number) for number in NOTEBOOKS}


def test_no_page_says_of_gpus_what_is_not_so() -> None:
    pairs = product(prose().items(), OLD_CLAIMS)
    assert [(name, claim) for (name, text), claim in pairs if re.search(claim, text)] == []


def test_what_pages_quote_of_nccl_is_in_the_tables_that_are_looked_up() -> None:
    marks = "Multiple Ranks", "No backend type", "Watchdog caught"
    known = {quote.partition("…")[0].strip() for quote, _ in quotes(GPUS + TROUBLE)}
    spans = [span for text in prose().values() for span in re.findall(r"`([^`\n]+)`", text)]
    quoted = [span for span in spans if span.startswith(marks)]
    same = {s for s in quoted for quote in known - {""} if s[: len(quote)] == quote[: len(s)]}
    assert set(quoted) == same and quoted


COMPILED = """
import torch, torch._dynamo.backends.distributed as cutter, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
cuts, cut = [], cutter.DDPOptimizer.compile_fn
cutter.DDPOptimizer.compile_fn = lambda *args: cuts.append(1) or cut(*args)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(self.a(x).relu())
def inside(net):
    net.compile(backend="eager")
    return DDP(net)
def before(net):
    return DDP(torch.compile(net, backend="eager"))
def after(net):
    return torch.compile(DDP(net), backend="eager")
for wrap in (inside, before, after):
    torch._dynamo.reset()
    cuts.clear()
    model = wrap(Net())
    model(torch.ones(2, 4)).sum().backward()
    print(next(iter(model.state_dict())), bool(cuts))
"""


def test_ddp_around_a_compiled_model_cuts_its_graph_and_keeps_the_plain_names() -> None:
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    names = ("module.a.weight", "module._orig_mod.a.weight", "_orig_mod.module.a.weight")
    assert done.stdout.splitlines() == [f"{name} True" for name in names]
