"""Which strategy is in force: found from the recipe, the command line and the launcher, before anything is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_recipes.config import fsdp
from zero_recipes.config import sequence_parallel as ulysses
from zero_recipes.config.ds_auto import fill_own_autos
from zero_recipes.config.ds_schema import shape_findings
from zero_recipes.config.recipe import Recipe, precision_of
from zero_recipes.core.errors import Refusal


@dataclass(frozen=True)
class Strategy:
    """How one run is spread over its processes."""

    name: str  # "single", "ddp", "fsdp2", "zero0" ... "zero3", with what is added to the stage (name_of)
    zero_stage: int | None  # None without DeepSpeed
    world_size: int
    ds_config: dict[str, Any] | None  # as read, "auto" values included
    source: str  # where the DeepSpeed configuration comes from, for messages
    offload_optimizer: str | None = None  # "cpu", "nvme" or None
    offload_param: str | None = None
    fsdp_config: dict[str, Any] | None = None  # transformers' `fsdp_config`; None without FSDP
    sequence_parallel: int = 1  # processes that share each sequence

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
        """What is in force, in seven lines."""
        args = training_args
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * self.replicas
        tokens = "" if args.max_length is None else f", at most {sequences * args.max_length:,} tokens"
        offloaded = [
            what for what, where in (("optimizer", self.offload_optimizer), ("params", self.offload_param)) if where
        ]
        return [
            f"strategy      {self.name}" + (f" (DeepSpeed, {self.source})" if self.is_deepspeed else ""),
            f"world size    {self.world_size} on {device}",
            f"global batch  {sequences} sequences{tokens} ({args.per_device_train_batch_size} per device x "
            f"{args.gradient_accumulation_steps} accumulation x {self.replicas} "
            + ("processes)" if self.sequence_parallel == 1 else f"groups of {self.sequence_parallel} processes)"),
            f"precision     {precision_of(vars(args))}",
            f"offloaded     {', '.join(offloaded) or 'nothing'}",
            f"optimizer     {self._from_ds_config('optimizer') or self._recipes_optimizer(args)}",
            f"schedule      {self._from_ds_config('scheduler') or self._recipes_schedule(args)}",
        ]

    def _from_ds_config(self, block: str) -> str | None:
        """What the ds_config's block makes, which then counts instead of the recipe's keys."""
        named = (self.ds_config or {}).get(block)
        if named is None:
            return None
        warmup = f", {named.get('params', {}).get('warmup_type', 'log')} warm-up" if block == "scheduler" else ""
        return f"{named['type']}{warmup} (the ds_config's {block} block; the recipe's keys do not count)"

    def _recipes_optimizer(self, args) -> str:
        name = getattr(args.optim, "value", args.optim)
        # accelerate 1.15, utils/deepspeed.py, map_pytorch_optim_to_deepspeed
        on_cpu = self.offload_optimizer and self.ds_config.get("zero_force_ds_cpu_optimizer", True)
        return f"{name}, as DeepSpeedCPU{'Adagrad' if name == 'adagrad' else 'Adam'}" if on_cpu else str(name)

    def _recipes_schedule(self, args) -> str:
        name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if not args.warmup_steps or name == "constant":
            return name
        long = f"{args.warmup_steps:g} steps" if args.warmup_steps >= 1 else f"{args.warmup_steps:.0%} of the steps"
        return f"{name}, linear warm-up over {long}"


def resolve(recipe: Recipe, environment: Mapping[str, str] | None = None) -> Strategy:
    """Find the strategy; the DeepSpeed configuration is read here and put into the recipe as one mapping.

    One path for every launcher: `accelerate launch` hands its ds_config to the training through the environment
    (ACCELERATE_DEEPSPEED_CONFIG_FILE), torchrun and deepspeed through the recipe's `deepspeed:` key.
    Raises Refusal where two places name different configurations.
    """
    env = os.environ if environment is None else environment
    world_size = int(env.get("WORLD_SIZE", 1))
    fsdp_config = fsdp.resolve(recipe, env, world_size)
    if fsdp_config is not None:
        return Strategy("fsdp2", None, world_size, None, "none", fsdp_config=fsdp_config)
    launched, launched_from = _from_launcher(env)
    named = recipe.values.get("deepspeed")
    if named is not None and launched is not None:
        config = read_ds_config(named)
        # a resolved recipe has our own "auto" values filled in already
        mine, theirs = (fill_own_autos(each, recipe.values, world_size, env) for each in (config, launched))
        if mine != theirs:
            raise Refusal(
                "ZR201",
                f"two DeepSpeed configurations: the recipe names {_shown(named)}, the launcher {launched_from}",
                "transformers (training_args.py, `if self.deepspeed`) would take the recipe's and drop the launcher's "
                "without a word.",
                "Remove `deepspeed:` from the recipe or the command line, or launch with torchrun.",
            )
        source = launched_from
    elif named is not None:
        config, source = read_ds_config(named), _shown(named)
    else:
        config, source = launched, launched_from
    if config is None:
        return Strategy("ddp" if world_size > 1 else "single", None, world_size, None, "none")

    findings = shape_findings(config, source)
    if findings:
        raise Refusal.of(findings)
    name = name_of(config)
    config = fill_own_autos(config, recipe.values, world_size, env)
    recipe.values["deepspeed"] = recipe.given["deepspeed"] = config
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    offload_optimizer = (zero.get("offload_optimizer") or {}).get("device")
    offload_param = (zero.get("offload_param") or {}).get("device")
    offload_optimizer = None if offload_optimizer == "none" else offload_optimizer
    offload_param = None if offload_param == "none" else offload_param
    _refuse_unsaved(recipe, stage, zero, source)
    shared = recipe.values["sequence_parallel_size"]
    ulysses.refuse_uneven_groups(shared, world_size)
    name += "_ulysses" if shared > 1 else ""
    return Strategy(name, stage, world_size, config, source, offload_optimizer, offload_param, sequence_parallel=shared)


def name_of(config: Mapping[str, Any]) -> str:
    """ "zero0" ... "zero3", then "_infinity" where states lie on NVMe, "_offload" where they lie in host memory, and
    ZeRO++'s parts: "_hpz", "_qwz", "_qgz", for all three "_plus_plus"."""
    zero = config.get("zero_optimization", {})
    devices = {(zero.get(key) or {}).get("device") for key in ("offload_optimizer", "offload_param")}
    offloads = "_infinity" if "nvme" in devices else "_offload" if "cpu" in devices else ""
    parts = ["_hpz"] if zero.get("zero_hpz_partition_size", 1) != 1 else []
    parts += [f"_q{kind[0]}z" for kind in ("weights", "gradients") if zero.get(f"zero_quantized_{kind}")]
    return f"zero{zero.get('stage', 0)}{offloads}" + ("_plus_plus" if len(parts) == 3 else "".join(parts))


