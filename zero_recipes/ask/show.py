"""Answers side by side, and the scores underneath, for a terminal of any width."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from zero_recipes.ask.answers import Asked
from zero_recipes.core.tables import plain
from zero_recipes.metrics.read_runs import SampleRow
from zero_recipes.training.samples import question, short

WIDE = 100  # columns from which prompt and answers stand in one line
LOWER_IS_BETTER = ("reference_loss", "perplexity")
SHOWN = 6


def show(asked: Asked, console: Console, base: str | None, model: str, most: int = SHOWN) -> None:
    """Print the first prompts with all answers, and the scores over all prompts. `base`, `model`: what they are called;
    without a base its column is left out."""
    rows = asked.rows[:most]
    which = "" if len(rows) == len(asked.rows) else f" (the first {len(rows)} of {len(asked.rows)} prompts)"
    console.print(plain(f"\nAnswers{which}", style="bold"))
    _show_wide(rows, console, base, model) if console.width >= WIDE else _show_narrow(rows, console, base, model)
    if not asked.means:
        console.print(plain("No prompt has a reference: nothing is scored."))
        return
    console.print(plain(f"\nScores over {asked.scored} references", style="bold"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    table.add_column("score")
    for name in filter(None, (base, model)):
        table.add_column(plain(name), justify="right")
    table.add_column("better")
    for name, sides in asked.means.items():
        numbers = [f"{side:.3f}" for side in sides if side is not None]
        table.add_row(name, *numbers, "lower" if name in LOWER_IS_BETTER else "higher")
    console.print(table)
    for why in dict.fromkeys(row.unscored for row in asked.rows if row.unscored):
        count = sum(row.unscored == why for row in asked.rows)
        console.print(plain(f"{count} of {len(asked.rows)} rows have no reference_loss: {why}"))


def _show_wide(rows: list[SampleRow], console: Console, base: str | None, model: str) -> None:
    table = Table(show_lines=True, box=box.SQUARE)
    for header in ("prompt", *_headers(rows, base, model)):
        table.add_column(plain(header), overflow="fold", ratio=1)
    for row in rows:
        table.add_row(plain(question(row.prompt)), *map(plain, _cells(row, rows, base)))
    console.print(table)


def _show_narrow(rows: list[SampleRow], console: Console, base: str | None, model: str) -> None:
    """Each prompt above its answers: beside them four columns would have 16 characters each."""
    for row in rows:
        console.print(plain(f"\n{question(row.prompt)}", style="bold cyan"))
        table = Table(box=box.SQUARE, expand=True)
        for header in _headers(rows, base, model):
            table.add_column(plain(header), overflow="fold", ratio=1)
        table.add_row(*map(plain, _cells(row, rows, base)))
        console.print(Padding(table, (0, 0, 0, 2)))


def _headers(rows: list[SampleRow], base: str | None, model: str) -> list[str]:
    referenced = any(row.reference is not None for row in rows)
    return [*filter(None, (base, model)), *(["reference"] if referenced else [])]


def _cells(row: SampleRow, rows: list[SampleRow], base: str | None) -> list[str]:
    referenced = any(each.reference is not None for each in rows)
    texts = [*([row.before] if base else []), row.after, *([row.reference] if referenced else [])]
    return [short(text) for text in texts]
