"""LoRA with a trained LM head under FSDP2: the head's gradient is that of one process's rows.

accelerate makes one group of final norm and LM head, which is gathered when the norm is called. It looks for the norm
among the children of `model.<base_model_prefix>`: of PEFT's model of a Llama that is the whole Llama, which has none.
The LM head becomes a group of its own, and stays sharded, since TRL's fused head (1.16, trainer/utils.py
`add_fused_lm_head`) reads its weight and never calls it. DTensor.full_tensor takes the gradient for one that is the
same on all ranks.

Library: accelerate 1.15, utils/fsdp_utils.py (`_find_final_norm`).
Upstream: none found.
Here: the norm is looked for in the model within the adapter.

See it: one CPU

    from accelerate.utils.fsdp_utils import _find_final_norm
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    assert _find_final_norm(model) is not None
    assert _find_final_norm(get_peft_model(model, LoraConfig())) is None
"""

from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Let accelerate find the final norm of a model inside an adapter too."""
    from accelerate.utils import fsdp_utils
    from peft import PeftModel

    @replaces(fsdp_utils, "_find_final_norm")
    def find_final_norm(find, model):
        return find(model.get_base_model() if isinstance(model, PeftModel) else model)
