"""The prompts: of the recipe, or of a file, read as a recipe's `sample_prompts` are."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zero_recipes.ask.target import Target
from zero_recipes.config import recipe as recipes
from zero_recipes.core.findings import first_line, refusal
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask, takes_rows, with_tokens


def read_questions(
    target: Target, prompts: Path | None, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> list[Sample]:
    """What both models are asked, with the tokens of the answers wanted as a training row has them. Raises Refusal."""
    requested = target.settings.sample_prompts if prompts is None else _of_file(prompts)
    if requested is None or str(requested) == "0":
        raise refusal(
            "ZR570",
            what=f"no prompts: {target.folder} was trained without sample_prompts"
            if target.is_ours
            else f"no prompts: no recipe lies beside {target.folder}",
        )
    settings = target.settings
    if not target.is_ours and "max_length" not in target.recipe.given:
        places = getattr(config.get_text_config(), "max_position_embeddings", None)
        settings = settings.replace(max_length=places)
    script_args, args, _, dataset_args, ours = recipes.instances(settings, target.recipe.path)
    rows = None
    if takes_rows(requested):
        rows = rows_to_ask(requested, None, script_args, args, dataset_args, ours.dataset_format)
    samples = choose_samples(requested, rows, ours.dataset_format, tokenizer, script_args.dataset_test_split)
    if not samples:
        raise refusal("ZR571", prompts=prompts or requested)
    return with_tokens(samples, tokenizer, args)


def _of_file(path: Path) -> str | list[str]:
    """The path of JSON Lines, or the lines of a plain text: one whose first line is no JSON object or whose name says
    so."""
    if not path.is_file() or path.suffix == ".jsonl":
        return str(path)
    try:
        lines = [line.strip("\r") for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise refusal("ZR572", path=path, error=first_line(error)) from error
    return str(path) if path.suffix != ".txt" and lines and lines[0].lstrip().startswith("{") else lines
