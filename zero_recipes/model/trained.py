"""What trains of a model, and how many parameters that is."""

from collections import Counter

import torch

from zero_recipes.engine.deepspeed import packed_weights, whole_size
from zero_recipes.model.towers import is_within, tower_names


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """Count a model's parameters: (all, trainable).

    Those that ZeRO stage 3 has partitioned or 4 bit has packed count whole; tied ones count once.
    """
    packed = {id(weight): state.shape.numel() for weight, state in packed_weights(model)}
    total = 0
    trainable = 0
    for p in model.parameters():
        size = packed.get(id(p), whole_size(p))
        total += size
        if p.requires_grad:
            trainable += size
    return total, trainable


def trained_parts(model: torch.nn.Module) -> str:
    """What trains, and how many parameters: "LoRA on 24 query_key_value, 24 dense; 185,088 of 12,345,678 parameters".

    The same on every rank, and under every strategy: by names and `requires_grad` alone.
    """
    total, trainable = parameter_counts(model)
    counts = f"{trainable:,} of {total:,} parameters"
    wrappers = _wrappers(model)
    if wrappers:
        return f"{_adapted_parts(model, wrappers)}; {counts}"
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if not frozen:
        return f"all {total:,} parameters"
    towers = tower_names(model)
    others = [name for name in frozen if not is_within(name, towers)]
    left_out = []
    if len(others) < len(frozen):
        names = ", ".join(tower.rpartition(".")[2] for tower in towers)
        left_out.append(f"{names} (text never reaches them)")
    if others:
        left_out.append(_counted(Counter(".".join(name.split(".")[-2:]) for name in others)))
    return f"{counts}, all but {'; '.join(left_out)}"


def _wrappers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """PEFT's modules around those of the model, by name."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    kinds = (BaseTunerLayer, ModulesToSaveWrapper)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def _adapted_parts(model: torch.nn.Module, wrappers: dict[str, torch.nn.Module]) -> str:
    """By what PEFT has done to them: a trained parameter belongs to the innermost wrapper around it."""
    trained: dict[str, list[str]] = {}  # {"LoRA on": names of modules}, in the model's order
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        owner = name
        while owner and owner not in wrappers:
            owner = owner.rpartition(".")[0]
        how, part = _how_trained(model, name, owner, wrappers.get(owner))
        parts = trained.setdefault(how, [])
        if part not in parts[-1:]:
            parts.append(part)
    texts = []
    for how, parts in trained.items():
        kinds = Counter(part.rpartition("/")[2] for part in dict.fromkeys(parts))
        texts.append(f"{how} {_counted(kinds)}")
    return "; ".join(texts)


def _how_trained(model, name: str, owner: str, wrapper: torch.nn.Module | None) -> tuple[str, str]:
    """("LoRA on", "model.layers.0.dense/dense"): how, and a module's whole name with its last one.

    `name`: of the parameter. `owner`: of the wrapper around it, if there is one.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper

    if wrapper is None:
        return "as they are", f"{name}/{'.'.join(name.split('.')[-2:])}"
    place = owner.replace(".base_layer", "").removesuffix(".token_adapter")
    kind = place.rpartition(".")[2]
    if isinstance(wrapper, TrainableTokensLayer):
        (indices,) = wrapper.token_indices.values()
        return f"{len(indices)} tokens of", f"{place}/{kind}"
    if isinstance(wrapper, ModulesToSaveWrapper):
        return "whole", f"{place}/{kind}"
    if hasattr(wrapper, "parameter_name"):  # target_parameters
        place = f"{place}.{wrapper.parameter_name}"
        kind = f"{kind}.{wrapper.parameter_name}"
    (adapter,) = model.peft_config.values()
    method = {"LORA": "LoRA"}.get(adapter.peft_type.value, adapter.peft_type.value)
    return f"{method} on", f"{place}/{kind}"


def _counted(kinds: Counter) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in kinds.items())
