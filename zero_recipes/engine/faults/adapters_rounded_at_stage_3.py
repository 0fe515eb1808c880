"""At stage 3 a new LoRA adapter begins with values that are rounded to 16 bits, though its dtype is fp32.

PEFT casts a new adapter to the dtype of the layer below, which is 16 bits after zero.Init, and then to fp32 again. At
other stages the base model is fp32 then, and the adapter has the values that were drawn.

Library: PEFT 0.21, tuners/tuners_utils.py (`_get_base_layer_device_and_dtype`).
Upstream: none found.
Here: PEFT is given no dtype for a layer that is partitioned.

See it: one CPU

    import deepspeed, torch
    from peft import LoraConfig, get_peft_model

    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        base = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = get_peft_model(base, LoraConfig(target_modules=["0"]))
    drawn = model.base_model.model[0].lora_A["default"].weight.detach()
    assert drawn.dtype == torch.float32 and torch.equal(drawn, drawn.bfloat16().float())
"""

from zero_recipes.engine.deepspeed import is_partitioned
from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Let adapters keep the fp32 values that PEFT draws."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    @replaces(BaseTunerLayer, "_get_base_layer_device_and_dtype")
    def device_and_dtype(faulty, self, base_layer):
        device, dtype = faulty(self, base_layer)
        return device, None if any(map(is_partitioned, base_layer.parameters())) else dtype
