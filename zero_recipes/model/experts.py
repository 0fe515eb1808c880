"""The experts of a mixture, of which transformers 5 holds all of a layer in one tensor for each matrix."""

from torch import nn


def fused_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the tensors that hold one matrix of all experts of a layer, by their names in the model.

    They are parameters of modules of experts, with the shape (experts, rows, columns). No torch.nn.Linear holds them:
    neither bitsandbytes packs them, nor does LoRA on modules reach them.
    """
    found = {}
    for path, module in model.named_modules():
        if "expert" not in type(module).__name__.lower():
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                found[f"{path}.{name}"] = parameter
    return found
