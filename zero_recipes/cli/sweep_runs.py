"""The runs of a sweep, put together before the first one starts: strategies by the values of `--set KEY=a,b,c`."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.checks.deepspeed_rules import top_level_keys, zero_keys
from zero_recipes.checks.rehearsal import parser_findings
from zero_recipes.checks.rules import Candidate
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import AMBIGUOUS, INLINE, launched_environment
from zero_recipes.config.ds_config import DsConfig, read_json_mapping, schema_findings
from zero_recipes.config.keys import key_choices, key_findings, key_types, recipe_findings
from zero_recipes.config.recipe import Settings
from zero_recipes.config.strategy import Strategy, launched_ds_config
from zero_recipes.core.files import write_json, write_text
from zero_recipes.core.findings import Refusal, raise_errors, refusal
from zero_recipes.report.table import short_names

DS_CONFIG, ACCELERATE_CONFIG = "ds_config.json", "accelerate.yaml"
SOURCE = "--set"
EXAMPLE = "--set per_device_train_batch_size=2,4,8"
LONGEST_NAME = 120  # characters of a run's folder; a file system takes 255 bytes
UNSAFE = re.compile(r"[^A-Za-z0-9._+,=-]")
# what each run of a sweep has of its own, or all of them alike
NOT_SWEPT = ("output_dir", "overwrite", "resume_from_checkpoint")


class _Values(yaml.SafeLoader):
    """YAML that takes 5e8 and 1e-5 for numbers. YAML 1.1 takes them for text."""


def _number(_: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    number = float(node.value)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


_Values.add_implicit_resolver("!exponent", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), [*"-+.0123456789"])
_Values.add_constructor("!exponent", _number)


@dataclass(frozen=True)
class SetKey:
    """One `--set`: a key and the values that it takes in turn."""

    key: str  # as it was written
    values: tuple[Any, ...]  # as YAML reads them
    is_ds: bool  # of the ds_config; else the recipe's


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str  # of its folder
    strategy: str
    config: Path  # the strategy's accelerate file
    values: Mapping[str, Any]  # what the sweep sets, by key
    words: tuple[str, ...] = ()  # of the command line, for the keys of the recipe among them
    ds_config: Mapping[str, Any] | None = None  # with the keys of DeepSpeed among them; None without such keys
    refusal: Refusal | None = None  # why these values cannot be run

    def config_in(self, folder: Path) -> Path:
        """The accelerate file to launch with: where values of the ds_config are set a new one in `folder`, beside that
        ds_config. The strategy's own files stay as they are."""
        if self.ds_config is None:
            return self.config
        ds_config, config = folder / DS_CONFIG, folder / ACCELERATE_CONFIG
        write_json(ds_config, self.ds_config)
        launched = yaml.safe_load(self.config.read_text())
        block = launched["deepspeed_config"]
        if not block.get("deepspeed_config_file"):  # accelerate takes no value of it beside a file
            launched.pop("mixed_precision", None)
            in_file = {*AMBIGUOUS, *INLINE} - {"zero3_init_flag"}
            block = {key: value for key, value in block.items() if key not in in_file}
        if {"zero_optimization", "zero_optimization.stage"} & set(self.values):
            block["zero3_init_flag"] = DsConfig(self.ds_config).stage == 3
        launched["deepspeed_config"] = block | {"deepspeed_config_file": str(ds_config)}
        write_text(config, yaml.safe_dump(launched, sort_keys=False))
        return config


def runs_of(
    recipe: Path, configs: Mapping[str, Path], sets: Sequence[str], overrides: list[str], num_processes: int
) -> list[SweepRun]:
    """One run a strategy and combination of values. `configs`: {strategy: accelerate file}; `sets`: KEY=a,b,c.

    Raises Refusal for a key that nothing here has; values that cannot be are refused each in its run.
    """
    if not sets:
        return [SweepRun(strategy, strategy, config, {}) for strategy, config in configs.items()]
    parsed = parse_sets(sets, key_types(), overrides)
    mapping = recipes.read_recipe_file(recipe)
    environments = {name: launched_environment(config, num_processes) for name, config in configs.items()}
    _refuse_without_deepspeed(parsed, environments)
    chosen = [(strategy, values) for strategy in configs for values in combinations(parsed)]
    runs = []
    for (strategy, values), name in zip(chosen, run_names(chosen), strict=True):
        words, ds_config, refusal = _prepared(recipe, mapping, overrides, parsed, values, environments[strategy])
        runs.append(SweepRun(name, strategy, configs[strategy], values, tuple(words), ds_config, refusal))
    return runs


def parse_sets(texts: Sequence[str], types: Mapping[str, Any], overrides: list[str]) -> list[SetKey]:
    """The `--set` options of a command line. `types`: of every key that a recipe may have.

    Raises Refusal for a key that neither a recipe nor a ds_config has, for values that cannot be read, and for a key
    that is given twice (`overrides`: the other options).
    """
    sets = [_parsed(text, types) for text in texts]
    given = [*recipes.named_on(overrides, types), *(each.key for each in sets)]
    for text, each in zip(texts, sets, strict=True):
        if given.count(each.key) > 1:
            raise _unreadable(text, f"{each.key} is given twice. Name it in one --set, with all its values.")
    return sets


