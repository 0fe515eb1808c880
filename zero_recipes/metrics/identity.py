"""Who a run is: the part of metrics.json that is known before the first step."""

from __future__ import annotations

import torch

from zero_recipes.config.run import RunConfig
from zero_recipes.core import environment
from zero_recipes.metrics.schema import RunIdentity
from zero_recipes.model import parameter_counts


def identity(run: RunConfig, training_args, model: torch.nn.Module) -> RunIdentity:
    """Who this run is: the part of metrics.json that is known before the first step."""
    recipe, strategy = run.recipe, run.strategy
    parameters, trainable = parameter_counts(model)
    return RunIdentity(
        name=recipe.name,
        strategy=strategy.name,
        zero_stage=strategy.zero_stage,
        world_size=strategy.world_size,
        device=environment.device_name(run.device),
        model=recipe.settings.model_name_or_path,
        parameters=parameters,
        trainable_parameters=trainable,
        precision=run.precision,
        micro_batch_size=training_args.per_device_train_batch_size,
        gradient_accumulation_steps=training_args.gradient_accumulation_steps,
        max_length=training_args.max_length,
        recipe_sha256=recipe.sha256,
    )
