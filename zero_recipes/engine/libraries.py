"""Which faults of libraries are worked around in a run, and what is quickened. See faults/ and speed/."""

from zero_recipes.config.strategy import Strategy
from zero_recipes.engine.faults import (
    adapters_rounded_at_stage_3,
    fp32_parameters,
    fsdp_head_of_an_adapter,
    group_timeouts,
    loaded_padding_row,
    new_tokens_need_cuda,
    quantized_gradients,
    stale_releases,
)
from zero_recipes.engine.speed import cpu_products, gradient_copies, module_walks, norms, releases


def patch_libraries(strategy: Strategy, device: str, ddp_timeout: int) -> None:
    """Patch what this strategy and device need, for the rest of the process. Call it before an engine is built.

    `ddp_timeout`: seconds.
    """
    stage = strategy.zero_stage if strategy.is_deepspeed else None
    loaded_padding_row.apply()
    if device == "cpu":
        cpu_products.multiply_in_fp32()
    if strategy.is_fsdp:
        fsdp_head_of_an_adapter.apply()
    if strategy.is_deepspeed:
        group_timeouts.apply(ddp_timeout)
        fp32_parameters.apply()
    if stage in (1, 2):
        norms.apply_to_stages_1_and_2()
    if stage == 3:
        norms.apply_to_stage_3()
        gradient_copies.apply()
        module_walks.apply()
        releases.apply()
        stale_releases.apply()
        adapters_rounded_at_stage_3.apply()
        new_tokens_need_cuda.apply()
    if strategy.is_deepspeed and strategy.ds.quantizes_gradients:
        quantized_gradients.apply()
