"""The rows as the trainer takes them: tokenised, audited, truncated and packed before any weight is loaded.

SFTTrainer prepares its rows after it has a model; here its own code does it before, on one process of each node, and
the result is kept beside the datasets library's cache. TRL's ranks take turns by collectives instead.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import datasets
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from zero_recipes.core.files import write_json
from zero_recipes.core.findings import Finding, Refusal, downgraded, ignored_codes
from zero_recipes.core.process import forks_end_with_parent
from zero_recipes.data.audit import Audit, padding_of
from zero_recipes.data.load import load_rows
from zero_recipes.data.padding import padding_findings
from zero_recipes.data.row_hash import data_sha256
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask
from zero_recipes.data.source import Source, both_sources
from zero_recipes.data.splits import finish, prepare_splits, tokenise, with_tokens
from zero_recipes.data.template import apply_chat_template_file, refuse_bad_template
from zero_recipes.data.token_columns import row_lengths
from zero_recipes.distributed.once_per_node import once_per_node
from zero_recipes.libs import huggingface
from zero_recipes.libs.huggingface import fingerprint

__all__ = ["Prepared", "apply_chat_template_file", "data_sha256", "finish", "prepare_rows", "tokenise"]

# what TRL's preparation reads of the arguments (trl/trainer/sft_trainer.py, `_prepare_dataset` and before it)
_READ_BY_TRL = ("max_length", "truncation_mode", "packing", "packing_strategy", "eval_packing", "shuffle_dataset")
_READ_BY_TRL += ("completion_only_loss", "assistant_only_loss", "dataset_text_field")
_VERSIONS = ("trl", "transformers", "datasets")
_OUR_PARTS = ("answers.py", "audit.py", "columns.py", "load.py", "max_length.py", "prepare.py", "row_hash.py")
_OUR_PARTS += ("splits.py", "template.py", "token_columns.py")
_TRLS_PART = Path(huggingface.__file__)  # calls TRL's preparation


@dataclass(frozen=True)
class Prepared:
    """What a run trains on, evaluates on and asks."""

    train: Dataset | IterableDataset
    evaluation: Dataset | IterableDataset | None
    samples: list[Sample]
    audit: Audit
    findings: list[Finding]  # warnings only
    data_sha256: str | None  # of the training rows; None for a stream

    @property
    def rows(self) -> int | None:
        """Training rows as the trainer counts them (packed ones once); None for a stream."""
        return len(self.train) if isinstance(self.train, Dataset) else None


def prepare_rows(script_args, training_args, dataset_args, ours, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """Load, tokenise and audit, once per node. Every process calls it; no collective.

    Changes `training_args` so that SFTTrainer takes the rows as they are. Raises Refusal for what the audit finds.
    """
    skips = (training_args.dataset_kwargs or {}).get("skip_prepare_dataset", False)

    def work() -> dict:
        rows, evaluation = load_rows(script_args, training_args, dataset_args, ours.dataset_format)
        templated = apply_chat_template_file(tokenizer, training_args)
        sources = both_sources(script_args, dataset_args)
        refuse_bad_template(rows, templated, training_args)
        loaded = (script_args, training_args, dataset_args, ours.dataset_format)
        asked = rows_to_ask(ours.sample_prompts, evaluation, *loaded)
        split = script_args.dataset_test_split
        samples = choose_samples(ours.sample_prompts, asked, ours.dataset_format, templated, split)
        ignored = ignored_codes(ours.ignore)
        if isinstance(rows, IterableDataset):
            folder, rows_sha256 = None, None
            splits, findings = prepare_splits(rows, evaluation, templated, training_args, skips, sources)
            found, findings = splits[0].audit, downgraded(findings, ignored)
        else:
            arguments = (rows, evaluation, templated, training_args, skips, sources, ignored)
            folder, found, findings, rows_sha256 = _cached(*arguments)
        if any(finding.level == "error" for finding in findings):
            raise Refusal(findings)
        samples = with_tokens(samples, templated, training_args)
        return {
            "folder": folder and str(folder),
            "samples": [asdict(sample) for sample in samples],
            "audit": asdict(found),
            "findings": [asdict(finding) for finding in findings],
            "data_sha256": rows_sha256,
        }

    shared = once_per_node(work)
    if shared["folder"] is None:  # TRL tokenises a stream as it comes
        train, evaluation = load_rows(script_args, training_args, dataset_args, ours.dataset_format, checked=False)
        evaluation = None if evaluation is None else read_whole(evaluation)
    else:
        splits = datasets.load_from_disk(shared["folder"])
        train, evaluation = splits["train"], splits.get("eval")
        training_args.dataset_kwargs = (training_args.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
        training_args.assistant_only_loss = False  # in the labels by now; SFTTrainer would look for conversations
    samples = [Sample(**sample) for sample in shared["samples"]]
    findings = [Finding(**finding) for finding in shared["findings"]]
    counted = Audit(**shared["audit"])
    findings += padding_findings(counted, training_args)
    return Prepared(train, evaluation, samples, counted, findings, shared["data_sha256"])


def read_whole(rows: IterableDataset) -> Dataset:
    """All rows of a stream, in memory.

    Of an evaluation: ranks whose shares of a stream differ in length wait for each other, and rows that accelerate 1.15
    repeats to even them out (data_loader.py, IterableDatasetShard) are not told apart where there is no length.
    """
    return Dataset.from_list(list(rows), features=rows.features)


def _cached(
    rows: Dataset,
    evaluation: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    training_args,
    skips: bool,
    sources: tuple[Source, Source],
    ignored: frozenset[str],
) -> tuple[Path, Audit, list[Finding], str | None]:
    """(folder with the splits, audit, findings, hash of the training rows), made now or by an earlier run of the same
    data and arguments; no hash where a finding is an error."""
    folder = _folder(rows, evaluation, tokenizer, training_args)
    note = folder / "audit.json"
    if not note.is_file():
        with forks_end_with_parent():
            prepared, findings = prepare_splits(rows, evaluation, tokenizer, training_args, skips, sources)
        found, ready = prepared[0].audit, prepared[0].ready
        splits = datasets.DatasetDict(train=ready)
        if evaluation is not None:
            splits["eval"] = prepared[1].ready
        judged = downgraded(findings, ignored)
        if any(finding.level == "error" for finding in judged):
            return folder, found, judged, None
        written = {"audit": asdict(found), "findings": [asdict(finding) for finding in findings]}
        written["data_sha256"] = data_sha256(ready)
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".part"))
        splits.save_to_disk(part)
        write_json(part / "audit.json", written)
        try:
            part.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(part)
    written = json.loads(note.read_text())
    findings = downgraded([Finding(**finding) for finding in written["findings"]], ignored)
    lengths = row_lengths(datasets.load_from_disk(folder)["train"])  # padding is of this run's micro batch
    found = Audit(**written["audit"] | {"padding_share": padding_of(lengths, training_args)})
    return folder, found, findings, written["data_sha256"]


def prepared_earlier(
    rows: Dataset, evaluation: Dataset | None, tokenizer: PreTrainedTokenizerBase, training_args
) -> Dataset | None:
    """The training rows as a run of the same data and arguments has prepared them; None where none is kept."""
    folder = _folder(rows, evaluation, tokenizer, training_args)
    return datasets.load_from_disk(folder)["train"] if (folder / "audit.json").is_file() else None


def _folder(rows: Dataset, evaluation: Dataset | None, tokenizer: PreTrainedTokenizerBase, training_args) -> Path:
    """Where the prepared rows are kept."""
    key = _key(rows, evaluation, tokenizer, training_args)
    return Path(datasets.config.HF_DATASETS_CACHE) / "zero-recipes" / key


def _key(
    rows: Dataset,
    evaluation: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    training_args,
) -> str:
    """A hash over data, tokenizer, versions, our own code that makes rows, and those arguments that do."""
    known = {name: getattr(training_args, name) for name in _READ_BY_TRL}
    known["seed"] = training_args.seed if training_args.shuffle_dataset else None
    known |= {name: importlib.metadata.version(name) for name in _VERSIONS}
    known |= {"train": fingerprint(rows), "eval": evaluation and fingerprint(evaluation)}
    known |= {"kwargs": training_args.dataset_kwargs}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
    for path in (*(Path(__file__).with_name(name) for name in _OUR_PARTS), _TRLS_PART):
        digest.update(path.read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + _without_loading(path))
    return digest.hexdigest()[:32]


def _without_loading(path: Path) -> bytes:
    """A tokenizer's file, without what transformers 5.23 notes there of how it was loaded: a plan looks offline."""
    if path.name != "tokenizer_config.json":
        return path.read_bytes()
    content = json.loads(path.read_text())
    kept = {key: value for key, value in content.items() if key not in ("is_local", "local_files_only")}
    return json.dumps(kept, sort_keys=True).encode()
