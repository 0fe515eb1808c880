"""Parameters that a model's class freezes are trained once the model comes from a checkpoint.

from_pretrained makes every parameter anew with `requires_grad=True`. A router's bias that its class freezes
(ERNIE-4.5-MoE) is given to the optimizer. A model built from its config, and one loaded at stage 3, which copies values
into the class's parameters, keep it frozen.

Library: transformers 5.23, core_model_loading.py (`set_param_for_module`).
Upstream: none found; others freeze again, too: vllm-project/speculators#594.
Here: what the class freezes is frozen again after loading.

See it: one CPU

    import tempfile

    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Ernie4_5_MoeConfig(**sizes, **heads, num_hidden_layers=2, moe_num_experts=4, moe_k=2)
    model = Ernie4_5_MoeForCausalLM(config)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    model.save_pretrained(folder := tempfile.mkdtemp())
    loaded = Ernie4_5_MoeForCausalLM.from_pretrained(folder)
    assert frozen and all(p.requires_grad for p in loaded.parameters()), frozen
"""

from transformers import PreTrainedModel


def freeze_as_the_class_does(model: PreTrainedModel, of_the_class: PreTrainedModel) -> None:
    """Freeze what the model's class freezes. `of_the_class`: the same model from its config, on the meta device."""
    frozen = {name for name, p in of_the_class.named_parameters() if not p.requires_grad}
    for name, p in model.named_parameters():
        if name in frozen:
            p.requires_grad_(False)
