"""Checks of weights in 4 or 8 bit (bitsandbytes): what may be trained over them, and who may share them out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding

RUN_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def quantized_findings(settings: Settings, strategy) -> Iterator[Finding]:
    """`settings`: the recipe's keys in force; `strategy`: a zero_recipes.config.strategy.Strategy."""
    key = next((key for key in ("load_in_4bit", "load_in_8bit") if getattr(settings, key)), None)
    if key is None:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        yield finding("ZR409", key=key)
    if not settings.use_peft:
        yield finding("ZR410", key=key)
    if settings.random_weights:
        yield finding("ZR411", key=key)
    if key == "load_in_8bit":
        yield from _shared_in_8_bit(strategy)
    else:
        yield from _shared_in_4_bit(str(settings.bnb_4bit_quant_storage or "uint8"), settings.precision, strategy)
    yield from _packed_twice(key, strategy)


def _shared_in_8_bit(strategy) -> Iterator[Finding]:
    if strategy.zero_stage == 3:
        yield finding("ZR412")
    if strategy.is_fsdp:
        yield finding("ZR413")


def _shared_in_4_bit(storage: str, precision: str, strategy) -> Iterator[Finding]:
    wanted = RUN_DTYPES.get(precision)
    if strategy.is_fsdp and storage != wanted:
        yield finding(
            "ZR414",
            storage=storage,
            precision=precision,
            fix=f"Set bnb_4bit_quant_storage: {wanted}: they are the same bits, and sharded."
            if wanted
            else "Set bf16: true and bnb_4bit_quant_storage: bfloat16: they are the same bits, and sharded.",
        )
    if strategy.is_deepspeed and wanted and storage not in ("uint8", wanted):
        yield finding("ZR415", storage=storage, precision=precision)
    if strategy.zero_stage == 3:
        yield finding("ZR416")


def _packed_twice(key: str, strategy) -> Iterator[Finding]:
    config = DsConfig({}) if strategy.ds_config is None else strategy.ds_config
    named = ["offload_param to NVMe"] if config.offload_param == "nvme" else []
    named += ["zero_quantized_weights"] if config.quantizes_weights else []
    named += ["zero_hpz_partition_size"] if config.hpz_partition_size != 1 else []
    if named:
        yield finding("ZR417", key=key, named=", ".join(named))
