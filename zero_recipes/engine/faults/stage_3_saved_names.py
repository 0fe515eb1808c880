"""A model loaded at stage 3 is saved as `language_model.model.model.layers...`, names that other programs do not know.

from_pretrained keeps the renamings of a class that a file has needed, and saving reverses them. At stage 3 it keeps all
of the class's, those of older files too, and saving reverses what has never been done (Gemma 3, Mistral 3, LLaVA).

Library: transformers 5.23, integrations/deepspeed.py (`_load_state_dict_into_zero3_model`).
Upstream: none found.
Here: a model that is loaded forgets the renamings that its file did not need.

See it: one CPU

    import tempfile

    import deepspeed
    from safetensors.torch import load_file
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed("gloo")
    text = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=tower))
    model.save_pretrained(folder := tempfile.mkdtemp())
    announced = HfDeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    loaded = Gemma3ForConditionalGeneration.from_pretrained(folder)
    loaded.save_pretrained(again := tempfile.mkdtemp(), state_dict=model.state_dict())
    assert load_file(folder + "/model.safetensors").keys() != load_file(again + "/model.safetensors").keys()
    deepspeed.comm.destroy_process_group()
"""

from transformers import PreTrainedModel


def forget_unused_renamings(model: PreTrainedModel) -> None:
    """Let a loaded model be saved under the names that it was loaded with."""
    renamings = getattr(model, "_weight_conversions", None)
    if renamings:
        model._weight_conversions = [renaming for renaming in renamings if renaming.was_used()]
