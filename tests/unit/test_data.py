"""One formatter for training and generation: Alpaca's prompt to the byte, the end supervised, pad is not eos."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from zero_recipes.cli import main as cli
from zero_recipes.core.findings import Refusal
from zero_recipes.data.load import alpaca_prompt, alpaca_row, format_rows, load_rows, load_tokenizer
from zero_recipes.data.samples import choose_samples
from zero_recipes.training.samples import question

BASE = Path(__file__).resolve().parents[2] / "tiny_world" / "base"

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\nTranslate.\n\n### Input:\nHund\n\n"
    "### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nTranslate.\n\n### Response:\n"
)


def test_the_prompt_to_the_byte():
    assert alpaca_prompt("Translate.", "Hund") == WITH_INPUT
    assert alpaca_prompt("Translate.") == alpaca_prompt("Translate.", "") == WITHOUT_INPUT
    assert question(WITH_INPUT) == "Translate.\nHund"


def test_training_and_generation_see_the_same_prompt():
    row = {"instruction": "Translate.", "input": "Hund", "output": "dog"}
    rows = format_rows(Dataset.from_list([row]), "alpaca")
    (sample,) = choose_samples(1, rows, "alpaca", tokenizer=None)
    assert rows[0] == alpaca_row(row) == {"prompt": sample.prompt, "completion": sample.reference}
    (listed,) = choose_samples(["Translate."], None, "alpaca", tokenizer=None)
    assert listed.prompt == WITHOUT_INPUT and listed.reference is None


def test_the_end_of_text_is_supervised_and_the_prompt_is_not(tmp_path):
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    rows = format_rows(
        Dataset.from_list([{"instruction": "Say it.", "input": "", "output": "The fish hums."}] * 2), "alpaca"
    )
    arguments = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=256)
    trainer = SFTTrainer(model=str(BASE), args=arguments, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["labels"][0].tolist()
    supervised = [label for label in labels if label != -100]
    assert supervised[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(supervised[:-1]) == "The fish hums."
    assert tokenizer.decode(batch["input_ids"][0][: labels.index(supervised[0])]) == alpaca_prompt("Say it.")


@pytest.mark.parametrize("pad", [None, "<|endoftext|>"])
def test_pad_is_not_the_end_of_text(tmp_path, pad):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path)
    model_args = SimpleNamespace(model_name_or_path=str(tmp_path), model_revision=None)
    mended = load_tokenizer(model_args, SimpleNamespace(trust_remote_code=False, eos_token=None, pad_token=None))
    assert (mended.pad_token, mended.eos_token) == ("<|padding|>", "<|endoftext|>")


def arguments(**changes):
    script = SimpleNamespace(
        dataset_name=None,
        dataset_config=None,
        dataset_streaming=False,
        dataset_train_split="train",
        dataset_test_split="test",
    )
    training = SimpleNamespace(seed=0, eval_strategy="no", dataset_text_field="text")
    for key, value in changes.items():
        setattr(training if hasattr(training, key) else script, key, value)
    return script, training, SimpleNamespace(datasets=[])


def test_missing_data_splits_and_columns_are_refused(tmp_path):
    with pytest.raises(Refusal, match="ZR504"):
        load_rows(*arguments(), None)
    (tmp_path / "train.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(Refusal, match=r"'test'.*ZR507"):
        load_rows(*arguments(dataset_name=str(tmp_path), eval_strategy="steps"), None)
    with pytest.raises(Refusal, match=r"instruction, input, output.*ZR501"):
        load_rows(*arguments(dataset_name=str(tmp_path)), "alpaca")
    with pytest.raises(Refusal, match=r"question.*ZR508"):
        load_rows(*arguments(dataset_name=str(tmp_path)), None)


def test_samples_that_cannot_be_had_are_refused(tmp_path):
    with pytest.raises(Refusal, match="ZR516"):
        choose_samples(3, None, "alpaca", None)
    with pytest.raises(Refusal, match="ZR517"):
        choose_samples("nowhere.jsonl", None, "alpaca", None)
    assert choose_samples(None, None, None, None) == choose_samples("0", None, None, None) == []


def test_scores_by_the_metric_modules_that_the_project_carries():
    from zero_recipes.data.samples import Sample
    from zero_recipes.training.samples import Answers, score

    samples = [Sample("p", "The fish hums."), Sample("p", "The fish hums."), Sample("p", None)]
    found = score(samples, Answers([" The fish hums.", "The cat hums.", "x"], [0.5, 1.5, None]))
    assert found[0] == {"exact_match": 1.0, "token_f1": 1.0, "reference_loss": 0.5}
    assert found[1]["exact_match"] == 0.0 and found[1]["token_f1"] == pytest.approx(2 / 3)
    assert found[2] == {}


def test_fetch_measures_what_is_here_already(monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert cli.main(["fetch", "recipes/tiny.yaml"]) == 0
    model, data = capsys.readouterr().out.splitlines()
    assert model.startswith("./tiny_world/base: ") and data.startswith("./tiny_world: ") and data.endswith(" kB")
