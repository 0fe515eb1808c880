"""Names in the keys of an adapter: each matches something of the model, or is refused with what there is.

PEFT 0.21 passes over a name that matches nothing, as long as another one matches (tuners/tuners_utils.py
`inject_adapter`, utils/other.py `_set_trainable`). What it names would stay frozen, without a word.
"""

import copy
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from zero_recipes.checks.adapter_names import matches, module_kinds, tails, texts
from zero_recipes.checks.adapter_targets import target_findings
from zero_recipes.checks.rules import bare_model
from zero_recipes.config.ds_config import quiet
from zero_recipes.config.run import Run
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, finding
from zero_recipes.model.config import adapter_config
from zero_recipes.model.towers import spare_towers
from zero_recipes.model.trained import trained_parts

# TRL's keys, by the names that PEFT has for them
TRL_KEYS = {
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
}
SHOWN = 40  # names of what there is


class Named(NamedTuple):
    """The names of one key that match nothing, and what there is."""

    key: str  # of PEFT's configuration
    unmatched: list[str]
    there: Iterable[str]


@functools.lru_cache(maxsize=1)
def adapted_model(run: Run) -> Any:
    """The run's model with its adapter, as PEFT makes it, without weights.

    None where there is no adapter, and where PEFT refuses it: making TRL's trainer reports that.
    """
    import peft

    if not run.settings.use_peft or bare_model(run) is None:
        return None
    try:
        with quiet():
            model = copy.deepcopy(bare_model(run))
            adapter = spare_towers(adapter_config(run.settings), model)
            return peft.get_peft_model(model, adapter, low_cpu_mem_usage=True)
    except Exception:  # libraries raise whatever they like
        return None


def trained_without_memory(run: Run) -> str | None:
    """What a run would train, in words (model.py `trained_parts`).

    None where the model is not at hand, or gets its adapter and its new tokens from TRL.
    """
    if run.settings.use_peft and run.settings.clones_tokenizer:
        return None
    model = adapted_model(run) if run.settings.use_peft else bare_model(run)
    return None if model is None else trained_parts(model)


def adapter_findings(run: Run) -> Iterator[Finding]:
    """Names in the keys of LoRA and other adapters that match nothing of the model."""
    settings = run.settings
    if not settings.use_peft:
        yield from _without_adapter(run)
        return
    adapted = adapted_model(run)
    if adapted is None or not hasattr(adapted.base_model, "targeted_module_names"):
        return
    for named in _names(bare_model(run), adapted, adapter_config(settings)):
        if named.unmatched:
            names = ", ".join(named.unmatched)
            there = ", ".join(list(dict.fromkeys(named.there))[:SHOWN])
            yield finding("ZR446", key=_key_in_recipe(named.key, settings), names=names, there=there or "nothing")
    yield from target_findings(bare_model(run), adapted, adapter_config(settings))
    if not settings.clones_tokenizer:  # whose tokens TRL adds to the embedding
        yield from _unknown_tokens(bare_model(run), adapter_config(settings))


def _without_adapter(run: Run) -> Iterator[Finding]:
    """A recipe that names parts for LoRA, and says nothing of `use_peft`. One that says false means it."""
    explicit = run.recipe.explicit
    named = [key for key in TRL_KEYS.values() if explicit.get(key)]
    if named and "use_peft" not in explicit:
        yield finding("ZR449", key=named[0])


def _key_in_recipe(key: str, settings: Settings) -> str:
    own = settings.peft_config or {}
    return TRL_KEYS[key] if key in TRL_KEYS and key not in own else f"peft_config.{key}"


def _names(model: nn.Module, adapted: Any, written: Any) -> Iterator[Named]:
    """What each key names in vain. `model`: without the adapter. `written`: the recipe's configuration for PEFT."""
    (in_force,) = adapted.peft_config.values()  # PEFT has filled in what the model's type decides
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    targeted = [*adapted.base_model.targeted_module_names, *adapted.base_model.targeted_parameter_names]
    kinds = module_kinds(model)
    yield Named("target_modules", _idle_targets(written, in_force, modules), kinds)
    yield from _layers(in_force, modules)
    wanted = texts(written, "target_parameters")
    # as PEFT matches them (`_inject_parameters`)
    unmatched = [name for name in wanted if not any(f".{each}".endswith(f".{name}") for each in parameters)]
    yield Named("target_parameters", unmatched, tails(parameters, 2))
    wanted = texts(written, "modules_to_save")
    unmatched = [name for name in wanted if not any(each.endswith(name) for each in modules)]  # as `_set_trainable`
    yield Named("modules_to_save", unmatched, kinds)
    yield Named("exclude_modules", _idle_exclusions(written, in_force, modules), kinds)
    for key in ("rank_pattern", "alpha_pattern"):
        yield Named(key, _idle_patterns(getattr(written, key, None), targeted), tails(targeted, 1))


