"""llama.cpp's converters with two fixes: python -m zero_recipes.tools.convert SCRIPT ARGUMENTS."""

import runpy
import sys

from transformers import GPTNeoXConfig


def carry_rotary_share() -> None:
    """Write `rotary_pct`, which conversion/gptneox.py reads and transformers 5 calls partial_rotary_factor."""
    to_dict = GPTNeoXConfig.to_dict
    GPTNeoXConfig.to_dict = lambda config: (
        to_dict(config) | {"rotary_pct": config.rope_parameters["partial_rotary_factor"]}
    )


def know_gpt2_by_its_pattern() -> None:
    """Let a tokenizer count as GPT-2's by its pattern: conversion/base.py knows tokenizers by a hash.

    A newly trained one has another, but may split words as GPT-2's.
    """
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def kind(self, tokenizer) -> str:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            splits = tokenizer.backend_tokenizer.pre_tokenizer
            if str(splits) == "ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)":
                return "gpt-2"
            raise

    TextModel.get_vocab_base_pre = kind


if __name__ == "__main__":
    carry_rotary_share()
    know_gpt2_by_its_pattern()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
