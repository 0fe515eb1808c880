"""Data and tokenizer of a recipe: found, loaded and formatted."""

import contextlib
import copy
import json
import os
import pkgutil
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import fsspec
import pandas
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    ReadInstruction,
    Value,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
    load_dataset_builder,
    packaged_modules,
)
from datasets.config import DATASET_STATE_JSON_FILENAME, DATASETDICT_JSON_FILENAME
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, set_seed
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.config import keys
from zero_recipes.config.settings import Settings
from zero_recipes.core.findings import Finding, Refusal, finding, first_line, refusal
from zero_recipes.core.library_errors import absent_model_as_finding, library_error_as_finding
from zero_recipes.data import forms
from zero_recipes.data.forms import Form, Rows
from zero_recipes.engine.faults import json_texts
from zero_recipes.engine.huggingface import single_process_env

PADDING_TOKENS = forms.tables()["padding"]
SEPARATORS = ",;\t"  # of CSV files: the one that the header has most of
# Python that copies CSV files without the rows whose `column` is blank. It stops where the new folder exists.
COPY_CSV = (
    "import os, pandas; os.mkdir('filled'); "
    "[rows[rows[{column!r}].str.strip() != ''].to_csv('filled/' + os.path.basename(file), sep=sep, index=False) "
    "for file, sep in {separators!r}.items() "
    "for rows in [pandas.read_csv(file, sep=sep, dtype=str, keep_default_na=False)]]"
)


class MissingSplit(Refusal):
    """Raised where the data has no split of the name that the recipe gives."""


def load_rows(settings: Settings) -> tuple[Rows, Rows | None, list[Form]]:
    """Load a recipe's rows. Raises Refusal.

    Returns (training rows, evaluation rows or None, what was recognised in each source).
    """
    splits, found = load_splits(settings)

    def rows_of(key: str) -> Rows:
        name = getattr(settings, key)
        try:
            rows = _part(splits, name)
        except (TypeError, ValueError):  # TypeError: a stream has no length
            raise MissingSplit([finding("ZR507", name=name, known=", ".join(splits), key=key)]) from None
        if settings.datasets:  # recognised entry by entry
            return rows
        recognised = _recognised(rows, name, settings, {})
        rows, form = _converted(recognised, recognised.form, settings)
        if form.example is None:  # all have weight 0
            raise _no_rows(f"the split {name}")
        found.append(form)
        return rows

    train = rows_of("dataset_train_split")
    evaluation = rows_of("dataset_test_split") if settings.evaluates else None
    distinct = {form.description: form for form in found}
    return train, evaluation, list(distinct.values())


def _part(splits: DatasetDict, name: str) -> Rows:
    """A split, or parts as `load_dataset` takes them: "train[:1000]+test"."""
    if name in splits:
        return splits[name]
    lengths = {split: len(rows) for split, rows in splits.items()}
    parts = []
    for part in ReadInstruction.from_spec(name).to_absolute(lengths):
        parts.append(splits[part.splitname].select(range(part.from_, part.to)))
    return concatenate_datasets(parts)


def load_splits(settings: Settings) -> tuple[DatasetDict, list[Form]]:
    """Load all splits of a recipe's data. Raises Refusal.

    The rows of a mixture are formatted already, and come with their forms.
    """
    sources = _sources(settings)
    if not any(source["path"] for source in sources):
        raise refusal("ZR504")
    set_seed(settings.seed)  # TRL 1.16 splits unseeded (scripts/utils.py): ranks would get different test sets
    with reading(sources):
        if settings.datasets:
            mixed, found = _mixed(settings)
            if settings.test_split_size is None:
                return DatasetDict({"train": mixed}), found
            return mixed.train_test_split(test_size=settings.test_split_size), found
        return _loaded(sources[0], None, settings.dataset_streaming), []


