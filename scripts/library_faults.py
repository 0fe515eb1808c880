"""What the docstrings in zero_recipes/engine/faults and speed say, as data. See the form in faults/__init__.py."""

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ENGINE = Path(__file__).resolve().parents[1] / "zero_recipes" / "engine"
FIELD = re.compile(r"^(Library|Upstream|Here): ", re.MULTILINE)


class Fault(NamedTuple):
    """One fault of a library. Texts are single lines but for the program."""

    name: str  # of its file
    symptom: str  # what a user sees
    what: str  # what goes wrong, and for whom
    library: str
    upstream: str
    here: str  # what this project does
    needs: str  # of the program
    program: str  # shows the fault: ends with an error where it is gone


def read_faults(folder: str) -> list[Fault]:
    """Read the files of a folder below zero_recipes/engine, by name. ValueError for a docstring of another form."""
    faults = []
    for path in sorted((ENGINE / folder).glob("[a-z]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text()))
        try:
            faults.append(_fault_of(path.stem, text))
        except (KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: its docstring has another form: {error!r}") from error
    return faults


def _fault_of(name: str, docstring: str) -> Fault:
    told, _, shown = docstring.partition("\n\nSee it: ")
    symptom, _, rest = told.partition("\n\n")
    what, *fields = FIELD.split(rest)
    texts = dict(zip(fields[::2], map(_line, fields[1::2]), strict=True))
    needs, _, program = shown.partition("\n\n")
    return Fault(
        name,
        _line(symptom),
        _line(what),
        texts["Library"],
        texts["Upstream"].rstrip("."),
        texts["Here"],
        needs.strip(),
        textwrap.dedent(program).strip(),
    )


def _line(text: str) -> str:
    return " ".join(text.split())
