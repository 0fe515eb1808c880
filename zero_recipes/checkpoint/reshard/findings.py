"""A run that goes on from a resharded checkpoint: what would make it another run than the one that was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from zero_recipes.checkpoint.reshard.load import read_index
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Finding, finding


def resharded_findings(settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """`settings` are the recipe's in force, `resume_from_checkpoint` the path of a whole resharded checkpoint."""
    checkpoint = settings.resume_from_checkpoint
    if strategy.zero_stage not in (1, 2, 3):
        yield finding("ZR712", name=strategy.name, checkpoint=checkpoint)
        return
    index = read_index(checkpoint)
    saved, old_world = index["global_batch"], index["source"]["world_size"]
    micro, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    total = micro * accumulation * strategy.world_size
    if total != saved:
        yield finding(
            "ZR713",
            total=total,
            checkpoint=checkpoint,
            saved=saved,
            micro=micro,
            accumulation=accumulation,
            world_size=strategy.world_size,
        )
    by_length = str(settings.train_sampling_strategy) in ("group_by_length", "batch_rebalance")
    if by_length and strategy.world_size != old_world:
        yield finding(
            "ZR714",
            train_sampling_strategy=settings.train_sampling_strategy,
            world_size=strategy.world_size,
            checkpoint=checkpoint,
            old_world=old_world,
        )
    if strategy.zero_stage != 3 and strategy.ds_config.zero.get("round_robin_gradients"):
        yield finding("ZR715", checkpoint=checkpoint)
    accumulates = strategy.ds_config.grad_accum_dtype is not None
    if strategy.zero_stage == 1 and accumulates:
        yield finding("ZR716", checkpoint=checkpoint)
    yield from _widths(checkpoint, index.get("states", "fp32"), strategy)
    best = json.loads((Path(checkpoint) / "trainer_state.json").read_text()).get("best_model_checkpoint")
    if settings.load_best_model_at_end and best is not None:
        yield finding("ZR717", best=best)


def _widths(checkpoint: str, saved: str, strategy: Strategy) -> Iterator[Finding]:
    """Masters and Adam's states of another dtype than the run's."""
    config = strategy.ds_config
    if saved == "fp32" and config.bf16_masters:
        yield finding("ZR289", checkpoint=checkpoint, zero_stage=strategy.zero_stage)
    elif saved == "bf16" and not (config.bf16_masters and config.bf16_states):
        yield finding("ZR290", name=strategy.name, checkpoint=checkpoint, zero_stage=max(strategy.zero_stage, 2))
