"""Count the lines, files and imports of each wing of ddp_helpers, and draw them as docs/architecture.png."""

import ast
from collections import Counter
from pathlib import Path
from textwrap import wrap

from ddp_helpers import ROOT
from ddp_helpers.draw.drawing import Picture, arrow, box, canvas, described, write
from ddp_helpers.draw.style import GREY, rank_colour

WINGS = {
    "upkeep": "what maintainers run: execute the course, measure it, keep its records",
    "lessons": "a module or a folder for each notebook, of its name: exercises, figures, what only it needs",
    "notebook": "where the learner sits: write scripts, start ranks, send jobs, read records, draw",
    "rank": "what runs on every rank: the one source of every line of a script",
}
ROW, WIDE, TALL = 10, 0.93, 0.66  # boxes in a row, and a box with the gap to the next, in inches


def modules() -> dict[str, Path]:
    """The file of each module of the package, by its dotted name."""
    paths = sorted((ROOT / "ddp_helpers").rglob("*.py"))
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imports() -> set[tuple[str, str]]:
    """Every import of one module of the package by another, as (who, whom); those inside functions, too."""
    known, found = modules(), set()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for alias in node.names if isinstance(node, ast.ImportFrom) and node.module else ():
                whom = f"{node.module}.{alias.name}"
                found |= {(name, one) for one in [whom if whom in known else node.module] if one in known}
    return found


def room(module: str) -> tuple[str, str]:
    """The wing that a module belongs to, and the part of that wing; ("", "") for the package and its command line."""
    _, wing, part, *_ = [*module.split("."), "", ""]
    return (wing, part) if wing in WINGS else ("", "")


def lines() -> dict[tuple[str, str], int]:
    """Count the lines of each part of each wing, files without code left out."""
    found = Counter()
    for name, path in modules().items():
        found[room(name)] += len(path.read_text().splitlines())
    return {(wing, part): count for (wing, part), count in found.items() if count and part}


def picture() -> Picture:
    """The wings one below the other, a box a part with its lines, and how many imports lead down."""
    sizes, crossing = lines(), Counter((room(who)[0], room(whom)[0]) for who, whom in imports())
    files = Counter(room(name)[0] for name in modules())
    up = sum(count for (who, whom), count in crossing.items() if who and whom and above(whom, who))
    title = f"{'No import leads' if not up else f'{up} imports lead'} up: {sum(sizes.values()):,} lines in four wings"
    parts = {wing: sorted((part, count) for (one, part), count in sizes.items() if one == wing) for wing in WINGS}
    rows = {wing: -(-len(found) // ROW) for wing, found in parts.items()}
    told = {wing: f"{sum(count for _, count in parts[wing]):,} lines, {files[wing]} files" for wing in WINGS}
    ax = canvas(0.6 + 0.85 * len(WINGS) + TALL * sum(rows.values()), title)
    top = 0.65
    for number, (wing, what) in enumerate(WINGS.items()):
        write(ax, 0.1, top + 0.05, f"{wing}/", size=12, weight="bold", ha="left")
        write(ax, 1.2, top + 0.05, f"{told[wing]}: {what}", size=10, ha="left", color=GREY)
        for place, (part, count) in enumerate(parts[wing]):
            corner = (0.1 + WIDE * (place % ROW), top + 0.25 + TALL * (place // ROW))
            text = "\n".join(wrap(part.replace("_", " "), 11, break_long_words=False))
            box(ax, corner, (WIDE - 0.08, TALL - 0.08), f"{text}\n{count}", rank_colour(number), size=7.5)
        top += 0.35 + TALL * rows[wing]
        if down := [f"{crossing[wing, low]} {low}/" for low in list(WINGS)[number + 1 :] if crossing[wing, low]]:
            arrow(ax, (0.35, top - 0.05), (0.35, top + 0.3))
            write(ax, 0.55, top + 0.12, f"imports {', '.join(down)}", size=9, ha="left")
        top += 0.5
    words = "; ".join(f"{wing}: {counted}" for wing, counted in told.items())
    return described(ax.figure, f"The wings of ddp_helpers. {title}. {words}")


def above(one: str, other: str) -> bool:
    """Whether a wing stands above the other in the picture, so that the other must not import it."""
    return list(WINGS).index(one) < list(WINGS).index(other)


if __name__ == "__main__":
    drawn = picture()
    print(drawn.alt, f"wrote {drawn.save(ROOT / 'docs' / 'architecture.png').relative_to(ROOT)}", sep="\n")