def _mixed(settings: Settings) -> tuple[Rows, list[Form]]:
    """One after the other, by TRL's `fraction`, or drawn by `weight`."""
    _refuse_unclear_shares(settings)
    entries = [_entry(entry, settings) for entry in settings.datasets]
    alike = forms.made_alike([entry.form for entry in entries], [str(entry["path"]) for entry in settings.datasets])
    parts = []
    found = []
    for entry, form in zip(entries, alike, strict=True):
        rows, form = _converted(entry, form, settings)
        parts.append(rows)
        found.append(form)
    parts = forms.with_same_columns(parts)
    weights = _shares("weight", settings)
    fractions = _shares("fraction", settings)
    if weights:
        stop = settings.mixture_stopping_strategy
        return interleave_datasets(parts, weights, seed=settings.seed, stopping_strategy=stop), found
    if fractions:
        whole = parts
        parts = _first_rows(parts, fractions)
        for number, (part, rows) in enumerate(zip(parts, whole, strict=True)):
            description = f"{found[number].description}; the first {len(part):,} of {len(rows):,} rows (fraction)"
            found[number] = found[number]._replace(description=description)
    return concatenate_datasets(parts), found


def _refuse_unclear_shares(settings: Settings) -> None:
    """TRL's `fraction` is a share of the mixture. Beside `weight`, or on one data set alone, it would do nothing."""
    fractions = [entry.get("fraction") for entry in settings.datasets]
    weights = [entry.get("weight") for entry in settings.datasets]
    if any(fraction is not None for fraction in fractions) and any(weight is not None for weight in weights):
        raise refusal("ZR581")
    if len(fractions) == 1 and fractions[0] not in (None, 1):
        path = settings.datasets[0]["path"]
        split = settings.datasets[0].get("split") or "train"
        raise refusal("ZR582", path=path, fraction=fractions[0], split=split, percent=max(1, round(100 * fractions[0])))


def _shares(key: str, settings: Settings) -> list[float]:
    """The entries' numbers over their sum; empty where none has the key."""
    numbers = [entry.get(key) for entry in settings.datasets]
    if None not in numbers:
        return [number / sum(numbers) for number in numbers]
    if set(numbers) != {None}:
        raise ValueError(f"`{key}` must be set for all entries of datasets, or for none")
    return []


def _first_rows(parts: list[Rows], shares: list[float]) -> list[Rows]:
    """As TRL 1.16 takes them (scripts/utils.py)."""
    pairs = list(zip(parts, shares, strict=True))
    total = min(len(part) / share for part, share in pairs if share > 0)
    return [part.select(range(round(share * total))) for part, share in pairs]


def _entry(entry: dict[str, Any], settings: Settings) -> "Recognised":
    """As TRL's get_dataset loads it, and recognised."""
    split = entry.get("split") or "train"
    rows = _loaded(_source(entry), split, settings.streaming)
    if isinstance(entry.get("columns"), list):
        rows = rows.select_columns(entry["columns"])
    return _recognised(rows, split, settings, entry)


def _loaded(source: dict[str, Any], split: str | None, streaming: bool) -> Any:
    """Rows of a split, or all splits.

    A CSV file holds texts: pandas would make the number 2101 of the text 02101, and nothing of the text NA.
    """
    saved = _saved_to_disk(source["path"])
    if saved is not None:
        if streaming:
            saved = DatasetDict({name: rows.to_iterable_dataset() for name, rows in saved.items()})
        return saved if split is None else _part(saved, split)
    json_texts.apply()
    return load_dataset(**source, split=split, streaming=streaming, **_csv_options(source))


def _saved_to_disk(path: Any) -> DatasetDict | None:
    """The splits of a folder that `save_to_disk` has written, which load_dataset refuses; None of others.

    A folder of a single split has it as "train", whatever it was before.
    """
    folder = Path(str(path))
    if (folder / DATASETDICT_JSON_FILENAME).is_file():
        return DatasetDict.load_from_disk(folder)
    if (folder / DATASET_STATE_JSON_FILENAME).is_file():
        return DatasetDict({"train": Dataset.load_from_disk(folder)})
    return None


def _csv_options(source: dict[str, Any]) -> dict[str, Any]:
    """How pandas reads CSV files that are here: by the header of the first; empty for other data.

    Refuses records that have more fields: pandas makes an index of the first ones, and every column moves.
    """
    path = str(source["path"])
    if path not in packaged_formats() and not any(Path(path).rglob("*.[ct]sv*")):
        return {}  # also of the hub, which would be asked twice
    files = _csv_files([source])
    if not files:
        return {}
    separator = _separator_of(files[0])
    head = pandas.read_csv(files[0], nrows=1, dtype=str, sep=separator)
    if head.empty and len(files) == 1:
        raise _no_rows(f"{files[0]}, which has a header alone,")
    if not isinstance(head.index, pandas.RangeIndex):
        raise _unknown_columns(files[0], head.columns, "as many fields in a record as the CSV header has")
    return {
        "features": Features(dict.fromkeys(head.columns, Value("string"))),
        "keep_default_na": False,
        "sep": separator,
    }


