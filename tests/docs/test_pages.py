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
from pages import DOCS, GLOSSARY, HOLE, PAGES, README, SEEDS, TRAINERS, TROUBLE, assigned, contents, prose, rows, ways

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
ALL_POINTS = {"NYU": 47, "ALCF": 39, "Demo": 24, "How-to": 13, "Princeton": 20}  # so that none is lost


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
    for (name, (text, header)), least in zip(TABLES.items(), (46, 80), strict=True):
        assert wrong_places(text, header) == [], name
        [first, *others] = rows(text, *header)
        assert len(others) + 1 >= least, name
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
    assert {name: len(table) for name, table in POINTS.items()} == ALL_POINTS
    for name, table in POINTS.items():  # the controls: other words, of a point and of a mistake; a row that is gone
        [first, (number, heading, _)] = next(iter(table.items()))
        assert len(unsaid_points(SEEDS, SAID | {name: table | {first: [number, heading, "words of nobody"]}})) == 1
    first = next(iter(SAID[MISTAKES]))
    assert len(unsaid_points(SEEDS, SAID | {MISTAKES: SAID[MISTAKES] | {first: "words of nobody"}})) == 1
    [line] = [line for line in SEEDS.splitlines() if f" {first} |" in line]
    assert len(unsaid_points(SEEDS.replace(f"{line}\n", "", 1), SAID)) == 1
    assert len(unsaid_points(SEEDS.replace(f" {first} |", " Another |", 1), SAID)) == 2


def test_each_seed_has_points_and_mistakes() -> None:
    assert re.findall(r"^- \*\*([\w-]+)\*\*, ", SEEDS, re.M) == [*POINTS]
    cells = [row[0] for row in rows(*TABLES["mistakes"][:1], *TABLES["mistakes"][1])]
    blamed = {seed for cell in cells for seed in re.match(r"\*(.*?):\* ", cell)[1].split(", ")}
    assert blamed == {*POINTS, "PyTorch's tutorial series"}


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


def test_each_word_of_the_glossary_stands_there_once_and_occurs_where_it_is_said_to_be_explained() -> None:
    words = [row[0] for row in rows(GLOSSARY, *TABLES["glossary"][1])]
    assert len(words) == len(set(words)) and unexplained(GLOSSARY) == []
    assert len(unexplained(GLOSSARY.replace(f"| {words[0]} |", "| zebra |", 1))) == 1  # the control


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
    [message, *others] = [row[0] for row in rows(text, "message", "cause", "fix")]
    assert len(others) >= 60 and unknown_messages(text.replace(message, "`nobody says this`", 1))  # the control


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


def test_a_page_lists_the_packages_that_make_installs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    needs = re.findall(r"^(?:USED|TESTED) := (.*)|^.*packages (ensurepip:[^\s;]+)", makefile, re.M)
    packages = {name for pair in needs for need in "".join(pair).split() for name in need.split(":")[1].split(",")}
    listed = rows((DOCS / "platforms.md").read_text(), "for what", "Debian packages")
    named = [name for _, names in listed for name in re.findall(r"`([^`]+)`", names)]
    assert {*named} == packages and len(named) == len(packages) and {"munge", "chromium", "python3-venv"} < packages


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == __version__ == citation["version"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]
    assert re.search(rf"^## \[(Unreleased|{re.escape(__version__)})\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


# ---- the instructor's page

NOT_HEADINGS = {"Predict", "Expect"}  # what else stands in italics there, with a capital letter
NUMBERS = ["Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve"]
TIMES = {word: number for number, word in enumerate(NUMBERS, 2)} | {"Fifteen": 15, "Twenty": 20, "Thirty": 30}


def unknown(number: str, text: str) -> list[str]:
    """What a text about a notebook sets in italics like a heading, and is none there."""
    named = re.findall(r"(?<![*\w])\*([A-Z\d][^*]*)\*(?!\*)", " ".join(text.split()))
    path = str(NOTEBOOKS[number].relative_to(ROOT))
    return [f"{number}: {name}" for name in named if name not in NOT_HEADINGS and not told(number, name, path)]


def wrong_plan(plan: list[list[str]]) -> list[str]:
    """What is wrong with a plan: a sum, a heading, or a row that gives a room less time than a reader is told."""
    problems, ends = [], None
    for begins, what, given in plan:
        now = int(begins[:2]) * 60 + int(begins[3:])
        if ends not in (None, now):
            problems.append(f"{begins}: the row before ends at {ends // 60:02}:{ends % 60:02}")
        ends = now + int(given)
        if about := re.match(r"(\d\d[a-z]?): ", what):
            number = about[1]
            problems += unknown(number, what)
            needs = []
            for exercise in re.findall(r"exercise (\d)", what):
                asked = re.search(rf"^\*\*{exercise}\.\*\* \((\w+) minutes", prose(number), re.M)
                needs += [TIMES[asked[1]] if asked else 99]
            problems += [f"{begins}: {given} of {need} minutes" for need in needs if need > int(given)]
    return problems if plan[-1][1:] == ["End", "0"] else [*problems, "no end"]


def test_the_plans_add_up_and_name_headings_and_give_an_exercise_its_time() -> None:
    lengths = []
    for title in ("Two hours", "Half a day"):
        plan = rows(section(TRAINERS, title), "from", "what", "minutes")
        assert wrong_plan(plan) == [], title
        lengths.append(sum(int(minutes) for *_, minutes in plan))
    assert lengths == [120, 210]
    early = [["09:00", "02: *Two processes*", "10"], ["09:15", "End", "0"]]
    hasty = [["09:00", "02: *Two processors*, exercise 1", "2"], ["09:02", "End", "0"]]
    assert len(wrong_plan(early)) == 1 and len(wrong_plan(hasty)) == 2  # the controls


def test_the_instructors_notes_name_headings_of_each_notebook() -> None:
    _, *parts = re.split(r"^\*\*(\d\d[a-z]?)\*\* ", section(TRAINERS, "Instructor's notes"), flags=re.M)
    notes = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(notes) == list(NOTEBOOKS)
    assert [name for number, note in notes.items() for name in unknown(number, note)] == []
    assert all(re.search(r"[Ee]xpect", note) and "*" in note for note in notes.values())
    assert unknown("02", notes["03"])  # the control


def test_each_answer_of_the_quiz_names_a_heading_that_is_there() -> None:
    text = section(TRAINERS, "The quiz")
    places = PLACE.findall(" ".join(text.split()))
    lost = [(number, heading) for number, heading, path in places if not told(number, heading, path)]
    core = {number for number in NOTEBOOKS if number.startswith("0")}
    assert lost == [] and core <= {number for number, *_ in places}
    assert re.findall(r"^(\d+)\. ", text, re.M) == 2 * [str(number) for number in range(1, 16)]
    number, _, path = places[0]
    assert not told(number, "Of nobody", path)  # the control


def told(number: str, heading: str, path: str) -> bool:
    """Whether the notebook at the path has this number, and a heading that begins so."""
    return NOTEBOOKS[number] == ROOT / path and any(
        name.replace("`", "").startswith(heading.replace("`", "")) for name in headings(number)
    )
