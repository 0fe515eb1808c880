"""A GPT-NeoX that is built from its config and trained under FSDP2 is saved with `lm_head`, which no loading reads.

For a model from its config, saving finds renamings by its class's name. torch's fully_shard puts "FSDP" before that.

Library: transformers 5.23, core_model_loading.py (`revert_weight_conversion`) and conversion_mapping.py.
Upstream: none found.
Here: the model gets its renamings (`_weight_conversions`) before it is sharded.

See it: one CPU

    import tempfile

    import torch
    from safetensors.torch import load_file
    from torch.distributed.fsdp import fully_shard
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=mesh).save_pretrained(folder := tempfile.mkdtemp(), state_dict=whole)
    assert "lm_head.weight" in load_file(folder + "/model.safetensors")  # the class's file has embed_out.weight
    torch.distributed.destroy_process_group()
"""

from transformers import PreTrainedModel


def keep_names_of_the_file(model: PreTrainedModel) -> None:
    """Let a model be saved under the names that its class has in files. Call it before sharding."""
    from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping

    if getattr(model, "_weight_conversions", None) is not None:
        return  # a model that is read from a file has them
    changes = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [change for change in changes if not isinstance(change, PrefixChange)]
    model._weight_conversions = renamings or None
