"""The form of a DeepSpeed configuration: blocks are mappings, counts numbers, ZeRO's block is as DeepSpeed reads it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from zero_recipes.config.ds_view import OFFLOADS
from zero_recipes.core.findings import Finding, finding

# blocks that transformers or DeepSpeed 0.19.8 read with .get(), and stop with a bare AttributeError on anything else
MAPPINGS = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "aio", "activation_checkpointing")
MAPPINGS += ("comms_logger", "flops_profiler", "checkpoint", "tensorboard", "wandb", "csv_monitor", "comet")
MAPPINGS += ("data_types", "tensor_parallel", "torch_autocast", "compile", "zenflow")
# not steps_per_print: accelerate (utils/dataclasses.py, DeepSpeedPlugin) writes infinity in its place
# keys of zero_optimization that runtime/config.py, _reject_removed_config_keys stops on, and what serves instead
REMOVED = {
    "mics_shard_size": "zero_hpz_partition_size, the GPUs of a machine, keeps gathering inside of it as MiCS did.",
    "mics_hierarchical_params_gather": "It went with MiCS.",
    "zeropp_loco_param": "zero_quantized_gradients works without it.",
}
COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def schema_findings(config: Mapping[str, Any], source: str) -> list[Finding]:
    """What DeepSpeed or transformers would stop on with an error that names no place."""
    found = list(_blocks(config, source))
    return found or [*_numbers(config, source), *_zero_optimization(config.get("zero_optimization", {}), source)]


def _blocks(config: Mapping[str, Any], source: str) -> Iterator[Finding]:
    places = [(name, config[name]) for name in MAPPINGS if name in config]
    for name in ("optimizer", "scheduler"):
        block = config.get(name)
        if isinstance(block, dict) and "params" in block:
            places.append((f"{name}.params", block["params"]))
        if isinstance(block, dict) and not isinstance(block.get("type"), str):
            yield finding("ZR207", name=name, source=source)
    zero = config.get("zero_optimization")
    for name in OFFLOADS:  # DeepSpeed takes None
        if isinstance(zero, dict) and zero.get(name) is not None:
            places.append((f"zero_optimization.{name}", zero[name]))
    for name, block in places:
        if not isinstance(block, dict):
            yield finding(
                "ZR208",
                name=name,
                source=source,
                block=block,
                fix='Write {"enabled": false} or leave it out.' if block in (False, None) else "Write a mapping.",
            )


def _numbers(config: Mapping[str, Any], source: str) -> Iterator[Finding]:
    places = {name: config[name] for name in COUNTS if name in config}
    steps = config.get("scheduler", {}).get("params", {})
    places |= {f"scheduler.params.{name}": steps[name] for name in steps if name.endswith("_num_steps")}
    for name, value in places.items():
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= (0 if "." in name else 1)
        if value != "auto" and not whole:
            yield finding("ZR209", name=name, source=source, value=value)
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage == "auto" or isinstance(stage, (bool, float)):
        yield finding("ZR261", source=source, stage=stage)
    clipping = config.get("gradient_clipping", "auto")
    if clipping != "auto" and not (isinstance(clipping, (int, float)) and not isinstance(clipping, bool)):
        yield finding("ZR210", source=source, clipping=clipping)


def _zero_optimization(block: Mapping[str, Any], source: str) -> Iterator[Finding]:
    """By DeepSpeed's own model of the block (runtime/zero/config.py): an unknown key or a wrong value stops it."""
    from pydantic import ValidationError

    for key in REMOVED.keys() & block.keys():
        yield finding("ZR291", key=key, source=source, removed=REMOVED[key])
    try:
        parsed_zero({key: value for key, value in block.items() if key not in REMOVED})
    except ValidationError as error:
        for fault in error.errors():
            place = ".".join(str(part) for part in fault["loc"])
            unknown = fault["type"] == "extra_forbidden"
            yield finding(
                "ZR211",
                place=place,
                source=source,
                what="is no key of DeepSpeed" if unknown else f"is {fault.get('input')!r}",
                msg=fault["msg"],
                fix="Check its spelling, or remove it." if unknown else "Write a value that it takes.",
            )
    except (TypeError, ValueError, AssertionError) as error:
        yield finding("ZR212", source=source, error=error)


def parsed_zero(block: Mapping[str, Any]):
    """DeepSpeed's own model of a zero_optimization block, "auto" left out. Raises what DeepSpeed raises."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with quiet():
        return DeepSpeedZeroConfig(**_without_auto(block))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the libraries say while they are only asked goes nowhere: the run says it again."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _without_auto(block: Mapping[str, Any]) -> dict[str, Any]:
    """The block without what transformers fills in."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in block.items()
        if value != "auto"
    }
