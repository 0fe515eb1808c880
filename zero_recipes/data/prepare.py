"""The rows as the trainer takes them: tokenised, audited, truncated and packed before any weight is loaded.

SFTTrainer prepares its rows after it has a model; here its own code does it before, on one process of each node, and
the result is kept beside the datasets library's cache. TRL's ranks take turns by collectives instead.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import datasets
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from zero_recipes.compat import huggingface
from zero_recipes.compat.huggingface import fingerprint, prepare_dataset
from zero_recipes.core.errors import Finding, Refusal, first_line
from zero_recipes.core.files import write_json
from zero_recipes.data.audit import Audit, audit, audit_findings
from zero_recipes.data.load import load_rows
from zero_recipes.data.samples import Sample, choose_samples, rows_to_ask
from zero_recipes.distributed.once_per_node import once_per_node

# what TRL's preparation reads of the arguments (trl/trainer/sft_trainer.py, `_prepare_dataset` and before it)
_READ_BY_TRL = ("max_length", "truncation_mode", "packing", "packing_strategy", "eval_packing", "shuffle_dataset")
_READ_BY_TRL += ("seed", "completion_only_loss", "assistant_only_loss", "dataset_text_field")
_VERSIONS = ("trl", "transformers", "datasets")
_TRLS_PART = Path(huggingface.__file__)  # calls TRL's preparation
STREAMED_ROWS = 1000  # of a streamed data set, audited before training
HASHED_ROWS = 1000  # at once; the batches' boundaries are part of the hash


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
        loaded = (script_args, training_args, dataset_args, ours.dataset_format)
        asked = rows_to_ask(ours.sample_prompts, evaluation, *loaded)
        split = script_args.dataset_test_split
        samples = choose_samples(ours.sample_prompts, asked, ours.dataset_format, templated, split)
        streams = isinstance(rows, IterableDataset)
        if streams:
            folder, data_sha256, start = None, None, Dataset.from_list(list(rows.take(STREAMED_ROWS)))
            _, _, found, findings = prepare_split(start, templated, training_args, training_args.packing, skips)
        else:
            folder, found, findings, data_sha256 = _cached(rows, evaluation, templated, training_args, skips)
        if any(finding.level == "error" for finding in findings):
            raise Refusal.of(findings)
        samples = with_tokens(samples, templated, training_args)
        return {
            "folder": folder and str(folder),
            "samples": [asdict(sample) for sample in samples],
            "audit": asdict(found),
            "findings": [asdict(finding) for finding in findings],
            "data_sha256": data_sha256,
        }

    shared = once_per_node(work)
    if shared["folder"] is None:  # TRL tokenises a stream as it comes
        train, evaluation = load_rows(script_args, training_args, dataset_args, ours.dataset_format)
        evaluation = None if evaluation is None else read_whole(evaluation)
    else:
        splits = datasets.load_from_disk(shared["folder"])
        train, evaluation = splits["train"], splits.get("eval")
        training_args.dataset_kwargs = (training_args.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
        training_args.assistant_only_loss = False  # in the labels by now; SFTTrainer would look for conversations
    samples = [Sample(**sample) for sample in shared["samples"]]
    findings = [Finding(**finding) for finding in shared["findings"]]
    return Prepared(train, evaluation, samples, Audit(**shared["audit"]), findings, shared["data_sha256"])


def read_whole(rows: IterableDataset) -> Dataset:
    """All rows of a stream, in memory.

    Of an evaluation: ranks whose shares of a stream differ in length wait for each other, and rows that accelerate 1.15
    repeats to even them out (data_loader.py, IterableDatasetShard) are not told apart where there is no length.
    """
    return Dataset.from_list(list(rows), features=rows.features)


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
        tokenizer.chat_template = Path(path).read_text()
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


def tokenise(rows: Dataset, tokenizer: PreTrainedTokenizerBase, training_args) -> Dataset:
    """input_ids and labels of each row, before truncation, dropping, packing and shuffling.

    By the code that SFTTrainer trains with. `tokenizer`: with the chat template applied.
    """
    whole = copy.copy(training_args)
    whole.max_length, whole.shuffle_dataset = None, False
    return prepare_dataset(rows, tokenizer, whole, packing=False)


def finish(tokenised: Dataset, tokenizer: PreTrainedTokenizerBase, training_args, packing: bool) -> Dataset:
    """Tokenised rows truncated or packed to max_length, rows without loss dropped, shuffled, as TRL does."""
    return prepare_dataset(tokenised, tokenizer, training_args, packing)


def with_tokens(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, training_args) -> list[Sample]:
    """The samples with the tokens of prompt and answer as a training row has them, truncated as one.

    By the code that SFTTrainer trains with: a tokenizer may write a word otherwise at a text's beginning than behind
    the prompt (SentencePiece's space mark). The answer's tokens alone carry loss, whatever training gives a loss.
    """
    alone = copy.copy(training_args)
    alone.shuffle_dataset, alone.completion_only_loss, alone.dataset_num_proc = False, True, None
    found = {}
    for templated in (False, True):  # a data set has rows of one kind
        rows = [s.row | {"sample": i} for i, s in enumerate(samples) if s.row is not None and s.templated == templated]
        if rows:
            for row in prepare_dataset(Dataset.from_list(rows), tokenizer, alone, packing=False):
                found[row["sample"]] = {"ids": tuple(row["input_ids"]), "labels": tuple(row["labels"])}
    return [replace(sample, row=None, **found.get(i, {})) for i, sample in enumerate(samples)]


def prepare_split(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, training_args, packing: bool, skips: bool
) -> tuple[Dataset, Dataset, Audit, list[Finding]]:
    """One split tokenised whole and as it is trained on, its counts and what is wrong with it.

    `skips`: the rows are ready as they are.
    """
    tokenised = rows if skips else tokenise(rows, tokenizer, training_args)
    ready = rows if skips else finish(tokenised, tokenizer, training_args, packing)
    found = audit(rows, tokenised, ready, tokenizer, training_args)
    return tokenised, ready, found, audit_findings(found, rows, tokenizer)


def _cached(
    rows: Dataset, evaluation: Dataset | None, tokenizer: PreTrainedTokenizerBase, training_args, skips: bool
) -> tuple[Path, Audit, list[Finding], str | None]:
    """(folder with the splits, audit, findings, hash of the training rows), made now or by an earlier run of the same
    data and arguments; no hash where a finding is an error."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "zero-recipes" / _key(rows, evaluation, tokenizer, training_args)
    note = folder / "audit.json"
    if not note.is_file():
        _, ready, found, findings = prepare_split(rows, tokenizer, training_args, training_args.packing, skips)
        splits = datasets.DatasetDict(train=ready)
        if evaluation is not None:
            packing = training_args.packing if training_args.eval_packing is None else training_args.eval_packing
            whole = evaluation if skips else tokenise(evaluation, tokenizer, training_args)
            splits["eval"] = whole if skips else finish(whole, tokenizer, training_args, packing)
        if any(finding.level == "error" for finding in findings):
            return folder, found, findings, None
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
    findings = [Finding(**finding) for finding in written["findings"]]
    return folder, Audit(**written["audit"]), findings, written["data_sha256"]


def data_sha256(rows: Dataset) -> str:
    """A hash of the rows themselves, in their order.

    Not `_key`: that one also changes with TRL's version, with our own code and with the micro batch, none of which
    makes other rows.
    """
    digest = hashlib.sha256()
    for batch in rows.with_format(None).iter(HASHED_ROWS):
        digest.update(repr(sorted(batch.items())).encode())
    return digest.hexdigest()


def _key(rows: Dataset, evaluation: Dataset | None, tokenizer: PreTrainedTokenizerBase, training_args) -> str:
    """A hash over data, tokenizer, arguments, versions and our own code that makes rows."""
    known = {name: getattr(training_args, name) for name in _READ_BY_TRL}
    known |= {name: importlib.metadata.version(name) for name in _VERSIONS}
    known |= {"train": fingerprint(rows), "eval": evaluation and fingerprint(evaluation)}
    known |= {"kwargs": training_args.dataset_kwargs, "batch": training_args.per_device_train_batch_size}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
    for path in (*(Path(__file__).with_name(name) for name in ("audit.py", "load.py", "prepare.py")), _TRLS_PART):
        digest.update(path.read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:32]