def _parsed(text: str, types: Mapping[str, Any]) -> SetKey:
    """The values are a YAML list without its brackets."""
    key, _, listed = text.partition("=")
    is_ds = _is_ds_key(key.strip(), types)
    try:
        values = yaml.load(f"[{listed}]", _Values)
        written = {json.dumps(value, sort_keys=True, allow_nan=False) for value in values}
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise _unreadable(text, f"{' '.join(str(error).split())}.") from None
    if not values or len(written) < len(values):
        raise _unreadable(text, "It has a key, and distinct values by comma.")
    return SetKey(key.strip(), tuple(values), is_ds)


def _unreadable(text: str, why: str) -> Refusal:
    return refusal("ZR355", text=text[:80], why=why, example=EXAMPLE)


def _is_ds_key(key: str, types: Mapping[str, Any]) -> bool:
    """Whether a key is the ds_config's; the recipe's first, where both have it. Raises Refusal for neither's."""
    if key in NOT_SWEPT:
        raise refusal("ZR358", key=key)
    if key in types:
        return False
    block, _, below = key.partition(".")
    in_zero = block == "zero_optimization" and below
    if below.split(".")[0] in zero_keys() if in_zero else block in top_level_keys():
        return True  # DeepSpeed's parser reads what is below
    zero = {f"zero_optimization.{name}" for name in zero_keys()}
    raise Refusal(list(key_findings(SOURCE, [key], {*types, *top_level_keys(), *zero})))


def combinations(sets: Sequence[SetKey]) -> list[dict[str, Any]]:
    """{key: value} of each run; the values of the last key change fastest."""
    keys = [each.key for each in sets]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(each.values for each in sets))]


def run_names(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """A folder's name for each (strategy, values): safe on any file system and unique."""
    texts = [_values_in_words(strategy, values) for strategy, values in runs]
    safe = [UNSAFE.sub("_", text)[:LONGEST_NAME] for text in texts]
    folded = [name.casefold() for name in safe]
    return [
        name if name == text and folded.count(name.casefold()) == 1 else f"{name},{_digest(run)}"
        for name, text, run in zip(safe, texts, runs, strict=True)
    ]


def _values_in_words(strategy: str, values: Mapping[str, Any]) -> str:
    named = short_names(list(values))
    return ",".join([strategy, *(f"{named[key]}={shown(value)}" for key, value in values.items())])


def _digest(run: tuple[str, Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:8]


def shown(value: Any) -> str:
    """A value as it is written in YAML, on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def option_words(key: str, value: Any) -> list[str]:
    """How run_sft.py's command line gives a key of the recipe that value."""
    return [f"--{key}", *map(shown, value)] if isinstance(value, list) else [f"--{key}={shown(value)}"]


def refuse_own_ds_config(recipe: Path, settings: Settings, runs: Sequence[SweepRun], num_processes: int) -> None:
    """Refuse a recipe or command line whose `deepspeed:` is not the ds_config of every run. Raises Refusal.

    Under a launch without DeepSpeed it would train by its own ds_config, in a row that is called ddp.
    """
    if settings.deepspeed is None:
        return
    own, others = read_json_mapping(settings.deepspeed), set()
    for run in runs:
        launched = launched_ds_config(launched_environment(run.config, num_processes), settings.precision)[0]
        others |= {run.strategy} if launched != own or run.ds_config is not None else set()
    if others:
        named = "an inline mapping" if isinstance(settings.deepspeed, dict) else settings.deepspeed
        raise refusal("ZR366", others=", ".join(sorted(others)), recipe=recipe, named=named)


def _prepared(recipe: Path, mapping, overrides, sets: list[SetKey], values: dict[str, Any], environment):
    """(words of the command line, ds_config or None, Refusal or None) of one run."""
    own = {each.key: values[each.key] for each in sets if not each.is_ds}
    in_ds_config = {tuple(each.key.split(".")): values[each.key] for each in sets if each.is_ds}
    words = [word for key, value in own.items() for word in option_words(key, value)]
    config, world_size = None, int(environment.get("WORLD_SIZE", 1))
    try:
        raise_errors(recipe_findings(SOURCE, own, {}, key_types(), key_choices()))
        parsed = recipes.parse_recipe(recipe, mapping, [*overrides, *words])
        settings = parsed.settings
        recipes.derive_accumulation(settings, parsed.given, world_size // settings.sequence_parallel_size or 1)
        if in_ds_config:
            config = with_values(launched_ds_config(environment, settings.precision)[0], in_ds_config)
            raise_errors(schema_findings(config, SOURCE))
            strategy = Strategy(SOURCE, world_size, DsConfig(config), SOURCE)
            raise_errors(parser_findings(Candidate(settings, strategy, "cuda", {})))
    except Refusal as refusal:
        return words, config, refusal
    return words, config, None


def with_values(config: Mapping[str, Any], values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A ds_config with each value at its path; blocks that are missing are made. Raises Refusal."""
    filled = copy.deepcopy(dict(config))
    for path, value in values.items():
        block = filled
        for name in path[:-1]:
            block[name] = {} if block.get(name) is None else block[name]
            if not isinstance(block[name], dict):
                raise refusal("ZR360", path=".".join(path), block=name, value=json.dumps(block[name]))
            block = block[name]
        block[path[-1]] = value
    return filled


def _refuse_without_deepspeed(sets: list[SetKey], environments: Mapping[str, Mapping[str, str]]) -> None:
    keys = [each.key for each in sets if each.is_ds]
    able = [name for name, env in environments.items() if env.get("ACCELERATE_USE_DEEPSPEED") == "true"]
    without = [name for name in environments if name not in able]
    if keys and without:
        raise refusal("ZR359", keys=", ".join(keys), without=", ".join(without), able=",".join(able) or "zero2")
