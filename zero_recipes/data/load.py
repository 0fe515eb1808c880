"""Data and tokenizer of a recipe: found, loaded and formatted, by one formatter for training and for generation."""

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_dataset_builder
from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed

from zero_recipes.config.recipe import Settings
from zero_recipes.core.findings import Refusal, first_line, library_error_as_finding, refusal
from zero_recipes.libs.huggingface import single_process_env

Rows = Dataset | IterableDataset

ALPACA_COLUMNS = ("instruction", "input", "output")
JSON_LINES = (".jsonl", ".json", ".ndjson")
FORMATS = dict.fromkeys(JSON_LINES, "json") | {".csv": "csv", ".parquet": "parquet"}
# tokens that exist only for padding, in the vocabularies of the models people fine-tune; Pythia has the first
PADDING_TOKENS = ("<|padding|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]")
# reserved, or never written by a tokenizer of today
PADDING_TOKENS += ("<|reserved_special_token_0|>", "<unk>", "[UNK]")

# the wrappers of the column `text` in tatsu-lab/alpaca (Stanford's train.py has no line break after "Response:"),
# byte for byte: a model prompted with other words than it was tuned on answers worse
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str, input: str = "") -> str:
    """Alpaca's prompt, with or without input. The answer follows directly."""
    if input:
        return _WITH_INPUT.format(instruction=instruction, input=input)
    return _WITHOUT_INPUT.format(instruction=instruction)


def alpaca_row(row: dict[str, Any]) -> dict[str, str]:
    """An Alpaca row as TRL's prompt and completion; TRL appends the end-of-text token, which is supervised. Raises
    TypeError where a column is not text: `str.format` would write the word None."""
    for name in ALPACA_COLUMNS:
        if not isinstance(row[name], str) and (name != "input" or row[name] is not None):
            raise TypeError(f"{name} is {row[name]!r}, not text")
    return {"prompt": alpaca_prompt(row["instruction"], row["input"] or ""), "completion": row["output"]}


def format_rows(rows: Rows, split: str = "the data") -> Rows:
    """Alpaca's rows as prompt and completion; all other columns are dropped. Raises Refusal."""
    with library_error_as_finding(f"reading the rows of {split}"):
        columns = rows.column_names or list(next(iter(rows)))
        return rows.map(_numbered_alpaca_row, with_indices=True, remove_columns=columns)


def _numbered_alpaca_row(row: dict[str, Any], number: int) -> dict[str, str]:
    try:
        return alpaca_row(row)
    except TypeError as error:
        raise TypeError(f"row {number}: {error}") from None


def load_rows(settings: Settings) -> tuple[Rows, Rows | None]:
    """(training rows, evaluation rows or None), formatted. Raises Refusal for what is missing, before any weight."""
    splits = load_splits(settings)

    def rows_of(key: str) -> Rows:
        name = getattr(settings, key)
        if name not in splits:
            raise refusal("ZR507", name=name, known=", ".join(splits), key=key)
        return _formatted(splits[name], name, settings)

    train = rows_of("dataset_train_split")
    return train, rows_of("dataset_test_split") if settings.evaluates else None


def load_splits(settings: Settings) -> DatasetDict:
    """All splits of the data that the recipe names, as they are. Raises Refusal."""
    from trl import DatasetMixtureConfig, get_dataset

    sources = _sources(settings)
    if not any(source["path"] for source in sources):
        raise refusal("ZR504")
    set_seed(settings.seed)  # TRL 1.16 splits unseeded (scripts/utils.py): ranks would get different test sets
    with reading(sources):
        if settings.datasets:
            entries, share = copy.deepcopy(settings.datasets), settings.test_split_size  # it makes objects of entries
            return get_dataset(DatasetMixtureConfig(entries, settings.streaming, share))
        return load_dataset(**sources[0], streaming=settings.dataset_streaming)


