"""Values in files that a shell or a YAML parser reads: each kind of place has one filter; nothing enters without."""

import os
import re
import shlex
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

HARMLESS = re.compile(r"[a-z0-9-]*")  # in a shell, in YAML and in a line of SLURM's


class NotQuoted(Exception):
    """A template prints a value without a filter."""


def templates() -> Environment:
    """Load zero_recipes/tools/templates. What they print is a number, HARMLESS letters, or comes from a filter."""
    environment = Environment(
        loader=PackageLoader("zero_recipes.tools", "templates"),
        undefined=StrictUndefined,
        finalize=_refuse_unquoted,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    filters = (comment, kubernetes, mapping, scalar)
    environment.filters |= {filter.__name__: filter for filter in filters}
    return environment


def _refuse_unquoted(value: Any) -> Any:
    if isinstance(value, (Markup, int)) or HARMLESS.fullmatch(str(value)):
        return value
    raise NotQuoted(repr(value))


def shell_word(text: Any) -> Markup:
    """Write one word for bash, on one line whatever is in it."""
    text = str(text)
    if text.isprintable():
        return Markup(shlex.quote(text))
    quoted = ""
    for byte in os.fsencode(text):
        letter = chr(byte)
        quoted += f"\\x{byte:02x}" if letter in "\\'" or not 0x20 <= byte < 0x7F else letter
    return Markup(f"$'{quoted}'")


def shell_command(words: list[str]) -> Markup:
    """Write a command on one line. A word that is Markup is the shell's own, such as a variable."""
    return Markup(" ".join(word if isinstance(word, Markup) else shell_word(word) for word in words))


def kubernetes(script: Any) -> Markup:
    """Write a script as an argument of a container.

    Kubernetes puts a variable's value for `$(NAME)`, and `$` for `$$`.
    """
    return Markup(re.sub(r"\$(?=[$(])", "$$", str(script)))


def scalar(text: Any) -> Markup:
    """Write a text in YAML, whatever is in it."""
    return Markup(yaml.safe_dump(str(text), default_style='"', width=float("inf")).strip())


def mapping(key: str, text: str, indent: int) -> Markup:
    """Write a key with a text in YAML, as a block of lines where that holds it."""
    is_lines = all(letter.isprintable() or letter == "\n" for letter in text)  # YAML knows line breaks of its own
    style = "|" if is_lines else '"'
    shown = yaml.safe_dump({key: text}, default_style=style, allow_unicode=is_lines, width=float("inf"))
    return Markup(re.sub(r"\n(?=.)", "\n" + " " * indent, shown.rstrip("\n")))


def comment(text: Any) -> Markup:
    """Write a text as the rest of a line that begins with #."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(text))
    return Markup(shown)
