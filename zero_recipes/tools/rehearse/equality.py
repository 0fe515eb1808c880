"""The launch whose steps plain torch takes too: the job in fp32, without what draws random numbers or rounds."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import refusal
from zero_recipes.tools.rehearse import observed, plain

SCRIPT = Path(observed.__file__)  # run_sft.py, observed
MODEL = "equal-model"  # the folder of the small model without dropout
# In a model's configuration, what draws random numbers.
RANDOM = re.compile(r"drop|jitter")
# Values of `optim` whose states are rounded: torch's AdamW steps in their place.
ROUNDED = re.compile(r"8bit|4bit")
KERNELS = re.compile("flash")  # attention that computes in 16 bits only


class EqualLaunch(NamedTuple):
    """How the job is launched to be compared with plain torch."""

    words: list[str]  # overrides
    without: list[str]  # what of the job is left out, in words


def equal_launch(settings: Settings, small: Path) -> EqualLaunch:
    """Overrides that leave out what no other program repeats; writes a copy of the small model without dropout.

    `settings`: of a rehearsal's launches. `small`: the folder of the rehearsal's small model.
    """
    values: dict[str, Any] = {"bf16": "false", "fp16": "false", "dtype": "float32"}
    without = []
    if settings.precision != "fp32":
        without.append(settings.precision)
    switched_off = {
        "load_in_4bit": False,
        "load_in_8bit": False,
        "tf32": None,
        "neftune_noise_alpha": None,
        "router_aux_loss_coef": 0.0,
    }
    for key, off in switched_off.items():
        if getattr(settings, key):
            values[key] = json.dumps(off)
            without.append(f"{key}: {getattr(settings, key)}")
    if settings.use_peft and settings.lora_dropout:
        values["lora_dropout"] = "0.0"
        without.append(f"lora_dropout: {settings.lora_dropout}")
    if ROUNDED.search(settings.optimizer_name):
        values["optim"] = "adamw_torch"
        without.append(f"optim: {settings.optimizer_name}")
    if KERNELS.search(str(settings.attn_implementation)):
        values["attn_implementation"] = "sdpa"
        without.append(f"attn_implementation: {settings.attn_implementation}")
    for key, own in (("peft_config", "lora_dropout"), ("model_init_kwargs", "dtype")):
        mapping = getattr(settings, key)
        if isinstance(mapping, Mapping) and own in mapping:
            values[key] = json.dumps({name: value for name, value in mapping.items() if name != own})
    model = small.with_name(MODEL)
    without += copy_without_dropout(small, model)
    words = []
    for key, value in (values | {"model_name_or_path": model}).items():
        words += [f"--{key}", str(value)]
    return EqualLaunch(words, without)


def copy_without_dropout(source: Path, target: Path) -> list[str]:
    """Copy a model's folder with every dropout of its configuration at 0. Returns what was changed, in words."""
    shutil.copytree(source, target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    changed = []
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key, value in part.items():
            if RANDOM.search(key) and isinstance(value, float) and value:
                part[key] = 0.0
                changed.append(f"{key}: {value}")
    path.write_text(json.dumps(config, indent=2))
    return changed


def why_not_launched(settings: Settings, is_small: bool) -> str | None:
    """Why the job is not compared with plain torch, in words; None where it is."""
    if not is_small:
        return "only of a model made small: plain torch runs it on one CPU"
    if ROUNDED.search(settings.optimizer_name):
        settings = settings.replace(optim="adamw_torch")  # as in the launch
    return plain.not_comparable(settings, {})


def judged_equal(out: Path, settings: Settings, recipe: Path, without: list[str]) -> str:
    """Let plain torch take the steps of a launch. Returns what is equal, in words. Raises Refusal.

    `out`: the launch's output_dir. `settings`: of the launch.
    """
    facts = json.loads((out / observed.FOLDER / observed.FACTS).read_text())
    reason = plain.not_comparable(settings, facts["ds_config"])
    if reason is not None:
        return f"not compared: {reason}"
    found = plain.compare(out, settings, recipe)
    if isinstance(found, plain.Difference):
        raise refusal("ZR885", what=found.what, run=found.run, plain=found.plain, folder=out)
    return f"{found}{', without ' if without else ''}{', '.join(without)}"
