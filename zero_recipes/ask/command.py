"""`zero-recipes ask`: a saved model beside its base, on the same prompts or in a conversation."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import transformers

from zero_recipes.ask.answers import answer_all, compare
from zero_recipes.ask.chat import Side, chat, wording
from zero_recipes.ask.load import forget, load_base, load_tokenizer, load_tuned, refuse_what_does_not_load
from zero_recipes.ask.questions import read_questions
from zero_recipes.ask.show import show
from zero_recipes.ask.target import NO_BASE, Target, find_target
from zero_recipes.config.run import choose_device
from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import plain, terminal
from zero_recipes.data.load import apply_chat_template_file
from zero_recipes.data.samples import Sample
from zero_recipes.model import load_config
from zero_recipes.training.generation import prompts_cut
from zero_recipes.training.samples import Answers, write_rows

SAMPLES = "samples.jsonl"
CHAT_TOKENS = 256  # of an answer in a conversation


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The verb. Returns the exit code; raises Refusal before any weight is loaded."""
    if arguments.chat and arguments.prompts is not None:
        raise refusal("ZR574")
    datasets.disable_progress_bars()  # of the checks: they take a moment
    transformers.utils.logging.disable_progress_bar()
    device = choose_device(use_cpu=False)
    target = find_target(arguments.model, arguments.base, overrides, arguments.trust_remote_code)
    tokenizer = load_tokenizer(target)
    if any(word.startswith("--chat_template_path") for word in overrides):  # the recipe's own is saved with the model
        tokenizer = apply_chat_template_file(tokenizer, target.settings)
    if arguments.chat:
        return _chat(target, tokenizer, device, arguments)
    out = _output_dir(arguments.output_dir, target)
    most = arguments.max_new_tokens or target.settings.sample_max_new_tokens
    samples = read_questions(target, arguments.prompts, tokenizer, _config(target))
    refuse_what_does_not_load(target, tokenizer, device)
    source = samples[0].source if arguments.prompts is None else arguments.prompts
    _describe(target, device, f"{len(samples)}, from {source}; at most {most} new tokens, greedy")
    base, tuned = _answers(target, tokenizer, device, samples, most)
    asked = compare(samples, base, tuned)
    write_rows(out / SAMPLES, asked.rows)
    show(asked, terminal(), None if base is None else "base", "model")
    print(f"written: {out / SAMPLES}")
    return 0


def _answers(
    target: Target, tokenizer, device: str, samples: list[Sample], most: int
) -> tuple[Answers | None, Answers]:
    """(the base's, the model's): one model in memory after the other, an adapter's base with the adapter off."""
    asked = (samples, most, target.settings.per_device_eval_batch_size)
    base = None
    if target.base is not None and not target.is_adapter:
        loaded = load_base(target, tokenizer, device)
        base = answer_all(loaded, *asked, "the base")
        del loaded
        forget(device)
    loaded = load_tuned(target, tokenizer, device)
    if (cut := prompts_cut(loaded.model, tokenizer, samples, most)) is not None:
        print(cut, flush=True)
    if target.is_adapter:
        with loaded.without_adapter():
            base = answer_all(loaded, *asked, "the base")
    return base, answer_all(loaded, *asked, "the model")


def _chat(target: Target, tokenizer, device: str, arguments: argparse.Namespace) -> int:
    """With the model; beside its base where --base names one."""
    words = wording(tokenizer, target.settings.dataset_format)
    beside = arguments.base not in (None, NO_BASE)
    both = beside and not target.is_adapter
    if not beside and not target.is_adapter:
        target = replace(target, base=None)
    refuse_what_does_not_load(target, tokenizer, device, 2 if both else 1)
    _describe(target, device, "from the terminal", beside)
    model = load_tuned(target, tokenizer, device)
    sides = [Side("model", model)]
    if beside:
        base = load_base(target, tokenizer, device) if both else model
        sides.insert(0, Side("base", base, switched_off=target.is_adapter))
    chat(sides, words, arguments.max_new_tokens or CHAT_TOKENS)
    return 0


def _output_dir(requested: Path | None, target: Target) -> Path:
    """Where samples.jsonl goes: the folder named, else the first of output/ask-NAME, ask-NAME-2, ... without one.

    Raises Refusal where one lies there.
    """
    if requested is None:
        name, number = f"ask-{target.name}", 1
        while os.path.lexists(Path("output") / (name if number == 1 else f"{name}-{number}") / SAMPLES):
            number += 1
        return Path("output") / (name if number == 1 else f"{name}-{number}")
    if os.path.lexists(requested / SAMPLES):
        raise refusal("ZR793", requested=requested / SAMPLES)
    return requested


def _config(target: Target):
    name = target.base if target.is_adapter else str(target.folder)
    args = target.settings.replace(model_name_or_path=name, model_revision="main")
    return load_config(args, args)


def _describe(target: Target, device: str, prompts: str, shows_base: bool = True) -> None:
    kind = "adapter" if target.is_adapter else "model"
    computed = "" if target.dtype == "auto" else f", {target.dtype}"
    computed += f", computed in {target.autocast}" if target.autocast else ""
    lines = {"model": f"{target.folder} ({kind}{computed})"}
    if target.base is None or not shows_base:
        lines["base"] = "none: the model answers alone (--base NAME puts one beside it)"
    else:
        how = ", the adapter switched off" if target.is_adapter else ""
        lines["base"] = target.base + (", with random weights" if target.draws_base else how)
    if target.recipe.settings.load_in_4bit or target.recipe.settings.load_in_8bit:
        lines["note"] = "trained on a quantized base; both are asked with the base's own weights"
    lines |= {"prompts": prompts, "device": device}
    console = terminal()
    for name, text in lines.items():
        console.print(plain(f"{name:8}{text}"), soft_wrap=True)
    if sys.stderr.isatty():  # loading may take minutes
        transformers.utils.logging.enable_progress_bar()
