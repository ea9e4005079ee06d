"""The reading edition: built without a warning, as of a link that leads nowhere; read without a network."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from real import served
from sphinx.search.en import SearchEnglish

from ddp_helpers import ROOT
from ddp_helpers.launch.screen import COLOURS, coloured_line

COURSE = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
NOTEBOOKS = [*COURSE, *sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb")), ROOT / "slurm" / "job.ipynb"]
PHONE = {"width": 390, "height": 844}
# What an article shows beyond the right edge of the screen, and not inside something that scrolls.
TOO_WIDE = """() => [...document.querySelectorAll('article *')].filter(part => {
    if (part.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let around = part.parentElement; around.tagName != 'ARTICLE'; around = around.parentElement)
        if (getComputedStyle(around).overflowX != 'visible') return false;
    return true;
}).map(part => part.outerHTML.slice(0, 80))"""


class Page(HTMLParser):
    """What a page that was built holds: its links, and its figures with their alt texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.figures: list[tuple[str, str]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attributes}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "img":
            self.figures.append((values["src"], values.get("alt", "")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the command of `make site`, which ends with an error at a warning."""
    build = tmp_path_factory.mktemp("build")
    options = re.search(r"-m (sphinx .*) build/site$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    command = [*options.replace("build/", f"{build}/").split(), str(build / "site")]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return build / "site"


def page(site: Path, notebook: Path) -> Path:
    return (site / notebook.relative_to(ROOT)).with_suffix(".html")


def cells(notebook: Path) -> list[tuple[str, str]]:
    """The kind and the source of each cell of a notebook."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook.read_text())["cells"]]


def test_the_first_page_leads_into_every_page_and_each_to_its_neighbours(site: Path) -> None:
    assert "url=README.html" in (site / "index.html").read_text()
    links = set(Page(site / "README.html").links)
    assert {page(site, path).relative_to(site).as_posix() for path in NOTEBOOKS} <= links
    assert {f"docs/{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= links
    first = COURSE[0].with_suffix(".html").relative_to(ROOT)
    assert f'class="next-page" href="{first}"' in (site / "README.html").read_text()
    assert 'class="prev-page" href="../README.html"' in page(site, COURSE[0]).read_text()
    for before, after in pairwise(COURSE):
        assert f'class="next-page" href="{after.stem}.html"' in page(site, before).read_text()
        assert f'class="prev-page" href="{before.stem}.html"' in page(site, after).read_text()


def test_no_picture_of_any_page_is_without_words(site: Path) -> None:
    pictures = [(path.name, *figure) for path in site.rglob("*.html") for figure in Page(path).figures]
    assert len(pictures) > 30
    assert [picture for picture in pictures if len(picture[-1]) < 20] == []


def test_cells_of_magics_are_highlighted_as_what_they_hold(site: Path) -> None:
    failures, seen = [], 0
    magic = re.compile(r"%%(ranks|launch|clinic|writefile|slurm|bash)")
    for path in NOTEBOOKS:
        text = page(site, path).read_text()
        blocks = re.findall(r"<span></span><span class=\"o\">%%</span>.*?</pre>", text, re.DOTALL)
        magics = sum(kind == "code" and bool(magic.match(source)) for kind, source in cells(path))
        failures += [f"{path.stem}: {len(blocks)} of {magics} cells"] if len(blocks) != magics else []
        python = [block for block in blocks if "import" in block and not re.search(">(slurm|bash)<", block)]
        failures += [f"{path.stem}: plain: {b[:300]}" for b in python if '<span class="k' not in b.split("\n", 1)[1]]
        seen += len(python)
    assert not failures, "\n".join(failures)
    assert seen > 20


def test_the_search_knows_a_word_of_each_notebook(site: Path) -> None:
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    failures = []
    for path in NOTEBOOKS:
        number = index["docnames"].index(path.relative_to(ROOT).with_suffix("").as_posix())
        prose = re.sub(r"\]\(.*?\)", "", cells(path)[0][1])
        words = set(re.findall(r"\b[a-z]+\b", prose)) - SearchEnglish.stopwords  # those are not indexed
        word = SearchEnglish({}).stem(max(sorted(words), key=len))
        places = [index[kind].get(word, []) for kind in ("terms", "titleterms")]
        known = [place for some in places for place in (some if isinstance(some, list) else [some])]
        failures += [f"{path.stem}: {word}"] if number not in known else []
    assert not failures, "\n".join(failures)


# ---- colours


def brightness(colour: str) -> float:
    """WCAG's relative luminance of a colour such as #0072B2."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two colours: 1 for the same, 21 for black on white; text needs 4.5."""
    darker, lighter = sorted((brightness(one), brightness(other)))
    return (lighter + 0.05) / (darker + 0.05)


def of_256(number: int) -> str:
    """A colour of a terminal's 256, behind the first 16: a cube of 6 x 6 x 6, then greys."""
    if number >= 232:
        return f"#{8 + 10 * (number - 232):02x}" + 2 * f"{8 + 10 * (number - 232):02x}"
    steps = [0, 95, 135, 175, 215, 255]
    return "#" + "".join(f"{steps[(number - 16) // base % 6]:02x}" for base in (36, 6, 1))


def test_the_labels_of_ranks_can_be_read_on_light_and_on_dark(site: Path) -> None:
    """JupyterLab has the same colours on white and on its dark ground, so each brings its own ground."""
    style, course = ((site / "_static" / name).read_text() for name in ("pygments.css", "course.css"))
    grounds = re.findall(r"^(?:body.*)?\.highlight { background: (#\w{6})", style, re.M)
    words = re.findall(r"-Color\[class\*=-\w+\].*\(--light, (#\w{6})\) var\(--dark, (#\w{6})\)", course)
    assert len(grounds) == 3 and len(words) == 6
    for light, dark in words:
        assert contrast(light, grounds[0]) >= 4.5 and min(contrast(dark, ground) for ground in grounds[1:]) >= 4.5
    labels = re.findall(r"-Color\[class\*=-BGC(\d+)\] { color: white; background: (#\w{6})", course)
    assert {int(number) for number, _ in labels} == {*COLOURS}
    assert min(contrast("#ffffff", ground) for _, ground in labels) >= 4.5
    removed, added = re.findall(r"^\.highlight \.g[di] { color: #(\w{6})", course, re.M)  # of a diff, on light
    assert max(re.findall("..", removed)) == removed[:2] and max(re.findall("..", added)) == added[2:4]  # red, green
    assert min(contrast(f"#{colour}", grounds[0]) for colour in (removed, added)) >= 4.5
    said = "".join(coloured_line(f"rank {rank}", "") for rank in range(8))
    pairs = [map(of_256, map(int, pair)) for pair in re.findall(r"\[38;5;(\d+);48;5;(\d+)m\[rank", said)]
    assert len(pairs) == 8 and min(contrast(*pair) for pair in pairs) >= 4.5
    assert contrast(of_256(27), "#111111") < 4, "the control: the blue of rank 0 as it was, on JupyterLab's dark ground"


# ---- in a browser


@pytest.fixture(scope="module")
def tab(browser):
    """A page of the browser, as wide as a phone, that keeps what was asked of other hosts."""
    tab = browser.new_page(viewport=PHONE)
    tab.asked = []
    tab.on("request", lambda request: request.url.startswith("file:") or tab.asked.append(request.url))
    return tab


def test_pages_fit_a_phone_and_ask_no_other_host(site: Path, tab) -> None:
    for path in sorted({*site.rglob("*.html")} - {site / "index.html"}):  # that one leads elsewhere at once
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path.name
        assert tab.evaluate(TOO_WIDE) == [], path.name
    assert tab.asked == []
    tab.evaluate("document.querySelector('article').innerHTML += `<p style='width: 500px'>wide</p>`")
    assert len(tab.evaluate(TOO_WIDE)) == 1


def test_the_search_works_from_a_folder_and_over_http_with_what_surrounds_the_word(site: Path, browser, tab) -> None:
    tab.goto(f"{(site / 'search.html').as_uri()}?q=monitored_barrier")
    tab.locator("#search-results li a", has_text="Break it and fix it").first.wait_for()
    with served(site) as address, browser.new_page() as other:
        other.goto(f"{address}search.html?q=monitored_barrier")
        other.locator("#search-results li p", has_text="that did not come").first.wait_for()


# What scrolls sideways, and no key reaches; what a screen reader has no name or level for; a box around nothing.
OUT_OF_REACH = """() => [...document.querySelectorAll(
    'article *, [role=heading]:not([aria-level]), .sidebar-drawer:not([aria-label])'
)].filter(part => {
    if (!part.closest('article')) return true;
    if (part.matches('.output.text_plain')) return part.checkVisibility() && !part.innerText.trim();
    return part.scrollWidth > part.clientWidth + 1 && getComputedStyle(part).overflowX == 'auto' && part.tabIndex < 0;
}).map(part => part.outerHTML.slice(0, 80))"""


def test_keys_and_screen_readers_reach_all(site: Path, tab) -> None:
    for path in (site / "README.html", page(site, COURSE[4]), site / "docs" / "your-script.html"):
        tab.goto(path.as_uri())
        assert tab.evaluate("document.querySelectorAll('article [tabindex=\"0\"]').length") > 3, path.name
        assert tab.evaluate(OUT_OF_REACH) == [], path.name


def test_light_and_dark_by_the_system_and_by_choice(site: Path, tab) -> None:
    parts = ["body", ".highlight", ".cell_output img", ".highlight [class*=-BGC27]"]  # the last: a rank's label
    look = "parts => parts.map(part => getComputedStyle(document.querySelector(part)))"
    look += ".map(style => [style.color, style.backgroundColor, style.filter].join(' '))"
    looks = {}
    for system in ("light", "dark"):
        tab.emulate_media(color_scheme=system)
        tab.goto(page(site, COURSE[1]).as_uri())
        for chosen in ("auto", "light", "dark"):
            tab.evaluate("theme => document.body.dataset.theme = theme", chosen)
            looks[system, chosen] = tab.evaluate(look, parts)
    light, dark = looks["light", "auto"], looks["dark", "auto"]
    assert [one != other for one, other in zip(light, dark, strict=True)] == [True, True, True, False]
    assert light[-1].startswith("rgb(255, 255, 255) rgb(11, 87, 192)")
    assert looks["light", "light"] == looks["dark", "light"] == light
    assert looks["light", "dark"] == looks["dark", "dark"] == dark
