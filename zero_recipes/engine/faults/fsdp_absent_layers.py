"""FSDP2 ends with "Could not find the transformer layer class SiglipTextEmbeddings in the model" for a composite model.

A class names the layers of all its parts in `_no_split_modules`, of a tower's relatives and of towers that this model
lacks, too. accelerate wraps each by its name, and raises where there is none (Gemma 3, the text part of Qwen3.5).

Library: accelerate 1.15, utils/dataclasses.py (`set_auto_wrap_policy`) and utils/fsdp_utils.py (`fsdp2_prepare_model`).
Upstream: none found.
Here: before sharding the model names only the layers that it has.

See it: one CPU

    from accelerate import FullyShardedDataParallelPlugin
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    tower = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=tower))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    try:
        plugin.set_auto_wrap_policy(model)
    except ValueError as error:
        assert "Could not find the transformer layer class" in str(error)
    else:
        raise AssertionError("faults/fsdp_absent_layers.py may go")
"""

from transformers import PreTrainedModel


def name_layers_at_hand(model: PreTrainedModel) -> None:
    """Let a model name only those layers for wrapping that it has.

    Private: `_no_split_modules` of transformers' models (5.23).
    """
    named = model._no_split_modules
    if named:
        kinds = {type(module).__name__ for module in model.modules()}
        model._no_split_modules = type(named)(name for name in named if name in kinds)
