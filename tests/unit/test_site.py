"""The site: every page in its navigation, every link alive, and read the same there as on GitHub."""

from __future__ import annotations

import html
import importlib.metadata
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if page != DOCS / "demo" / "report.md")
PARTS = ["Lesson", "How-to", "Reference", "Internals"]
site_links = runpy.run_path(str(ROOT / "scripts" / "site_links.py"))


class Settings(yaml.SafeLoader):
    """mkdocs.yml without the Python objects that it names."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def settings() -> dict:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)


def named_pages(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in named_pages(part)]


def test_every_page_stands_in_the_navigation_once_and_every_entry_is_a_page():
    nav = settings()["nav"]
    assert [name for entry in nav for name in entry] == ["Home", *PARTS]
    assert sorted(named_pages(nav)) == [page.relative_to(DOCS).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_its_title_and_a_sentence(page):
    title, gap, text = page.read_text().split("\n")[:3]
    assert title.startswith("# ") and gap == "" and re.match(r"[\w`*]", text), (title, text)


def test_the_readme_is_short_and_its_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    links = re.findall(r"\]\(([^)]+)\)", readme)
    parts = [link.partition("#") for link in links]
    assert len(links) > 15 and [name for name, _, _ in parts if not (ROOT / name).exists()] == []
    for name, _, part in parts:
        headings = re.findall(r"^#+ (.*)", (ROOT / name).read_text(), re.M) if part else []
        assert not part or part in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_strategies_page_has_every_accelerate_file_with_its_ds_config():
    rows = re.findall(
        r"^\| \[(\w+)\]\(../accelerate_configs/(\w+).yaml\) \| (?:\[\w+\]\(../(ds_configs/\w+.json)\))? *\|",
        (DOCS / "strategies.md").read_text(),
        re.M,
    )
    named = {}
    for path in (ROOT / "accelerate_configs").glob("*.yaml"):
        deepspeed = yaml.safe_load(path.read_text()).get("deepspeed_config", {})
        named[path.stem] = deepspeed.get("deepspeed_config_file", "").removeprefix("./")
    assert {text: ds_config for text, _, ds_config in rows} == named
    assert all(text == file for text, file, _ in rows)


def test_what_make_docs_installs_is_what_the_theme_requires():
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs")
    locked = {
        _name(line.partition("==")[0]): line.partition("==")[2]
        for lock in ("requirements.lock", "requirements-docs.lock")
        for line in (ROOT / lock).read_text().splitlines()
        if "==" in line
    }
    seen, todo = set(), ["mkdocs-material"]
    while todo:
        name = _name(todo.pop())
        if name not in seen:
            seen.add(name)
            todo += [
                re.match(r"[\w.-]+", required)[0]
                for required in importlib.metadata.requires(name) or []
                if "extra ==" not in required and "win32" not in required and "python_version" not in required
            ]
    assert seen <= locked.keys()
    ours = {_name(line.partition("==")[0]) for line in (ROOT / "requirements-docs.lock").read_text().splitlines()[1:]}
    assert {name: importlib.metadata.version(name) for name in ours} == {name: locked[name] for name in ours}
    assert ours <= seen


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_pages_read_the_same_on_github_and_in_the_site():
    """Lists without an empty line before them, escapes and inner lists are where the two dialects part."""
    markdown = pytest.importorskip("markdown", reason="Markdown is not installed: make docs")
    from markdown_it import MarkdownIt

    github = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    extensions = ["attr_list", "md_in_html", "pymdownx.superfences", "sane_lists", "tables"]
    for page in PAGES:
        text = page.read_text()
        one, other = github.render(text), markdown.markdown(text, extensions=extensions)
        assert _read(one) == _read(other), page.name
        for tag in ("li", "ol", "td", "code", "h2", "h3", "a", "img"):
            assert one.count(f"<{tag}") - other.count(f"<{tag}") == 0, (page.name, tag)


def _read(text: str) -> str:
    """The words of a page as one string, that a failure shows the place."""
    return "".join(html.unescape(re.sub(r"<!--.*?-->|</?[a-z][^>]*>", " ", text, flags=re.S)).split())


PAGE = """<h1 id="top">Page</h1><a href="#top">up</a> <a href="https://example.org">elsewhere</a>
<a href="other.html">other</a> <img src="picture.png"><a href="files/a%20b.txt">file</a>"""
BROKEN = {
    '<a href="gone.html">x</a>': "gone.html: no such file in the site",
    '<a href="other.html#gone">x</a>': "other.html#gone: no such part of the page",
    '<a href="#gone">x</a>': "#gone: no such part of the page",
    '<img src="gone.png">': "gone.png: no such file in the site",
    '<script src="https://unpkg.com/x.js"></script>': "https://unpkg.com/x.js: loaded from the network",
    '<link rel="stylesheet" href="//fonts.example.org/x">': "//fonts.example.org/x: loaded from the network",
}


def small_site(folder: Path, more: str = "") -> Path:
    (folder / "files").mkdir(parents=True)
    (folder / "index.html").write_text(PAGE + more)
    (folder / "other.html").write_text("<h1>Other</h1>")
    (folder / "picture.png").touch()
    (folder / "files" / "a b.txt").touch()
    return folder


@pytest.mark.parametrize("more", BROKEN)
def test_dead_links_and_what_a_page_would_load_are_found(tmp_path, more):
    assert site_links["dead_links"](small_site(tmp_path / "whole")) == []
    assert site_links["dead_links"](small_site(tmp_path / "broken", more)) == [f"index.html: {BROKEN[more]}"]


def built(folder: Path, config: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_site_is_built_and_a_page_that_links_to_nothing_stops_it(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs")
    ran = built(tmp_path / "site", ROOT / "mkdocs.yml")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "site" / "files" / "accelerate_configs" / "zero3.yaml.txt").is_file()
    assert 'href="files/ds_configs/zero3.json"' in (tmp_path / "site" / "strategies.html").read_text()

    for name in ("mkdocs.yml", "scripts/site_links.py", "recipes/tiny.yaml"):
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "copy" / name)
    config = tmp_path / "copy" / "mkdocs.yml"
    config.write_text(config.read_text().partition("\nnav:")[0])
    page = tmp_path / "copy" / "docs" / "index.md"
    page.parent.mkdir()
    for name in ("site.css", "iframe-worker.js"):
        shutil.copy(DOCS / name, page.parent / name)
    whole = "# Page\n\n[a recipe](../recipes/tiny.yaml), [itself](#page)\n"
    page.write_text(whole)
    ran = built(tmp_path / "small", config)
    assert ran.returncode == 0, ran.stderr
    page.write_text(whole + "\n[gone](../recipes/gone.yaml)\n\n[gone](#gone)\n")
    ran = built(tmp_path / "small", config)
    assert ran.returncode == 1
    assert "docs/index.md links to ../recipes/gone.yaml: the repository has no such file" in ran.stderr
    assert "'#gone'" in ran.stderr
