"""Tables on the terminal: what models and people wrote is printed as it is."""

import io

from rich.console import Console

from zero_recipes.core.tables import print_texts


def test_long_texts_are_folded_and_square_brackets_are_no_markup():
    console = Console(width=40, file=io.StringIO())
    print_texts("Before and after", ("prompt", "after"), [["[/INST] what [bold]now[/bold]?", "x" * 60]], console)
    printed = console.file.getvalue()
    assert "[/INST]" in printed and "[bold]" in printed and printed.count("x") == 60
    assert max(map(len, printed.splitlines())) <= 40
