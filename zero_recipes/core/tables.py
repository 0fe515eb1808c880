"""Rows under columns, for the terminal (rich): every table that this project prints."""

import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero_recipes.core.process import escape_unprintable

Row = Any  # whatever the cells of its columns take


def plain(text: str, style: str = "") -> Text:
    """A text of people or models for the terminal, as it is: rich takes "[/INST]" for a closing tag."""
    return Text(shown(text), style=style)


def shown(text: str) -> str:
    """A text without orders to the terminal: control characters and half surrogates are escaped as Python does."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in "\t\n" or unicodedata.category(character) not in ("Cc", "Cs"):
        return character
    return repr(character)[1:-1]


def terminal(stderr: bool = False) -> Console:
    """Open the terminal for printing, on standard output or standard error."""
    escape_unprintable()
    return Console(stderr=stderr)


@contextmanager
def working(what: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show that something takes time: a spinner on a terminal, else a line at once and every ten seconds.

    Gives a function that says something else from then on.
    """
    console = console or terminal(stderr=True)
    if console.is_terminal:
        with console.status(plain(what)) as status:
            yield lambda text: status.update(plain(text))
        return
    started = time.monotonic()
    done = threading.Event()
    message = deque([what], maxlen=1)

    def say() -> None:
        while not done.wait(10):
            seconds = time.monotonic() - started
            console.print(plain(f"{message[0]}: {seconds:.0f} s"), soft_wrap=True)

    console.print(plain(what), soft_wrap=True)
    threading.Thread(target=say, daemon=True).start()
    try:
        yield message.append
    finally:
        done.set()


class Column(NamedTuple):
    """A column of a table: its header, and how a row becomes the text of its cell."""

    header: str  # broken by hand, for narrow columns
    cell: Callable[[Row], str]


def print_columns(named: list[Column], others: list[Column], rows: Sequence[Row], console: Console) -> None:
    """Print rows in as few tables as fit into the terminal. Each table begins with the `named` columns."""
    taken = len(others)
    table = _table(named, others, rows)
    wide = console.options.update(max_width=10_000)
    while taken > 1 and console.measure(table, options=wide).maximum > console.width:
        taken -= 1
        table = _table(named, others[:taken], rows)
    console.print(table, "")
    if taken < len(others):
        print_columns(named, others[taken:], rows, console)


def _table(named: list[Column], others: list[Column], rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, column in enumerate(named + others):
        justify = "left" if number < len(named) else "right"
        table.add_column(plain(column.header), justify=justify, vertical="middle", no_wrap=True)
    for row in rows:
        table.add_row(*[plain(column.cell(row)) for column in named + others])
    return table


def print_texts(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table of texts that are folded at its width, with lines between its rows."""
    table = Table(title=plain(title), show_lines=True)
    for header in headers:
        table.add_column(plain(header), overflow="fold")
    for row in rows:
        table.add_row(*map(plain, row))
    console.print(table)
