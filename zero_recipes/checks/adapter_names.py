"""Names of a model's modules and parameters, as PEFT matches what an adapter's keys name."""

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from zero_recipes.model.config import takes_all_linear


def module_kinds(model: nn.Module) -> list[str]:
    """Last names of modules with weights of their own, in the model's order: "q_proj", "lm_head"."""
    names = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name and next(module.parameters(recurse=False), None) is not None:
            names.append(name)
    return tails(names, 1)


def tails(names: Iterable[str], parts: int) -> list[str]:
    """The last parts of dotted names, each once."""
    return list(dict.fromkeys(".".join(name.split(".")[-parts:]) for name in names))


def texts(config: Any, key: str) -> list[str]:
    """The value of a key as a list of names, in order; one text is one name."""
    value = getattr(config, key, None)
    if isinstance(value, str):
        return [value]
    return sorted(map(str, value or ()))


def matches(config: Any, modules: list[str], **changes: Any) -> bool:
    """Whether PEFT would find any target, were its configuration another one."""
    from peft.tuners.tuners_utils import check_target_module_exists

    changed = copy.copy(config)
    for key, value in changes.items():
        setattr(changed, key, value)
    return any(check_target_module_exists(changed, module) for module in modules if module)


def named_modules(model: nn.Module, config: Any) -> list[str]:
    """The modules that an adapter's target_modules name, whatever PEFT makes of the names.

    "all-linear" names the linear layers without the LM head. What `exclude_modules` and the like leave out is left out.
    """
    if config.target_modules is None:  # PEFT takes the usual ones of the model's type
        return []
    if not takes_all_linear(config):
        modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
        return [name for name in modules if matches(config, [name])]
    head = model.get_output_embeddings()
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head:
            layers.append(name)
    return [name for name in layers if matches(config, [name], target_modules=[name])]
