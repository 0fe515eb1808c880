"""What an adapter's targets come to in a model: what PEFT refuses, what stays frozen, and what would never train.

Everything is looked up in the model's modules and their classes, and tried with PEFT itself on a model without weights.
"""

import copy
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import nn

from zero_recipes.checks.adapter_names import named_modules, tails, texts
from zero_recipes.config.ds_config import quiet
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding, first_line
from zero_recipes.model.config import adapter_config, takes_all_linear
from zero_recipes.model.experts import fused_experts

SHOWN = 12  # names of layers


def refused_targets(model: nn.Module, settings: Settings) -> Iterator[Finding]:
    """Why PEFT refuses a recipe's adapter, where it is for its targets: with the names or the value to write instead.

    Nothing where PEFT takes it, and where it refuses it for another reason.
    `model`: without weights; it is not changed.
    """
    written = adapter_config(settings)
    if not hasattr(written, "lora_dropout"):  # no adapter, or none that is LoRA
        return
    trial = copy.copy(written)
    trial.lora_dropout = 0.0
    if _refusal(model, trial) is not None:
        kept = yield from _refused_modules(model, written)
        trial.target_modules = set(kept)
    if written.lora_dropout and _refusal(model, trial) is None:
        names = tails(_adapted(model, trial).base_model.targeted_parameter_names, 2)
        if names:
            key = "peft_config.lora_dropout" if "lora_dropout" in (settings.peft_config or {}) else "lora_dropout"
            yield finding("ZR455", recipe_key=key, names=", ".join(names), key=key, dropout=written.lora_dropout)


def _refused_modules(model: nn.Module, written: Any) -> Iterator[Finding]:
    """Yield the finding about kinds of modules that PEFT refuses, each tried by itself. Returns the names to keep."""
    trial = copy.copy(written)
    trial.lora_dropout = 0.0
    trial.target_parameters = None
    named = named_modules(model, written)
    kept = []
    refused = []
    error: Exception | None = None
    for kind in tails(named, 1):
        trial.target_modules = {kind}
        raised = _refusal(model, trial)
        if raised is None:
            kept.append(kind)
        else:
            refused.append(kind)
            error = raised
    unused = tails(unused_targets(model, named), 1)
    kept = [kind for kind in kept if kind not in unused]
    if refused and kept:
        yield finding("ZR456", names=", ".join(refused), error=first_line(error), kept=", ".join(kept))
    return kept


def _adapted(model: nn.Module, config: Any) -> Any:
    """A copy of the model with an adapter. Raises what PEFT raises."""
    import peft

    with quiet():  # PEFT writes into both that it is given
        return peft.get_peft_model(copy.deepcopy(model), copy.deepcopy(config), low_cpu_mem_usage=True)


def _refusal(model: nn.Module, config: Any) -> Exception | None:
    """What PEFT raises at an adapter; None where it takes it."""
    try:
        _adapted(model, config)
    except Exception as error:  # libraries raise whatever they like
        return error
    return None


def target_findings(model: nn.Module, adapted: Any, written: Any) -> Iterator[Finding]:
    """What an adapter's names seem to reach, and do not. PEFT says nothing of it.

    Args:
        model: without weights and without the adapter.
        adapted: the same model with it.
        written: the recipe's configuration for PEFT.
    """
    reached = set(adapted.base_model.targeted_module_names)
    named = named_modules(model, written)
    missed = [name for name in named if name not in reached]
    # PEFT takes names of modules that have become parameters out of the list (`_idle_targets`)
    parameters = adapted.base_model.targeted_parameter_names
    if missed and parameters:
        yield finding("ZR458", count=len(missed), names=_shown(tails(missed, 2)))
    yield from _frozen_experts(model, adapted, written)
    unused = unused_targets(model, reached)
    if unused:
        kept = [kind for kind in tails(adapted.base_model.targeted_module_names, 1) if kind not in tails(unused, 1)]
        classes = {type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in unused}
        names = ", ".join(tails(unused, 1))
        yield finding("ZR482", names=names, classes=", ".join(sorted(classes)), kept=", ".join(kept))


def _frozen_experts(model: nn.Module, adapted: Any, written: Any) -> Iterator[Finding]:
    """Experts without an adapter, though the recipe names all linear layers, or a name that the experts have, too."""
    if texts(written, "target_parameters") or adapted.base_model.targeted_parameter_names:
        return
    experts = fused_experts(model)
    shared = set(tails(experts, 1)).intersection(texts(written, "target_modules"))
    if not experts or not (takes_all_linear(written) or shared):
        return
    names = tails(experts, 2)
    size = sum(weight.numel() for weight in experts.values())
    total = sum(weight.numel() for weight in model.parameters())
    added = 0
    for weight in experts.values():
        count, rows, columns = weight.shape
        added += getattr(written, "r", 0) * count * (rows + columns)
    sizes = {"size": f"{size:,}", "total": f"{total:,}", "added": f"{added:,}"}
    yield finding("ZR457", names=", ".join(names), **sizes)


def _shown(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def unused_targets(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Which of some linear layers an adapter would not train: those whose weight the layer around them reads itself.

    An adapter stands in the call of a layer. Mamba's mixers hand `self.out_proj.weight` to a kernel, and multiply with
    `self.dt_proj.weight`, without calling these layers.
    """
    found = []
    for name in names:
        parent, _, child = name.rpartition(".")
        if _reads_weight(type(model.get_submodule(parent)), child):
            found.append(name)
    return found


@cache
def _reads_weight(kind: type, child: str) -> bool:
    """Whether a class hands the weight of a child on as it is, in a method that is not about its first values."""
    handed_on = re.compile(rf"\bself\.{re.escape(child)}\.weight\s*[,)@]")
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if method.__module__.startswith("torch.") or "init" in name or "reset" in name:
            continue
        try:
            source = inspect.getsource(method)
        except OSError:  # of a class that was made at run time
            continue
        if handed_on.search(source):
            return True
    return False
