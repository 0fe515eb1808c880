"""Findings: what is wrong with a run, why, and how to fix it. Their texts are in findings.yaml.

A refusal ends a run before any weight is loaded, with one message and exit code 2.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from zero_recipes.core.files import encodable, package_yaml, write_json
from zero_recipes.core.process import escape_unprintable, rank, wait_for_rank_0

# exit codes
FAILED = 1
REFUSED = 2
PREEMPTED = os.EX_TEMPFAIL  # 75
INTERRUPTED = 128 + signal.SIGINT
UNFINISHED = "the run has not finished"  # in the metrics.json of one that is alive, or was killed
PRINT_SECONDS = 20.0
LONGEST_MESSAGE = 600  # characters of a library's message in a finding; --traceback shows all of it
REFUSAL_FILE = "ZERO_RECIPES_REFUSAL_FILE"  # in the environment: where a refused run says so to who launched it
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
    "9": "the finished model",
}


@dataclass(frozen=True)
class Finding:
    """What is wrong, why it cannot work, and how to fix it: one sentence or two each."""

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
        if self.level == "error":
            return "refused"
        return "warning (ignored)" if self.ignored else "warning"

    def __str__(self) -> str:
        return shown([self])


def shown(findings: Iterable[Finding], tracebacks: bool = False) -> str:
    """As people read them: those of one code for the same reason as one, with a line for each."""
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
    """{code: {"level", "what", "why", "fix"; some have "source", "ignore" and "example"}} of findings.yaml."""
    rows = package_yaml(__package__, "findings.yaml")
    return {code: {"level": "error"} | row for code, row in rows.items()}


def finding(
    code: str, /, *, level: str | None = None, scope: str = "run", recipe_key: str | None = None, **values: Any
) -> Finding:
    """`values`: what the code's templates in findings.yaml name. `level`: where a code may be either."""
    row = table()[code]
    texts = {part: encodable(row[part].format_map(values)) for part in PARTS}
    return Finding(code, **texts, level=level or row["level"], key=recipe_key, scope=scope)


def refusal(code: str, /, *, scope: str = "run", **values: Any) -> "Refusal":
    """To be raised, for the finding of that code."""
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


class RunFailed(Exception):
    """A run that ends early, on all ranks, for a reason that it knows: one message, no traceback."""

    status = "failed"  # in metrics.json
    exit_code = FAILED
    scope = "run"  # who prints it, as of a Finding


def ending(name: str, /, **values: Any) -> str:
    """A text of endings.yaml. Of an error in `values` its first line."""
    values = {key: first_line(value) if isinstance(value, Exception) else value for key, value in values.items()}
    return package_yaml(__package__, "endings.yaml")[name].format_map(values)


class Preempted(RunFailed):
    """A signal has ended the run, and all that it has trained is saved."""

    status = "preempted"
    exit_code = PREEMPTED


class PeerFailed(RuntimeError):
    """What another rank failed of, or that it died: never the cause of a run's end. One line, no traceback."""


@contextlib.contextmanager
def library_error_as_finding(doing: str, keys: Iterable[str] = ()) -> Iterator[None]:
    """Whatever a library raises inside becomes one Refusal with the library's message.

    A Refusal passes as it is, and so does memory that is not enough.
    `doing`: "making the optimizer (optim: lomo)". `keys`: the finding is about the first that the message names.
    """
    try:
        yield
    except (Refusal, RunFailed):
        raise
    except Exception as error:  # libraries raise whatever they like
        message = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "out of memory" in message:
            raise
        named = next((key for key in keys if re.search(rf"\b{re.escape(key)}\b", message)), None)
        hint = next((hint for words, hint in table()["ZR199"]["hints"].items() if words in message), "")
        about = {"doing": doing, "name": type(error).__name__, "message": message[:LONGEST_MESSAGE], "hint": hint}
        trace = "".join(traceback.format_exception(error))
        # transformers, dynamic_module_utils.py
        raised_by = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
        found = finding("ZR199", recipe_key=named, **about)
        not_run = "resolve_trust_remote_code" in raised_by
        raise Refusal([replace(found, trace=trace, is_of_code_not_run=not_run)]) from error


@contextlib.contextmanager
def collected(findings: list[Finding]) -> Iterator[None]:
    """Findings of a Refusal raised inside are added to `findings`, and the program goes on."""
    try:
        yield
    except Refusal as refusal:
        findings += refusal.findings


def first_line(error: BaseException) -> str:
    """What a library's error says, in the line that a finding has room for."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def downgraded(findings: list[Finding], ignored: Container[str]) -> list[Finding]:
    found = []
    for finding in findings:
        if finding.level == "error" and finding.code in ignored:
            finding = replace(finding, level="warning", ignored=True)
        found.append(finding)
    return found


def ignored_codes(ignore: list[str] | str | None) -> frozenset[str]:
    """The codes of a recipe's `ignore` key; one text may hold several by comma."""
    text = ignore if isinstance(ignore, str) else " ".join(ignore or [])
    return frozenset(text.replace(",", " ").upper().split())


def described(code: str) -> dict[str, Any]:
    """The row of a code with its area, and with <names> for what only a run knows."""
    row = table()[code] | {"area": AREAS[code[2]]}
    for part in PARTS:
        row[part] = re.sub(r"\{(\w*)[^{}]*\}", _placeholder, row[part])
    return row


def _placeholder(field: re.Match) -> str:
    return f"<{field[1].replace('_', ' ')}>"


def raise_errors(findings: list[Finding]) -> None:
    """One Refusal for all errors among the findings."""
    if any(finding.level == "error" for finding in findings):
        raise Refusal(findings)


def print_ending(ending: BaseException, tracebacks: bool = False) -> int:
    """Print why a run ends, each finding on the ranks of its scope. Returns the exit code of every rank."""
    escape_unprintable()
    if isinstance(ending, KeyboardInterrupt):
        if rank() == 0:
            print("ended by Ctrl-C", file=sys.stderr, flush=True)
        return INTERRUPTED
    if isinstance(ending, Refusal):
        message = str(ending)
        mine = [finding for finding in ending.findings if _prints(finding.scope)]
        texts = [shown(mine, tracebacks)] if mine else []
    else:
        is_known = isinstance(ending, (RunFailed, PeerFailed))
        message = f"{getattr(ending, 'status', type(ending).__name__)}: {ending}"
        texts = []
        if is_known and _prints(getattr(ending, "scope", "rank")):
            texts.append(message)
        if tracebacks or not is_known:
            texts.append("".join(traceback.format_exception(ending)))
    for text in texts:
        print(text, file=sys.stderr, flush=True)
    _tell_launcher(message)
    refusal_file = os.environ.get(REFUSAL_FILE)
    if refusal_file and isinstance(ending, Refusal):
        first = ending.findings[0]
        write_json(Path(refusal_file), {"code": first.code, "reason": first.what, "error": message})
    if rank() and (not texts or isinstance(ending, PeerFailed)):
        wait_for_rank_0(PRINT_SECONDS)  # a launcher ends all when the first ends, and rank 0 has the message
    if isinstance(ending, Refusal):
        return REFUSED
    return getattr(ending, "exit_code", FAILED)


def _prints(scope: str) -> bool:
    if scope == "rank":
        return True
    if scope == "machine":
        return int(os.environ.get("LOCAL_RANK", rank())) == 0
    return rank() == 0


def _tell_launcher(message: str) -> None:
    """accelerate and torchrun turn the exit code into 1, and close with a table that shows what is in this file.

    See torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with open(error_file, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
