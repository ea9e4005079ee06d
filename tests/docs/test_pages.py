"""README and docs/: what they say of notebooks, messages and commands is so."""

import ast
import json
import re
import shlex
import tomllib
from difflib import unified_diff
from functools import cache
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import yaml
from pages import (
    DOCS,
    GLOSSARY,
    HOLE,
    PAGES,
    README,
    SEEDS,
    TRAINERS,
    TROUBLE,
    assigned,
    contents,
    prose,
    rows,
    ways,
)
from real import python

from ddp_helpers import ROOT, __version__, cli
from ddp_helpers.launch import scripts
from ddp_helpers.lessons.train_mnist_with_ddp.exercises import RANKS
from ddp_helpers.upkeep.front_page import (
    NOTEBOOKS,
    course_map,
    front_page_text,
    minutes,
)

LINK = re.compile(r"\[(\d\d[a-z]?)[^]]*\]\((?:\.\./)?(notebooks/[^)#]+)\)")


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


def test_the_map_of_the_course_has_each_notebook_with_what_it_needs() -> None:
    boxes = dict(part.split(" needs ") for part in course_map((ROOT / "README.md").read_text()).alt.split("; "))
    assert list(boxes) == list(NOTEBOOKS)
    assert boxes["01"] == "" and boxes["06"] == "02, 03, 04, 05" and boxes["17"] == "06, 07, 10"


def test_the_front_page_says_what_the_notebooks_and_the_records_say() -> None:
    assert front_page_text(README) == README, "run: python -m ddp_helpers.upkeep.front_page"


def test_readmes_diff_is_of_the_two_spirals() -> None:
    [shown] = re.findall(r"^```diff\n(.*?)^```$", README, re.M | re.S)
    before, after = ((ROOT / "notebooks" / name).read_text() for name in ("spirals.py", "spirals_ddp.py"))
    real = list(unified_diff(before.splitlines(), after.splitlines(), n=1000, lineterm=""))
    rest = iter(real)
    assert all(line in rest for line in shown.splitlines()), "a line is not in the diff, or in another order"
    assert {line for line in real if re.search(r"DDP\(|DistributedSampler\(|all_reduce\(", line)} <= {
        *shown.splitlines()
    }


# ---- seeds and glossary: where a thing is taught

TABLES = {
    "seeds": (SEEDS, ("point", "notebook", "heading", "there it says")),
    "mistakes": (SEEDS, ("seed", "it says", "but", "evidence", "notebook", "heading", "there it says")),
    "glossary": (GLOSSARY, ("word", "what it is", "notebook", "heading")),
}


def wrong_places(text: str, header: tuple[str, ...]) -> list[str]:
    """Rows with an empty cell, or whose heading is not in the notebook that they name."""
    problems = []
    for cells in rows(text, *header):
        row = dict(zip(header, cells, strict=False))
        link = LINK.fullmatch(row["notebook"]) if len(cells) == len(header) and all(cells) else None
        if not link:
            problems.append(f"no notebook or heading: {' | '.join(cells)}")
        elif NOTEBOOKS.get(link[1]) != ROOT / link[2] or row["heading"] not in headings(link[1]):
            problems.append(f"{link[1]} has no heading {row['heading']}")
    return problems


@pytest.mark.parametrize(("name", "least"), [("seeds", 130), ("mistakes", 35), ("glossary", 50)])
def test_each_row_names_a_heading_that_is_there(name: str, least: int) -> None:
    text, header = TABLES[name]
    assert wrong_places(text, header) == []
    assert len(rows(text, *header)) >= least


def plain(text: str) -> str:
    """A text in small letters, on one line, without marks of emphasis and code."""
    return " ".join(re.sub(r"[*`]", "", text).lower().split())


def unsaid_points(text: str, header: tuple[str, ...]) -> list[str]:
    """Rows whose quoted words do not stand under their heading, in a sentence or in code."""
    problems = []
    for *_, place, heading, words in rows(text, *header):
        number = LINK.match(place)[1]
        if plain(words) not in plain(section(contents(number), heading)):
            problems.append(f"{number}, {heading}: {words}")
    return problems