def read_ds_config(named: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration from a path, an inline mapping or a JSON string, as a mapping."""
    if isinstance(named, dict):
        return named
    text = str(named)
    if text.lstrip().startswith("{"):
        return _loads(text, "the inline deepspeed configuration")
    path = Path(text)
    if not path.is_file():
        raise Refusal(
            "ZR202",
            f"there is no DeepSpeed configuration {path}",
            f"Paths are relative to the working directory, {Path.cwd()}.",
            "Start from the repository's folder, or name one of ds_configs/*.json by its full path.",
        )
    return _loads(path.read_text(), str(path))


def _loads(text: str, place: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        comment = " JSON knows no `//` comments." if "//" in text else ""
        raise Refusal(
            "ZR203",
            f"{place} is not JSON",
            f"{error}.{comment}",
            "Mend it; the files in ds_configs/ are good examples.",
        ) from None
    if not isinstance(config, dict):
        raise Refusal(
            "ZR204", f"{place} is no mapping", "A DeepSpeed configuration is one.", "See ds_configs/zero2.json."
        )
    return config


def _from_launcher(env: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    if env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None, "none"
    path = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path.lower() in ("none", ""):
        raise Refusal(
            "ZR205",
            "the accelerate file describes ZeRO inline, without a `deepspeed_config_file`",
            "Keys such as zero_stage in an accelerate file cover a part of DeepSpeed's configuration only.",
            "Use accelerate_configs/zero2.yaml, or point `deepspeed_config_file` at one of ds_configs/*.json.",
        )
    return read_ds_config(path), path


def _refuse_unsaved(recipe: Recipe, stage: int, zero: dict[str, Any], source: str) -> None:
    saves = recipe.values["save_model"] or recipe.values["save_strategy"] not in ("no", False)
    if stage == 3 and saves and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        raise Refusal(
            "ZR206",
            f"{source} is ZeRO stage 3 without stage3_gather_16bit_weights_on_model_save, and the run saves a model",
            "Each rank holds a part of every weight; without the gather there is no model.safetensors at the end.",
            'Set "stage3_gather_16bit_weights_on_model_save": true, or run with --save_model false --save_strategy no.',
        )


def _shown(named: Any) -> str:
    return "an inline mapping" if isinstance(named, dict) else str(named)
