"""What an optimizer is, read from whatever wraps it: its class, and the settings that each parameter steps with.

Private: the groups that DeepSpeed's optimizers keep beside torch's `param_groups` (DeepSpeed 0.19.8,
runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py, runtime/fp16/). ZeRO puts flat pieces into
`param_groups`; which parameters a piece is made of stands in these lists alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

from zero_recipes.engine.deepspeed import base_optimizer, is_stage_3, members_of_groups

# Keys of a group that say how a step is computed, not what it comes to.
WITHOUT_EFFECT = {"params", "initial_lr", "foreach", "fused", "capturable", "differentiable", "step", "bias_correction"}
# Lists of parameters by group, of the optimizers that DeepSpeed wraps around torch's.
MEMBERS = ("bit16_groups", "bf16_groups", "fp16_groups")
FOREIGN = "a parameter that is not the model's"
# What wrappers put into the names of a model's parameters.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class OptimizerFacts:
    """An optimizer's class, and what it does with each parameter."""

    kind: str  # "torch.AdamW": the package and the class
    is_decoupled: bool | None  # whether weight decay goes past the moments (AdamW); None where that is no question
    settings: Mapping[str, Mapping[str, Any]]  # {parameter: {"lr", "weight_decay", "betas", ...}}
    repeated: tuple[str, ...] = ()  # parameters that are in more than one group


def optimizer_facts(optimizer: Any, model: torch.nn.Module) -> OptimizerFacts:
    """Read an optimizer that steps on `model`'s parameters, through accelerate's and DeepSpeed's wrappers."""
    base = base_optimizer(optimizer)
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    settings: dict[str, Mapping[str, Any]] = {}
    repeated = []
    # a group that a library has lost: its members stay without settings
    for group, members in zip(base.param_groups, group_members(optimizer), strict=False):
        of_group = {key: _plain(value) for key, value in group.items() if key not in WITHOUT_EFFECT}
        of_group["lr"] = _plain(group.get("initial_lr", group.get("lr")))
        for parameter in members:
            name = names.get(id(parameter), FOREIGN)
            if name in settings:
                repeated.append(name)
            settings[name] = of_group
    return OptimizerFacts(kind_of(base), is_decoupled(base), settings, tuple(repeated))


def group_members(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """Return the model's parameters in each of the inner optimizer's `param_groups`."""
    wrapper = optimizer
    while wrapper is not None:
        if is_stage_3(wrapper):
            return members_of_groups(wrapper)
        for name in MEMBERS:
            if hasattr(wrapper, name):
                return [list(members) for members in getattr(wrapper, name)]
        wrapper = getattr(wrapper, "optimizer", None)
    return [list(group["params"]) for group in base_optimizer(optimizer).param_groups]


def current_rates(optimizer: Any, model: torch.nn.Module) -> dict[str, float]:
    """Return {parameter: its learning rate now}."""
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    rates = {}
    groups = base_optimizer(optimizer).param_groups
    for group, members in zip(groups, group_members(optimizer), strict=False):
        for parameter in members:
            rates[names.get(id(parameter), FOREIGN)] = _plain(group.get("lr"))
    return rates


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the package and the class of an optimizer: "torch.AdamW"."""
    cls = type(optimizer)
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"


def is_decoupled(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether an Adam decays weights past its moments, as AdamW does. None for other optimizers."""
    mode = getattr(optimizer, "adam_w_mode", None)  # DeepSpeed's FusedAdam and DeepSpeedCPUAdam
    if mode is not None:
        return bool(mode)
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return bool(optimizer.param_groups[0].get("decoupled_weight_decay"))
    return None


def plain_name(name: str) -> str:
    """Return the name of a parameter as the bare model has it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def trained_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that have gradients, as the bare model has them."""
    return {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}


def _plain(value: Any) -> Any:
    """Return a number for a tensor, a list for a tuple, other values as they are."""
    if torch.is_tensor(value):
        return value.item()
    if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
        return [_plain(one) for one in value]
    return value


def are_equal(asked: Any, built: Any) -> bool:
    """Whether two settings of a group mean the same: numbers up to fp32's rounding."""
    if isinstance(asked, list) and isinstance(built, list):
        return len(asked) == len(built) and all(map(are_equal, asked, built))
    if isinstance(asked, Number) and isinstance(built, Number):
        return abs(asked - built) <= 1e-6 * max(abs(asked), abs(built))
    return asked == built