def _csv_files(sources: list[dict[str, Any]]) -> list[str]:
    return [file for file in _local_files(sources) if file.removesuffix(".gz").endswith((".csv", ".tsv"))]


def _separator_of(file: str) -> str:
    with fsspec.open(file, "rt", compression="infer", encoding="utf-8-sig") as lines:
        header = lines.readline()
    return max(SEPARATORS, key=header.count)


def copies_without_empty(settings: Settings, found: list[Form]) -> dict[str, str]:
    """How CSV files are copied without the rows whose answer, or text, is empty: what ZR533 says of it, by name.

    Empty for other data, and where several columns may be meant. `found`: the forms of the data.
    """
    formats = packaged_formats()
    sources = [source for source in _sources(settings) if source["path"] in formats or not on_hub(source["path"])]
    files = _csv_files(sources)
    names = {Path(file).name for file in files}
    columns = {form.required[-1] for form in found if form.required}
    if not files or len(names) != len(files) or len(columns) != 1:
        return {}
    column = columns.pop()
    for mapping in (settings.columns, *(entry.get("columns") for entry in settings.datasets)):
        if isinstance(mapping, Mapping):
            column = mapping.get(column, column)
    separators = {file: _separator_of(file) for file in files}
    code = COPY_CSV.format(separators=separators, column=column)
    copies = f"filled/{names.pop()}" if len(files) == 1 else "filled"
    return {"column": column, "code": shlex.quote(code), "copies": copies}


def _no_rows(place: str) -> Refusal:
    return refusal("ZR523", place=place)


def _unknown_columns(split: str, columns: Iterable[str], wanted: str) -> Refusal:
    return refusal("ZR508", split=split, columns=", ".join(columns), wanted=wanted)


def _sources(settings: Settings) -> list[dict[str, Any]]:
    entries = settings.datasets or [{"path": settings.dataset_name, "name": settings.dataset_config}]
    return [_source(entry) for entry in entries]


