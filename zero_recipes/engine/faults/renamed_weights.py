"""After a resume the loss jumps back to that of a fresh LM head: "There were missing keys ... lm_head.weight".

The Trainer loads a checkpoint by `model.load_state_dict(file, strict=False)`, with the file's names. Weights that
saving renames (GPTNeoX: lm_head becomes embed_out) are left out with a mere warning: a resumed run trains a fresh LM
head, and `load_best_model_at_end` keeps the last model's.

Library: transformers 5.23, trainer.py (`_load_from_checkpoint`, `_load_best_model`).
Upstream: huggingface/transformers#48822.
Here: from_pretrained reads the checkpoint, and its weights are copied into the model.

See it: one CPU

    import tempfile

    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8}
    config = GPTNeoXConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    folder = tempfile.mkdtemp()
    saved = GPTNeoXForCausalLM(config)
    saved.save_pretrained(folder)
    fresh = GPTNeoXForCausalLM(config)
    Trainer(fresh, TrainingArguments(folder, use_cpu=True, report_to="none"))._load_from_checkpoint(folder)
    assert torch.equal(fresh.gpt_neox.embed_in.weight, saved.gpt_neox.embed_in.weight)
    assert not torch.equal(fresh.lm_head.weight, saved.lm_head.weight)
"""

import torch
from transformers import PreTrainedModel


def load_weights_by_class(model: PreTrainedModel, checkpoint: str) -> None:
    """Put all of a checkpoint's weights into `model`, as from_pretrained would."""
    whole = type(model).from_pretrained(checkpoint, dtype=model.dtype, local_files_only=True)
    with torch.no_grad():
        model.load_state_dict(whole.state_dict())
