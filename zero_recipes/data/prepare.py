"""Rows, tokenised, audited, truncated and packed before any weight is loaded.

SFTTrainer prepares its rows after it has a model, where ranks take turns by collectives. Here its own code does it
before, on one process of each node, and the result is kept beside the datasets library's cache.
"""

import copy
import hashlib
import importlib.metadata
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import datasets
import numpy as np
from datasets import Dataset
from huggingface_hub import constants
from transformers import PreTrainedTokenizerBase as Tokenizer

from zero_recipes.config.row_lengths import RowLengths
from zero_recipes.config.settings import Settings
from zero_recipes.config.trl_arguments import WITHOUT_LAUNCH, trl_arguments
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import (
    Finding,
    Refusal,
    downgraded,
    finding,
    first_line,
    ignored_codes,
    raise_errors,
    refusal,
)
from zero_recipes.core.library_errors import library_error_as_finding
from zero_recipes.core.process import forks_end_with_parent
from zero_recipes.data import as_written, forms, load, masks
from zero_recipes.data import audit as audits
from zero_recipes.data.as_written import compared_as_written
from zero_recipes.data.audit import NO_KEYS, Audit, RowKeys
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask, with_tokens
from zero_recipes.data.thoughts import DROP, LAST
from zero_recipes.engine import huggingface
from zero_recipes.engine.group import once_per_node
from zero_recipes.engine.huggingface import single_process_env

DAY = 86400.0  # seconds: nothing is prepared for longer
STREAMED_ROWS = 1000  # of a streamed data set, audited before training
PLANNED_ROWS = 2000  # tokenised for a plan, spread over all: Alpaca's mean is then known to 2 %
_VERSIONS = ("trl", "transformers", "datasets")


class Data(NamedTuple):
    """A recipe's rows, loaded and formatted, with its tokenizer and samples; nothing is tokenised."""

    train: load.Rows
    evaluation: load.Rows | None
    samples: list[Sample]
    tokenizer: Tokenizer
    forms: list[forms.Form]


class Split(NamedTuple):
    """One split in each state of its preparation, and its counts."""

    rows: Dataset
    tokenised: Dataset  # whole
    ready: Dataset  # as they are trained on
    audit: Audit
    thoughts: str = ""  # what became of them, in words


@dataclass(frozen=True)
class Prepared:
    """What a run trains on, evaluates on and samples."""

    tokenizer: Tokenizer  # of the model, whose rows these are
    train: load.Rows
    evaluation: Dataset | None
    samples: list[Sample]
    audit: Audit
    findings: list[Finding]  # warnings only
    data_sha256: str  # of the training rows; of a stream's first STREAMED_ROWS
    evaluation_sha256: str | None  # the same of the evaluation rows
    shown: list  # `recognised`, and rows with what carries loss for `audit.show_rows`

    @property
    def rows(self) -> int | None:
        """How many training rows the trainer counts (packed ones once); None for a stream."""
        return len(self.train) if isinstance(self.train, Dataset) else None


