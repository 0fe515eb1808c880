"""A run that goes on from a resharded checkpoint: what would make it another run than the one that was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from zero_recipes.checkpoint.reshard.load import read_index
from zero_recipes.config.settings import Settings
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.errors import Finding


def resharded_findings(settings: Settings, strategy: Strategy) -> Iterator[Finding]:
    """`settings` are the recipe's in force, `resume_from_checkpoint` the path of a whole resharded checkpoint."""
    checkpoint = settings.resume_from_checkpoint
    if strategy.zero_stage not in (1, 2, 3):
        yield Finding(
            "ZR712",
            f"{strategy.name} resumes from {checkpoint}, a resharded checkpoint",
            "Its states are by parameter, for engines of ZeRO stages 1, 2 and 3; another run would begin with a fresh "
            "optimizer.",
            "Launch with accelerate_configs/zero1.yaml, zero2.yaml or zero3.yaml.",
        )
        return
    index = read_index(checkpoint)
    saved, old_world = index["global_batch"], index["source"]["world_size"]
    micro, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    total = micro * accumulation * strategy.world_size
    if total != saved:
        yield Finding(
            "ZR713",
            f"a global batch of {total} sequences resumes from {checkpoint}, which had {saved}",
            f"{micro} per device x {accumulation} accumulation x {strategy.world_size} processes: the steps to come "
            "would skip or repeat rows (transformers, trainer.py, _init_training_state counts steps) and be another "
            "run's.",
            f"Choose them so that their product is {saved}; zero-recipes reshard printed such a command.",
        )
    by_length = str(settings.train_sampling_strategy) in ("group_by_length", "batch_rebalance")
    if by_length and strategy.world_size != old_world:
        yield Finding(
            "ZR714",
            f"train_sampling_strategy: {settings.train_sampling_strategy} on {strategy.world_size} processes resumes "
            f"from {checkpoint}, a run on {old_world}",
            "The order of the rows depends on the number of processes (transformers, trainer.py, _get_train_sampler): "
            "the epoch would go on with rows that were seen already, and leave others out.",
            f"Reshard for --world_size {old_world}.",
        )
    if strategy.zero_stage != 3 and strategy.ds_config.zero.get("round_robin_gradients"):
        yield Finding(
            "ZR715",
            f"round_robin_gradients resumes from {checkpoint}, a resharded checkpoint",
            "DeepSpeed 0.19.8 then lays parameters in another order than it maps them (runtime/zero/stage_1_and_2.py, "
            "_link_all_hp_params takes bit16_groups, the flat buffer round_robin_bit16_groups): states would go to "
            "other parameters.",
            "Remove round_robin_gradients from the ds_config.",
        )
    accumulates = strategy.ds_config.grad_accum_dtype is not None
    if strategy.zero_stage == 1 and accumulates:
        yield Finding(
            "ZR716",
            f"data_types.grad_accum_dtype at stage 1 resumes from {checkpoint}, a resharded checkpoint",
            "DeepSpeed may take its BF16_Optimizer (runtime/bf16_optimizer.py), which keeps its states otherwise than "
            "the stages do.",
            "Remove data_types from the ds_config, or use stage 2.",
        )
    yield from _widths(checkpoint, index.get("states", "fp32"), strategy)
    best = json.loads((Path(checkpoint) / "trainer_state.json").read_text()).get("best_model_checkpoint")
    if settings.load_best_model_at_end and best is not None:
        yield Finding(
            "ZR717",
            f"load_best_model_at_end, and the best checkpoint so far, {best}, was written before resharding",
            "If it stays the best, the run dies at its end: DeepSpeed loads a checkpoint at its own stage and world "
            "only (transformers, trainer.py, _load_best_model).",
            "Resume with --load_best_model_at_end false.",
        )


def _widths(checkpoint: str, saved: str, strategy: Strategy) -> Iterator[Finding]:
    """Masters and Adam's states of another dtype than the run's."""
    config = strategy.ds_config
    if saved == "fp32" and config.bf16_masters:
        yield Finding(
            "ZR289",
            f"bf16.bf16_master_weights_and_grads resumes from {checkpoint}, whose states are in fp32",
            "Each master weight would be rounded to 8 bits, and what Adam has added up below that would be lost.",
            f"Launch with accelerate_configs/zero{strategy.zero_stage}.yaml.",
        )
    elif saved == "bf16" and not (config.bf16_masters and config.bf16_states):
        yield Finding(
            "ZR290",
            f"{strategy.name} resumes from {checkpoint}, whose states are in bf16",
            "They are taken over exactly and kept in fp32 from now on: small updates are no longer lost, and the steps "
            "to come are not those of a run with states in bf16.",
            f"Launch with accelerate_configs/zero{max(strategy.zero_stage, 2)}_bf16_states.yaml to go on as before.",
            level="warning",
        )