@pytest.mark.parametrize("name", ["seeds", "mistakes"])
def test_each_point_of_the_seeds_stands_where_the_page_says(name: str) -> None:
    text, header = TABLES[name]
    assert unsaid_points(text, header) == []
    wrong = rows(text, *header)[0][-1]
    assert len(unsaid_points(text.replace(f"| {wrong} |", "| words of nobody |", 1), header)) == 1


def test_each_seed_has_points_and_mistakes() -> None:
    seeds = re.findall(r"^- \*\*([\w-]+)\*\*:", SEEDS, re.M)
    assert len(seeds) == 5
    sections = dict(re.findall(r"^## (.+)\n([^#]*)", SEEDS, re.M))
    blamed = {seed for row in rows(*TABLES["mistakes"][:1], *TABLES["mistakes"][1]) for seed in row[0].split(", ")}
    for seed in seeds:
        assert rows(sections[seed], *TABLES["seeds"][1]) and seed in blamed


def test_a_word_stands_once_in_the_glossary() -> None:
    words = [row[0] for row in rows(GLOSSARY, *TABLES["glossary"][1])]
    assert len(words) == len(set(words))


def says(text: str, word: str) -> bool:
    """Whether a text has a word of the glossary, or words that begin with it; its brackets are left out."""
    stems, words = (re.findall(r"[a-z\d]+", part.lower()) for part in (re.sub(r" *\(.*\)", "", word), text))
    starts = range(len(words) - len(stems) + 1)
    return any(all(map(str.startswith, words[start:], stems)) for start in starts)


def unexplained(text: str) -> list[str]:
    """Words of the glossary that do not occur in the section in which they are said to be explained."""
    table = rows(text, *TABLES["glossary"][1])
    places = {word: (LINK.match(link)[1], heading) for word, _, link, heading in table}
    return [f"{word}: {', '.join(at)}" for word, at in places.items() if not says(section(prose(at[0]), at[1]), word)]


def test_each_word_occurs_where_it_is_said_to_be_explained() -> None:
    assert unexplained(GLOSSARY) == []


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
    for first, *_ in rows(text, "message", "cause", "cure"):
        quoted = re.findall(r"`([^`]+)`", first)
        if not any(len(re.sub(r"\W", "", quote)) > 10 for quote in quoted):
            problems.append(f"no message: {first}")
        for quote in quoted:
            pattern = re.compile("[^\n]*?".join(map(re.escape, quote.strip("…").split("…"))))
            if not any(pattern.search(source) for source in messages()):
                problems.append(quote)
    return problems


def test_every_quoted_message_is_in_the_source() -> None:
    assert unknown_messages(TROUBLE) == []
    assert len(rows(TROUBLE, "message", "cause", "cure")) >= 50


# ---- the trainer's page


def wrong_in_plans(text: str) -> list[str]:
    """Rows whose minutes are not their notebook's, or that do not begin where the one before them ends."""
    problems, plan = [], ("from", "what", "minutes")
    for section in re.split(r"^## ", text, flags=re.M):
        table = rows(section, *plan)
        for (start, what, length), (after, *_) in pairwise([*table, ["", "", ""]]):
            if (link := LINK.match(what)) and int(length.split()[-1]) != minutes(link[1]).reading:
                problems.append(f"{start} {what}: {length} minutes, but its Time line says {minutes(link[1])}")
            if after and clock(after) - clock(start) != int(length.split()[0]):
                problems.append(f"{start} {what}: {length} minutes, but the next is at {after}")
    return problems


def clock(text: str) -> int:
    hours, rest = text.split(":")
    return 60 * int(hours) + int(rest)


