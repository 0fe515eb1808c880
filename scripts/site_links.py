"""A hook of mkdocs (mkdocs.yml): the site has every file that its pages link to, and no link of it is dead.

Pages link to files beside docs/ as on GitHub (`../recipes/pythia.yaml`). Such a file is copied to files/ of the site,
and the link points there. After the build every href and src is followed: it must end at a file of the site and its
#part at an id there, and no page may load anything from elsewhere. What is wrong is a warning, an error with --strict
(--quiet makes mkdocs count none).
"""

import logging
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
SHOWN = (".json", ".png", ".svg", ".html", ".ipynb")  # a browser shows the others only as text
CODES = "codes.html"  # mkdocs.yml: no folder for each page
LOG = logging.getLogger("mkdocs.hooks.site_links")


def outside(link: str, page: str) -> Path | None:
    """The repository's file that a link in docs/`page` names, where that lies beside docs/."""
    target = Path(os.path.normpath(DOCS / Path(page).parent / link))
    return None if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT) else target


def place(target: Path) -> str:
    """Where the site has a file of the repository."""
    name = f"files/{target.relative_to(ROOT).as_posix()}"
    return name if target.suffix in SHOWN else f"{name}.txt"


def on_files(files, config):
    from mkdocs.structure.files import File

    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            target = outside(link, page.src_uri)
            if target is None or place(target) in files.src_uris:
                continue
            if target.is_file():
                files.append(File.generated(config, place(target), abs_src_path=str(target)))
            else:
                LOG.warning(f"docs/{page.src_uri} links to {link}: the repository has no such file")
    return files


def on_page_markdown(markdown, page, config, files):
    def moved(found: re.Match) -> str:
        target = outside(found[1], page.file.src_uri)
        known = target is not None and target.is_file()
        return os.path.relpath(place(target), Path(page.file.src_uri).parent) if known else found[1]

    return LINK.sub(moved, markdown)


def on_page_content(html, page, config, files):
    """A code such as ZR213 in a text links to its part of the page of codes."""
    if page.file.src_uri == "codes.md":
        return html
    pattern = re.compile(r"<(a|code|pre|h\d)\b.*?</\1>|\bZR\d{3}\b", re.DOTALL)
    return pattern.sub(
        lambda found: found[0] if found[1] else f'<a href="{CODES}#{found[0].lower()}">{found[0]}</a>', html
    )


class Page(HTMLParser):
    """The links of a page, what it loads, and its ids."""

    def __init__(self, text: str):
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                (self.links if tag == "a" else self.loads).add(value)


def dead_links(site: Path) -> list[str]:
    """`page: link, why` of all that is wrong in the HTML and CSS of a built site."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = [
        f"{path.relative_to(site)}: {link}: {why}"
        for path, page in pages.items()
        for link in sorted(page.links | page.loads)
        if (why := fault(link, link in page.loads, path, site, pages))
    ]
    for path in sorted(site.rglob("*.css")):
        loaded = re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^)'\"\s]+)", path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(site)}: {one}: loaded from the network" for one in loaded]
    return wrong


def fault(link: str, loaded: bool, path: Path, site: Path, pages: dict[Path, Page]) -> str | None:
    """Why a link of a page is dead; None for one that is not."""
    parts = urlsplit(link)
    if parts.scheme in ("data", "javascript", "mailto"):
        return None
    if parts.scheme or parts.netloc:
        return "loaded from the network" if loaded else None
    name = unquote(parts.path)
    target = path if not name else site / name.lstrip("/") if name.startswith("/") else path.parent / name
    target = Path(os.path.normpath(target))
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "no such file in the site"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "no such part of the page"
    return None


def on_post_build(config):
    for one in dead_links(Path(config.site_dir)):
        LOG.warning(one)
