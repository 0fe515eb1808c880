"""What an accelerate file would put into the environment of a run, and what in that contradicts itself.

accelerate reads the file. Its own way from there to the environment (utils/launch.py) is that of a launch: it looks for
this machine's GPUs, and a free port.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from zero_recipes.core.errors import Finding, Refusal, first_line

if TYPE_CHECKING:
    from accelerate.commands.config.config_args import ClusterConfig

# accelerate 1.15, utils/dataclasses.py, DeepSpeedPlugin._deepspeed_config_checks
AMBIGUOUS = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device")
AMBIGUOUS += ("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path")
AMBIGUOUS += ("zero3_save_16bit_model", "mixed_precision")


def launched_environment(config_file: Path | None, num_processes: int | None) -> dict[str, str]:
    """The variables that `accelerate launch` sets and a run is put together from. Raises Refusal for a broken file."""
    if config_file is None:
        return {} if num_processes in (None, 1) else {"WORLD_SIZE": str(num_processes)}
    config = _read(config_file)
    count = num_processes or config.num_processes
    environment = {"WORLD_SIZE": str(count)}
    if config.num_machines > 1 and count % config.num_machines == 0:
        environment["LOCAL_WORLD_SIZE"] = str(count // config.num_machines)
    if config.distributed_type in ("MULTI_CPU", "NO") and count != 1 and not config.mpirun_config:
        # accelerate 1.15, commands/launch.py, simple_launcher: one process, whatever num_processes says
        return {"ACCELERATE_USE_CPU": str(config.use_cpu), "MASTER_ADDR": "127.0.0.1"}
    if config.distributed_type == "FSDP":
        environment["ACCELERATE_USE_FSDP"] = "true"
        named = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
        given = config.fsdp_config.items()
        environment |= {named.get(key, key.upper()): str(value) for key, value in given if value is not None}
    if config.mixed_precision:
        environment["ACCELERATE_MIXED_PRECISION"] = str(config.mixed_precision)
    if config.parallelism_config:
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    if not config.deepspeed_config:
        return environment
    given = [*config.deepspeed_config, *(["mixed_precision"] if config.mixed_precision else [])]
    return environment | {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config.deepspeed_config.get("deepspeed_config_file") or "none"),
        "ACCELERATE_CONFIG_DS_FIELDS": ",".join(map(str, given)),
    }


def launcher_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What an accelerate file says beside the ds_config that it names. `environment`: the launcher's."""
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        yield Finding(
            "ZR301",
            "the accelerate file has a parallelism_config",
            "It changes how many rows a step has and which process gets which (accelerate, parallelism_config.py). "
            "Nothing here counts tokens under its tensor or context parallelism.",
            "Remove it. Sequence parallelism (Ulysses) is the recipe's: sequence_parallel_size.",
        )
    if environment.get("ACCELERATE_MIXED_PRECISION", "no").lower() == "fp8":
        yield Finding(
            "ZR302",
            "the accelerate file requests FP8",
            "transformers (training_args.py, __post_init__) silently puts the recipe's bf16 or fp16 in its place, and "
            "none of the libraries that compute in FP8 (Transformer Engine, torchao, MS-AMP) is used here.",
            "Remove mixed_precision; the recipe's bf16: true says the precision.",
        )
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() in ("none", ""):
        return
    given = environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    beside = [name for name in AMBIGUOUS if name in given]
    if beside:
        yield Finding(
            "ZR303",
            f"the accelerate file has {', '.join(beside)} beside deepspeed_config_file",
            "accelerate (utils/dataclasses.py, DeepSpeedPlugin) stops with a ValueError about what it would ignore.",
            "Remove them: the ds_config says how to shard, the recipe's bf16 and fp16 say the precision.",
        )


def _read(path: Path) -> ClusterConfig:
    """The file as accelerate reads it, its blocks as mappings and num_processes at least 1. Raises Refusal."""
    from accelerate.commands.config.config_args import load_config_from_file

    if not path.is_file():
        raise Refusal(
            "ZR304",
            f"there is no accelerate file {path}",
            f"Paths are relative to the working directory, {Path.cwd()}.",
            "See accelerate_configs/.",
        )
    try:
        config = load_config_from_file(str(path))
        for name in ("deepspeed_config", "fsdp_config", "parallelism_config"):  # SageMaker's config has none
            if not isinstance(getattr(config, name), dict):  # by hand: accelerate does not check types
                raise TypeError(f"{name} is no mapping")
    except yaml.YAMLError as error:
        raise Refusal(
            "ZR305", f"{path} is not YAML", str(error).replace("\n", " "), "Correct the line that it names."
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise Refusal(
            "ZR306",
            f"{path} is not an accelerate file",
            f"{first_line(error).rstrip('.')}.",
            "See those in accelerate_configs/.",
        ) from error
    config.num_processes = 1 if config.num_processes in (None, -1) else config.num_processes
    config.num_machines = 1 if config.num_machines is None else config.num_machines
    for name in ("num_processes", "num_machines"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refusal(
                "ZR307",
                f"{name} in {path} is {value!r}",
                "It must be a whole number of at least 1.",
                "Write a whole number.",
            )
    return config
