"""Write the table of all finding codes: zero_recipes/core/codes.json and docs/checks.md. --check: are they up to date?

What, why and fix are read from the source, where each finding is made; what only a run knows stands in <angle
brackets>. Examples are the cases of the tests. What neither tells stands in scripts/codes.yaml.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.core.codes import AREAS, IGNORABLE  # noqa: E402

PACKAGE = ROOT / "zero_recipes"
TABLE = PACKAGE / "core" / "codes.json"
PAGE = ROOT / "docs" / "checks.md"
BY_HAND = yaml.safe_load((ROOT / "scripts" / "codes.yaml").read_text())
CODE = re.compile(r"ZR\d{3}")
PARTS = ("what", "why", "fix")
WIDEST = 240  # characters of a cell of the page
INTRODUCTION = """# What is refused, and how to fix it

`zero-recipes check RECIPE.yaml` prints all findings about a run at once. `run_sft.py` refuses on the same errors,
before any weight is loaded, with exit code 2; warnings are printed once, and the run goes on. Every finding has a code:
`zero-recipes explain ZR104` prints its cause, fix and an example.

`--ignore ZR608` (in a recipe: `ignore: [ZR608]`) turns an error into a warning where that is safe: the codes marked *.
Any other code under `ignore` is refused. Codes marked (w) are warnings. &lt;Angle brackets> stand for what the program
fills in. This page is generated: `python scripts/checks_page.py`.
"""


def table() -> dict[str, dict[str, Any]]:
    """{code: its area, levels, what, why, fix, and an example where there is one}, in the order of the codes."""
    examples = {**_combinations(), **_faults(), **BY_HAND["examples"]}
    rows = {}
    for code, level, parts in sorted(findings_in_source(), key=lambda row: row[0]):
        parts = dict(zip(PARTS, parts, strict=True)) | BY_HAND["parts"].get(code, {})
        rows[code] = {"area": AREAS[code[2]], "level": level} | parts
        if code in examples:
            rows[code]["example"] = examples[code].rstrip()
    return rows


def findings_in_source() -> Iterator[tuple[str, str, list[str]]]:
    """(code, level, [what, why, fix]) of each place that makes a finding."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for scope in ast.walk(tree):
            for node in ast.iter_child_nodes(scope):
                node.parent = scope
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and call.args and _is_code(call.args[0]):
                named = {keyword.arg: keyword.value for keyword in call.keywords}
                parts = [*call.args[1:4], *(named[key] for key in PARTS if key in named)]
                yield call.args[0].value, _level(named.get("level")), [_text(part, call) for part in parts]


def _is_code(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(CODE.fullmatch(node.value))


def _level(node: ast.expr | None) -> str:
    if node is None:
        return "error"
    return node.value if isinstance(node, ast.Constant) else "error or warning"


def _text(node: ast.expr, call: ast.Call) -> str:
    """The words of an expression; what is only known in a run stands in angle brackets."""
    if ast.unparse(node) in BY_HAND["words"]:
        return BY_HAND["words"][ast.unparse(node)]
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(_text(part, call) for part in node.values)
        case ast.FormattedValue():
            return _text(node.value, call)
        case ast.BinOp(op=ast.Add()):
            return _text(node.left, call) + _text(node.right, call)
        case ast.IfExp():
            return _either(_text(node.body, call), _text(node.orelse, call))
        case ast.Name():
            assigned = _assigned(node.id, call)
            return f"<{_words(node.id)}>" if assigned is None else _text(assigned, call)
        case ast.Attribute():
            return f"<{_words(node.attr)}>"
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return f"<{_words(key)}>"
        case ast.Subscript():
            return _text(node.value, call)
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.GeneratorExp(generators=[loop])]):
            return _text(loop.iter, call)
        case ast.Call(func=ast.Attribute(attr="join"), args=[joined]):
            return _text(joined, call)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=key), *_]):
            return f"<{_words(key)}>"
        case ast.Call(func=ast.Name(id="len")):
            return "<number>"
        case ast.Call(func=ast.Attribute(attr="size")):
            return "<size>"
        case ast.Call(func=ast.Attribute(attr="replace", value=value)):
            return _text(value, call)
        case ast.Call(args=[*_, last]):
            return _text(last, call)
        case ast.Call(func=ast.Attribute(value=value)):
            return _text(value, call)
        case ast.BoolOp(values=[first, *_]):
            return _text(first, call)
    return "<number>"