def _sources(settings: Settings) -> list[dict[str, Any]]:
    """What `load_dataset` takes, for each; of a file of a known format its reader."""
    keys, named = ("path", "name", "data_dir", "data_files"), settings.dataset_name
    kind = FORMATS.get(Path(str(named).removesuffix(".gz")).suffix)
    if kind is not None and os.path.isfile(named):
        return [{"path": kind, "data_files": {"train": named}}]
    mixture = [{key: entry.get(key) for key in keys} for entry in settings.datasets]
    return mixture or [{"path": named, "name": settings.dataset_config}]


def _formatted(rows: Rows, split: str, settings: Settings) -> Rows:
    """Raises Refusal where the first row lacks the columns that are read."""
    sources = _sources(settings)
    with reading(sources):
        first = next(iter(rows), None)
    if not first:
        raise refusal("ZR523", split=split)
    wanted = _columns_read(settings)
    # pandas makes an index of the first fields where a CSV file's records have more than its header
    if "__index_level_0__" in first and any(file.endswith((".csv", ".tsv")) for file in _local_files(sources)):
        wanted = {"as many fields as the header of the CSV file names": {""}}
    if not any(columns <= first.keys() for columns in wanted.values()):
        raise refusal("ZR508", split=split, columns=", ".join(sorted(first)), wanted=", ".join(wanted))
    chats = [name for name in ("prompt", "messages", "conversations") if isinstance(first.get(name), list)]
    if settings.assistant_only_loss and not chats:  # TRL 1.16 refuses it once it has the model
        raise refusal("ZR431", first=", ".join(first))
    return rows if settings.dataset_format is None else format_rows(rows, split)


