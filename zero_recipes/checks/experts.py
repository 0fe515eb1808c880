"""Mixtures of experts under ZeRO: layers whose ranks use other parts of them, and DeepSpeed's leaf modules.

File names are those of DeepSpeed 0.19.8, under deepspeed/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zero_recipes.config.settings import Settings
from zero_recipes.core.errors import Finding

LISTS = ("classes", "names", "name_suffixes")  # of zero_optimization.leaf_module
LAUNCHED = "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"


def expert_findings(settings: Settings, strategy, environment: Mapping[str, str], config, model) -> list[Finding]:
    """`config`: the model's, None where it is not at hand; `model`: the model without memory, None where it cannot be
    made; `environment`: the launcher's."""
    named = strategy.ds_config.zero.get("leaf_module") or {}
    return [
        *_leaf_modules(named if isinstance(named, Mapping) else {}, settings, strategy.zero_stage, model),
        *_separate_experts(settings, strategy, environment, config, model),
    ]


def is_looked_at(strategy, config) -> bool:
    """Whether the model has to be made for `expert_findings`: it takes a second for a large one."""
    mixture = config is not None and any("expert" in key for key in config.to_dict())
    return bool(strategy.ds_config.zero.get("leaf_module")) or (mixture and strategy.world_size > 1)


def _leaf_modules(named: Mapping, settings: Settings, zero_stage: int, model) -> Iterator[Finding]:
    listed = {key: [named[key]] if isinstance(named.get(key), str) else named.get(key) or [] for key in LISTS}
    if zero_stage != 3 and any(listed.values()):
        yield Finding(
            "ZR284",
            f"zero_optimization.leaf_module at stage {zero_stage}",
            "Only stage 3 gathers weights by module (runtime/zero/partitioned_param_coordinator.py).",
            "Remove it, or use stage 3.",
            level="warning",
        )
    elif model is not None:
        missing = _missing(listed, model, "base_model.model." if settings.use_peft else "")
        if missing:
            yield Finding(
                "ZR283",
                f"zero_optimization.leaf_module names what the model does not have: {', '.join(missing)}",
                "DeepSpeed warns of it at most, and gathers by every module as usual (utils/z3_leaf_module.py, "
                "apply_zero_leaf_module_config).",
                "Name classes, modules or ends of modules' names of this model, or remove them.",
            )


def _missing(listed: Mapping, model, prefix: str) -> list[str]:
    """What DeepSpeed itself would not find; the classes that it names by default need not be there."""
    from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES

    names = [prefix + name for name, _ in model.named_modules()]
    return [
        *(c for c in listed["classes"] if c not in DEFAULT_LEAF_MODULE_CLASSES and not _of_class(model, c)),
        *(name for name in listed["names"] if name not in names),
        *(end for end in listed["name_suffixes"] if not any(name.endswith(end) for name in names)),
    ]


def _of_class(model, name: str) -> list:
    """The modules that DeepSpeed takes for leaves by this class name, short or whole."""
    named = [(type(module), module) for module in model.modules()]
    return [module for kind, module in named if name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")]


def _separate_experts(settings: Settings, strategy, environment: Mapping[str, str], config, model) -> Iterator[Finding]:
    """transformers' own mixtures hold a layer's experts in one tensor; other code may have a module for each."""
    stage = strategy.zero_stage
    if not stage or strategy.world_size == 1:
        return
    if model is None:
        yield from _unknown(settings, strategy, environment, config)
        return
    layers = _with_separate_experts(model)
    if not layers:
        return
    classes = sorted({type(layer).__name__ for layer in layers})
    kinds, quoted = ", ".join(classes), ", ".join(f'"{name}"' for name in classes)
    if stage < 3:
        yield Finding(
            "ZR285",
            f"{kinds} has a module for each expert, at ZeRO stage {stage}",
            "Where the ranks' tokens use other experts, DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, "
            "reduce_ipg_grads) adds up the gradients of different experts: each rank fills the bucket with those that "
            "it has. The model trains on wrong gradients, without a word.",
            'Use stage 3 with "leaf_module", stage 0 or DDP; where every rank always calls every expert, ignore it.',
        )
    elif not all(_is_leaf(layer, model, strategy, environment, settings) for layer in layers):
        yield Finding(
            "ZR286",
            f"{kinds} has a module for each expert, at ZeRO stage 3",
            "A rank whose tokens use none of one does not gather it, and the others wait for it forever "
            "(modelscope/ms-swift#5875).",
            f'Add to the ds_config: "zero_optimization": {{"leaf_module": {{"classes": [{quoted}]}}}}.',
        )


def _with_separate_experts(model) -> list:
    import torch

    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return [
        module
        for module in model.modules()
        if any("expert" in name and isinstance(c, lists) and len(c) > 1 for name, c in module.named_children())
    ]


def _is_leaf(layer, model, strategy, environment: Mapping[str, str], settings: Settings) -> bool:
    """As DeepSpeed's configuration has it, its defaults included, or accelerate's list of classes."""
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig

    leaf = DeepSpeedZeroLeafModuleConfig(**(strategy.ds_config.zero.get("leaf_module") or {}))
    launched = [name.strip() for name in environment.get(LAUNCHED, "").split(",")]
    if any(found is layer for name in (*leaf.classes, *launched) if name for found in _of_class(model, name)):
        return True
    prefix = "base_model.model." if settings.use_peft else ""
    own = next(prefix + name for name, module in model.named_modules() if module is layer)
    return own in leaf.names or any(own.endswith(end) for end in leaf.name_suffixes)


def _unknown(settings: Settings, strategy, environment: Mapping[str, str], config) -> Iterator[Finding]:
    """The class cannot be made here, and nobody has named leaf modules."""
    if strategy.zero_stage != 3 or not settings.trust_remote_code:
        return
    if strategy.ds_config.zero.get("leaf_module") or environment.get(LAUNCHED):
        return
    own_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if own_class and any("expert" in key for key in config.to_dict()):
        yield Finding(
            "ZR191",
            "a mixture of experts by code of its own, at ZeRO stage 3",
            "Where each expert is a module of its own, a rank whose tokens use none of one does not gather it, and the "
            "others wait for it forever (modelscope/ms-swift#5875). DeepSpeed 0.19.8 knows Mixtral, Qwen2-MoE and "
            "Qwen3-MoE (runtime/zero/leaf_module_config.py).",
            'Name the class of the layer with the experts in the ds_config: "zero_optimization": {"leaf_module": '
            '{"classes": ["TheSparseMoeBlock"]}}; or use DDP.',
            level="warning",
        )
