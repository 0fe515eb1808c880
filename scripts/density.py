"""How tightly zero_recipes/ is written, and its weight: exits 1 where one is above its limit.

Code that is squeezed into few lines is hard to read. Each limit is an average over all code lines: no single line is
judged. A code line is neither blank nor a comment nor part of a docstring.
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "zero_recipes"
MOST_BYTES = 900_000
MOST_CHARACTERS = 45  # of a code line, without its indentation
MOST_PER_100_LINES = {"comprehensions": 4.0, "parallel assignments": 0.7, "conditional expressions": 3.5}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def lines_of_docstrings(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines.update(range(text.lineno, text.end_lineno + 1))
    return lines


def kind_of(node: ast.AST) -> str | None:
    """A key of MOST_PER_100_LINES."""
    if isinstance(node, COMPREHENSIONS):
        return "comprehensions"
    if isinstance(node, ast.IfExp):
        return "conditional expressions"
    if isinstance(node, ast.Assign):
        sides = [*node.targets, node.value]
        if all(isinstance(side, ast.Tuple) for side in sides):
            return "parallel assignments"
    return None


def main() -> int:
    code_lines = characters = size = 0
    counts = dict.fromkeys(MOST_PER_100_LINES, 0)
    for path in [*PACKAGE.rglob("*.py"), PACKAGE.with_name("run_sft.py")]:
        if "_files" in path.parts:
            continue
        source = path.read_text()
        if path.is_relative_to(PACKAGE):
            size += len(source.encode())
        tree = ast.parse(source)
        documented = lines_of_docstrings(tree)
        for number, line in enumerate(source.splitlines(), 1):
            text = line.strip()
            if text and not text.startswith("#") and number not in documented:
                code_lines += 1
                characters += len(text)
        for node in ast.walk(tree):
            kind = kind_of(node)
            if kind is not None:
                counts[kind] += 1
    figures = [
        ("bytes of zero_recipes/", size, MOST_BYTES),
        ("characters a line", characters / code_lines, MOST_CHARACTERS),
    ]
    for kind, most in MOST_PER_100_LINES.items():
        figures.append((f"{kind} per 100 lines", 100 * counts[kind] / code_lines, most))
    is_bad = False
    for name, value, most in figures:
        is_above = value > most
        is_bad |= is_above
        print(f"{name}: {value:,.6g}, at most {most:,}{' <- above' if is_above else ''}")
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