def _source(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What `load_dataset` takes. Of one file of a known format its reader, and the file."""
    path = entry["path"]
    kind = _format_of(str(path))
    if kind is not None and os.path.isfile(path):
        return {"path": kind, "data_files": {"train": path}}
    return {key: entry.get(key) for key in ("path", "name", "data_dir", "data_files")}


def _format_of(file: str) -> str | None:
    return keys.FORMATS.get(Path(file.removesuffix(".gz")).suffix)


class Recognised(NamedTuple):
    """Rows of a split, not converted, and the form that they have."""

    rows: Rows
    kinds: dict[str, str]  # what each column holds
    form: Form
    split: str


def _recognised(rows: Rows, split: str, settings: Settings, entry: Mapping[str, Any]) -> Recognised:
    """`entry`: of `datasets`, whose own keys go before the recipe's."""
    columns = entry.get("columns")
    if not isinstance(columns, Mapping):  # names of columns to keep
        columns = None
    dataset_format = entry.get("dataset_format") or settings.dataset_format
    with reading(_sources(settings)), forms.row_errors_as_findings(split):
        rows = forms.rename(rows, columns or settings.columns)
        if next(iter(rows), None) is None:
            raise _no_rows(f"the split {split}")
        kinds = forms.column_kinds(rows)
    form = forms.recognise(kinds, settings, dataset_format)
    if form is None:
        column = forms.column_like_turns(rows, kinds)
        if column is not None:
            raise refusal("ZR583", split=split, column=column)
        columns = [f"{name} ({kind})" for name, kind in sorted(kinds.items())]
        wanted = forms.tables()["wanted"]
        raise _unknown_columns(split, columns, wanted.get(dataset_format, wanted["any"]))
    if dataset_format is None:
        with reading(_sources(settings)):
            form = forms.of_mixed_rows(form, rows, kinds, settings, split)
    return Recognised(rows, kinds, form, split)


def _converted(recognised: Recognised, form: Form, settings: Settings) -> tuple[Rows, Form]:
    """The rows as `form` makes them, and the form with what became of the columns and its first row."""
    rows, kinds, _, split = recognised
    if settings.assistant_only_loss and not form.turns:  # TRL 1.16 refuses it once it has the model
        raise refusal("ZR431", first=", ".join(kinds))
    description = form.description
    if rows.info.builder_name == "text":
        description += "; each line of a .txt file is a row of its own"
    unread = forms.unread(kinds, form)
    if unread:
        description += f"; not used: {', '.join(unread)}"
    kept = forms.leave_out_weightless(rows, kinds, split)
    if isinstance(kept, Dataset) and len(kept) < len(rows):
        description += f"; {len(rows) - len(kept):,} rows of weight 0 are left out"
    rows = forms.convert(kept, form, split)
    with reading(_sources(settings)), forms.row_errors_as_findings(split):
        return rows, form._replace(description=description, example=next(iter(rows), None))


def refuse_data_at_hand(settings: Settings, asks_hub: bool) -> None:
    """Look at the first rows of the data: is it there, with the splits and columns that the recipe names?

    And is there a chat template for turns? Raises Refusal where not.

    `asks_hub`: data of the hub is looked at too, which takes seconds.
    """
    paths = [entry["path"] for entry in settings.datasets] or [settings.dataset_name]
    if not asks_hub and any(map(on_hub, set(paths) - packaged_formats())):
        return
    _refuse_unclear_shares(settings)
    evaluates = settings.evaluates and settings.test_split_size is None  # else of rows that a stream has yet to read
    as_stream = settings.replace(
        dataset_streaming=True,
        streaming=True,
        dataset_train_split=_whole_split(settings.dataset_train_split),
        dataset_test_split=_whole_split(settings.dataset_test_split),
        test_split_size=None,
        eval_strategy="steps" if evaluates else "no",
        datasets=[_streamed(entry) for entry in settings.datasets],
    )
    with single_process_env(), reading([{"path": path} for path in paths]):
        _, _, found = load_rows(as_stream)
    template = settings.chat_template_path
    is_elsewhere = template is not None and not os.path.exists(template) and not asks_hub
    if is_elsewhere or not any(form.turns for form in found):
        return
    tokenizer = None
    with contextlib.suppress(Refusal):  # it is not at hand, or wrong: the run asks for it
        tokenizer = read_tokenizer(
            settings.model_name_or_path, settings, revision=settings.model_revision, local_files_only=not asks_hub
        )
    if tokenizer is not None:
        refuse_turns_without_template(found, apply_chat_template_file(tokenizer, settings))


def refuse_turns_without_template(found: list[Form], tokenizer: Tokenizer) -> None:
    """Raise Refusal where rows are turns and the tokenizer has no chat template to write them with.

    `tokenizer`: with the recipe's chat template.
    """
    for form in found:
        if form.turns and not tokenizer.chat_template:
            raise refusal("ZR890", form=form.description)


def _streamed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the datasets library and TRL cannot take of a stream."""
    return {**entry, "fraction": None, "split": _whole_split(entry.get("split") or "train")}


def _whole_split(name: str) -> str:
    """The first split of "train[:100]+test"."""
    split = re.split(r"[\[+]", name)[0]
    return "train" if split == "all" else split


# what libraries raise over rows


@contextlib.contextmanager
def reading(sources: list[dict[str, Any]]) -> Iterator[None]:
    """Turn what the datasets library raises within it into a Refusal; of broken JSON it names the line."""
    try:
        yield
    except (Refusal, MemoryError):
        raise
    except Exception as error:
        paths = [str(source["path"]) for source in sources]
        named = ", ".join(paths)
        cause = error.__cause__ or error  # datasets wraps what it meets
        why = f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}"
        for file in _local_files(sources):
            place = _broken(file)
            if place is not None:
                raise refusal("ZR522", named=named, place=place, error=why) from error
        for path in paths:
            if not os.path.exists(path) and not on_hub(path):  # only a path can be so
                why = f"There is no file or folder {path}."
                break
        raise refusal("ZR506", named=named, error=why, cwd=Path.cwd()) from error


def _local_files(sources: list[dict[str, Any]]) -> Iterator[str]:
    for source in sources:
        with contextlib.suppress(Exception):  # what is wrong with it is being reported already
            for files in load_dataset_builder(**source).config.data_files.values():
                yield from filter(os.path.isfile, files)


def _broken(file: str) -> str | None:
    """The first line that is no JSON object: "a.json line 5: Expecting"."""
    if _format_of(file) != "json":
        return None
    number = 0
    try:
        with fsspec.open(file, "rb", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.lstrip().startswith(b"["):  # one list, whose error knows its line
                    json.loads(line + lines.read())
                elif line.strip() and not isinstance(json.loads(line.strip()), dict):
                    raise ValueError("not an object with named columns")
    except json.JSONDecodeError as error:
        return f"{file} line {number + error.lineno - 1}: {error.msg}"
    except (OSError, EOFError, ValueError, RecursionError) as error:
        return f"{file} line {number}: {first_line(error)}"
    return None


def read_tokenizer(name: str, settings: Settings, **keywords: Any) -> Tokenizer:
    """Read a tokenizer as it is saved. `keywords`: of from_pretrained. Raises Refusal."""
    with library_error_as_finding(f"reading the tokenizer of {name}"), absent_model_as_finding(name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=settings.trust_remote_code, **keywords)


def load_tokenizer(settings: Settings) -> Tokenizer:
    """Read a run's tokenizer, with a padding token that is not the end of text. Raises Refusal."""
    name = settings.model_name_or_path
    return with_padding(read_tokenizer(name, settings, revision=settings.model_revision), settings)


def with_padding(tokenizer: Tokenizer, settings: Settings) -> Tokenizer:
    """Give a tokenizer a padding token that is not the end of text. Raises Refusal where it has none.

    TRL falls back to pad = end of text. Its own labels are built before padding, but a model saved so teaches everyone
    downstream to mask the end.
    """
    name = settings.model_name_or_path
    end = settings.eos_token or tokenizer.eos_token
    pad = settings.pad_token or tokenizer.pad_token
    if pad is None or (pad == end and settings.pad_token is None):
        vocabulary = tokenizer.get_vocab()
        pad = next((token for token in PADDING_TOKENS if token in vocabulary and token != end), end)
    if pad == end:
        raise refusal("ZR502", model_name_or_path=name, end=end)
    _refuse_unknown_token("pad_token", pad, tokenizer)
    tokenizer.pad_token = pad
    return tokenizer


def tokenizer_findings(settings: Settings, asks_hub: bool) -> Iterator[Finding]:
    """Find what a run would refuse of its tokenizer: `eos_token` and `pad_token`. Raises Refusal.

    `asks_hub`: a tokenizer of the hub is downloaded; else it is taken from the cache, or a warning says that it was not
    looked at.
    """
    name = settings.model_name_or_path
    try:
        tokenizer = read_tokenizer(name, settings, revision=settings.model_revision, local_files_only=not asks_hub)
    except Refusal as refused:
        if not on_hub(name):
            raise
        yield finding("ZR755", name=name, error=refused.findings[0].why)
        return
    with_padding(tokenizer, settings)
    if settings.eos_token is not None:
        _refuse_unknown_token("eos_token", settings.eos_token, tokenizer)


def _refuse_unknown_token(key: str, token: str, tokenizer: Tokenizer) -> None:
    if token not in tokenizer.get_vocab():
        raise refusal("ZR503", key=key, token=token)


def apply_chat_template_file(tokenizer: Tokenizer, settings) -> Tokenizer:
    """A copy of the tokenizer, as SFTTrainer will make it from eos_token and chat_template_path. Raises Refusal.

    A copy: SFTTrainer must still find which tokens it adds, for LoRA trains those.
    """
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
            clone_chat_template(_WithoutEmbeddings(), tokenizer, path, resize_to_multiple_of=None)
    return tokenizer


class _WithoutEmbeddings(Mock):
    """For `clone_chat_template`, where only the tokenizer is to change."""

    def resize_token_embeddings(self, new_num_tokens: int, pad_to_multiple_of: None) -> None:
        self.vocab_size = new_num_tokens


def on_hub(name: str | None) -> bool:
    """Whether a name is one of the hub: no path that is here, and none that only a path can be ("./model")."""
    if name is None or os.path.exists(name):  # pathlib raises at a name that is too long
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def packaged_formats() -> set[str]:
    """The names of formats such as json, csv and parquet, which are no data sets of the hub."""
    return {module.name for module in pkgutil.iter_modules(packaged_modules.__path__)}
