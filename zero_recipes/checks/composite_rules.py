"""Composite models: whether their class takes text alone, and what of an adapter lies where text never comes."""

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from zero_recipes.checks.adapter_rules import adapted_model
from zero_recipes.checks.rules import bare_model
from zero_recipes.config.run import Run
from zero_recipes.core.findings import Finding, finding, first_line
from zero_recipes.model.towers import auto_class, excluding, is_within, tower_names


def composite_findings(run: Run) -> Iterator[Finding]:
    """What is wrong with a composite model, one with towers for images or sound, in this run."""
    model = bare_model(run)
    if model is None:
        return
    if auto_class(run.config) is not AutoModelForCausalLM:
        reason = refuses_text(model)
        if reason is not None:
            yield finding("ZR490", kind=type(model).__name__, reason=reason)
    if run.settings.use_peft:
        yield from _adapters_in_towers(run)


def refuses_text(model: PreTrainedModel) -> str | None:
    """Why a model's class takes no row of text without an image or sound, in its own words; None where it takes one.

    A forward pass of a model without weights, until it needs a value: the class looks at its arguments first.
    """
    ids = torch.ones((1, 8), dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except (TypeError, ValueError) as error:
        return first_line(error)
    except Exception:  # what the values decide cannot be computed without them
        return None
    return None


def _adapters_in_towers(run: Run) -> Iterator[Finding]:
    """Trained modules that the recipe names, in a tower: they have no gradients."""
    adapted = adapted_model(run)
    if adapted is None:
        return
    towers = tower_names(bare_model(run))
    before = "base_model.model."
    modules = set()
    for name, p in adapted.named_parameters():
        if p.requires_grad and is_within(name.removeprefix(before), towers):
            modules.add(name.rpartition(".lora_")[0] or name.rpartition(".")[0])
    if modules:
        yield finding("ZR491", count=len(modules), towers=", ".join(towers), pattern=excluding(towers))
