"""LoRA at stage 3 with leaf modules (`leaf_module`): "The size of tensor a must match the size of tensor b".

DeepSpeed reduces the gradients of a leaf module in a full backward hook. Behind a frozen embedding no input of the
first layer has a gradient, and torch calls its hook before its parameters' gradients exist.

Library: DeepSpeed 0.19.8, runtime/zero/stage3.py (`reduce_leaf_module_grads`).
Upstream: none found.
Here: the embeddings' output asks for gradients.

See it: one CPU

    import torch

    layer = torch.nn.Linear(2, 2)
    seen = []
    layer.register_full_backward_hook(lambda *_: seen.append(layer.weight.grad))
    layer(torch.ones(1, 2)).sum().backward()  # as behind a frozen embedding
    layer.weight.grad = None
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert seen[0] is None, seen
"""

from transformers import PreTrainedModel

from zero_recipes.config.settings import Settings


def let_inputs_have_gradients(model: PreTrainedModel, settings: Settings) -> None:
    """Let the embeddings' output of a model with leaf modules ask for gradients, where an adapter trains."""
    config = settings.deepspeed
    has_leaves = isinstance(config, dict) and "leaf_module" in config["zero_optimization"]
    if settings.use_peft and has_leaves:
        model.enable_input_require_grads()
