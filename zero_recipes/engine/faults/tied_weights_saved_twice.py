"""model.safetensors has `lm_head.weight` though the model ties it to its embeddings.

transformers finds tied weights by their memory. DeepSpeed (stages 0 to 2, by accelerate.get_state_dict) and FSDP2 hand
it copies: the file holds the embeddings twice, and tools that read it without transformers take them for two weights.

Library: transformers 5.23, modeling_utils.py (`remove_tied_weights_from_state_dict`), as `Trainer._save` calls it.
Upstream: none found; the same file of another trainer: hiyouga/LLaMA-Factory#10560.
Here: a name that is tied to another with an equal tensor is left out before the model is saved.

See it: one CPU

    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in remove_tied_weights_from_state_dict(copies, model)
"""

import torch
from transformers import PreTrainedModel


def without_aliases(
    model: torch.nn.Module, state_dict: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor] | None:
    """Return a state dict with tied weights once, under the name that they are tied to. Those that differ are kept."""
    if not state_dict or not isinstance(model, PreTrainedModel):
        return state_dict
    kept = dict(state_dict)
    for alias, source in model.all_tied_weights_keys.items():
        if alias in state_dict and source in state_dict and torch.equal(state_dict[alias], state_dict[source]):
            del kept[alias]
    return kept
