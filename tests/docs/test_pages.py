"""README and docs/: what they say of notebooks, messages and commands is so."""

import ast
import json
import re
import shlex
import tomllib
from dataclasses import replace
from difflib import unified_diff
from functools import cache
from pathlib import Path

import nbformat
import yaml
from pages import GLOSSARY, HOLE, PAGES, README, SEEDS, TRAINERS, TROUBLE, assigned, contents, prose, rows, ways

from ddp_helpers import ROOT, __version__, cli
from ddp_helpers.rank import scripts
from ddp_helpers.upkeep import troubleshooting
from ddp_helpers.upkeep.front_page import NOTEBOOKS, course_map, front_page_text
from ddp_tools.explain.rules import load_rules

SEEN = "no-message-at-all"  # its rows quote no message of ours
PLACE = re.compile(r"\[(\d\d[a-z]?), ([^\]]+)\]\(\.\./(notebooks/[^)]+)\)")
SAID = tomllib.loads(Path(__file__).with_name("seeds_said.toml").read_text())
MISTAKES = "Published mistakes"
POINTS = {name: table for name, table in SAID.items() if name != MISTAKES}


def headings(number: str) -> set[str]:
    """The headings of a notebook, its title among them."""
    return {title.strip() for title in re.findall(r"^#+ +(.+)$", prose(number), re.M)}


def section(text: str, heading: str) -> str:
    """What stands below a heading, down to the next of its level or of a higher one; '' if the heading is not there."""
    kept, level, fenced = [], 0, False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        title = None if fenced else re.match(r"(#+) +(.+)", line)
        if level and title and len(title[1]) <= level:
            break
        if level:
            kept.append(line)
        elif title and title[2].strip() == heading:
            level = len(title[1])
    return "\n".join(kept)


# ---- the front page


def test_the_front_page_says_what_the_notebooks_say() -> None:
    assert front_page_text(README) == README, "run: python -m ddp_helpers.upkeep.front_page"
    boxes = dict(part.split(" needs ") for part in course_map(README).alt.split("; "))
    assert list(boxes) == list(NOTEBOOKS)
    assert boxes["01"] == "" and boxes["06"] == "02, 03, 04, 05" and boxes["17"] == "06, 07, 10"


def test_the_map_is_drawn_also_while_a_new_notebooks_last_cell_is_empty() -> None:
    empty = re.sub(r"(?m)^(\| \[17 .*\|) [^|]+ \|$", r"\1  |", README)
    assert course_map(empty).alt == course_map(README).alt.replace("17 needs 06, 07, 10", "17 needs ")


SHOWN = re.findall(r"^```diff\n(.*?)^```$", README, re.M | re.S)[0].splitlines()
SPIRALS = [(ROOT / "notebooks" / name).read_text() for name in ("spirals.py", "spirals_ddp.py")]


LEFT_OUT = {  # what README's sentence says stands in 06, and the words by which such a line is known
    "evaluation": ("test_", "right"),
    "dropout's seed": ("manual_seed(1 + rank)", "if rank == 0:"),
}


