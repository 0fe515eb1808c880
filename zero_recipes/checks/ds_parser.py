"""DeepSpeed's own parser, asked before a run: the ds_config as transformers and accelerate would hand it over.

File names are those of DeepSpeed 0.19.8 (under deepspeed/), accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from zero_recipes.checks.ds_optimizer import optimizer_findings
from zero_recipes.config.ds_config import fill_own_autos, quiet
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding, first_line
from zero_recipes.libs.huggingface import without_deepspeed_announcement

# top-level keys that runtime/config.py, _reject_removed_config_keys stops on
REMOVED = ("amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting")
REMOVED += ("nebula", "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients")
STEPS = 1000  # of a run by epochs, whose rows are not counted yet: only that it is a number matters
HIDDEN_SIZE = 64  # of a model whose configuration is not at hand, which is found elsewhere: likewise


def fill_auto(config: dict[str, Any], settings: Settings, world_size: int):
    """transformers' HfTrainerDeepSpeedConfig with the Trainer's values filled in, and the arguments that it was given.

    Its `mismatches` name what was written by hand and differs from the run.
    """
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = SimpleNamespace(**settings.as_dict(), world_size=world_size)
    arguments.bf16 = settings.precision == "bf16"
    warmup = settings.warmup_steps  # transformers, training_args.py, get_warmup_steps
    arguments.get_warmup_steps = lambda steps: int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
    with without_deepspeed_announcement():  # it announces itself to all; this is only a look
        filled = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    filled.trainer_config_process(arguments)
    return filled, arguments


def parser_findings(
    config: Mapping[str, Any], source: str, settings: Settings, world_size: int, model: Any
) -> list[Finding]:
    """What transformers, accelerate and DeepSpeed would raise on while the engine is built.

    `model`: its configuration, None where it is not at hand. No process group is needed, and none is looked at: batch
    sizes are transformers' to compare (`fill_auto`). Nothing is printed, and no state of the libraries changes.
    """
    with quiet():
        found = list(_removed(config, source))
        rest = {"zero_optimization": {}} | {key: value for key, value in config.items() if key not in REMOVED}
        try:
            asked, contradictions = _handed_over(rest, settings, world_size, model)
        except Exception as error:  # whatever the libraries make of values of any form
            return [
                *found,
                _stops("accelerate and transformers (DeepSpeedPlugin, HfTrainerDeepSpeedConfig)", source, error),
            ]
        found += _of_the_schedule(contradictions, source)
        found += _parsed(asked, source)
        offload = asked["zero_optimization"].get("offload_optimizer") or {}
        return found + list(optimizer_findings(asked, source, offload.get("device", "none") not in (None, "none")))


def _removed(config: Mapping[str, Any], source: str) -> Iterator[Finding]:
    for key in REMOVED:
        if key in config:
            error = _raised({"train_batch_size": 1, key: config[key]})
            if error is not None:
                yield finding("ZR256", key=key, source=source, error=first_line(error))


def _handed_over(
    config: dict[str, Any], settings: Settings, world_size: int, model: Any
) -> tuple[dict[str, Any], list[str]]:
    """(the mapping that DeepSpeedConfig gets, what in its schedule contradicts the run in transformers' words).

    Raises what the libraries raise on the way.
    """
    from accelerate.utils import DeepSpeedPlugin, clear_environment

    config = fill_own_autos(config, None, world_size, {}, [1])  # what waits for the model or the launch
    filled, arguments = fill_auto(config, settings, world_size)
    filled.mismatches = []  # reported by their own names; a second precision would only be reported again
    for precision in ("bf16", "fp16"):
        if isinstance(filled.config.get(precision), dict):
            filled.config[precision]["enabled"] = settings.precision == precision
    named = SimpleNamespace(config=model or SimpleNamespace(hidden_size=HIDDEN_SIZE))
    try:
        with without_deepspeed_announcement():
            filled.trainer_config_finalize(arguments, named, settings.max_steps if settings.max_steps > 0 else STEPS)
    except ValueError:
        if not filled.mismatches:  # of the schedule, which has its own finding
            raise
    with clear_environment():  # the launcher's variables have been read
        plugin = DeepSpeedPlugin(hf_ds_config=filled)
        plugin.set_mixed_precision({"fp32": "no"}.get(settings.precision, settings.precision))
    size = getattr(named.config, "hidden_size", HIDDEN_SIZE)
    plugin.deepspeed_config_process(  # accelerate, accelerator.py, _prepare_deepspeed
        must_match=False,
        **{
            "gradient_clipping": 1.0,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
            "train_micro_batch_size_per_gpu": settings.per_device_train_batch_size,
            "train_batch_size": 1,
            "zero_optimization.reduce_bucket_size": size * size,
            "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * size * size),
            "zero_optimization.stage3_param_persistence_threshold": 10 * size,
        },
    )
    asked = dict(plugin.deepspeed_config)
    asked.pop("train_batch_size", None)  # DeepSpeed would compare it with a world that does not stand yet
    asked |= {"train_micro_batch_size_per_gpu": settings.per_device_train_batch_size}
    by_steps = settings.max_steps > 0 or settings.warmup_steps >= 1 or settings.warmup_steps == 0
    return asked, [text for text in filled.mismatches if by_steps and "warmup_num_steps" in text]


def _of_the_schedule(contradictions: list[str], source: str) -> Iterator[Finding]:
    for text in contradictions:
        written, _, wanted = text.removeprefix("- ds ").partition(" vs hf ")
        yield finding("ZR264", source=source, written=written, wanted=wanted)


def _parsed(asked: dict[str, Any], source: str) -> Iterator[Finding]:
    """What DeepSpeedConfig refuses: it stops at the first block, so that each is asked without those before."""
    from pydantic import ValidationError

    while (error := _raised(asked)) is not None:
        key = next((key for key in asked if str(_raised(_without(asked, key))) != str(error)), None)
        if isinstance(error, ValidationError):
            yield from _of_block(error, key or error.title, source)
        else:
            yield _stops("DeepSpeed (runtime/config.py)", source if key is None else f"{key} in {source}", error)
        if key is None or key == "train_micro_batch_size_per_gpu":
            return
        asked = _without(asked, key)


def _of_block(error: Any, block: str, source: str) -> Iterator[Finding]:
    """The faults of one block: its unknown keys together, each wrong value by itself."""
    places = {".".join(map(str, (block, *fault["loc"]))): fault for fault in error.errors()}
    unknown = [place for place, fault in places.items() if fault["type"] == "extra_forbidden"]
    if unknown:
        yield finding("ZR257", source=source, unknown=", ".join(unknown), title=error.title)
    for place, fault in places.items():
        if place not in unknown:
            yield finding(
                "ZR260", place=place, source=source, input=fault.get("input"), title=error.title, msg=fault["msg"]
            )


def _without(asked: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name != key}


def _raised(asked: dict[str, Any]) -> Exception | None:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(copy.deepcopy(asked))
    except Exception as error:
        return error
    return None


def _stops(who: str, source: str, error: Exception) -> Finding:
    return finding("ZR258", source=source, name=type(error).__name__, error=first_line(error), who=who)
