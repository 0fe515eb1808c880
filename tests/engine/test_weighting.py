"""Every token weighs the same where transformers and TRL weigh ranks or micro batches; faults and their mending."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tests.helpers.tiny import write_recipe, write_rows

STEPS, TOLERANCE = 4, 1e-5


def test_the_first_token_of_a_row_counts_in_no_evaluation(one, two, tmp_path):
    """Of rows of text it has a label and no loss; every other token weighs the same, whatever its batch and rank."""
    recipe = write_text_recipe(tmp_path, eval_strategy="steps", eval_steps=STEPS, eval_on_start=True)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--per_device_eval_batch_size", "4"]
    wanted = one.run("equivalence_cases.evaluate_plainly", argv=argv)[0]
    found = two.run("train", argv=argv)[0]["metrics"]["eval_history"]
    assert found[0]["loss"] == pytest.approx(wanted, rel=TOLERANCE)


def write_text_recipe(folder: Path, **keys) -> Path:
    """A GPT-2 with weights and rows of text: every token but a row's first has a loss."""
    rows = folder / "text"
    rows.mkdir()
    lines = [json.dumps({"text": "The fish hums. " * (1 + i * i % 17)}) for i in range(80)]
    (rows / "train.jsonl").write_text("\n".join(lines) + "\n")
    (rows / "test.jsonl").write_text("\n".join(lines[:11]) + "\n")
    recipe = write_recipe(
        folder, dataset_name=str(rows), dataset_format=None, random_weights=False, bf16=False, max_steps=STEPS,
        global_batch_size=16, weight_decay=0.01, max_grad_norm=1.0, data_seed=7, **keys,
    )  # fmt: skip
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1031, n_positions=256, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        pad_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return recipe


def losses(group, recipe: Path, out: Path, *more: str, **keywords) -> tuple[list[float], list[float]]:
    """The losses of a run in training and in evaluation."""
    argv = [str(recipe), "--output_dir", str(out / f"train-{group.world_size}"), *more, "--overwrite", "true"]
    found = group.run("train", argv=argv, **keywords)[0]["metrics"]
    return found["loss_history"], [entry["loss"] for entry in found["eval_history"]]


def assert_equal(found: tuple[list[float], ...], wanted: tuple[list[float], ...]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)


def test_packed_rows_that_are_repeated_have_no_loss(one, two, tmp_path):
    """In a micro batch of 4 packed rows stand in one, and the last ones of an epoch are repetitions."""
    recipe = write_recipe(
        tmp_path, dataset_name=str(write_rows(tmp_path / "few", count=55)), packing=True, max_length=64, bf16=False,
        global_batch_size=8, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=9,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    plain = losses(one, recipe, tmp_path, "--per_device_train_batch_size", "8")
    found = losses(two, recipe, tmp_path)
    assert_equal(found, plain)
    repeated = losses(two, recipe, tmp_path, left_out="zero_recipes.training.token_loss.without_loss")
    assert repeated[0] != pytest.approx(plain[0], rel=100 * TOLERANCE)
    assert repeated[1] != pytest.approx(plain[1], rel=TOLERANCE)


def test_a_stream_is_its_rows_again_and_again(one, two, tmp_path):
    """21 rows at 8 a step, against the same rows written five times and read in their order, without a stream."""
    rows = write_rows(tmp_path / "few", count=21)
    again = write_rows(tmp_path / "again", count=21)
    (again / "train.jsonl").write_text((rows / "train.jsonl").read_text() * 5)
    keys = {"bf16": False, "max_steps": 9, "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 4}
    keys |= {"global_batch_size": 8, "dataset_name": str(rows), "dataset_streaming": True}
    recipe = write_recipe(tmp_path, **keys)
    whole = ["--dataset_name", str(again), "--dataset_streaming", "false", "--train_sampling_strategy", "sequential"]
    plain = losses(one, recipe, tmp_path, *whole)
    for group in (one, two):
        assert_equal(losses(group, recipe, tmp_path), plain)
    assert "21 rows" in (tmp_path / "train-2" / "recipe.resolved.yaml").read_text(), "its start is audited"
