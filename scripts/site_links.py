"""A hook of mkdocs (mkdocs.yml): the site has every file that its pages link to, and no link of it is dead.

Pages link to files beside docs/ as on GitHub (`../recipes/pythia.yaml`). Such a file is copied to files/ of the site,
and the link points there. The notebook becomes a page with its outputs, the atlas gets its script and figures, and each
code gets its cause and fix. After the build every href and src is followed: it must end at a file of the site and its
#part at an id there, and no page may load anything from elsewhere. What is wrong is a warning, an error with --strict
(--quiet makes mkdocs count none).

Markdown beside docs/ (`../CONTRIBUTING.md`) becomes a page in files/, whose links lead to the others.
"""

import html
import json
import logging
import os
import re
import string
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.tools.atlas.page import FOLDER, whole_page  # noqa: E402

DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
SHOWN = (".json", ".png", ".svg", ".html", ".ipynb")  # a browser shows the others only as text
BESIDE = "files/"  # where the site has files beside docs/
ALONE = re.compile(r"\{\w+\}\.?")  # a text that only a run knows
CODES = "codes.html"  # mkdocs.yml: no folder for each page
NOTEBOOK, NOTEBOOK_PAGE = "lesson.ipynb", "notebook.md"
ATLAS, ATLAS_PAGE = FOLDER / "page.html", "atlas/index.html"
LOG = logging.getLogger("mkdocs.hooks.site_links")


def outside(link: str, page: str) -> Path | None:
    """The repository's file that a link of a page names, where the page or the file is beside docs/."""
    is_beside = page.startswith(BESIDE)
    source = ROOT / page.removeprefix(BESIDE) if is_beside else DOCS / page
    target = Path(os.path.normpath(source.parent / link))
    if target.is_relative_to(DOCS) and not is_beside:
        return None
    return target if target.is_relative_to(ROOT) else None


def place(target: Path) -> str:
    """Where the site has a file of the repository."""
    if target == ATLAS:
        return ATLAS_PAGE
    name = f"files/{target.relative_to(ROOT).as_posix()}"
    if target.is_relative_to(DOCS):
        return name.removeprefix(f"{BESIDE}docs/")
    return name if target.suffix in (*SHOWN, ".md") else f"{name}.txt"


def on_files(files, config):
    from mkdocs.structure.files import File

    pages = list(files.documentation_pages())
    for page in pages:
        for link in LINK.findall(page.content_string):
            target = outside(link, page.src_uri)
            if target is None or place(target) in files.src_uris:
                continue
            if target == ATLAS:
                files.append(File.generated(config, ATLAS_PAGE, content=whole_page()))
            elif target.is_file():
                files.append(File.generated(config, place(target), abs_src_path=str(target)))
                if target.suffix == ".md":
                    pages.append(files.get_file_from_path(place(target)))  # its links, too
            else:
                LOG.warning(f"docs/{page.src_uri} links to {link}: the repository has no such file")
    files.append(File.generated(config, NOTEBOOK_PAGE, content=notebook_page(DOCS / NOTEBOOK)))
    return files


def notebook_page(path: Path) -> str:
    """The cells of a notebook with their outputs, as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            picture = output.get("data", {}).get("image/png")
            text = "".join(output.get("text", []))
            parts.append(f'<img alt="" src="data:image/png;base64,{picture}">' if picture else f"```text\n{text}\n```")
    return "\n\n".join(parts)


def with_cause_and_fix(markdown: str) -> str:
    """The page of codes, each folded up, with what findings.yaml says of it inside."""
    table = yaml.safe_load((ROOT / "zero_recipes" / "core" / "findings.yaml").read_text(encoding="utf-8"))

    def plain(template: str) -> str:
        parsed = string.Formatter().parse(template)
        return html.escape("".join(words + (f"<{name}>" if name else "") for words, name, _, _ in parsed), quote=False)

    def explained(found: re.Match) -> str:
        row = table[found[1]]
        lines = [f"{part.title()}: {plain(row[part])}" for part in ("why", "fix") if not ALONE.fullmatch(row[part])]
        example = html.escape(row.get("example", "").strip()).replace("\n", "<br>")
        lines += [f"Example: <code>{example}</code>"] if example else []
        head = f'<summary markdown="span"><code>{found[1]}</code> {found[2]}</summary>'
        # the heading gives the search and the links of other pages their place; a link to it opens the details
        return f'<details markdown="1">{head}\n\n##### {found[1]}\n\n<p>{"<br>".join(lines)}</p>\n\n</details>\n'

    return re.sub(r"##### (ZR\d{3,4})\n\n([^\n]+)\n", explained, markdown)


def on_page_markdown(markdown, page, config, files):
    def moved(found: re.Match) -> str:
        target = outside(found[1], page.file.src_uri)
        known = target is not None and target.is_file()
        return os.path.relpath(place(target), Path(page.file.src_uri).parent) if known else found[1]

    if page.file.src_uri == "codes.md":
        markdown = with_cause_and_fix(markdown)
    markdown = markdown.replace(f"]({NOTEBOOK})", f"]({NOTEBOOK_PAGE})")
    return LINK.sub(moved, markdown)


def on_page_content(html, page, config, files):
    """A code such as ZR213 in a text links to its part of the page of codes."""
    if page.file.src_uri == "codes.md":
        return html
    codes = os.path.relpath(CODES, Path(page.file.src_uri).parent)
    pattern = re.compile(r"<(a|code|pre|h\d)\b.*?</\1>|\bZR\d{3,4}\b", re.DOTALL)
    return pattern.sub(
        lambda found: found[0] if found[1] else f'<a href="{codes}#{found[0].lower()}">{found[0]}</a>', html
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
            elif name in ("href", "src", "srcset") and value:
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
