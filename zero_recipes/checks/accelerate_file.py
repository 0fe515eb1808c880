"""What an accelerate file would put into the environment of a run, and what in it contradicts itself."""

from __future__ import annotations

from pathlib import Path

import yaml

from zero_recipes.refusal import Finding, Refusal

INLINE = ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps")


def launched_environment(config_file: Path | None, num_processes: int | None) -> tuple[dict[str, str], list[Finding]]:
    """(the variables that `accelerate launch` sets and our strategy is resolved from, findings about the file)."""
    if config_file is None:
        return {} if num_processes in (None, 1) else {"WORLD_SIZE": str(num_processes)}, []
    if not config_file.is_file():
        raise Refusal(
            f"there is no accelerate file {config_file}",
            f"Paths are relative to the working directory, {Path.cwd()}.",
            "See accelerate_configs/.",
        )
    config = yaml.safe_load(config_file.read_text()) or {}
    environment = {"WORLD_SIZE": str(num_processes or config.get("num_processes") or 1)}
    kind = str(config.get("distributed_type")).upper()
    if kind in ("MULTI_CPU", "NO") and environment["WORLD_SIZE"] != "1" and not config.get("mpirun_config"):
        # accelerate 1.15, commands/launch.py, simple_launcher: one process, whatever num_processes says
        return {"ACCELERATE_USE_CPU": str(config.get("use_cpu", False)), "MASTER_ADDR": "127.0.0.1"}, []
    if kind == "FSDP":
        environment["ACCELERATE_USE_FSDP"] = "true"
    deepspeed = config.get("deepspeed_config") or {}
    if not deepspeed:
        return environment, []
    named = deepspeed.get("deepspeed_config_file")
    environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(named or "none")}
    return environment, list(_contradictions(config_file, config, deepspeed)) if named else []


def _contradictions(config_file: Path, config: dict, deepspeed: dict):
    beside = [key for key in INLINE if key in deepspeed]
    beside += ["mixed_precision"] if config.get("mixed_precision") else []
    if beside:
        yield Finding(
            f"{config_file} has {', '.join(beside)} beside deepspeed_config_file",
            "accelerate (utils/dataclasses.py, DeepSpeedPlugin) stops with a ValueError about ambiguous values.",
            "Remove them: the ds_config says how to shard, the recipe's bf16 and fp16 say the precision.",
        )
