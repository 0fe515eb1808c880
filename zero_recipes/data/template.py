"""The chat template in force, and whether rows and template fit each other."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from zero_recipes.core.errors import Refusal, first_line
from zero_recipes.data.library_errors import library_errors


def apply_chat_template_file(tokenizer: PreTrainedTokenizerBase, training_args) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer as SFTTrainer will make it from eos_token and chat_template_path.

    A copy: SFTTrainer must still find which tokens it adds, for LoRA trains those.
    """
    from trl import clone_chat_template

    tokenizer = copy.deepcopy(tokenizer)
    if training_args.eos_token is not None:
        if training_args.eos_token not in tokenizer.get_vocab():
            raise Refusal(
                "ZR509",
                f"eos_token {training_args.eos_token!r} is not in the model's vocabulary",
                "TRL stops on it (sft_trainer.py), but only once the model is loaded.",
                f"Name a token that the model has; its own is {tokenizer.eos_token!r}.",
            )
        tokenizer.eos_token = training_args.eos_token
    path = training_args.chat_template_path
    if path is not None and is_template_file(path):
        with library_errors("ZR539", f"the chat template {path} cannot be read", "Python", "Save it as UTF-8."):
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None and path.endswith((".jinja", ".j2")):
        raise Refusal(
            "ZR510",
            f"there is no chat template {path}",
            f"Paths are relative to the working directory, {Path.cwd()}.",
            "Check chat_template_path.",
        )
    elif path is not None:
        try:
            AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise Refusal(
                "ZR511",
                f"chat_template_path {path} is neither a .jinja file nor a model with a tokenizer",
                first_line(error),
                "Check the path; zero-recipes fetch downloads a model of the hub.",
            ) from error
        clone_chat_template(_without_embeddings(tokenizer), tokenizer, path)
    return tokenizer


def is_template_file(path: str) -> bool:
    """As TRL sees it (trainer/sft_trainer.py): the template itself, and no tokenizer to clone."""
    return os.path.isfile(path) and path.endswith((".jinja", ".j2"))


def _without_embeddings(tokenizer: PreTrainedTokenizerBase) -> SimpleNamespace:
    """What `clone_chat_template` wants of a model, where only the tokenizer is to change."""
    text_config = SimpleNamespace()
    stand_in = SimpleNamespace(can_generate=lambda: False, vocab_size=0)
    stand_in.config = SimpleNamespace(get_text_config=lambda: text_config)

    def resize_token_embeddings(new_num_tokens: int, pad_to_multiple_of: int | None) -> None:
        stand_in.vocab_size = new_num_tokens

    stand_in.resize_token_embeddings = resize_token_embeddings
    return stand_in


def refuse_bad_template(rows, tokenizer: PreTrainedTokenizerBase, training_args) -> None:
    """Refuse chats without a chat template, and a template that is no template."""
    first = next(iter(rows))
    column = next((name for name in ("prompt", "messages", "conversations") if name in first), None)
    if "input_ids" in first or column is None or not isinstance(first[column], list):
        return
    if not tokenizer.chat_template:
        raise Refusal(
            "ZR527",
            f"the rows are chats (column {column}), but the tokenizer has no chat template",
            "Nothing says how the turns become one text.",
            "Set chat_template_path to a .jinja file or to a model whose template fits.",
        )
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        named = training_args.chat_template_path or "of the model"
        raise Refusal(
            "ZR535",
            f"the chat template {named} has a mistake in line {error.lineno}",
            f"jinja2: {error.message}",
            "Correct the template.",
        ) from error
    except Exception:  # it may want a system's turn or tools: the rows themselves will show
        return
