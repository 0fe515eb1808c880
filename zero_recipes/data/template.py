"""The chat template in force, and whether rows and template fit each other."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from zero_recipes.core.findings import first_line, refusal
from zero_recipes.data.library_errors import library_errors


def apply_chat_template_file(tokenizer: PreTrainedTokenizerBase, training_args) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer as SFTTrainer will make it from eos_token and chat_template_path.

    A copy: SFTTrainer must still find which tokens it adds, for LoRA trains those.
    """
    from trl import clone_chat_template

    tokenizer = copy.deepcopy(tokenizer)
    if training_args.eos_token is not None:
        if training_args.eos_token not in tokenizer.get_vocab():
            raise refusal("ZR509", eos_token=training_args.eos_token, eos_token_2=tokenizer.eos_token)
        tokenizer.eos_token = training_args.eos_token
    path = training_args.chat_template_path
    if path is not None and is_template_file(path):
        with library_errors("ZR539", path=path):
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None and path.endswith((".jinja", ".j2")):
        raise refusal("ZR510", path=path, cwd=Path.cwd())
    elif path is not None:
        try:
            AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise refusal("ZR511", path=path, error=first_line(error)) from error
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
        raise refusal("ZR527", column=column)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        named = training_args.chat_template_path or "of the model"
        raise refusal("ZR535", named=named, lineno=error.lineno, message=error.message) from error
    except Exception:  # it may want a system's turn or tools: the rows themselves will show
        return
