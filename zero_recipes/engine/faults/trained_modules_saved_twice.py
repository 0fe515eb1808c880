"""adapter_model.safetensors has a trained LM head several times, one of them the base model's.

Where the vocabulary has grown, PEFT adds all that is below the embeddings and the LM head to an adapter's file. Of a
head in `modules_to_save` that is also PEFT's own copy, which no loading reads, and the frozen one, which is the base
model's.

Library: PEFT 0.21, utils/save_and_load.py (`get_peft_model_state_dict`), as peft_model.py calls it.
Upstream: none found.
Here: each module is saved once, under the name by which PEFT loads it.

See it: one CPU

    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    heads = [name for name in get_peft_model_state_dict(model, save_embedding_layers=True) if "lm_head" in name]
    assert len(heads) > 1, heads
"""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch


@contextlib.contextmanager
def trained_modules_saved_once() -> Iterator[None]:
    """Within it an adapter's file has the modules of modules_to_save once."""
    from peft import peft_model

    whole = peft_model.get_peft_model_state_dict

    def once(*arguments, **keywords):
        tensors = whole(*arguments, **keywords)
        kept = {}
        for name, tensor in tensors.items():
            own = name.replace(".modules_to_save.", ".").replace(".original_module.", ".")
            if own == name or own not in tensors:
                kept[name] = tensor
        return kept

    with patch.object(peft_model, "get_peft_model_state_dict", once):
        yield