def _idle_targets(written: Any, in_force: Any, modules: list[str]) -> list[str]:
    """Names that no module has, or none that is not excluded or in `layers_to_transform`.

    Some modules are parameters in transformers 5 (Mixtral's w1, w2 and w3): PEFT takes their names out.
    """
    if isinstance(written.target_modules, str):
        if in_force.target_modules != written.target_modules:  # "all-linear": PEFT has put names in its place
            return []
        patterns = {written.target_modules: written.target_modules} | _alternatives(written.target_modules)
        return [name for name, one in patterns.items() if not matches(in_force, modules, target_modules=one)]
    names = texts(written, "target_modules")
    if texts(in_force, "target_parameters") != texts(written, "target_parameters"):
        names = [name for name in names if name in in_force.target_modules]
    return [name for name in names if not matches(in_force, modules, target_modules=[name])]


# a group of a regular expression without groups or sets in it; not one that must not match, "(?!vision|audio)"
GROUP = re.compile(r"\((\?:|\?P<\w+>)?([^()?\[\]][^()\[\]]*)\)")


def _alternatives(pattern: str) -> dict[str, str]:
    """{an alternative of "a|b" or "(a|b)": the pattern with it alone}; without those that cannot be cut out so."""
    found = {}
    if "|" in pattern and {*"(["}.isdisjoint(pattern):
        found = {one: one for one in pattern.split("|")}
    for group in GROUP.finditer(pattern):
        texts = group[2].split("|")
        for text in texts if len(texts) > 1 else ():
            found[text] = f"{pattern[: group.start()]}(?:{text}){pattern[group.end() :]}"
    return {text: one for text, one in found.items() if _is_pattern(one)}


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _idle_exclusions(written: Any, in_force: Any, modules: list[str]) -> list[str]:
    """Names in `exclude_modules` that exclude nothing: PEFT matches them as it matches targets."""
    idle = []
    limits = {"modules_to_save": None, "layers_to_transform": None, "exclude_modules": None}
    for name in texts(written, "exclude_modules"):
        targets = name if isinstance(written.exclude_modules, str) else [name]
        if not matches(in_force, modules, target_modules=targets, **limits):
            idle.append(name)
    return idle


def _layers(in_force: Any, modules: list[str]) -> Iterator[Named]:
    """What `layers_to_transform` (numbers) and `layers_pattern` (names of lists of layers) name in vain."""
    indexes = getattr(in_force, "layers_to_transform", None)
    if indexes is None:
        return
    if isinstance(indexes, int):
        indexes = [indexes]
    numbered = re.findall(r"([^.\s]+)\.(\d+)\.", " ".join(modules))
    unmatched = [str(index) for index in indexes if not matches(in_force, modules, layers_to_transform=[index])]
    yield Named("layers_to_transform", unmatched, _ranges({int(number) for _, number in numbered}))
    patterns = texts(in_force, "layers_pattern")
    unmatched = [pattern for pattern in patterns if not matches(in_force, modules, layers_pattern=[pattern])]
    yield Named("layers_pattern", unmatched, [name for name, _ in numbered])


def _ranges(numbers: set[int]) -> list[str]:
    """[0, 1, 2, 5] as ["0 to 2", "5"]."""
    texts = []
    for number in sorted(numbers):
        if number - 1 in numbers:
            continue
        last = number
        while last + 1 in numbers:
            last += 1
        texts.append(str(number) if last == number else f"{number} to {last}")
    return texts


def _idle_patterns(patterns: Any, targeted: list[str]) -> list[str]:
    """Patterns that give no target its rank or alpha. Of several that match a target PEFT takes the first."""
    from peft.utils.other import get_pattern_key

    if not isinstance(patterns, dict):
        return []
    taken = {get_pattern_key(patterns.keys(), name) for name in targeted}
    return [pattern for pattern in patterns if pattern not in taken]


def _unknown_tokens(model: nn.Module, written: Any) -> Iterator[Finding]:
    """Trained tokens that the embedding does not have.

    With weights the run would stop, on a GPU by a device-side assert. A model without memory looks nothing up.
    """
    wanted = getattr(written, "trainable_token_indices", None)
    if not wanted:
        return
    if not isinstance(wanted, dict):
        wanted = {"": wanted}
    for name, indices in wanted.items():
        embedding = model.get_input_embeddings()
        if name:
            embedding = next(module for path, module in model.named_modules() if path.endswith(name))
        size = len(embedding.weight)
        unknown = [str(index) for index in indices if not 0 <= index < size]
        if unknown:
            yield finding("ZR448", tokens=", ".join(unknown[:5]), last=size - 1)