def unsaid(shown: list[str], before: str, after: str) -> list[str]:
    """The new lines that neither README's diff shows nor its sentence names; "how a process finds its rank and its GPU"
    stands, with imports and flags, above the data and between the flags and the group.
    """
    above = after[: after.index("def spirals(")]
    below = after[after.index("    parser = ") : after.index("    dist.init_process_group(")]
    named = {f"+{line}" for line in (above + below).splitlines()}
    words = tuple(word for words in LEFT_OUT.values() for word in words)
    changes = [*unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")][2:]
    new = [line for line in changes if line.startswith("+") and line not in named.union(shown)]
    return [line for line in new if not any(word in line for word in words)]


def test_readmes_diff_is_of_the_two_spirals_and_says_what_it_leaves_out() -> None:
    said = " ".join(README.split())
    assert all(part in said for part in (*LEFT_OUT, "how a process finds its rank and its GPU"))
    real = iter([*unified_diff(*(text.splitlines() for text in SPIRALS), n=1000, lineterm="")])
    assert all(line in real for line in SHOWN), "a line is not in the diff, or in another order"
    assert unsaid(SHOWN, *SPIRALS) == []
    for line in SHOWN:
        assert unsaid([other for other in SHOWN if other != line], *SPIRALS) == [line], "the control"


# ---- seeds and glossary: where a thing is taught

TABLES = {
    "mistakes": (SEEDS, ("what is published", "what is true, and how we know", "where")),
    "glossary": (GLOSSARY, ("word", "what it is", "where")),
}


def wrong_places(text: str, header: tuple[str, ...]) -> list[str]:
    """Rows with an empty cell, or whose last cell names no heading of the notebook that it links to."""
    problems = []
    for cells in rows(text, *header):
        place = PLACE.fullmatch(cells[-1]) if len(cells) == len(header) and all(cells) else None
        if not place:
            problems.append(f"no notebook or heading: {' | '.join(cells)}")
        elif NOTEBOOKS.get(place[1]) != ROOT / place[3] or place[2] not in headings(place[1]):
            problems.append(f"{place[1]} has no heading {place[2]}")
    return problems


def test_each_row_names_a_heading_that_is_there() -> None:
    for name, (text, header) in TABLES.items():
        assert wrong_places(text, header) == [], name
        first, *_ = rows(text, *header)
        _, heading, _ = PLACE.fullmatch(first[-1]).groups()
        assert wrong_places(text.replace(f", {heading}]", ", Of nobody]", 1), header), name  # the control


def plain(text: str) -> str:
    """A text in small letters, on one line, without marks of emphasis and code."""
    return " ".join(re.sub(r"[*`]", "", text).lower().split())


def taught(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """The notebook and heading of each published mistake, which the page names, and of each point, from the data."""
    places = {cells[0]: PLACE.fullmatch(cells[-1]).groups()[:2] for cells in rows(text, *TABLES["mistakes"][1])}
    there = {(MISTAKES, re.sub(r"^\*.*?:\* ", "", mistake)): place for mistake, place in places.items()}
    return there | {(name, point): place[:2] for name, table in POINTS.items() for point, place in table.items()}


def unsaid_points(text: str, said: dict[str, dict]) -> list[str]:
    """Rows without words that prove them, words without a row, and words that do not stand under the row's heading."""
    there = taught(text)
    proofs = {(name, point): words for name, table in said.items() for point, words in table.items()}
    problems = [f"no row, or no words: {', '.join(key)}" for key in there.keys() ^ proofs.keys()]
    for key in there.keys() & proofs.keys():
        number, heading = there[key]
        words = proofs[key] if key[0] == MISTAKES else proofs[key][-1]
        if plain(words) not in plain(section(contents(number), heading)):
            problems.append(f"{number}, {heading}: {words}")
    return problems


def test_each_point_of_the_seeds_and_each_mistake_stands_where_it_is_said_to_stand() -> None:
    assert unsaid_points(SEEDS, SAID) == []
    for name, table in POINTS.items():  # the controls: other words, of a point and of a mistake; a row that is gone
        [first, (number, heading, _)] = next(iter(table.items()))
        assert len(unsaid_points(SEEDS, SAID | {name: table | {first: [number, heading, "words of nobody"]}})) == 1
    first = next(iter(SAID[MISTAKES]))
    assert len(unsaid_points(SEEDS, SAID | {MISTAKES: SAID[MISTAKES] | {first: "words of nobody"}})) == 1
    [line] = [line for line in SEEDS.splitlines() if f" {first} |" in line]
    assert len(unsaid_points(SEEDS.replace(f"{line}\n", "", 1), SAID)) == 1
    assert len(unsaid_points(SEEDS.replace(f" {first} |", " Another |", 1), SAID)) == 2


def says(text: str, word: str) -> bool:
    """Whether a text has a word of the glossary, or words that begin with it; its brackets are left out."""
    stems, words = (re.findall(r"[a-z\d]+", part.lower()) for part in (re.sub(r" *\(.*\)", "", word), text))
    starts = range(len(words) - len(stems) + 1)
    return any(all(map(str.startswith, words[start:], stems)) for start in starts)


def unexplained(text: str) -> list[str]:
    """Words of the glossary that do not occur in the section in which they are said to be explained."""
    table = rows(text, *TABLES["glossary"][1])
    places = {word: PLACE.fullmatch(place).groups()[:2] for word, _, place in table}
    return [f"{word}: {', '.join(at)}" for word, at in places.items() if not says(section(prose(at[0]), at[1]), word)]


def test_each_word_of_the_glossary_occurs_where_it_is_said_to_be_explained() -> None:
    assert unexplained(GLOSSARY) == []
    [first, *_], *_ = rows(GLOSSARY, *TABLES["glossary"][1])
    assert len(unexplained(GLOSSARY.replace(f"| {first} |", "| zebra |", 1))) == 1  # the control


# ---- troubleshooting: every message is one that the source has


def modules() -> list[Path]:
    """The files of the package, in both houses."""
    return [path for house in ("ddp_helpers", "ddp_tools") for path in (ROOT / house).rglob("*.py")]


@cache
def messages() -> tuple[str, ...]:
    """All texts of the helpers, with a hole for each value, and the files that are not Python; 10 and 10b whole."""
    texts = []
    for path in sorted(modules()):
        tree = ast.parse(path.read_text())
        constants = assigned(tree.body)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for scope in (tree, *functions):
            names = constants | (assigned(ast.walk(scope)) if scope is not tree else {})
            for node in ast.walk(scope):
                if isinstance(node, ast.JoinedStr | ast.Constant):
                    texts += [text for text in ways(node, names) if text != HOLE]
    texts += [
        re.sub(r"\$\$?(\w+|[({][^)}]*[)}])", HOLE, (ROOT / name).read_text())
        for name in ("Makefile", "slurm/cluster", "slurm/job.sbatch.jinja", ".ci/packages")
    ]
    faults = [cell for number in ("10", "10b") for cell in nbformat.read(NOTEBOOKS[number], as_version=4).cells]
    return (*texts, "\n".join([cell.source + json.dumps(cell.get("outputs", "")) for cell in faults]))


def unknown_messages(text: str) -> list[str]:
    """Quoted messages that no source has, and rows that quote none."""
    problems = []
    for first, *_ in rows(text, "message", "cause", "fix"):
        quoted = re.findall(r"`([^`]+)`", first)
        if not any(len(re.sub(r"\W", "", quote)) > 10 for quote in quoted):
            problems.append(f"no message: {first}")
        for quote in quoted:
            pattern = re.compile("[^\n]*?".join(map(re.escape, quote.strip("…").split("…"))))
            if not any(pattern.search(source) for source in messages()):
                problems.append(quote)
    return problems


def test_every_quoted_message_is_in_the_source() -> None:
    """Those of all rules on what this course says, also of the rules that have no row on the page."""
    ours = [replace(rule, says_cure=False) for rule in load_rules() if not rule.who and rule.section != SEEN]
    text = troubleshooting.table(ours)
    assert unknown_messages(text) == [] and unknown_messages(TROUBLE) == []
    [message, *_], *_ = rows(text, "message", "cause", "fix")
    assert unknown_messages(text.replace(message, "`nobody says this`", 1))  # the control


# ---- commands and paths that the pages name


def commands() -> set[str]:
    """The names of the commands of ddp-course."""
    [subparsers] = [action for action in cli.make_parser()._actions if isinstance(action.choices, dict)]
    return set(subparsers.choices)


def wrong_names(text: str) -> list[str]:
    """Targets of make, commands, parameters of job.ipynb and files that are named in code, and not there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"```bash\n(.*?)```", text, re.S))
    made = re.findall(r"(?:^|&& )make (?:-\S+ \S+ )?([a-z-]+)\b", code, re.M)
    problems = [f"make {name}" for name in made if name not in targets]
    names = re.findall(r"(?<![\w/-])ddp-course ([\w-]+)", code)
    problems += [f"ddp-course {name}" for name in names if name not in commands()]
    for words in re.findall(r"papermill slurm/job\.ipynb .*", code):
        given = re.findall(r" -p (\w+) | -y \"(\w+):", words)
        problems += [name for pair in given if (name := "".join(pair)) not in parameters()]
    paths = re.findall(r"(?<![\w./-])((?:ddp_helpers|tests|slurm|docs|notebooks)/[\w./-]+\w)", code)
    meant = ("notebooks/NN", "slurm/sites/NAME", "slurm/sites/ours")  # names that stand for others
    return problems + [path for path in paths if not path.startswith(meant) and not list(ROOT.glob(f"{path}*"))]


@cache
def parameters() -> set[str]:
    """The names in the cell of slurm/job.ipynb that is tagged so."""
    cells = nbformat.read(ROOT / "slurm" / "job.ipynb", as_version=4).cells
    [cell] = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    return {*re.findall(r"^(\w+)\b.* = ", cell, re.M)}


def refused(text: str) -> list[str]:
    """Commands, within a sentence or in a block, that lack something, or give what cannot be given."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S))
    lines = re.findall(r"`(?:\.venv/bin/)?ddp-course ([^`\n]+)`", text) + re.findall(r"^ddp-course (.+)$", blocks, re.M)
    wrong = []
    for line in lines:
        words = shlex.split(line, comments=True)
        try:
            _, more = cli.make_parser().parse_known_args(words[: words.index("--")] if "--" in words else words)
            wrong += [line] if more else []
        except SystemExit:
            wrong.append(line)
    return wrong


def test_what_a_page_names_is_there_and_its_commands_are_whole() -> None:
    """Those in blocks, too, of which test_commands_of_pages types most."""
    pages = {path.stem: path.read_text() for path in PAGES}
    assert {name: wrong for name, text in pages.items() if (wrong := wrong_names(text) + refused(text))} == {}
    wrong = ["fits", "fits my.py:Net --inputs 1", "check-site"]  # the controls
    assert refused("".join(f"`ddp-course {line}`" for line in wrong)) == wrong
    assert refused("```bash\nddp-course data --folders x  # 5\n```\n") == ["data --folders x  # 5"]
    assert wrong_names("`ddp-course none my.py`") == ["ddp-course none"] and wrong_names("`make none`") == ["make none"]
    assert wrong_names('`papermill slurm/job.ipynb x -p node 2 -y "lr: 1"`') == ["node", "lr"]
    assert wrong_names("`docs/none.md`") == ["docs/none.md"]


def test_functions_of_scripts_that_a_message_names_are_there() -> None:
    texts = [path.read_text() for path in modules()]
    named = {name for text in texts for name in re.findall(r"(?<![\w./])scripts\.(?!md\b)([a-z]\w*)", text)}
    assert "write_script" in named  # the control: notebook 17's judge says it
    assert named <= {*dir(scripts)}


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == __version__ == citation["version"]
    assert citation["license"] == project["license"]
    assert re.search(rf"^## \[(Unreleased|{re.escape(__version__)})\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


# ---- the instructor's page

PLAN = "from", "what", "minutes"
NOT_HEADINGS = {"Predict", "Expect"}  # what else stands in italics there, with a capital letter


def unknown(number: str, text: str) -> list[str]:
    """What a text about a notebook sets in italics like a heading, and is none there."""
    named = re.findall(r"(?<![*\w])\*([A-Z\d][^*]*)\*(?!\*)", " ".join(text.split()))
    path = str(NOTEBOOKS[number].relative_to(ROOT))
    return [f"{number}: {name}" for name in named if name not in NOT_HEADINGS and not told(number, name, path)]


def test_the_plans_name_headings_of_the_notebooks() -> None:
    plan = [row for title in ("Two hours", "Half a day") for row in rows(section(TRAINERS, title), *PLAN)]
    about = [(what[:2], what) for _, what, _ in plan if re.match(r"\d\d: ", what)]
    assert about and [name for number, what in about for name in unknown(number, what)] == []
    assert unknown("02", "02: *Two processors*, exercise 1")  # the control


def test_the_instructors_notes_name_headings_of_each_notebook() -> None:
    _, *parts = re.split(r"^\*\*(\d\d[a-z]?)\*\* ", section(TRAINERS, "Instructor's notes"), flags=re.M)
    notes = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(notes) == list(NOTEBOOKS)
    assert [name for number, note in notes.items() for name in unknown(number, note)] == []
    assert unknown("02", notes["03"])  # the control


def test_each_answer_of_the_quiz_names_a_heading_that_is_there() -> None:
    text = section(TRAINERS, "The quiz")
    places = PLACE.findall(" ".join(text.split()))
    lost = [(number, heading) for number, heading, path in places if not told(number, heading, path)]
    assert lost == []
    number, _, path = places[0]
    assert not told(number, "Of nobody", path)  # the control


def told(number: str, heading: str, path: str) -> bool:
    """Whether the notebook at the path has this number, and a heading that begins so."""
    return NOTEBOOKS[number] == ROOT / path and any(
        name.replace("`", "").startswith(heading.replace("`", "")) for name in headings(number)
    )