def _columns_read(settings: Settings) -> dict[str, set[str]]:
    """{in words: the columns} of each kind of rows that can be trained on."""
    if settings.dataset_format is not None:
        return {", ".join(ALPACA_COLUMNS): set(ALPACA_COLUMNS)}
    if (settings.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return {"input_ids, with skip_prepare_dataset": {"input_ids"}}
    kinds = {"prompt and completion": {"prompt", "completion"}}
    kinds |= {name: {name} for name in ("messages", "conversations", "input_ids")}
    return kinds | {f"{settings.dataset_text_field} (dataset_text_field)": {settings.dataset_text_field}}


def refuse_data_at_hand(settings: Settings, asks_hub: bool) -> None:
    """Look at the first rows of the data: is it there, with the splits and columns that the recipe names? `asks_hub`:
    data of the hub is looked at too, which takes seconds. Raises Refusal."""
    sources = [{"path": entry["path"]} for entry in settings.datasets] or [{"path": settings.dataset_name}]
    if not asks_hub and any(map(on_hub, {source["path"] for source in sources} - packaged_formats())):
        return
    made_later = settings.test_split_size is not None  # of rows that a stream has yet to read
    as_stream = {"dataset_streaming": True, "streaming": True, "test_split_size": None}
    as_stream |= {"eval_strategy": "steps" if settings.evaluates and not made_later else "no"}
    with single_process_env(), reading(sources):
        load_rows(settings.replace(**as_stream, datasets=[_streamed(entry) for entry in settings.datasets]))


def _streamed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `datasets` without what the datasets library and TRL cannot take of a stream: "train[:100]+test"."""
    split = re.split(r"[\[+]", entry.get("split") or "train")[0]
    return dict(entry) | {"fraction": None, "split": "train" if split == "all" else split}


# what libraries raise over rows


@contextlib.contextmanager
def reading(sources: list[dict[str, Any]]) -> Iterator[None]:
    """What the datasets library raises becomes a Refusal, with the file and line of broken JSON."""
    try:
        yield
    except (Refusal, MemoryError):
        raise
    except Exception as error:
        named = ", ".join(str(source["path"]) for source in sources)
        place = next(filter(None, map(_broken_json, _local_files(sources))), None)
        if place is not None:
            raise refusal("ZR522", named=named, place=place, error=_root_cause(error)) from error
        raise refusal("ZR506", named=named, error=_root_cause(error), cwd=Path.cwd()) from error


def _local_files(sources: list[dict[str, Any]]) -> Iterator[str]:
    for source in sources:
        with contextlib.suppress(Exception):  # what is wrong with it is being reported already
            for files in load_dataset_builder(**source).config.data_files.values():
                yield from filter(os.path.isfile, files)


def _broken_json(file: str) -> str | None:
    """The first line of a JSON file that is no JSON in UTF-8, or no object: "train.jsonl line 5: Expecting value"."""
    if not file.removesuffix(".gz").endswith(JSON_LINES):
        return None
    number = 0
    try:
        with fsspec.open(file, "rb", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.lstrip().startswith(b"["):  # one list, whose error knows its line
                    json.loads((line + lines.read()).decode("utf-8-sig"))
                elif line.strip() and not isinstance(json.loads(line.strip().decode("utf-8-sig")), dict):
                    raise ValueError("not an object with named columns")
    except json.JSONDecodeError as error:
        return f"{file} line {number + error.lineno - 1}: {error.msg}"
    except (OSError, EOFError, ValueError, RecursionError) as error:
        return f"{file} line {number}: {first_line(error)}"
    return None


def _root_cause(error: BaseException) -> str:
    """The message of the first error in a chain, with its type: datasets wraps what it meets."""
    while (earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if type(earlier).__name__ == "RemoteTraceback":  # another process's traceback, as text
            break
        error = earlier
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def load_tokenizer(settings: Settings) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a padding token that is not the end of text.

    TRL falls back to pad = end of text. Its labels are built before padding, so that the end is supervised all the
    same, but a model saved with pad = eos teaches everyone downstream to mask the end. Raises Refusal where the
    vocabulary has no token that can pad and the recipe names none.
    """
    tokenizer = AutoTokenizer.from_pretrained(
        settings.model_name_or_path,
        revision=settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
    )
    end = settings.eos_token or tokenizer.eos_token
    pad = settings.pad_token or tokenizer.pad_token
    if pad is None or (pad == end and settings.pad_token is None):
        vocabulary = tokenizer.get_vocab()
        pad = next((token for token in PADDING_TOKENS if token in vocabulary and token != end), end)
    if pad == end:
        raise refusal("ZR502", model_name_or_path=settings.model_name_or_path, end=end)
    _refuse_unknown_token("pad_token", pad, tokenizer)
    tokenizer.pad_token = pad
    return tokenizer


def _refuse_unknown_token(key: str, token: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if token not in tokenizer.get_vocab():
        raise refusal("ZR503", key=key, token=token)


def apply_chat_template_file(tokenizer: PreTrainedTokenizerBase, settings) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer as SFTTrainer will make it from eos_token and chat_template_path. Raises Refusal. A copy:
    SFTTrainer must still find which tokens it adds, for LoRA trains those."""
    from trl import clone_chat_template

    tokenizer = copy.deepcopy(tokenizer)
    if settings.eos_token is not None:
        _refuse_unknown_token("eos_token", settings.eos_token, tokenizer)
        tokenizer.eos_token = settings.eos_token
    path = settings.chat_template_path
    with library_error_as_finding(f"reading the chat template of {path} (chat_template_path)"):
        # as TRL sees it (trainer/sft_trainer.py): the template itself, and no tokenizer to clone
        if path is not None and os.path.isfile(path) and path.endswith((".jinja", ".j2")):
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        elif path is not None:
            clone_chat_template(_without_embeddings(), tokenizer, path, resize_to_multiple_of=None)
    return tokenizer


def _without_embeddings() -> SimpleNamespace:
    """What `clone_chat_template` wants of a model, where only the tokenizer is to change."""

    def resize_token_embeddings(new_num_tokens: int, pad_to_multiple_of: None) -> None:
        stand_in.vocab_size = new_num_tokens

    config = SimpleNamespace(get_text_config=SimpleNamespace)
    stand_in = SimpleNamespace(config=config, can_generate=lambda: False, vocab_size=0)
    stand_in.resize_token_embeddings = resize_token_embeddings
    return stand_in


def on_hub(name: str | None) -> bool:
    """Whether a name is one of the hub: no path that is here, and none that only a path can be ("./model")."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name is None or os.path.exists(name):  # pathlib raises at a name that is too long
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def packaged_formats() -> set[str]:
    """Names that are formats, not data sets of the hub: json, csv, parquet and others."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    return set(_PACKAGED_DATASETS_MODULES)
