"""Find the lines of a one-device script that need a decision before several ranks run it.

The command `plan` calls it with source texts: nothing is imported or run, and torch is not needed.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

# Of "dataset", "model", "training", "evaluation", "print"; "label": the value of a seed or name;
# "precision": the arguments of autocast; "sorted": the arguments of sorted(); "micro-batches": a
# loop over the micro-batches of a step.
Places = frozenset[str]

_NO_GRADIENT = re.compile(r"no_grad|inference_mode")
_PRINT = re.compile(
    r"(^|\.)(print|info|debug|tqdm|progress_bar|set_postfix|set_description|format)$"
)
_TEST, _TRAIN = re.compile(r"(^|[^a-z])(te?st|val|eval|dev)", re.I), re.compile("train", re.I)
_LOSS, _SUM = re.compile(r"loss|nll|^ce$", re.I), re.compile(r"\.sum\(\)")
_STEPS = re.compile(r"(opt\w*|scaler)\.(step|zero_grad)\(")
_MICRO = re.compile(r"accum|micro", re.I)
# Expressions that count the terms of a loss, and the batches of an epoch.
_TERMS = re.compile(r"\.size\(0\)|\.shape\[0\]|^len\(|\.sum\(\)|\.numel\(\)|batch_?size|^n$|^bs$")
_BATCHES = re.compile(r"\blen\([^()]*(loader|batches|_dl|iter)\w*\)|// ?\(?[^()]*batch_?size", re.I)
_WRITES = re.compile(r"^['\"][wax]b?\+?['\"]$")
_GIVES_WEIGHTS = re.compile(r"\.parameters\(|_parameters\(|^params$|param_groups")
_LABEL = re.compile(r"seed|run_?id|run_?name|suffix", re.I)
_SIMPLE = ast.Assign | ast.AnnAssign | ast.Expr | ast.Return | ast.AugAssign
Simple: TypeAlias = _SIMPLE | None  # the simple statement that a node is part of


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of line that needs one decision; the head of kinds.toml explains the fields."""

    name: str
    step: str
    cure: str
    more: str
    calls: Sequence[str] = ()
    other: Sequence[str] = ()
    only_in: Sequence[str] = ()
    not_in: Sequence[str] = ()

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the start of a fact about such a line."""
        called = "|".join(self.calls)
        return re.compile("|".join([rf"call (.*\.)?({called})$"] * bool(called) + [*self.other]))


@dataclass(frozen=True)
class Found:
    """A line that needs a decision."""

    kind: Kind
    line: int


def kinds() -> list[Kind]:
    """Read all kinds, in the order of the plan."""
    text = Path(__file__).with_name("kinds.toml").read_text()
    return [Kind(**entry) for entry in tomllib.loads(text)["kind"]]


def find(tree: ast.AST, known: Sequence[Kind]) -> Iterator[Found]:
    """Yield each line of a file that is of a kind, once for each kind and statement."""
    patterns = [(kind, kind.pattern) for kind in known]
    seen = set()
    for node, statement, places in _with_places(tree, None, frozenset()):
        for fact in _facts(node, statement, places):
            for kind, pattern in patterns:
                here = places.isdisjoint(kind.not_in)
                here &= not kind.only_in or not places.isdisjoint(kind.only_in)
                found = Found(kind, getattr(statement or node, "lineno", 0))
                if here and found not in seen and pattern.match(fact):
                    seen.add(found)
                    yield found


def _with_places(
    node: ast.AST, statement: Simple, places: Places
) -> Iterator[tuple[ast.AST, Simple, Places]]:
    """Yield a node and all below it, each with its simple statement and its places."""
    places = _places_within(node, places)
    statement = node if isinstance(node, _SIMPLE) else statement
    yield node, statement, places
    for child in ast.iter_child_nodes(node):
        yield from _with_places(child, statement, places)


def _places_within(node: ast.AST, places: Places) -> Places:
    """Add to the places of a node the ones that it creates for its children."""
    if isinstance(node, ast.ClassDef):
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        places |= {"dataset"} if methods & {"__getitem__", "__call__"} else set()
        places |= {"model"} if "forward" in methods else set()
    elif isinstance(node, ast.FunctionDef | ast.With | ast.For | ast.While):
        text = ast.unparse(node)
        if ".backward(" in text:
            if not isinstance(node, ast.For | ast.While):
                return places
            # Within a loop that steps, one that does not adds up gradients.
            adds_up = "training" in places and not _STEPS.search(text)
            return places | {"training"} | ({"micro-batches"} if adds_up else set())
        tests = bool(_NO_GRADIENT.search(text.partition(":\n")[0])) or (
            isinstance(node, ast.FunctionDef)
            and bool(re.search(r"\.eval\(\)", text) or _NO_GRADIENT.search(text))
        )
        if tests and not places & {"model", "dataset"}:
            return places - {"training"} | {"evaluation"}
    elif isinstance(node, ast.Call):
        places |= {"print"} if _PRINT.search(name := ast.unparse(node.func)) else set()
        places |= {"sorted"} if name == "sorted" else set()
        places |= {"precision"} if re.search(r"autocast$|GradScaler$", name) else set()
    elif isinstance(node, ast.Assign) and _LABEL.search(ast.unparse(node.targets[0])):
        places |= {"label"}
    return places


def _facts(node: ast.AST, statement: Simple, places: Places) -> Iterator[str]:
    """Describe a node in the words of the patterns in kinds.toml."""
    match node:
        case ast.Call():
            yield from _facts_of_call(node, statement)
        case ast.keyword(arg=str(name)) if name != "device_type":
            yield f"keyword {name}={ast.unparse(node.value)}"
        case ast.Attribute() | ast.Name() if isinstance(node.ctx, ast.Load):
            yield f"name {ast.unparse(node)}"
        case ast.Constant(value=str(text)) if len(text) < 9:
            yield f"text {text}"
        case ast.Assign():
            yield from (f"set {ast.unparse(target)}" for target in node.targets)
            if (value := ast.unparse(node.value)).startswith("len(") and _BATCHES.search(value):
                yield "counts"
        case ast.AugAssign(op=ast.Add()):
            yield f"add {ast.unparse(node.target)} {ast.unparse(node.value)}"
        case ast.AugAssign(op=ast.Div()):
            yield from _facts_of_division(node.target, node.value, places)
        case ast.BinOp(op=ast.Div()):
            yield from _facts_of_division(node.left, node.right, places)
        case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()]):
            yield f"compare {ast.unparse(node)}"
        case ast.ClassDef():
            yield from (f"class {ast.unparse(base)}" for base in node.bases)
        case ast.For() if "training" in places and re.search(
            r"range\([^,]+,[^,]+,", ast.unparse(node.iter)
        ):
            yield "strides"
        case ast.For() if "micro-batches" in places:
            yield "accumulates"
        case ast.If() if "%" in ast.unparse(node.test) and "training" in places:
            body = "\n".join(map(ast.unparse, node.body))
            yield from ["accumulates"] * bool(_STEPS.search(body))
        case ast.ExceptHandler(type=ast.expr() as caught):
            yield f"except {ast.unparse(caught)}"
        case ast.With() | ast.FunctionDef() if "evaluation" in places:
            head = ast.unparse(node).partition(":\n")[0]
            yield from ["tests"] * bool(_NO_GRADIENT.search(head))
    if isinstance(node, ast.BinOp) and "print" not in places and _BATCHES.search(ast.unparse(node)):
        yield "counts"


def _role_of_loader(node: ast.Call, names: str) -> str:
    """Whether a loader is for training or a test: by its name, its dataset's name, or its order."""
    given = {each.arg or "**": ast.unparse(each.value) for each in node.keywords}
    for text in (names, ast.unparse(node.args[0]) if node.args else "", *given.values()):
        if bool(_TEST.search(text)) != bool(_TRAIN.search(text)):
            return "loader test" if _TEST.search(text) else "loader train"
    return "loader train" if given.get("shuffle", "False") != "False" else "loader test"


def _facts_of_call(node: ast.Call, statement: Simple) -> Iterator[str]:
    """Describe a call."""
    name = ast.unparse(node.func)
    yield f"call {name}"
    if re.search(r"(^|\.)DataLoader$", name):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        yield _role_of_loader(node, " ".join(map(ast.unparse, targets)))
    words = [ast.unparse(each) for each in [*node.args, *(each.value for each in node.keywords)]]
    if re.search(r"(^|\.)[A-Z]\w+$", name) and any(map(_GIVES_WEIGHTS.search, words)):
        yield "optimizer"
    if re.search(r"(^|\.)open$", name) and any(map(_WRITES.match, words)):
        yield "writes"


def _facts_of_division(left: ast.expr, right: ast.expr, places: Places) -> Iterator[str]:
    """Describe a division that makes a mean of a loss, or scales it for a micro-batch."""
    numerator, denominator = ast.unparse(left), ast.unparse(right)
    is_loss = _LOSS.search(numerator) or ("training" in places and _SUM.search(numerator))
    if places & {"evaluation", "print"} or not is_loss:
        return
    if _MICRO.search(denominator):
        yield "accumulates"
    elif _TERMS.search(denominator) and not _BATCHES.search(denominator):
        yield "divides"
