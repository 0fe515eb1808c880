"""`--set KEY=a,b,c` of a sweep: its values, their combinations, and what each run is called."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from zero_recipes.checks.deepspeed_rules import top_level_keys, zero_keys
from zero_recipes.config.recipe import named_on
from zero_recipes.config.validation import key_findings
from zero_recipes.core.findings import Refusal, refusal

LONGEST_NAME = 120  # characters of a run's folder; a file system takes 255 bytes
# what each run of a sweep has of its own, or all of them alike
NOT_SWEPT = ("output_dir", "overwrite", "resume_from_checkpoint")
EXAMPLE = "--set per_device_train_batch_size=2,4,8"
# YAML 1.1 takes these for text: 5e8, 1e-5
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
SAFE = re.compile(r"[^A-Za-z0-9._+-]")


@dataclass(frozen=True)
class SetKey:
    """One `--set`: a key and the values that it takes in turn."""

    key: str  # as it was written
    values: tuple[Any, ...]  # as YAML reads them
    is_ds: bool  # of the ds_config; else the recipe's

    @property
    def path(self) -> tuple[str, ...]:
        """From the top of the ds_config to the key."""
        return tuple(self.key.split("."))


def parse_sets(texts: Sequence[str], types: Mapping[str, Any], overrides: list[str]) -> list[SetKey]:
    """The `--set` options of a command line. `types`: of every key that a recipe may have.

    Raises Refusal for a key that neither a recipe nor a ds_config has, for values that cannot be read, and for a key
    that is given twice (`overrides`: the other options).
    """
    sets: list[SetKey] = []
    for text in texts:
        parsed = _parsed(text, types)
        if parsed.key in named_on(overrides, types) | {other.key for other in sets}:
            raise _unreadable(text, f"{parsed.key} is given twice. Name it in one --set, with all its values.")
        sets.append(parsed)
    return sets


def combinations(sets: Sequence[SetKey]) -> list[dict[str, Any]]:
    """{key: value} of each run; the values of the last key change fastest."""
    keys = [each.key for each in sets]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(each.values for each in sets))]


def run_names(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A folder's name for each (strategy, values): safe on any file system, unique, and the same in every sweep."""
    names = [_name(strategy, values) for strategy, values in runs]
    folded = [name.casefold() for name in names]
    return [
        f"{name},{_digest(*run)}" if folded.count(name.casefold()) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def shown(value: Any) -> str:
    """A value as it is written in YAML, on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def option_words(key: str, value: Any) -> list[str]:
    """How run_sft.py's command line gives a key of the recipe that value."""
    if isinstance(value, list):
        return [f"--{key}", *map(shown, value)]
    return [f"--{key}={shown(value)}"]


def _parsed(text: str, types: Mapping[str, Any]) -> SetKey:
    """The values are a YAML list without its brackets."""
    key, _, listed = text.partition("=")
    is_ds = _is_ds_key(key.strip(), types)
    try:
        values = _numbers(yaml.safe_load(f"[{listed}]"))
        written = [json.dumps(value, sort_keys=True, allow_nan=False) for value in values]
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise _unreadable(text, f"{' '.join(str(error).split())}.") from None
    if not values or len(set(written)) < len(values):
        raise _unreadable(text, "It has a key, and distinct values by comma.")
    return SetKey(key.strip(), tuple(values), is_ds)


def _is_ds_key(key: str, types: Mapping[str, Any]) -> bool:
    """Whether a key is the ds_config's; the recipe's first, where both have it. Raises Refusal for neither's."""
    if key in NOT_SWEPT:
        raise refusal("ZR358", key=key)
    if key in types:
        return False
    path = tuple(key.split("."))
    zero = path[:1] == ("zero_optimization",) and len(path) > 1
    if path[1] in zero_keys() if zero else path[0] in top_level_keys():
        return True  # DeepSpeed's parser reads what is below (cli/sweep_runs.py)
    below = {f"zero_optimization.{name}" for name in zero_keys()}
    raise Refusal(list(key_findings("--set", [key], {*types, *top_level_keys(), *below})))


def _numbers(value: Any) -> Any:
    """5e8 as the number that it is: PyYAML wants 5.0e+8."""
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    if not isinstance(value, str) or not EXPONENT.fullmatch(value):
        return value
    number = float(value)
    return int(number) if math.isfinite(number) and number.is_integer() and abs(number) < 2**53 else number


def _unreadable(text: str, why: str) -> Refusal:
    return refusal("ZR355", text=text[:80], why=why, example=EXAMPLE)


def _name(strategy: str, values: Mapping[str, Any]) -> str:
    last = [key.rpartition(".")[2] for key in values]
    keys = [name if last.count(name) == 1 else key for key, name in zip(values, last, strict=True)]
    halves = [(key, shown(value)) for key, value in zip(keys, values.values(), strict=True)]
    safe = [(key, SAFE.sub("_", text)) for key, text in halves]
    name = ",".join([strategy, *map("=".join, safe)])
    if safe == halves and len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]},{_digest(strategy, values)}"


def _digest(strategy: str, values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([strategy, dict(values)], sort_keys=True).encode()).hexdigest()[:8]
