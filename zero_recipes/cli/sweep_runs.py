"""The runs of a sweep, put together before the first one starts: strategies by values, each with its launch."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.checks.candidate import Candidate
from zero_recipes.checks.rehearsal import parser_findings
from zero_recipes.cli.set_values import SetKey, combinations, option_words, parse_sets, run_names
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import AMBIGUOUS, INLINE, launched_environment
from zero_recipes.config.ds_config import DsConfig, read_json_mapping, schema_findings
from zero_recipes.config.keys import key_choices, key_types
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy, launched_ds_config
from zero_recipes.config.validation import recipe_findings
from zero_recipes.core.files import write_json, write_text
from zero_recipes.core.findings import Finding, Refusal, raise_errors, refusal

DS_CONFIG, ACCELERATE_CONFIG = "ds_config.json", "accelerate.yaml"
SOURCE = "--set"


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
    in_ds_config = {each.path: values[each.key] for each in sets if each.is_ds}
    words = [word for key, value in own.items() for word in option_words(key, value)]
    config, world_size = None, int(environment.get("WORLD_SIZE", 1))
    try:
        raise_errors(recipe_findings("--set", own, {}, key_types(), key_choices()))
        parsed = recipes.parse_recipe(recipe, mapping, [*overrides, *words])
        settings = parsed.settings
        recipes.derive_accumulation(settings, parsed.given, world_size // settings.sequence_parallel_size or 1)
        if in_ds_config:
            config = with_values(launched_ds_config(environment, settings.precision)[0], in_ds_config)
            raise_errors(_ds_findings(config, settings, world_size))
    except Refusal as refusal:
        return words, config, refusal
    return words, config, None


def _ds_findings(config: dict[str, Any], settings: Settings, world_size: int) -> list[Finding]:
    return schema_findings(config, SOURCE) or parser_findings(
        Candidate(settings, Strategy(SOURCE, world_size, DsConfig(config), SOURCE), "cuda", {})
    )


def with_values(config: Mapping[str, Any], values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A copy of a ds_config with these values, each by its path; blocks that are missing are made. Raises Refusal."""
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