def minutes_to_read(number: str, until: str = "") -> float:
    """Compute how long a newcomer reads and runs a notebook as it stands with its outputs.

    until: words of the last cell that is read; all of them are, if it is empty. The rates were
    fitted to readers with a clock: 150 words of prose a minute, 500 characters of
    code, 1,500 of printed output; 0.7 minutes a figure, 0.5 a Predict.
    """
    total = 0.0
    for cell in nbformat.read(NOTEBOOKS[number], as_version=4).cells:
        if cell.cell_type == "markdown":
            total += len(cell.source.split()) / 150 + 0.5 * ("**Predict" in cell.source)
            if until and until in cell.source:
                return total
            continue
        total += len(cell.source) / 500
        for output in cell.outputs:
            data = output.get("data", {"text/plain": output.get("text", "")})
            total += 0.7 * ("<img " in data.get("text/html", ""))
            total += len(shown_text(data)) / 1500
    return total


COUNTS = {"Five": 5, "Ten": 10, "Fifteen": 15, "Twenty": 20, "Thirty": 30}


def minutes_of_exercises(number: str) -> int:
    """Add up what the exercises say that they take; ten minutes for one that does not say it."""
    cells = nbformat.read(NOTEBOOKS[number], as_version=4).cells
    said = [re.search(r"^\*\*\d\.\*\* \((\w+) minutes", cell.source, re.M) for cell in cells]
    times = [COUNTS[match[1]] for match in said if match]
    stubs = sum("raise NotImplementedError" in cell.source for cell in cells if cell.cell_type == "code")
    return sum(times) + 10 * (stubs - len(times))


def shown_text(data: dict[str, str]) -> str:
    """Return the text that an output shows: of a picture none, of what is folded its summary."""
    html = data.get("text/html", "")
    if "<img " in html:
        return ""
    if "<details" not in html:
        return data.get("text/plain", "")
    folded = re.sub(r"(?s)<details.*?(<summary.*?</summary>).*?</details>", r"\1", html)
    return re.sub(r"(?s)<style.*?</style>|<[^>]+>", "", folded)


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_the_time_line_is_what_the_cells_come_to(number: str) -> None:
    assert abs(minutes(number).reading - minutes_to_read(number)) <= 5
    if number not in ("16", "17"):  # eight of them, and projects: both say themselves how long
        assert minutes(number).exercises == minutes_of_exercises(number)


def test_the_short_path_takes_two_hours() -> None:
    total = 0.0
    for number in ("01", "02", "03", "04", "05", "06", "07", "08"):
        said = re.search(r"that is (\d+) minutes of this one", nbformat.read(NOTEBOOKS[number], 4).cells[0].source)
        needed = minutes_to_read(number, until="You may stop here; ")
        assert said and abs(int(said[1]) - needed) <= 2, (number, needed)
        assert needed < 0.8 * minutes_to_read(number), f"{number} has no place at which to stop"
        total += needed
    assert 100 < total < 122


def test_each_part_of_a_notebook_has_its_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = "<style>p {}</style><details><summary>six</summary>" + "x" * 3000 + "</details>"
    shown = [
        nbformat.v4.new_output("display_data", {"text/html": "<img >", "text/plain": "x" * 3000}),
        nbformat.v4.new_output("display_data", {"text/html": folded, "text/plain": "x" * 3000}),
        nbformat.v4.new_output("stream", text="x" * 1497),
    ]
    code = nbformat.v4.new_code_cell("raise NotImplementedError".ljust(1000), outputs=shown)
    words = nbformat.v4.new_markdown_cell("**Predict** " + "word " * 299)
    nbformat.write(nbformat.v4.new_notebook(cells=[words, code]), tmp_path / "book.ipynb")
    monkeypatch.setitem(NOTEBOOKS, "00", tmp_path / "book.ipynb")
    assert minutes_to_read("00") == pytest.approx(2 + 0.5 + 2 + 0.7 + 1)
    words.source = "**1.** (Fifteen minutes.) Write.\n\nWait twenty minutes."
    untimed = nbformat.v4.new_markdown_cell("**2.** Write more.")
    another = nbformat.v4.new_code_cell(code.source)
    nbformat.write(nbformat.v4.new_notebook(cells=[words, code, untimed, another]), tmp_path / "book.ipynb")
    assert minutes_of_exercises("00") == 15 + 10


