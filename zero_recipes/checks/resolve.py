"""Decide a run: what recipe, command line, launcher and machine come to together, before anything is checked."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zero_recipes.checkpoint.output_dir import refuse_long_name
from zero_recipes.checkpoint.resume import batch_kept, checkpoint_to_resume, requested_batch, requested_in
from zero_recipes.checks.machine import offline_where_unreachable
from zero_recipes.config.read import read_recipe
from zero_recipes.config.recipe import RecipeFile
from zero_recipes.config.run import UNDECIDED, Run, choose_device, settings_in_force
from zero_recipes.config.settings import derive_accumulation
from zero_recipes.config.strategy import Strategy, resolve_strategy
from zero_recipes.core.findings import Finding, Refusal, collected
from zero_recipes.core.gpus import Gpu
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.model.config import load_config
from zero_recipes.model.meta import MetaModel


class Resolved(NamedTuple):
    """A run, and what about it could not be decided."""

    run: Run | None  # None where its folder cannot be looked at
    findings: list[Finding]
    wrong_keys: frozenset[str]  # of the recipe, that have an error and are left out


@library_error_as_finding("checking the recipe")
def resolve(
    path: Path,
    mapping: RecipeFile,
    overrides: list[str],
    environment: Mapping[str, str],
    starts_now: bool = True,
    gpu: Gpu | None = None,
) -> Resolved:
    """Decide everything about a run. What cannot be decided is left out, with a finding, and the rest goes on.

    Args:
        path, mapping: the recipe's file, and what `recipe_in_force` has read of it.
        overrides: "--key", "value", ... of the command line.
        environment: the launcher's.
        starts_now: False where the run is only looked at (zero-recipes check).
        gpu: a card that this machine need not have; the run is decided for such cards.

    Nothing is written. It sets what libraries read when they are imported: DS_ACCELERATOR, HF_HUB_OFFLINE.
    """
    findings: list[Finding] = []

    def attempt(decide: Callable, *arguments: Any) -> Any:
        """None where `decide` refuses; its findings are added."""
        with collected(findings):
            return decide(*arguments)

    recipe, of_recipe, wrong_keys = read_recipe(path, mapping, overrides, environment)
    findings += of_recipe
    try:
        refuse_long_name(recipe.output_dir)
    except Refusal as refused:  # nothing in such a folder can be looked up
        return Resolved(None, [*findings, *refused.findings], wrong_keys)
    written = recipe.settings
    findings += offline_where_unreachable(written)
    device = choose_device(written.use_cpu or gpu is not None)
    if gpu is not None and not written.use_cpu:
        device = "cuda"
    placed = written.replace(use_cpu=device == "cpu")
    loaded = placed if gpu is None else placed.replace(attn_implementation="sdpa")  # flash attention is its card's
    meta = attempt(lambda: MetaModel(load_config(loaded), loaded))
    strategy = attempt(resolve_strategy, placed, environment, lambda _: meta and meta.size)
    world_size = int(environment.get("WORLD_SIZE", 1))
    strategy = strategy or Strategy(UNDECIDED, world_size)
    requested = requested_in(recipe.output_dir, written)
    checkpoint = attempt(checkpoint_to_resume, recipe.output_dir, requested, written.overwrite)
    kept = {}  # a checkpoint to go on from keeps its batch
    accumulation = None
    if strategy.name != UNDECIDED:
        batch = requested_batch(written)
        kept = attempt(batch_kept, recipe.output_dir, requested, batch, strategy.world_size) or {}
        if not kept:
            accumulation = attempt(derive_accumulation, written, recipe.explicit, strategy.replicas)
    settings, explicit = settings_in_force(recipe, strategy, device, accumulation)
    settings = settings.replace(resume_from_checkpoint=checkpoint, **kept)
    if settings.disable_tqdm is None:  # a moving bar on a terminal, one line per `logging_steps` elsewhere
        settings = settings.replace(disable_tqdm=not sys.stderr.isatty())
    explicit = MappingProxyType({**explicit, **kept})
    run = Run(recipe, settings, explicit, strategy, device, environment, meta, starts_now, gpu)
    return Resolved(run, findings, wrong_keys)
