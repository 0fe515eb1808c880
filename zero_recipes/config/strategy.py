"""Which strategy is in force: found from the recipe, the command line and the launcher, before anything is loaded."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from zero_recipes.config.accelerate import inline_ds_config
from zero_recipes.config.ds_config import DsConfig, are_one, fill_own_autos, read_json_mapping, refuse_bad_schema
from zero_recipes.config.fsdp_config import fsdp_config_in_force
from zero_recipes.config.recipe import Settings, precision_of
from zero_recipes.core.findings import Finding, finding, refusal
from zero_recipes.core.host import allocator_settings


@dataclass(frozen=True)
class Strategy:
    """How one run is spread over its processes."""

    name: str  # "single", "ddp", "fsdp2", "zero0" ... "zero3", with what is added to the stage (DsConfig.name)
    world_size: int
    ds_config: DsConfig | None = None  # as read, "auto" values included; None without DeepSpeed
    source: str = "none"  # where the DeepSpeed configuration comes from, for messages
    fsdp_config: dict[str, Any] | None = None  # transformers' `fsdp_config`; None without FSDP
    sequence_parallel: int = 1  # processes that share each sequence

    @property
    def zero_stage(self) -> int | None:
        """None without DeepSpeed."""
        return None if self.ds_config is None else self.ds_config.stage

    @property
    def ds(self) -> DsConfig:
        """The DeepSpeed configuration; an empty one without DeepSpeed."""
        return self.ds_config or DsConfig({})

    @property
    def replicas(self) -> int:
        """Groups of processes that have sequences of their own: the data-parallel size."""
        return self.world_size // self.sequence_parallel

    @property
    def is_deepspeed(self) -> bool:
        return self.ds_config is not None

    @property
    def is_fsdp(self) -> bool:
        return self.fsdp_config is not None

    def described(self, device: str, training_args) -> list[str]:
        """What is in force, a line each."""
        args = training_args
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * self.replicas
        tokens = "" if args.max_length is None else f", at most {sequences * args.max_length:,} tokens"
        places = {"optimizer": self.ds.offload_optimizer, "params": self.ds.offload_param}
        offloaded = [what for what, where in places.items() if where]
        return [
            f"strategy      {self.name}" + (f" (DeepSpeed, {self.source})" if self.is_deepspeed else ""),
            f"world size    {self.world_size} on {device}",
            f"global batch  {sequences} sequences{tokens} ({args.per_device_train_batch_size} per device x "
            f"{args.gradient_accumulation_steps} accumulation x {self.replicas} "
            + ("processes)" if self.sequence_parallel == 1 else f"groups of {self.sequence_parallel} processes)"),
            f"precision     {precision_of(args)}"
            + (f", computed in {self.ds.autocast} by torch.autocast" if self.ds.autocast else ""),
            f"offloaded     {', '.join(offloaded) or 'nothing'}",
            *([f"allocator     {allocator_settings(os.environ)}"] if device == "cuda" else []),
        ]


def resolve_strategy(
    settings: Settings, environment: Mapping[str, str], size_of_model: Callable[[Settings], tuple[int, int] | None]
) -> Strategy:
    """Find the strategy; the DeepSpeed configuration is read here.

    One path for every launcher: `accelerate launch` hands its ds_config to the training through the environment
    (ACCELERATE_DEEPSPEED_CONFIG_FILE), torchrun and deepspeed through the recipe's `deepspeed:` key.
    `settings`, `size_of_model`: see fill_own_autos. Raises Refusal where two places name different configurations.
    """
    world_size = int(environment.get("WORLD_SIZE", 1))
    fsdp_config = fsdp_config_in_force(settings, environment, world_size)
    if fsdp_config is not None:
        return Strategy("fsdp2", world_size, fsdp_config=fsdp_config)

    size = cache(lambda: size_of_model(settings))

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
    name += "_ulysses" if shared > 1 else ""
    return Strategy(name, world_size, filled, source, sequence_parallel=shared)


def _in_force(
    settings: Settings, environment: Mapping[str, str], fill: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[dict[str, Any] | None, str]:
    """(the DeepSpeed configuration, where it comes from); (None, "none") without DeepSpeed."""
    launched, launched_from = launched_ds_config(environment, settings.precision)
    named = settings.deepspeed
    if named is None:
        return launched, launched_from
    config, shown = read_json_mapping(named), "an inline mapping" if isinstance(named, dict) else str(named)
    if launched is None:
        return config, shown
    if not are_one(config, launched, fill):
        raise refusal("ZR201", shown=shown, launched_from=launched_from)
    return launched, launched_from


def launched_ds_config(env: Mapping[str, str], precision: str) -> tuple[dict[str, Any] | None, str]:
    """(the DeepSpeed configuration of the launcher, where it comes from); else (None, "none"). Raises Refusal."""
    if env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None, "none"
    path = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path.lower() in ("none", ""):
        return inline_ds_config(env, precision), "the accelerate file's deepspeed_config"
    return read_json_mapping(path), path


def sequence_parallel_findings(settings: Settings, strategy, device: str, config) -> Iterator[Finding]:
    """What does not go with shared sequences. `config`: the model's, None where it is not at hand."""
    size = settings.sequence_parallel_size
    if settings.parallelism_config is not None:
        yield finding("ZR244")
    if size == 1:
        return
    if not strategy.is_deepspeed:
        yield finding("ZR245", size=size, name=strategy.name)
    heads, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if config is not None and (keys is None or heads % size or (keys % size and size % keys)):
        yield finding("ZR247", size=size, model_type=config.model_type, heads=heads, keys=keys)
    attention = str(settings.attn_implementation)
    kernel = "/" in attention and "flash-attn" in attention  # as accelerate
    if not kernel and attention not in ("None", "sdpa", "flash_attention_2", "flash_attention_3"):
        yield finding("ZR248", size=size, attn_implementation=attention)
    fits_window = (settings.max_length or math.inf) <= (getattr(config, "sliding_window", None) or 0)
    exact = {"full_attention", *(["sliding_attention"] if fits_window or "flash" in attention else [])}
    if layers := sorted({*(getattr(config, "layer_types", None) or ())} - exact):
        yield finding("ZR298", size=size, model_type=config.model_type, layers=", ".join(layers))
    if settings.joined_by:
        yield finding("ZR249", key=settings.joined_by, size=size)
    multiple = settings.pad_to_multiple_of
    uneven = not isinstance(multiple, int) or not multiple or multiple % size  # TRL also takes text
    if uneven or not settings.dataloader_drop_last or (device == "cpu" and multiple != settings.max_length):
        yield finding("ZR251", size=size, multiple="unset" if multiple is None else multiple, device=device)
    if settings.sample_prompts not in (None, 0, "0"):
        yield finding("ZR253", size=size)
    if settings.saves_checkpoints or settings.resume_from_checkpoint not in (None, False, "false"):
        yield finding("ZR254", size=size)
    if settings.loss_type != "nll" or settings.label_smoothing_factor:
        yield finding("ZR255", size=size)
