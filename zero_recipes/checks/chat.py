"""Loss on the assistant's turns alone: the chat template must mark them."""

from __future__ import annotations

from collections.abc import Iterator

from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, Refusal, finding


def chat_findings(settings: Settings) -> Iterator[Finding]:
    """Findings about assistant_only_loss. `settings`: the recipe's keys in force.

    A tokenizer that is not at hand yields nothing: the run itself refuses it.
    """
    if not settings.assistant_only_loss:
        return
    if settings.dataset_format == "alpaca":
        yield finding("ZR418")
        return
    try:
        tokenizer = _tokenizer(settings)
    except (OSError, ValueError, Refusal):
        return
    yield from template_findings(tokenizer)


def template_findings(tokenizer) -> Iterator[Finding]:
    """At most one finding: a chat template that cannot say which tokens are the assistant's.

    The same questions as trl/trainer/sft_trainer.py asks once the model has been loaded.
    """
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    fix = (
        "Put {% generation %} ... {% endgeneration %} around the assistant's text and its end-of-turn token in a "
        ".jinja file and name it as chat_template_path; or remove assistant_only_loss."
    )
    if not tokenizer.chat_template:
        yield finding("ZR419", fix=fix)
        return
    replaced = None
    if not has_generation_markers(tokenizer.chat_template):
        try:
            replaced = get_training_chat_template(tokenizer)
        except ValueError as error:
            yield finding("ZR420", error=error, fix=fix)
            return
    if not is_chat_template_stop_token_trained(tokenizer, chat_template=replaced):
        yield finding("ZR421", fix=fix)


def _tokenizer(settings: Settings):
    """The tokenizer with the chat template in force."""
    from zero_recipes.data.load import apply_chat_template_file, load_tokenizer

    arguments = settings
    return apply_chat_template_file(load_tokenizer(arguments, arguments), arguments)