def prepare_rows(settings: Settings, training_args, tokenizer: Tokenizer, replicas: int = 1) -> Prepared:
    """Prepare the rows of a run, or find them prepared. Raises Refusal on every process.

    One process of each node does it, and all read them.
    `training_args` is changed to what is prepared. `tokenizer`: the model's. `replicas`: ranks with rows of their own.
    """
    ignored = ignored_codes(settings.ignore)
    prepare = partial(_made_or_kept, settings, training_args, tokenizer, ignored)
    made = once_per_node(prepare, "prepares the data of this machine")
    if made["folder"] is None:
        train, evaluation = _stream(settings, training_args, tokenizer)
    else:
        splits = datasets.load_from_disk(made["folder"])
        train = splits["train"]
        evaluation = splits.get("eval")
        training_args.dataset_kwargs = (training_args.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
        training_args.assistant_only_loss = False  # in the labels by now; SFTTrainer would look for conversations
    samples = [Sample(**sample) for sample in made["samples"]]
    audit = Audit(**made["audit"])
    findings = [Finding(**finding) for finding in made["findings"]]
    findings += audits.left_out_findings(train, evaluation, settings, replicas)
    findings = downgraded(findings, ignored)
    raise_errors(findings)
    digests = (made["data_sha256"], made.get("evaluation_sha256"))  # kept rows of an earlier version have one
    return Prepared(tokenizer, train, evaluation, samples, audit, findings, *digests, made["shown"])


def _stream(settings: Settings, training_args, tokenizer) -> tuple[load.Rows, Dataset | None]:
    """Training rows, tokenised as they come, and evaluation rows."""
    train, evaluation, _ = load.load_rows(settings)
    if evaluation is not None:  # whole, in memory: of a stream's shares that differ in length ranks wait for others
        evaluation = Dataset.from_list(list(evaluation), features=evaluation.features)
    if not audits.skips_preparation(training_args):
        templated = load.apply_chat_template_file(tokenizer, settings)
        train = _tokenised(train, templated, settings, training_args, settings.dataset_train_split)
        if evaluation:
            evaluation = _tokenised(evaluation, templated, settings, training_args, settings.dataset_test_split)
        training_args.assistant_only_loss = False
    return train, evaluation


def _tokenised(rows: load.Rows, tokenizer, settings: Settings, training_args, split: str) -> load.Rows:
    tokenised = masks.tokenise(rows, tokenizer, training_args, RowKeys.of(settings), split)
    return tokenised.select_columns(["input_ids", "labels"])


def _made_or_kept(settings: Settings, training_args, tokenizer, ignored: frozenset[str]) -> dict:
    """As JSON. The findings are not downgraded: other runs ignore others. Of errors not ignored nothing is kept."""
    data = read_data(settings, tokenizer)
    ours = RowKeys.of(settings)
    folder = _folder(data, training_args, ours) if isinstance(data.train, Dataset) else None
    if folder is not None and (folder / "audit.json").is_file():
        made = json.loads((folder / "audit.json").read_text())
        findings = [Finding(**finding) for finding in made["findings"]]
        raise_errors(downgraded(findings, ignored))
    else:
        with forks_end_with_parent():
            splits, findings = prepare_splits(data, settings, training_args)
        raise_errors(downgraded(findings, ignored))
        made = {
            "audit": asdict(splits[0].audit),
            "findings": [asdict(finding) for finding in findings],
            "shown": [recognised(data, splits[0]), shown_rows(data, splits[0], training_args, ours)],
            "data_sha256": data_sha256(splits[0].ready),
            "evaluation_sha256": data_sha256(splits[1].ready) if len(splits) > 1 else None,
        }
        if folder is not None:
            _keep(folder, [split.ready for split in splits], made)
    samples = with_tokens(data.samples, data.tokenizer, training_args, ours)
    return made | {"folder": folder and str(folder), "samples": [asdict(sample) for sample in samples]}


def read_data(settings: Settings, tokenizer: Tokenizer) -> Data:
    """Load and format the rows of a recipe and choose its samples. Nothing is tokenised yet. Raises Refusal."""
    tokenizer = load.apply_chat_template_file(tokenizer, settings)
    rows, evaluation, found = load.load_rows(settings)
    load.refuse_turns_without_template(found, tokenizer)
    prompts = rows_to_ask(settings.sample_prompts, evaluation, settings)
    split = settings.dataset_test_split
    ours = RowKeys.of(settings)
    samples = choose_samples(settings.sample_prompts, prompts, settings.dataset_format, tokenizer, split, ours)
    return Data(rows, evaluation, samples, tokenizer, found)


def finish(tokenised: Dataset, tokenizer: Tokenizer, training_args, packing: bool, ours: RowKeys = NO_KEYS) -> Dataset:
    """Truncate or pack tokenised rows to max_length, drop rows without loss and shuffle, as TRL does.

    Packed by one process: TRL 1.16 packs within one worker's share, so that packs would depend on their number.
    """
    if ours.drops(training_args.max_length):
        fits = audits.row_lengths(tokenised) <= training_args.max_length
        tokenised = tokenised.select(np.flatnonzero(fits))
    args = copy.copy(training_args)
    args.dataset_num_proc = None
    if not packing:
        args.dataset_num_proc = masks.workers(len(tokenised), training_args.dataset_num_proc)
    return huggingface.prepare_dataset(tokenised, tokenizer, args, packing)


def prepare_splits(data: Data, settings: Settings, training_args) -> tuple[list[Split], list[Finding]]:
    """Prepare the training rows and the evaluation rows, if there are any.

    Returns the splits, and what is wrong with each and with both together. Of a stream the first STREAMED_ROWS.
    Raises Refusal.
    """
    name = settings.dataset_train_split
    rows = _start_of(data.train, name)
    ours = RowKeys.of(settings)
    read_as = " and ".join(form.description for form in data.forms)
    told = (read_as, partial(load.copies_without_empty, settings, data.forms))
    train, findings = prepare_split(rows, data.tokenizer, training_args, training_args.packing, ours, name, *told)
    if data.evaluation is None:
        return [train], findings
    name = settings.dataset_test_split
    rows = _start_of(data.evaluation, name)
    packing = _eval_packing(training_args)
    evaluation, found = prepare_split(rows, data.tokenizer, training_args, packing, ours, name, *told)
    findings += [finding for finding in found if finding not in findings]
    train.audit.largest_id = max(train.audit.largest_id, evaluation.audit.largest_id)
    train.audit.longest_sequence = max(train.audit.longest_sequence, evaluation.audit.longest_sequence)
    findings += audits.overlap_findings(train.tokenised, evaluation.tokenised, name)
    return [train, evaluation], findings


def _eval_packing(training_args) -> bool:
    return training_args.packing if training_args.eval_packing is None else training_args.eval_packing


def _start_of(rows: load.Rows, split: str) -> Dataset:
    """The rows, or the first of a stream."""
    if isinstance(rows, Dataset):
        return rows
    with library_error_as_finding(f"reading the rows of {split}"), forms.row_errors_as_findings(split):
        first_rows = list(rows.take(STREAMED_ROWS))
        return Dataset.from_list(first_rows, features=rows.features, on_mixed_types="use_json")


def prepare_split(
    rows: Dataset,
    tokenizer: Tokenizer,
    training_args,
    packing: bool,
    ours: RowKeys = NO_KEYS,
    split: str = "the data",
    read_as: str = "",
    copies_without_empty: Callable[[], dict[str, str]] = dict,
) -> tuple[Split, list[Finding]]:
    """Prepare one split. Raises Refusal.

    `read_as`, `copies_without_empty`: of `audit_findings`.

    Returns the split, and what is wrong with it.
    """
    with library_error_as_finding(f"tokenizing the rows of {split}"):
        audits.refuse_broken_tokens(rows, tokenizer, split)
        if ours.thinking in (DROP, LAST) and not masks.has_turns(rows):
            raise refusal("ZR587", thinking=ours.thinking)
        findings = []
        thoughts = ""
        if audits.skips_preparation(training_args):
            tokenised = ready = rows
        else:
            tokenised = masks.tokenise_as_written(rows, tokenizer, training_args, ours, split)
            tokenised, doubled = masks.with_single_markers(rows, tokenised, tokenizer)
            if doubled:
                markers = " and ".join(dict.fromkeys([str(tokenizer.bos_token), str(tokenizer.eos_token)]))
                about = {"count": len(doubled), "rows": len(rows), "split": split, "row": doubled[0]}
                findings.append(finding("ZR530", **about, markers=markers))
            found, counts = compared_as_written(rows, tokenised, tokenizer, training_args, split, ours)
            findings += found
            thoughts = str(counts)
            ready = finish(tokenised, tokenizer, training_args, packing, ours)
    found = audits.audit(rows, tokenised, ready, tokenizer, training_args, ours)
    told = (split, read_as, copies_without_empty)
    findings += audits.audit_findings(found, rows, tokenizer, training_args, ours, *told)
    return Split(rows, tokenised, ready, found, thoughts), findings


def recognised(data: Data, split: Split) -> list[str]:
    """Say in words what the columns are taken for, what nothing reads, and what became of thoughts."""
    lines = [form.description for form in data.forms]
    unread = as_written.unread_by_template(split.rows, data.tokenizer)
    if unread:
        lines.append(f"not read by the chat template: {', '.join(unread)}")
    if split.thoughts:
        lines.append(split.thoughts)
    return lines


def shown_rows(data: Data, split: Split, training_args, ours: RowKeys) -> list[tuple[int, list[tuple[str, bool]]]]:
    """Three rows, or of several forms one each, as (number, [(text, whether it has a loss)])."""
    examples = [form.example for form in data.forms if form.example is not None]
    if len(examples) < 2:
        return audits.shown_rows(split.tokenised, data.tokenizer)
    shown = []
    for example in examples:
        row = Dataset.from_list([example], on_mixed_types="use_json")
        tokenised = masks.tokenise(row, data.tokenizer, training_args, ours)
        shown += audits.shown_rows(tokenised, data.tokenizer)
    return shown


def _keep(folder: Path, splits: list[Dataset], made: dict) -> None:
    """Whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob("*.part"):  # by a run that was killed
        if time.time() - left.stat().st_mtime > DAY:
            shutil.rmtree(left, ignore_errors=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".part"))
    datasets.DatasetDict(zip(("train", "eval"), splits, strict=False)).save_to_disk(part)
    write_json(part / "audit.json", made)
    try:
        part.rename(folder)
    except OSError:  # another run was faster
        shutil.rmtree(part)


def _folder(data: Data, training_args, ours: RowKeys) -> Path:
    """Where prepared rows are kept: a hash over all that makes them."""
    known = {name: getattr(training_args, name, None) for name in forms.tables()["read_of_arguments"]}
    known |= vars(ours)
    known["seed"] = training_args.seed if training_args.shuffle_dataset else None
    known |= {name: importlib.metadata.version(name) for name in _VERSIONS}
    known["train"] = huggingface.fingerprint(data.train)
    known["eval"] = data.evaluation and huggingface.fingerprint(data.evaluation)
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
    digest.update(forms.code_digest().encode())
    digest.update(repr(data.tokenizer).encode())  # its configuration: the file also says how it was loaded
    with tempfile.TemporaryDirectory() as folder:
        data.tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            digest.update(path.name.encode())
            if path.is_file() and path.name != "tokenizer_config.json":
                digest.update(path.read_bytes())
    return Path(datasets.config.HF_DATASETS_CACHE) / "zero-recipes" / digest.hexdigest()[:32]


def data_sha256(rows: Dataset) -> str:
    """A hash of the rows themselves, in their order, whatever Arrow's chunks, widths of integers and versions."""
    digest = hashlib.sha256()
    for table in audits.tables(rows, sorted(rows.column_names)):
        for name in table.column_names:
            digest.update(name.encode())
            if audits.is_of_integers(table.schema.field(name).type):
                for array in audits.flat(table[name]):
                    digest.update(array.astype("<i8").tobytes())
            else:
                digest.update(repr(table[name].to_pylist()).encode())
    return digest.hexdigest()


# the lengths of rows, for a plan


def rows_at_hand(settings: Settings, path: Path) -> RowLengths | str:
    """The lengths of a recipe's rows for a plan, or a text that says why they are not known. The hub is not asked.

    All as a run has prepared them, where one has; else at most PLANNED_ROWS. `path`: the recipe's.
    """
    if settings.streams:
        return "the data is a stream"
    try:
        hub = patch.object(constants, "HF_HUB_OFFLINE", True)
        with single_process_env(), hub, patch.object(datasets.config, "HF_HUB_OFFLINE", True):
            return _counted(settings, path)
    except Refusal as refusal:
        if isinstance(refusal.__cause__, OSError):
            return "data or tokenizer are not on this machine"
        return refusal.what
    except Exception as error:  # readers of a dozen formats and tokenizers: the run reports what is wrong
        return first_line(error)


def _counted(settings: Settings, path: Path) -> RowLengths:
    settings = settings.replace(**WITHOUT_LAUNCH, dataset_num_proc=None, sample_prompts=None)
    args = trl_arguments(settings, path).training
    data = read_data(settings, load.load_tokenizer(settings))
    ours = RowKeys.of(settings)
    folder = _folder(data, args, ours)
    count = len(data.train)
    evaluates = settings.evaluates and isinstance(data.evaluation, Dataset)
    evaluated = None
    if (folder / "audit.json").is_file():
        kept = datasets.load_from_disk(folder)
        if evaluates:
            evaluated = _evaluated(kept["eval"], args)
        found = _of_prepared(kept["train"], f"all {count:,} rows, as prepared by an earlier run")
        return replace(found, evaluated=evaluated)
    chosen, ready = _some(data.train, data, args, args.packing, ours)
    if evaluates:
        _, some = _some(data.evaluation, data, args, _eval_packing(args), ours)
        evaluated = _evaluated(some, args)
    epoch = round(len(ready) * count / len(chosen))
    whole = f"all {count:,} rows" if len(chosen) == count else f"{len(chosen):,} of {count:,} rows"
    return replace(_of_prepared(ready, f"{whole} tokenised"), epoch=epoch, evaluated=evaluated)


def _some(rows: Dataset, data: Data, args, packing: bool, ours: RowKeys) -> tuple[Dataset, Dataset]:
    """At most PLANNED_ROWS of the rows, and what is made of them."""
    step = math.ceil(len(rows) / PLANNED_ROWS)
    chosen = rows.select(range(0, len(rows), step or 1))
    if audits.skips_preparation(args):
        return chosen, chosen
    tokenised = masks.tokenise(chosen, data.tokenizer, args, ours)
    return chosen, finish(tokenised, data.tokenizer, args, packing, ours)


def _evaluated(ready: Dataset, args) -> tuple[int, int]:
    """RowLengths.evaluated: the rows with most loss may meet in one batch."""
    longest = 0
    with_loss = []
    for _, labels, lengths in audits.token_batches(ready):
        longest = max(longest, int(lengths.max()))
        with_loss += audits.supervised_tokens(labels, lengths).tolist()
    most = sorted(with_loss, reverse=True)[: args.per_device_eval_batch_size]
    return longest, sum(most)


def _of_prepared(ready: Dataset, source: str) -> RowLengths:
    """Reads Arrow's buffers, no token."""
    if "seq_lengths" in ready.column_names:  # TRL's bfd; "wrapped" makes rows of its own, all full
        lengths = np.concatenate(ready.with_format("numpy")["seq_lengths"][:])
    else:
        lengths = audits.row_lengths(ready)
    return RowLengths(tuple(lengths.tolist()), len(ready), len(ready), source)