def test_the_plans_add_up() -> None:
    assert len(re.findall(r"^\| from \|", TRAINERS, re.M)) == 3
    assert wrong_in_plans(TRAINERS) == []


def test_a_red_row_of_the_doctor_is_a_site_that_is_not_ready(cluster, tmp_path: Path) -> None:
    """The course's GPUs are only counted: without --no-cuda in the site file the ranks look for them in vain."""
    site = tmp_path / "hopeful.toml"
    site.write_text('sbatch = ["--partition=course"]\n')
    done = python("-m", "ddp_helpers", "ready", site, "--nodes", 1, "--gpus", 1, cwd=ROOT, limit=200)
    assert done.returncode == 1 and "checks RED" in done.stdout and "is given, but" in done.stdout


# ---- commands and paths that the pages name


def commands() -> set[str]:
    """The names of the commands of ddp-course."""
    [subparsers] = [action for action in cli.make_parser()._actions if isinstance(action.choices, dict)]
    return set(subparsers.choices)


def wrong_names(text: str) -> list[str]:
    """Targets of make, commands of ddp_helpers and files of the repository that are named and not there."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"```bash\n(.*?)```", text, re.S))
    problems = [
        f"make {name}"
        for name in re.findall(r"(?:^|&& )make (?:-\S+ \S+ )?([a-z]+)\b", code, re.M)
        if name not in targets
    ]
    names = re.findall(r"(?<![\w/-])ddp-course ([\w-]+)", code)
    problems += [f"ddp-course {name}" for name in names if name not in commands()]
    paths = re.findall(r"(?<![\w./-])((?:ddp_helpers|tests|slurm|docs|notebooks)/[\w./-]+\w)", code)
    made = ("notebooks/NN", "slurm/sites/NAME", "slurm/sites/ours")  # names that stand for others
    return problems + [path for path in paths if not path.startswith(made) and not list(ROOT.glob(f"{path}*"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_a_page_names_is_there(path: Path) -> None:
    assert wrong_names(path.read_text()) == []


def refused(text: str) -> list[str]:
    """Commands in a line of text that lack something, or give what cannot be given."""
    lines = []
    for line in re.findall(r"`(?:\.venv/bin/)?ddp-course ([^`\n]+)`", text):
        words, _, _ = line.partition(" -- ")
        try:
            _, more = cli.make_parser().parse_known_args(shlex.split(words))
            lines += [line] if more else []
        except SystemExit:
            lines.append(line)
    return lines


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_command_within_a_sentence_is_whole(path: Path) -> None:  # test_typed types those in blocks
    assert refused(path.read_text()) == []
    wrong = ["fits", "fits my.py:Net --inputs 1", "ready"]
    assert refused("".join(f"`ddp-course {line}`" for line in wrong)) == wrong
    assert wrong_names("`ddp-course none my.py`") == ["ddp-course none"]


# ---- numbers and lists that the pages take from elsewhere


def code(number: str) -> str:
    """The code cells of a notebook."""
    cells = nbformat.read(NOTEBOOKS[number], as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def test_functions_of_scripts_that_a_message_names_are_there() -> None:
    texts = [path.read_text() for path in modules()]
    named = {name for text in texts for name in re.findall(r"(?<![\w./])scripts\.(?!md\b)([a-z]\w*)", text)}
    assert "write_script" in named  # the control: notebook 17's judge says it
    assert named <= {*dir(scripts)}


def test_readme_lists_the_packages_that_make_installs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    needs = re.findall(r"^(?:USED|TESTED) := (.*)|^.*packages (ensurepip:\S+)", makefile, re.M)
    packages = {name for pair in needs for need in "".join(pair).split() for name in need.split(":")[1].split(",")}
    [listed] = re.findall(r"Debian's packages that are missing.*?What cannot be had", README, re.S)
    assert {*re.findall(r"`([^` ]+)`", listed)} == packages and {"munge", "chromium"} < packages


def test_the_trainers_page_knows_the_sweep_of_08() -> None:
    cells = nbformat.read(NOTEBOOKS["08"], as_version=4).cells
    [settings] = [cell.outputs[0].text for cell in cells if "print(*settings" in cell.source]
    assert re.findall(r"08 has (\d+) jobs for each person", TRAINERS) == [str(len(settings.splitlines()))]


def test_elsewhere_knows_which_notebooks_need_what() -> None:
    needs = {row[0]: row[1:] for row in rows((DOCS / "elsewhere.md").read_text(), "need", "how much", "where it bites")}
    workers = {number for number in NOTEBOOKS if re.search(r'num_workers"? ?[=:] ?[1-9]', code(number))}
    slurm = {number for number in NOTEBOOKS if re.search(r"jobs\.available\(|^%%slurm", code(number), re.M)}
    assert {*re.findall(r"\b\d\d[a-z]?\b(?! MB)", needs["`/dev/shm`"][0])} == workers
    assert {*re.findall(r"\b\d\d[a-z]?\b", needs["Slurm"][1])} == slurm
    assert f"06 starts {sum(RANKS)} at once" in needs["processes"][0]


# ---- housekeeping


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == __version__ == citation["version"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]
    assert re.search(rf"^## \[(Unreleased|{re.escape(__version__)})\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def within_bounds(tag: str) -> bool:
    """Whether a tag of ruff's lies in the bounds of pyproject.toml."""
    test = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    [bounds] = [line for line in test if line.startswith("ruff")]
    low, high = (tuple(map(int, part.split("."))) for part in re.findall(r"[\d.]+", bounds))
    return low <= tuple(map(int, tag.removeprefix("v").split("."))) < high


