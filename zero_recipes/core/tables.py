"""Rows under columns, for the terminal (rich) and for markdown: every table that this project prints."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Any  # whatever the cells of its columns take
# characters that turn the direction of the line around them, and with it of the columns beside
TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def plain(text: str, style: str = "") -> Text:
    """What people and models wrote, as it stands: no markup, no orders to the terminal, on any terminal.

    rich takes "[/INST]" for a closing tag, a terminal takes an escape sequence for an order, and a lone surrogate
    cannot be written at all: control characters other than tab and line break are shown as Python writes them.
    """
    return Text(shown(text), style=style)


def shown(text: str) -> str:
    """The same for what is printed without rich."""
    return "".join(repr(c)[1:-1] if _is_order(c) else c for c in text)


def _is_order(character: str) -> bool:
    turns_the_line = unicodedata.bidirectional(character) in TURNS
    return character not in "\t\n" and (turns_the_line or unicodedata.category(character) in ("Cc", "Cs"))


def terminal(stderr: bool = False) -> Console:
    """A Console on which a character that the terminal's encoding lacks is escaped, and no error."""
    console = Console(stderr=stderr)
    reconfigure = getattr(console.file, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return console


class Column(NamedTuple):
    """A header (broken by hand, for narrow columns) and how a row is shown under it."""

    header: str
    cell: Callable[[Row], str]


def print_columns(named: list[Column], others: list[Column], rows: Sequence[Row], console: Console) -> None:
    """Any rows under any columns; each table begins with the `named` ones."""
    for group in _fitting(named, others, rows, console.width):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in group:
            justify = "left" if column in named else "right"
            table.add_column(plain(column.header), justify=justify, vertical="middle", no_wrap=True)
        for row in rows:
            table.add_row(*(plain(column.cell(row)) for column in group))
        console.print(table)


def print_texts(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Rows of long texts, as models and people wrote them, each folded within its column."""
    table = Table(title=plain(title), show_lines=True)
    for header in headers:
        table.add_column(plain(header), overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    console.print(table)


def _fitting(named: list[Column], others: list[Column], rows: Sequence[Row], width: int) -> list[list[Column]]:
    """Deal the columns out to as few tables as fit in `width` characters, each beginning with the named ones."""
    start = 2 + sum(_width(column, rows) for column in named)
    groups, used = [list(named)], start
    for column in others:
        if used + _width(column, rows) > width and len(groups[-1]) > len(named):
            groups, used = [*groups, list(named)], start
        groups[-1].append(column)
        used += _width(column, rows)
    return groups


def _width(column: Column, rows: Sequence[Row]) -> int:
    """Characters of the widest line in a column, with the two that part it from the next."""
    texts = [*column.header.split("\n"), *(column.cell(row) for row in rows)]
    return 2 + max(len(text) for text in texts)


def markdown_columns(named: list[Column], others: list[Column], rows: Sequence[Row]) -> str:
    """Any rows under any columns; all but the `named` ones are aligned to the right."""
    chosen = named + others
    lines = [
        _markdown_line(column.header.replace("\n", " ") for column in chosen),
        _markdown_line("---" if index < len(named) else "---:" for index in range(len(chosen))),
        *(_markdown_line(column.cell(row) for column in chosen) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _markdown_line(cells: Any) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
