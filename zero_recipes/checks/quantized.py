"""Checks of weights in 4 or 8 bit (bitsandbytes): what may be trained over them, and who may share them out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from zero_recipes.config.ds_view import DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.core.errors import Finding

RUN_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def quantized_findings(settings: Settings, strategy) -> Iterator[Finding]:
    """`settings`: the recipe's keys in force; `strategy`: a zero_recipes.config.strategy.Strategy."""
    key = next((key for key in ("load_in_4bit", "load_in_8bit") if getattr(settings, key)), None)
    if key is None:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        yield Finding(
            "ZR409",
            f"{key}, but the package bitsandbytes is not installed",
            "transformers (quantizers/quantizer_bnb_4bit.py) stops without it.",
            f"pip install bitsandbytes, or remove {key}.",
        )
    if not settings.use_peft:
        yield Finding(
            "ZR410",
            f"{key} without LoRA",
            "transformers (trainer_utils.py, validate_quantization_for_training) trains no purely quantized model, and "
            "says so once the model has been loaded.",
            f"Set use_peft: true, or remove {key}.",
        )
    if settings.random_weights:
        yield Finding(
            "ZR411", f"{key} with random_weights", "There are no weights to quantize.", "Remove one of the two."
        )
    if key == "load_in_8bit":
        yield from _shared_in_8_bit(strategy)
    else:
        yield from _shared_in_4_bit(str(settings.bnb_4bit_quant_storage or "uint8"), settings.precision, strategy)
    yield from _packed_twice(key, strategy)


def _shared_in_8_bit(strategy) -> Iterator[Finding]:
    if strategy.zero_stage == 3:
        yield Finding(
            "ZR412",
            "load_in_8bit at ZeRO stage 3",
            "bitsandbytes 0.50 (nn/modules.py, init_8bit_state) keeps the whole weights beside the parameter, in "
            "state.CB: every rank holds all of them, which the stage was to avoid.",
            "Use load_in_4bit, whose weights are partitioned; or ds_configs/zero2.json.",
        )
    if strategy.is_fsdp:
        yield Finding(
            "ZR413",
            "load_in_8bit under FSDP2",
            "FSDP2 makes plain parameters of the weights, and bitsandbytes 0.50 (nn/modules.py, Linear8bitLt.forward) "
            "reads CB from them: the first step fails.",
            "Use load_in_4bit with bnb_4bit_quant_storage: bfloat16; or ds_configs/zero2.json.",
        )


def _shared_in_4_bit(storage: str, precision: str, strategy) -> Iterator[Finding]:
    wanted = RUN_DTYPES.get(precision)
    if strategy.is_fsdp and storage != wanted:
        yield Finding(
            "ZR414",
            f"load_in_4bit under FSDP2 with bnb_4bit_quant_storage: {storage} in {precision}",
            "accelerate (utils/fsdp_utils.py, fsdp2_prepare_model) leaves weights that are packed into integers out of "
            "the sharding, with a warning, and every rank holds the whole of them; FSDP2 casts those packed into "
            "another dtype than the run's, as if their bits were numbers.",
            f"Set bnb_4bit_quant_storage: {wanted}: they are the same bits, and sharded."
            if wanted
            else "Set bf16: true and bnb_4bit_quant_storage: bfloat16: they are the same bits, and sharded.",
        )
    if strategy.is_deepspeed and wanted and storage not in ("uint8", wanted):
        yield Finding(
            "ZR415",
            f"bnb_4bit_quant_storage: {storage} in {precision} under DeepSpeed",
            "deepspeed/runtime/engine.py, _cast_module_mixed_precision casts packed weights as if their bits were "
            "numbers: float16 becomes other weights silently, float32 stops the first step.",
            "Remove bnb_4bit_quant_storage: uint8, the default, is never cast.",
        )
    if strategy.zero_stage == 3:
        yield Finding(
            "ZR416",
            "load_in_4bit at ZeRO stage 3",
            "transformers (modeling_utils.py, get_init_context) builds a quantized model without zero.Init: every rank "
            "loads the whole of it, half a byte a parameter, and the engine partitions it afterwards "
            "(huggingface/peft#2016).",
            "Every GPU needs memory for the whole model at the start; after that stage 3 holds a part.",
            level="warning",
        )


def _packed_twice(key: str, strategy) -> Iterator[Finding]:
    config = DsConfig({}) if strategy.ds_config is None else strategy.ds_config
    named = ["offload_param to NVMe"] if config.offload_param == "nvme" else []
    named += ["zero_quantized_weights"] if config.quantizes_weights else []
    named += ["zero_hpz_partition_size"] if config.hpz_partition_size != 1 else []
    if named:
        yield Finding(
            "ZR417",
            f"{key} with {', '.join(named)}",
            "They swap, pack or copy parameters as if they were 16-bit numbers. Never run together here.",
            "Use ds_configs/zero3.json or zero3_offload.json.",
        )
