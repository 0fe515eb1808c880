"""From a recipe to the jobs that a prediction is asked for: model, strategies, numbers of GPUs. No weight, no hub."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_view import DsConfig
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import read_ds_config
from zero_recipes.core.errors import Refusal
from zero_recipes.planner.formulas import family
from zero_recipes.planner.job import Job

MODELS = Path(__file__).with_name("models")
CONFIGS = Path("accelerate_configs")
GPUS_PER_NODE = 8  # of most machines that are rented; --gpus_per_node says otherwise
ALL = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")

Strategies = dict[str, dict[str, Any] | None]  # {name: its ds_config, None without DeepSpeed}


def read_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe with its overrides; raises Refusal for what neither TRL nor we know."""
    return recipes.parse(path, recipes.read(path), list(overrides))


def read_strategies(recipe: Recipe, names: Sequence[str] | None, folder: Path = CONFIGS) -> Strategies:
    """The strategies that are asked for: files of `folder`; unset, the recipe's own `deepspeed:`, or all.

    Raises Refusal where a file is missing, or where `names` and the recipe's `deepspeed:` contradict each other.
    """
    own = recipe.settings.deepspeed
    if names is None and str(recipe.settings.fsdp).lower() == "true":
        return {family.FSDP: None}
    if own is not None and names is None:
        config = read_ds_config(own)
        return {DsConfig(config).name: config}
    if own is not None:
        raise Refusal(
            "ZR801",
            f"--strategies {','.join(names)}, but the recipe names a DeepSpeed configuration itself",
            "A run under these strategies would be refused: two places would say how to shard.",
            "Leave out --strategies, or remove `deepspeed:` from the recipe.",
        )
    return {name: _ds_config_of(folder / f"{name}.yaml") for name in names or ALL}


def strategies_here(folder: Path = CONFIGS) -> Strategies:
    """Those of ALL whose files are in `folder`; nothing where the program runs elsewhere."""
    return {name: _ds_config_of(folder / f"{name}.yaml") for name in ALL if (folder / f"{name}.yaml").is_file()}


def _ds_config_of(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.yaml"))
        raise Refusal(
            "ZR802",
            f"there is no strategy {path.stem}",
            f"Strategies are the files of {path.parent}/, relative to the working directory, {Path.cwd()}.",
            f"Start from the repository's folder; the strategies there are {', '.join(known) or 'none'}.",
        )
    launched = yaml.safe_load(path.read_text()) or {}
    named = (launched.get("deepspeed_config") or {}).get("deepspeed_config_file")
    return None if named is None else read_ds_config(named)


def model_config(settings: Settings) -> dict[str, Any]:
    """The model's config.json: of a folder, of those in plan/models/, or of the cache. Never asks the hub.

    Raises Refusal where it is in none of them.
    """
    name, revision = settings.model_name_or_path, settings.model_revision
    if name is None:
        raise Refusal(
            "ZR803",
            "the recipe names no model",
            "`model_name_or_path` is not set.",
            "Add e.g. model_name_or_path: EleutherAI/pythia-410m",
        )
    local = Path(name) / "config.json"
    if local.is_file():
        return json.loads(local.read_text())
    known = known_models()
    if name in known and revision in (None, "main"):
        return known[name]["config"]
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        cached = None  # a path of a folder that is not there
    if isinstance(cached, str):
        return json.loads(Path(cached).read_text())
    at = "" if revision in (None, "main") else f" at revision {revision}"
    raise Refusal(
        "ZR804",
        f"the config.json of {name}{at} is not here",
        "A plan needs no weights, but the model's config: it is in no folder of this name, not among the project's own "
        "(zero_recipes/planner/models/) and not in the cache.",
        "zero-recipes fetch RECIPE.yaml (where the recipe has random_weights: true it leaves the weights out), or a "
        "folder with the config.json as --model_name_or_path.",
    )


def known_models() -> dict[str, dict[str, Any]]:
    """{model's name on the hub: its file in plan/models/ with config, source, revision and parameters}."""
    models = {}
    for path in sorted(MODELS.glob("*.json")):
        entry = json.loads(path.read_text())
        models |= dict.fromkeys((entry["model"], *entry["names"]), entry)
    return models


def job_of(
    recipe: Recipe,
    config: dict[str, Any],
    strategy: str,
    ds_config: dict[str, Any] | None,
    world_size: int,
    gpus_per_node: int = GPUS_PER_NODE,
) -> Job:
    """One job. Raises Refusal where global_batch_size cannot be made of so many ranks."""
    ds_config = copy.deepcopy(ds_config)
    if ds_config is not None and DsConfig(ds_config).hpz_partition_size == "auto":  # as ds_auto.py fills it in a run
        ds_config["zero_optimization"]["zero_hpz_partition_size"] = min(gpus_per_node, world_size)
    settings = recipe.settings.replace(deepspeed=ds_config)
    accumulation = recipes.derive_accumulation(settings, recipe.given, world_size)
    if accumulation is not None:
        settings = settings.replace(gradient_accumulation_steps=accumulation)
    name = "single" if ds_config is None and world_size == 1 else strategy
    per_node = min(gpus_per_node, world_size)
    return Job(settings.model_name_or_path, config, settings, name, ds_config, world_size, per_node)
