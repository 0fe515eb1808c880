"""The page of the atlas, whole: page.html with its script (page.js) and the planner's figures (atlas.json).

benchmarks/atlas.py makes the figures. The site has the same page (scripts/site_links.py), so this imports no library.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
FIGURES = FOLDER / "atlas.json"


def whole_page(figures: str | None = None) -> str:
    """Return the page with script and figures in it. `figures`: JSON, in place of those of the package."""
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    script = (FOLDER / "page.js").read_text(encoding="utf-8")
    if figures is None:
        figures = FIGURES.read_text(encoding="utf-8")
    figures = figures.replace("</", "<\\/")  # would end the element
    return page.replace("/* page.js */", script).replace("/* atlas.json */", figures)
