"""What is asked: a saved model or adapter, the base beside it, and how its run computed. No weight is read here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from zero_recipes.checkpoint.saved_model import (
    ADAPTER,
    INDEX,
    SINGLE,
    Entry,
    NotWhole,
    compare_with_adapter,
    entries_of,
)
from zero_recipes.checkpoint.verify import verify
from zero_recipes.config import recipe as recipes
from zero_recipes.config.recipe import Recipe
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import first_line, refusal
from zero_recipes.core.process import environment_kept
from zero_recipes.metrics.schema import FILE, ContractError, Metrics

RECIPE = "recipe.resolved.yaml"
NO_BASE = "none"  # --base none: the model alone
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_COMPUTED_IN = {"bf16": "bfloat16", "fp16": "float16"}
# what a recipe says about its training, and what asking has no use for: the process group, DeepSpeed, FSDP, the device
_ONE_PROCESS = {"deepspeed": None, "fsdp": None, "fsdp_config": None, "parallelism_config": None, "use_cpu": True}
_ONE_PROCESS |= {"bf16": False, "fp16": False, "tf32": None, "torch_compile": False, "use_liger_kernel": False}
_ONE_PROCESS |= {"accelerator_config": None, "resume_from_checkpoint": None, "report_to": "none", "packing": False}
_ONE_PROCESS |= {"load_in_4bit": False, "load_in_8bit": False, "push_to_hub": False, "padding_free": False}


@dataclass(frozen=True)
class Target:
    """A saved model, ready to be loaded."""

    folder: Path
    is_adapter: bool
    base: str | None  # None: the model is asked alone
    recipe: Recipe  # the run's own, or TRL's defaults
    settings: Settings  # of one process
    is_ours: bool  # whether the recipe is the run's own
    draws_base: bool  # the run began with random weights, and so does the base
    dtype: str  # of the weights, as torch names it; "auto": as they are saved
    autocast: str | None  # the dtype that the run computed in, where its weights are float32
    adapter_dtype: str | None

    @property
    def name(self) -> str:
        """How its answers are called: the folder, of a checkpoint the run and the step."""
        folder = self.folder.resolve()
        return f"{folder.parent.name}-{folder.name}" if _is_checkpoint(folder) else folder.name


def find_target(folder: Path, base: str | None, overrides: list[str], trust_remote_code: bool = False) -> Target:
    """The model in `folder`, whole, with its run's recipe where it has one.

    `base`: of the command line, `none` for no base. `overrides`: recipe keys of the command line. Code that a model
    brings runs only where `trust_remote_code` says so, whatever the recipe says. Raises Refusal.
    """
    is_adapter = _refuse_no_model(folder)
    recipe, is_ours = _recipe_of(folder, overrides)
    settings = recipe.settings.replace(**_ONE_PROCESS, trust_remote_code=trust_remote_code)
    said = base
    if base is None:
        base = settings.model_name_or_path if is_ours else _base_of_adapter(folder) if is_adapter else None
    elif base == NO_BASE:
        base = None
    if is_adapter and base is None:
        raise refusal("ZR788", folder=folder, why="" if said == NO_BASE else " adapter_config.json does not name one.")
    entries = _whole(folder, is_adapter, base, trust_remote_code)
    dtype = _dtype_of(entries)
    return Target(
        folder=folder,
        is_adapter=is_adapter,
        base=base,
        recipe=recipe,
        settings=settings,
        is_ours=is_ours,
        draws_base=is_ours and said is None and recipe.settings.random_weights,
        dtype=_base_dtype(dtype, settings, is_ours) if is_adapter else dtype,
        autocast=_precision(folder, recipe) if is_ours and dtype == "float32" else None,
        adapter_dtype=dtype if is_adapter else None,
    )


def _refuse_no_model(folder: Path) -> bool:
    """Whether an adapter lies there. Raises Refusal where neither model nor adapter does."""
    if not folder.is_dir():
        raise refusal("ZR784", folder=folder, cwd=Path.cwd())
    is_adapter = (folder / "adapter_config.json").is_file()
    if any((folder / name).is_file() for name in ((ADAPTER,) if is_adapter else (SINGLE, INDEX))):
        return is_adapter
    pickles = sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("adapter_model*.bin")])
    if pickles:
        raise refusal("ZR786", folder=folder, name=pickles[0].name)
    below = sorted(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    states = [*folder.glob("global_step*"), *folder.glob("zero_states"), *folder.glob("pytorch_model_fsdp*")]
    if states:
        raise refusal("ZR785", folder=folder, name=states[0].name, parent=folder.parent)
    raise refusal(
        "ZR795",
        folder=folder,
        single=SINGLE,
        index=INDEX,
        adapter=ADAPTER,
        fix=f"Ask {below[-1]}."
        if below
        else "Name the output_dir of a run that has saved its model (save_model: true).",
    )


def _recipe_of(folder: Path, overrides: list[str]) -> tuple[Recipe, bool]:
    """(the recipe, whether it is the run's own). What its `env:` sets is not kept: the file may be a stranger's."""
    places = [folder / RECIPE, *([folder.resolve().parent / RECIPE] if _is_checkpoint(folder) else [])]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        known = folder / ("adapter_config.json" if (folder / "adapter_config.json").is_file() else "config.json")
        return recipes.parse_recipe(known, {"model_name_or_path": str(folder)}, overrides), False
    with environment_kept():
        mapping = recipes.read_recipe_file(path)
        return recipes.parse_recipe(path, mapping, overrides), True


def _is_checkpoint(folder: Path) -> bool:
    return re.fullmatch(r"checkpoint-\d+", folder.resolve().name) is not None


def _base_of_adapter(folder: Path) -> str | None:
    try:
        return json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path") or None
    except (OSError, ValueError, AttributeError):
        return None  # what is wrong with the file is said where PEFT reads it


def _whole(folder: Path, is_adapter: bool, base: str | None, trust_remote_code: bool) -> dict[str, Entry]:
    """The tensors' headers. Raises Refusal where a model is incomplete, or an adapter does not fit its base.

    Of a checkpoint no checksums: its manifest is over the optimizer's states too.
    """
    try:
        if is_adapter:
            entries = entries_of(folder)
            compare_with_adapter(folder, entries, trust_remote_code, base)
        else:
            verify(folder, skip_checksums=_is_checkpoint(folder), trust_remote_code=trust_remote_code)
            entries = entries_of(folder)
    except NotWhole as error:
        if "custom code" in str(error) or "trust_remote_code" in str(error):
            fix = "If you trust that code: --trust_remote_code."
        elif is_adapter:
            fix = "Name its own base with --base, or save the adapter again."
        else:
            fix = f"zero-recipes verify {folder} says the same; copy it again, or ask a checkpoint of its run."
        raise refusal("ZR787", folder=folder, error=first_line(error), fix=fix) from error
    return entries


def _dtype_of(entries: dict[str, Entry]) -> str:
    """Of most of the weights; "auto" where they are none of the usual ones."""
    sizes: dict[str, int] = {}
    for entry in entries.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.elements
    return _DTYPES.get(max(sizes, key=sizes.__getitem__), "auto")


def _base_dtype(adapter_dtype: str, settings: Settings, is_ours: bool) -> str:
    """DeepSpeed and FSDP turn base and adapter into 16 bit; else the run loaded its base as the recipe says."""
    if not is_ours:
        return "auto"
    return settings.dtype or "auto" if adapter_dtype == "float32" else adapter_dtype


def _precision(folder: Path, recipe: Recipe) -> str | None:
    """The dtype that the run computed in, where it is not float32."""
    run = folder.resolve().parent if _is_checkpoint(folder) else folder
    try:
        precision = Metrics.read(run / FILE).precision
    except (OSError, ContractError):
        precision = None
    return _COMPUTED_IN.get(precision or recipe.settings.precision)
