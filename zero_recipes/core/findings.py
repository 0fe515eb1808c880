"""Findings: what is wrong with a run, why, and how to fix it. Their texts are in findings.yaml.

A refusal ends a run before any weight is loaded, with one message and exit code 2.
"""

import contextlib
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from zero_recipes.core.files import encodable, package_yaml

PARTS = ("what", "why", "fix")  # of a finding's text
# of findings, by the first digit of a code
AREAS = {
    "1": "recipe and command line",
    "2": "DeepSpeed configuration",
    "3": "launch",
    "4": "model",
    "5": "data",
    "6": "machine",
    "7": "checkpoints and resuming",
    "8": "planner and tools, evaluating and saving, data formats, imports from other trainers",
    "9": "the finished model, files and logins",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run: what it is, why it cannot work, and how to fix it."""

    code: str  # "ZR104": stable; `zero-recipes explain ZR104` says more
    what: str
    why: str
    fix: str
    level: str = "error"  # or "warning": printed once, and the run goes on
    key: str | None = None  # the recipe's key that it is about
    scope: str = "run"  # who prints it: rank 0 of the "run", the first rank of each "machine", or each "rank"
    ignored: bool = False  # an error that the recipe's `ignore` makes a warning
    is_of_code_not_run: bool = False  # without trust_remote_code
    trace: str = field(default="", compare=False, repr=False)  # the traceback of what a library raised

    @property
    def head(self) -> str:
        """The word that a finding's text begins with."""
        if self.level == "error":
            return "refused"
        return "warning (ignored)" if self.ignored else "warning"

    def __str__(self) -> str:
        return shown([self])


def shown(findings: Iterable[Finding], tracebacks: bool = False) -> str:
    """Write findings for people: those of one code for the same reason become one, with a line for each."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.head, finding.code, finding.why), []).append(finding)
    lines = []
    for group in groups.values():
        lines += _lines(group)
        if tracebacks:
            lines += [finding.trace for finding in group if finding.trace]
    return "\n".join(lines)


def _lines(group: list[Finding]) -> list[str]:
    """Findings of one code and reason; a fix that they share comes last."""
    first = group[0]
    has_one_fix = all(finding.fix == first.fix for finding in group)
    whats = [finding.what if has_one_fix else f"{finding.what}. {finding.fix}" for finding in group]
    what = "\n    ".join(whats)
    lines = [f"{first.head}: {what} [{first.code}]", f"    why: {first.why}"]
    if has_one_fix:
        lines.append(f"    fix: {first.fix}")
    return lines


@cache
def table() -> dict[str, dict[str, Any]]:
    """Read findings.yaml: the texts of each code.

    Returns {code: {"level", "what", "why", "fix"}}; some rows also have "source", "ignore" and "example".
    """
    rows = package_yaml(__package__, "findings.yaml")
    return {code: {"level": "error"} | row for code, row in rows.items()}


def finding(
    code: str, /, *, level: str | None = None, scope: str = "run", recipe_key: str | None = None, **values: Any
) -> Finding:
    """Make the finding of a code.

    Args:
        code: its name in findings.yaml.
        level: "error" or "warning", where a code may be either.
        scope: which ranks print it (Finding.scope).
        recipe_key: the recipe's key that it is about.
        values: what the code's templates name.
    """
    row = table()[code]
    texts = {part: encodable(row[part].format_map(values)) for part in PARTS}
    return Finding(code, **texts, level=level or row["level"], key=recipe_key, scope=scope)


def refusal(code: str, /, *, scope: str = "run", **values: Any) -> "Refusal":
    """Make the Refusal for one finding, to be raised. The arguments are those of `finding`."""
    return Refusal([finding(code, scope=scope, **values)])


class Refusal(Exception):
    """A run that is refused, for one finding or for several at once; warnings among them are left out."""

    def __init__(self, findings: list[Finding]):
        self.findings = [finding for finding in findings if finding.level == "error"]
        super().__init__(self.findings)
        self.codes = [finding.code for finding in self.findings]
        self.what = "\n".join(finding.what for finding in self.findings)
        self.why = "\n".join(finding.why for finding in self.findings)
        self.fix = "\n".join(finding.fix for finding in self.findings)

    def __str__(self) -> str:
        return shown(self.findings)


@contextlib.contextmanager
def collected(findings: list[Finding]) -> Iterator[None]:
    """Add the findings of a Refusal that is raised inside to `findings`, and go on."""
    try:
        yield
    except Refusal as refusal:
        findings += refusal.findings


def first_line(error: BaseException) -> str:
    """The first line of a library's error: as much as a finding has room for."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def downgraded(findings: list[Finding], ignored: Container[str]) -> list[Finding]:
    """Turn the errors whose codes the recipe ignores, and may ignore, into warnings."""
    found = []
    for finding in findings:
        may_be = "ignore" in table().get(finding.code, {})
        if finding.level == "error" and finding.code in ignored and may_be:
            finding = replace(finding, level="warning", ignored=True)
        found.append(finding)
    return found


def ignored_codes(ignore: list[str] | str | None) -> frozenset[str]:
    """Read the codes of a recipe's `ignore` key. One text may hold several, separated by commas."""
    text = ignore if isinstance(ignore, str) else " ".join(ignore or [])
    return frozenset(text.replace(",", " ").upper().split())


def described(code: str) -> dict[str, Any]:
    """The row of a code in findings.yaml with its area, and with <names> for what only a run knows."""
    row = table()[code] | {"area": AREAS[code[2]]}
    for part in PARTS:
        row[part] = re.sub(r"\{(\w*)[^{}]*\}", _placeholder, row[part])
    return row


def _placeholder(field: re.Match) -> str:
    return f"<{field[1].replace('_', ' ')}>"


def raise_errors(findings: list[Finding]) -> None:
    """Raise one Refusal for all errors among the findings; nothing without errors."""
    if any(finding.level == "error" for finding in findings):
        raise Refusal(findings)
