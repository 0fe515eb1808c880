"""`zero-recipes explain ZR104`: what a finding means, why it is one, how to fix it, and an example."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from zero_recipes.cli.options import subcommand
from zero_recipes.core.findings import AREAS, REFUSED, described, near_codes, table


def add_explain(verbs) -> None:
    verb = subcommand(verbs, "explain", "what a finding's code means; without a code: the areas of all codes")
    verb.add_argument("code", nargs="?", help="e.g. ZR104")
    verb.set_defaults(func=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    code = (arguments.code or "").upper()
    if not code:
        print(*_areas(), sep="\n")
        return 0
    if code not in table():
        near = near_codes(code)
        print(f"there is no code {code}" + (f"; near it: {', '.join(near)}" if near else ""), file=sys.stderr)
        return REFUSED
    print(*_explained(code), sep="\n")
    return 0


def _areas() -> list[str]:
    counts = Counter(AREAS[code[2]] for code in table())
    width = max(map(len, counts))
    listed = [f"ZR{digit}xx  {area:{width}}  {counts[area]} codes" for digit, area in AREAS.items()]
    return [*listed, "", "All of them: docs/codes.md. One: zero-recipes explain ZR104"]


def _explained(code: str) -> list[str]:
    row = described(code)
    lines = [f"{code} ({row['area']}, {row['level']}): {row['what']}"]
    lines += [f"    why: {row['why']}", f"    fix: {row['fix']}"]
    if "ignore" in row:
        lines.append(f"    --ignore {code} makes it a warning: {row['ignore']}")
    elif row["level"] != "warning":
        lines.append("    --ignore does not take it: the run would stop, or be wrong")
    if "example" in row:
        lines += ["", "example:", *(f"    {line}" for line in row["example"].splitlines())]
    return lines
