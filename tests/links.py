"""Links and figures of the pages that `make site` builds."""

import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"stylesheet", "icon", "preload", "modulepreload", "manifest", "preconnect", "dns-prefetch"}
# A style sheet, or a script, that fetches something from another host. A link in a comment is none.
ELSEWHERE = re.compile(
    r"""(?:url\(\s*|@import\s+|importScripts\(\s*|\bimport\(\s*|\bfetch\(\s*)["']?((?:https?:)?//[^"')\s]+)"""
)


class Page(HTMLParser):
    """What a page holds: its anchors, its links, what it loads, and its figures with their alt texts."""

    def __init__(self, html: str = "") -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.figures: list[tuple[str, str]] = []
        self.feed(html)
        self.loads += ELSEWHERE.findall(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attributes}
        self.anchors |= {found[key] for key in ("id", "name") if key in found and (key == "id" or tag == "a")}
        if tag in ("a", "area") and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and LOADED & set(found.get("rel", "").split()):
            self.loads.append(found["href"])
        elif tag == "img":
            self.figures.append((found["src"], found.get("alt", "")))
        if tag != "a":
            self.loads += [found[key] for key in ("src", "srcset", "poster", "data") if found.get(key)]


def read(path: Path) -> Page:
    """A page as it was built."""
    return Page(path.read_text(encoding="utf-8"))


def well_formed(url: str) -> bool:
    """An address on the web that can be right."""
    parts = urlsplit(url)
    return parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc) is not None and " " not in url


def inside(url: str) -> bool:
    """Whether an address is a place in the same folder tree, not one on the web."""
    parts = urlsplit(url)
    return not parts.scheme and not parts.netloc


def dead(paths: Iterable[Path]) -> list[str]:
    """What leads nowhere, a line each: links, anchors and images. An address on the web is looked at, not asked for."""
    pages = {path.resolve(): read(path) for path in paths}
    found = []
    for path, page in pages.items():
        for url in dict.fromkeys([*page.links, *page.loads]):
            if not (leads(pages, path, url) if inside(url) else url.startswith("data:") or well_formed(url)):
                found.append(f"{path.name}: {url}")
    return found


def leads(pages: dict[Path, Page], path: Path, url: str) -> bool:
    """Whether a link to a place in the same folder tree finds a file, and the anchor in it."""
    parts = urlsplit(url)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.exists():
        return False
    if not parts.fragment or target.suffix != ".html":
        return True
    anchors = (pages[target] if target in pages else read(target)).anchors
    return unquote(parts.fragment) in anchors


def loaded_from_elsewhere(folder: Path) -> list[str]:
    """What the pages, style sheets and scripts of a folder would load from another host."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".html", ".css", ".js")):
        text = path.read_text(encoding="utf-8")
        loads = Page(text).loads if path.suffix == ".html" else ELSEWHERE.findall(text)
        found += [f"{path.name}: {url}" for url in loads if not inside(url) and not url.startswith("data:")]
    return found
