"""What the pages quote of PyTorch and NCCL is in the installed files, what ran on CPUs is so."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from faults.ranks import run
from pages import DOCS, PAGES, prose, rows

from ddp_helpers.upkeep.front_page import NOTEBOOKS
from ddp_tools.explain.rules import load_rules

PACKAGES = Path(find_spec("torch").origin).parents[1]
GPUS = (DOCS / "gpus.md").read_text()
OF_GPUS = ("torch/lib/libtorch_cuda.so", "torch/lib/libc10_cuda.so", "nvidia/nccl/lib/libnccl.so.2")


@cache
def words(library: str) -> bytes:
    """The bytes of an installed file."""
    return (PACKAGES / library).read_bytes()


def quotes(text: str) -> list[tuple[str, str]]:
    """Each quoted line of a page's tables, which one of the files for GPUs has."""
    table = [line for line, _ in rows(text, "its line", "what it means")]
    return [(quote, "") for line in table for quote in re.findall(r"`([^`]+)`", line)]


def quotes_of_rules() -> list[tuple[str, str]]:
    """Each quoted message of others that `explain` knows, and the file that has it, for some since a torch."""
    theirs = [rule for rule in load_rules() if rule.who]
    return [(quote, rule.who) for rule in theirs for quote in re.findall(r"`([^`]+)`", rule.message)]


def unsaid(quoted: list[tuple[str, str]]) -> list[str]:
    """Quotes of which a piece, between one … and the next, is not in the file that is named."""
    lost = []
    for quote, place in quoted:
        library, _, since = place.partition(" since ")
        files = [library] if library else OF_GPUS
        pieces = [piece.strip().encode() for piece in quote.split("…")]
        assert re.search(r"\w{4}", quote), f"too little to look up: {quote}"
        if not all((PACKAGES / name).exists() for name in files) or (since and torch.__version__ < since):
            continue  # a torch for CPUs has neither CUDA nor NCCL beside it
        if not any(all(piece in words(name) for piece in pieces) for name in files):
            lost.append(quote)
    return lost


def test_the_libraries_have_the_lines_of_the_page_for_gpus() -> None:
    assert unsaid(quotes(GPUS) + quotes_of_rules()) == []
    changed = [(quote.replace(" dump", " jump"), place) for quote, place in quotes(GPUS) if "Received a dump" in quote]
    assert len(unsaid(changed)) == 1, "the control"


def test_what_pages_quote_of_nccl_is_in_the_tables_that_are_looked_up() -> None:
    marks = "Multiple Ranks", "No backend type", "Watchdog caught"
    known = {quote.partition("…")[0].strip() for quote, _ in quotes(GPUS) + quotes_of_rules()}
    texts = [*(path.read_text() for path in PAGES), *map(prose, NOTEBOOKS)]
    spans = [span for text in texts for span in re.findall(r"`([^`\n]+)`", text)]
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


def test_ddp_around_a_compiled_model_cuts_its_graph_and_keeps_the_plain_names(tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(COMPILED)
    ended = run(tmp_path / "compiled.py", size=1, folder=tmp_path)
    names = ("module.a.weight", "module._orig_mod.a.weight", "_orig_mod.module.a.weight")
    assert re.findall("^.*(?:True|False)$", ended.said[0], re.M) == [f"{name} True" for name in names], ended.said
