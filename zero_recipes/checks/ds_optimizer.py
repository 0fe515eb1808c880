"""The optimizer and the schedule that a ds_config names, asked of the classes that DeepSpeed would make.

File names are those of DeepSpeed 0.19.8, under deepspeed/.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from zero_recipes.core.findings import Finding, finding, first_line

# runtime/engine.py, _configure_basic_optimizer: (class on the device that trains, class where states are offloaded)
CLASSES = {
    "adam": ("deepspeed.ops.adam.FusedAdam", "deepspeed.ops.adam.DeepSpeedCPUAdam"),
    "adamw": ("deepspeed.ops.adam.FusedAdam", "deepspeed.ops.adam.DeepSpeedCPUAdam"),
    "adagrad": ("torch.optim.Adagrad", "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad"),
    "lamb": ("deepspeed.ops.lamb.FusedLamb",) * 2,
    "lion": ("deepspeed.ops.lion.FusedLion", "deepspeed.ops.lion.DeepSpeedCPULion"),
    "muadam": ("mup.MuAdam",) * 2,
    "muadamw": ("mup.MuAdamW",) * 2,
    "musgd": ("mup.MuSGD",) * 2,
}
# of Adam, read by the engine itself (get_optimizer_configuration)
ENGINES_OWN = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
MADE = "DeepSpeed (runtime/engine.py) makes it by that name with those params, once the model has been loaded."


def optimizer_findings(config: Mapping[str, Any], source: str, offloads: bool) -> Iterator[Finding]:
    """`config`: as DeepSpeed gets it, without "auto"; `offloads`: the optimizer's states lie in host memory or on NVMe.

    Muon is not looked at: it makes its groups by the model's parameters.
    """
    block = config.get("optimizer")
    if isinstance(block, dict) and str(block.get("type")).lower() != "muon":
        try:
            _bind(str(block["type"]), dict(block.get("params") or {}), offloads)
        except Exception as error:  # of whatever class is named
            yield finding("ZR262", type=block["type"], source=source, error=first_line(error), made=MADE)
    block = config.get("scheduler")
    if isinstance(block, dict):
        try:
            _schedule(str(block["type"]), dict(block.get("params") or {}))
        except Exception as error:
            yield finding("ZR263", type=block["type"], source=source, error=first_line(error), made=MADE)


def _bind(name: str, parameters: dict[str, Any], offloads: bool) -> None:
    """Raises what the class does with those parameters' names."""
    adam = name.lower() in ("adam", "adamw")
    on_device, offloaded = CLASSES.get(name.lower(), (f"torch.optim.{name}",) * 2)
    path = offloaded if offloads else on_device
    if adam and parameters.get("torch_adam"):
        path = "torch.optim.AdamW"
    module, _, attribute = path.rpartition(".")
    cls = getattr(importlib.import_module(module), attribute)
    taken = {key: value for key, value in parameters.items() if not (adam and key in ENGINES_OWN)}
    inspect.signature(cls).bind([], **taken)


def _schedule(name: str, parameters: dict[str, Any]) -> None:
    import torch
    from deepspeed.runtime import lr_schedules

    cls = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    cls(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3), **parameters)
