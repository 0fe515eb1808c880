"""A look at the data that costs no more than its first rows: is it there, has it the splits and columns named?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zero_recipes.checks.cache import missing_of_model, on_hub, packaged_formats
from zero_recipes.checks.refused_late import sample_findings
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, Refusal, finding, first_line
from zero_recipes.libs.single_process import single_process_env

FIRST = 4  # rows that are tokenised
MIXTURE = ("path", "name", "data_dir", "data_files")  # of an entry, what says which data it is


def data_at_hand_findings(settings: Settings, asks_hub: bool) -> list[Finding]:
    """Findings about data and splits. `asks_hub`: whether data of the hub is looked at too, which takes seconds."""
    with single_process_env():
        return list(_found(settings, asks_hub))


def _found(settings: Settings, asks_hub: bool) -> Iterator[Finding]:
    from zero_recipes.data.at_hand import refuse_absent_data

    try:
        refuse_absent_data([entry["path"] for entry in settings.datasets] or [settings.dataset_name])
        if settings.datasets:
            yield from _mixture_findings(settings, asks_hub)
        elif not on_hub(settings.dataset_name):
            _look(settings)
        elif asks_hub and settings.dataset_name not in packaged_formats():
            _splits_of_run(settings, _splits({"path": settings.dataset_name, "name": settings.dataset_config}))
    except Refusal as refusal:
        yield from refusal.findings
    except Exception as error:  # readers of a dozen formats: each raises what it likes
        named = ", ".join(str(entry["path"]) for entry in settings.datasets) or settings.dataset_name
        yield finding("ZR428", named=named, name=type(error).__name__, error=first_line(error))


def _look(settings: Settings) -> None:
    """The run's own loading and tokenising, of the first rows alone. Raises Refusal."""
    from datasets import Dataset

    from zero_recipes.data import load, samples, splits, template

    plain = settings.replace(dataset_streaming=True, datasets=[])
    rows, evaluation = load.load_rows(plain, plain, plain, settings.dataset_format)
    name = settings.model_name_or_path
    if not (Path(str(name)).is_dir() or (on_hub(name) and not missing_of_model(settings))):
        return  # no tokenizer yet
    arguments = SimpleNamespace(**plain.as_dict())
    tokenizer = template.apply_chat_template_file(load.load_tokenizer(arguments, arguments), arguments)
    template.refuse_bad_template(rows, tokenizer, arguments)
    if not sample_findings(settings):
        requested, form = settings.sample_prompts, settings.dataset_format
        asked = samples.rows_to_ask(requested, evaluation, arguments, arguments, arguments, form)
        samples.choose_samples(requested, asked, form, tokenizer, settings.dataset_test_split)
    if not (settings.dataset_kwargs or {}).get("skip_prepare_dataset"):
        splits.tokenise(Dataset.from_list(list(rows.take(FIRST))), tokenizer, arguments)


def _mixture_findings(settings: Settings, asks_hub: bool) -> Iterator[Finding]:
    from zero_recipes.data.at_hand import refuse_missing_split

    size = settings.test_split_size
    if size is not None and not (0 < size < 1 or (size >= 1 and size == int(size))):
        yield finding("ZR158", size=size)
    if size is not None and settings.streaming:
        yield finding("ZR159")
    shares = [entry.get("fraction") is not None for entry in settings.datasets]
    if any(shares) and not all(shares):
        yield finding("ZR160")
    for entry in settings.datasets:
        if not on_hub(entry["path"]) or (asks_hub and entry["path"] not in packaged_formats()):
            named = re.split(r"[\[+]", entry.get("split") or "train")[0]  # "train[:100]+test"
            if named != "all":
                refuse_missing_split(_splits(entry), named, "datasets")
    _splits_of_run(settings, ["train"] if size is None else ["train", "test"])


def _splits_of_run(settings: Settings, known: list[str]) -> None:
    from zero_recipes.data.at_hand import refuse_missing_split

    refuse_missing_split(known, settings.dataset_train_split, "dataset_train_split")
    if settings.evaluates:
        refuse_missing_split(known, settings.dataset_test_split, "dataset_test_split")


def _splits(entry: Mapping[str, Any]) -> list[str]:
    """The names of the splits of one data set, by the datasets library's own way of finding them. Raises Refusal."""
    from datasets import load_dataset_builder

    from zero_recipes.data.at_hand import not_loaded

    path = entry["path"]
    try:
        builder = load_dataset_builder(**{key: entry.get(key) for key in MIXTURE})
    except (OSError, ValueError) as error:
        raise not_loaded([path], error) from error
    found = builder.config.data_files or builder.info.splits or {}
    return [str(name) for name in found] or ([Path(path).name] if not on_hub(path) else [])
