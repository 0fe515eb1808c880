"""A leaf module (`leaf_module`) that returns a list trains nothing at stage 3: its gradients are dropped.

DeepSpeed reduces the gradients of a leaf module in a full backward hook, which torch calls for outputs that are a
tensor or a tuple of tensors. For a list torch warns, and the gradients of the whole layer are never reduced: on a GPU
the run goes on without them, on a CPU `zero_grad` raises "unknown parameter type". Layers of OpenAI's GPT return lists.

Library: DeepSpeed 0.19.8, runtime/zero/stage3.py (`reduce_leaf_module_grads`).
Upstream: none found.
Here: a list that a leaf module returns becomes a tuple.

See it: one CPU

    import torch


    class Layer(torch.nn.Linear):
        def forward(self, x):
            return [super().forward(x)]


    layer = Layer(2, 2)
    called = []
    layer.register_full_backward_hook(lambda *_: called.append(layer))
    layer(torch.ones(1, 2, requires_grad=True))[0].sum().backward()
    assert not called
"""

from typing import Any

import torch

from zero_recipes.config.settings import Settings


def return_tuples(model: torch.nn.Module, settings: Settings) -> None:
    """Let the leaf modules of a ds_config return tuples in place of lists."""
    config = settings.deepspeed
    if not isinstance(config, dict):
        return
    classes = config["zero_optimization"].get("leaf_module", {}).get("classes", ())
    for module in model.modules():
        if type(module).__name__ in classes:
            module.register_forward_hook(_tuple_of_list)  # before the backward hook looks at the output


def _tuple_of_list(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    return tuple(output) if isinstance(output, list) else output
