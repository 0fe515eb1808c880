"""Options that do nothing, lose states or end the run under the Trainer; files are those of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.config.ds_config import DsConfig
from zero_recipes.core.findings import Finding, finding


def unsupported_findings(config: DsConfig, device: str) -> Iterator[Finding]:
    if config.zero.get("zero_quantized_nontrainable_weights"):
        yield finding("ZR292")
    if config.offload_block("offload_optimizer").get("super_offload") and device != "cpu":
        yield finding("ZR293")
    if not config.raw.get("managed_gradient_accumulation", True):
        yield finding("ZR295")
    if str(config.raw.get("gradient_allreduce_op")).lower() == "sum" and config.stage < 3:
        yield finding("ZR296")
    divided = config.raw.get("gradient_predivide_factor", 1.0) != 1.0
    scaled = config.zero.get("reduce_scatter", True) and (divided or config.raw.get("prescale_gradients"))
    if (config.stage > 1 and scaled) or (config.stage == 3 and divided):
        yield finding("ZR297", stage=config.stage)
