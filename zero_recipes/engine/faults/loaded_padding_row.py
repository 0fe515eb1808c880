"""IndexError: index 0 is out of bounds for dimension 0 with size 0, while a Youtu model is loaded at stage 3.

After loading, transformers initializes what the files did not have. YoutuPreTrainedModel also writes zeros over the row
of the padding token, which was loaded. At stage 3 the embedding is partitioned, and has no rows there.

Library: transformers 5.23, models/youtu/modeling_youtu.py (`_init_weights`).
Upstream: none found.
Here: an embedding of which all was loaded is not initialized, in any class. Gemma's have a scale that no file holds.

See it: one CPU

    import tempfile

    import torch
    from transformers import YoutuConfig, YoutuForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "kv_lora_rank": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8}
    model = YoutuForCausalLM(YoutuConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1))
    torch.nn.init.ones_(model.model.embed_tokens.weight)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = YoutuForCausalLM.from_pretrained(folder)
    assert not loaded.model.embed_tokens.weight[0].any()
"""

import torch
from transformers import PreTrainedModel

from zero_recipes.engine.replacing import replaces


def apply() -> None:
    """Keep the rows of embeddings as they were loaded."""

    @replaces(PreTrainedModel, "_initialize_weights")
    def initialize(initialize_module, self, module, *arguments, **keywords):
        if isinstance(module, torch.nn.Embedding) and is_loaded_whole(module):
            return
        initialize_module(self, module, *arguments, **keywords)


def is_loaded_whole(embedding: torch.nn.Embedding) -> bool:
    """Whether the files had all that an embedding holds."""
    tensors = [*embedding.parameters(recurse=False), *embedding.buffers(recurse=False)]
    return all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)
