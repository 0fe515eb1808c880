"""Options of ZeRO stage 3 that do nothing or lose states under the Trainer; files are those of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.config.ds_view import DsConfig
from zero_recipes.core.errors import Finding


def unsupported_findings(config: DsConfig, device: str) -> Iterator[Finding]:
    if config.zero.get("zero_quantized_nontrainable_weights"):
        yield Finding(
            "ZR292",
            "zero_quantized_nontrainable_weights",
            "It packs what is frozen when zero.Init partitions it (runtime/zero/partition_parameters.py, "
            "_partition_param); the Trainer freezes afterwards, and nobody calls quantize_nontrainable_params "
            "(runtime/zero/stage3.py), which takes fp16 alone: frozen weights would stay as wide as they are. On CPUs "
            "its quantizer does not exist, and below stage 3 the key is not read."
            if config.stage == 3
            else f"It is read at stage 3 alone (runtime/zero/partition_parameters.py); at stage {config.stage} nothing "
            "would be packed, silently.",
            "Remove it; load_in_4bit: true with use_peft: true packs the frozen weights into half a byte each.",
        )
    if config.offload_block("offload_optimizer").get("super_offload") and device != "cpu":
        yield Finding(
            "ZR293",
            "offload_optimizer.super_offload",
            "Each rank keeps Adam's moments in a second process (runtime/superoffload/superoffload_utils.py), and "
            "nothing brings them into a checkpoint (superoffload_stage3.py has no state_dict of its own): a resumed "
            "run would begin with fresh ones. It needs CUDA, and was never compared with other runs here.",
            "Remove super_offload: offload_optimizer to the CPU keeps the same states in the same memory.",
        )