def _either(one: str, other: str) -> str:
    """What an `a if test else b` may become: a plural's "s" or the longer ending alone, else both."""
    texts = [text for text in (one, other) if re.search(r"[a-zA-Z]", text)]
    if not texts or max(map(len, texts)) <= 2:
        return max(texts, key=len, default="")
    return " / ".join(dict.fromkeys(texts))


def _assigned(name: str, call: ast.Call) -> ast.expr | None:
    """What a variable of the function or a constant of the module is assigned to, where that is one text."""
    scope: ast.AST = call
    while not isinstance(scope, (ast.FunctionDef, ast.Module)):
        scope = scope.parent
    module = scope
    while not isinstance(module, ast.Module):
        module = module.parent
    for nodes in (list(ast.walk(scope)), module.body):
        values = [value for target, value in _assignments(nodes) if target == name]
        if len(values) == 1 and _is_text(values[0]):
            return values[0]
    return None


def _assignments(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Tuple)
        ):
            yield from zip(map(ast.unparse, node.targets[0].elts), node.value.elts, strict=True)
        elif isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), node.value


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.JoinedStr() | ast.Constant(value=str()):
            return True
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, op=ast.Add(), right=other):
            return _is_text(one) or _is_text(other)
    return False


def _words(name: str) -> str:
    return name.strip("_")


def _faults() -> dict[str, str]:
    from tests.helpers.bad_recipes import FAULTS

    return {fault.code: fault.bad.written() for fault in reversed(FAULTS)}


def _combinations() -> dict[str, str]:
    from tests.helpers.known_bad import CASES

    examples = {}
    for bad, fixed, code, *_ in reversed(CASES.values()):
        shown = {key: value for key, value in bad.items() if fixed.get(key) != value}
        config, beside = shown.get("deepspeed"), fixed.get("deepspeed", {})
        if isinstance(config, dict):
            shown["deepspeed"] = _differing(config, beside)
        examples[code] = yaml.safe_dump(shown, sort_keys=False).replace(str(ROOT), ".")
    return examples


def _differing(config: dict, beside: dict) -> dict:
    """The keys of a ds_config that are not the same in another; its stage always."""
    shown = {key: value for key, value in config.items() if beside.get(key) != value}
    zero = {"stage": config["zero_optimization"]["stage"]}
    other = beside.get("zero_optimization", {})
    changed = config["zero_optimization"].items() if other.get("stage") == zero["stage"] else ()
    return {"zero_optimization": zero | {k: v for k, v in changed if other.get(k) != v}} | {
        key: value for key, value in shown.items() if key != "zero_optimization"
    }


def page(rows: dict[str, dict[str, Any]]) -> str:
    """docs/checks.md: one table for each area."""
    lines = [INTRODUCTION]
    for area in AREAS.values():
        found = {code: row for code, row in rows.items() if row["area"] == area}
        lines += [f"## {area[0].upper()}{area[1:]}\n", "| code | what | fix |", "| --- | --- | --- |"]
        for code, row in found.items():
            mark = "*" if code in IGNORABLE else " (w)" if row["level"] == "warning" else ""
            lines.append(f"| {code}{mark} | {_cell(row['what'])} | {_cell(row['fix'])} |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    text = text if len(text) <= WIDEST else text[:WIDEST].rsplit(" ", 1)[0] + " ..."
    parts = text.split("`")  # every second one is code, where Markdown leaves "<" alone
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


def main(argv: list[str]) -> int:
    rows = table()
    texts = {TABLE: json.dumps(rows, indent=1, ensure_ascii=False) + "\n", PAGE: page(rows)}
    if "--check" in argv:
        stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
        print(*(f"{path.relative_to(ROOT)} is not up to date" for path in stale), sep="\n")
        return int(bool(stale))
    for path, text in texts.items():
        path.write_text(text)
        print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
