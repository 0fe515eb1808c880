"""Mixtures of experts under ZeRO: layers whose ranks use other parts of them, and DeepSpeed's leaf modules.

File names are those of DeepSpeed 0.19.8, under deepspeed/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding

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
        yield finding("ZR284", zero_stage=zero_stage)
    elif model is not None:
        missing = _missing(listed, model, "base_model.model." if settings.use_peft else "")
        if missing:
            yield finding("ZR283", missing=", ".join(missing))


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
        yield finding("ZR285", kinds=kinds, stage=stage)
    elif not all(_is_leaf(layer, model, strategy, environment, settings) for layer in layers):
        yield finding("ZR286", kinds=kinds, quoted=quoted)


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
        yield finding("ZR191")