def test_commits_are_checked_by_the_ruff_of_the_tests() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tags = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in repos}
    assert within_bounds(tags["ruff-pre-commit"]) and not within_bounds("v0.18.0") and not within_bounds("v0.8.9")
    hooks = {hook["id"]: hook for repo in repos for hook in repo["hooks"]}
    assert "jupyter" in hooks["ruff-check"]["types_or"] and "jupyter" in hooks["ruff-format"]["types_or"]
    assert {"end-of-file-fixer", "check-yaml", "check-toml"} <= hooks.keys()


def test_once_a_week_the_newest_torch_is_tried() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["newest-torch"]["steps"]]
    assert workflow[True]["schedule"] and workflow["permissions"] == {"contents": "read"}  # YAML takes `on` for true
    upgrade = next(number for number, step in enumerate(steps) if "--upgrade" in step and "torch torchvision" in step)
    assert "<" not in steps[upgrade] and steps.index("make test") > upgrade > steps.index("make .venv/installed")
    assert "make test-all" in [step.get("run") for step in workflow["jobs"]["all"]["steps"]]


# ---- the quiz

PLACE = re.compile(r"\[(\d\d[a-z]?), ([^\]]+)\]\(\.\./(notebooks/[^)]+)\)")


def test_each_answer_of_the_quiz_names_a_heading_that_is_there() -> None:
    text = (DOCS / "quiz.md").read_text()
    places = PLACE.findall(text)
    lost = [(number, heading) for number, heading, path in places if not told(number, heading, path)]
    assert lost == [] and text.count("<details>") == 30 and {number for number, *_ in places} == NOTEBOOKS.keys()


def told(number: str, heading: str, path: str) -> bool:
    """Whether the notebook at the path has this number, and a heading that begins so."""
    return NOTEBOOKS[number] == ROOT / path and any(
        name.replace("`", "").startswith(heading.replace("`", "")) for name in headings(number)
    )
