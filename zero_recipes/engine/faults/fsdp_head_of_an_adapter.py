"""A trained LM head of an adapter or a composite model under FSDP2: its gradient is that of one process's rows.

accelerate makes one group of final norm and LM head, which is gathered when the norm is called. It looks for the norm
among the children of `model.<base_model_prefix>`: of PEFT's model of a Llama that is the whole Llama, which has none,
and of a composite model (Qwen3.5) the towers and the decoder, whose norm is one level below.
The LM head becomes a group of its own, and stays sharded, since TRL's fused head (1.16, trainer/utils.py
`add_fused_lm_head`) reads its weight and never calls it. DTensor.full_tensor takes the gradient for one that is the
same on all ranks.

Library: accelerate 1.15, utils/fsdp_utils.py (`_find_final_norm`).
Upstream: none found.
Here: the norm is looked for in the model within the adapter, and in its decoder.

See it: one CPU

    from accelerate.utils.fsdp_utils import _find_final_norm
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    assert _find_final_norm(model) is not None
    assert _find_final_norm(get_peft_model(model, LoraConfig())) is None
"""

from torch import nn

from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Let accelerate find the final norm of a model inside an adapter and of a composite model, too."""
    from accelerate.utils import fsdp_utils
    from peft import PeftModel

    @replaces(fsdp_utils, "_find_final_norm")
    def find_final_norm(find, model):
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        norm = find(base)
        return norm_of_decoder(base) if norm is None else norm


def norm_of_decoder(model: nn.Module) -> nn.Module | None:
    """The norm behind the last layer of a model's decoder, as its class names that. None where there is none."""
    decoder = model
    while hasattr(decoder, "get_decoder") and decoder.get_decoder() not in (decoder, None):
        decoder = decoder.get_decoder()
    norms = [module for module in decoder.children() if "Norm" in type(module).__name__]
    return norms[-1] if norms else None
