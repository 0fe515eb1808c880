"""Which strategy is in force."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from zero_recipes.config.accelerate import ds_config_file, inline_ds_config, is_on
from zero_recipes.config.ds_config import (
    DsConfig,
    ModelSize,
    are_one,
    fill_own_autos,
    read_json_mapping,
    refuse_bad_schema,
)
from zero_recipes.config.fsdp_config import fsdp_config_in_force
from zero_recipes.config.settings import Settings
from zero_recipes.core.allocator import allocator_settings
from zero_recipes.core.findings import refusal


@dataclass(frozen=True)
class Strategy:
    """How a run shares its work and its states among the processes.

    Args:
        name: "single", "ddp", "fsdp2", "zero0" ... "zero3", with what is added to the stage (DsConfig.name).
        world_size: the number of processes.
        ds_config: as it is read, "auto" values included; None without DeepSpeed.
        source: where the DeepSpeed configuration comes from, for messages.
        fsdp_config: transformers' `fsdp_config`; None without FSDP.
        sequence_parallel: processes that share each sequence.
    """

    name: str
    world_size: int
    ds_config: DsConfig | None = None
    source: str = "none"
    fsdp_config: dict[str, Any] | None = None
    sequence_parallel: int = 1

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage; None without DeepSpeed."""
        return None if self.ds_config is None else self.ds_config.stage

    @property
    def ds(self) -> DsConfig:
        """The DeepSpeed configuration; an empty one without DeepSpeed."""
        return self.ds_config or DsConfig({})

    @property
    def replicas(self) -> int:
        """The data-parallel size: groups of processes that have sequences of their own."""
        return self.world_size // self.sequence_parallel

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed trains."""
        return self.ds_config is not None

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 trains."""
        return self.fsdp_config is not None

    def described(self, device: str, settings: Settings, computed: str) -> list[str]:
        """Describe what is in force, a line for each fact.

        `computed`: the precision in which the run computes.
        """
        strategy = self.name
        if self.is_deepspeed:
            strategy += f" (DeepSpeed, {self.source})"
        precision = settings.precision
        if self.ds.autocast:
            precision += f", computed in {self.ds.autocast} by torch.autocast"
        elif computed != precision:
            precision = f"{computed}, the dtype of the weights (no mixed precision)"
        offloaded = []
        if self.ds.offload_optimizer:
            offloaded.append("optimizer")
        if self.ds.offload_param:
            offloaded.append("params")
        facts = {
            "strategy": strategy,
            "world size": f"{self.world_size} on {device}",
            "global batch": self._batch_described(settings),
            "precision": precision,
            "offloaded": ", ".join(offloaded) or "nothing",
        }
        if device == "cuda":
            facts["allocator"] = allocator_settings(os.environ)
        return [f"{name:<14}{fact}" for name, fact in facts.items()]

    def _batch_described(self, settings: Settings) -> str:
        micro = settings.per_device_train_batch_size
        passes = settings.gradient_accumulation_steps
        sequences = micro * passes * self.replicas
        batch = f"{sequences} sequences"
        if settings.max_length is not None:
            batch += f", at most {sequences * settings.max_length:,} tokens"
        group = "processes"
        if self.sequence_parallel > 1:
            group = f"groups of {self.sequence_parallel} processes"
        return f"{batch} ({micro} per device x {passes} accumulation x {self.replicas} {group})"


def resolve_strategy(
    settings: Settings,
    environment: Mapping[str, str],
    size_of_model: Callable[[Settings], ModelSize | None],
) -> Strategy:
    """Decide the strategy of a run. Raises Refusal where two places name different configurations.

    `accelerate launch` hands its ds_config over through the environment (ACCELERATE_DEEPSPEED_CONFIG_FILE),
    torchrun and deepspeed through the recipe's `deepspeed:` key.
    `settings`, `size_of_model`: see fill_own_autos.
    """
    world_size = int(environment.get("WORLD_SIZE", 1))
    fsdp_config = fsdp_config_in_force(settings, environment, world_size)
    if fsdp_config is not None:
        return Strategy("fsdp2", world_size, fsdp_config=fsdp_config)

    @cache
    def size() -> ModelSize | None:
        return size_of_model(settings)

    def fill(config: dict[str, Any]) -> dict[str, Any]:
        return fill_own_autos(config, settings, world_size, environment, size)

    config, source = _in_force(settings, environment, fill)
    if config is None:
        return Strategy("ddp" if world_size > 1 else "single", world_size)
    refuse_bad_schema(config, source)
    name = DsConfig(config).name
    filled = DsConfig(fill(config))
    shared = settings.sequence_parallel_size
    if shared < 1 or world_size % shared:
        raise refusal("ZR243", size=shared, world_size=world_size)
    if shared > 1:
        name += "_ulysses"
    return Strategy(name, world_size, filled, source, sequence_parallel=shared)


def _in_force(
    settings: Settings,
    environment: Mapping[str, str],
    fill: Callable[[dict[str, Any]], dict[str, Any]],
) -> tuple[dict[str, Any] | None, str]:
    launched, launched_from = launched_ds_config(environment, settings.precision)
    named = settings.deepspeed
    if named is None:
        return launched, launched_from
    config = read_json_mapping(named)
    shown = "an inline mapping" if isinstance(named, dict) else str(named)
    if launched is None:
        return config, shown
    if not are_one(config, launched, fill):
        raise refusal("ZR201", shown=shown, launched_from=launched_from)
    return launched, launched_from


def launched_ds_config(env: Mapping[str, str], precision: str) -> tuple[dict[str, Any] | None, str]:
    """Read the launcher's DeepSpeed configuration. Raises Refusal.

    Returns (the configuration, where it comes from), or (None, "none") without DeepSpeed.
    """
    if not is_on(env, "DEEPSPEED"):
        return None, "none"
    path = ds_config_file(env)
    if path is None:
        return inline_ds_config(env, precision), "the accelerate file's deepspeed_config"
    return read_json_mapping(path), path
