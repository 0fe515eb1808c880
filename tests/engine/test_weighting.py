"""Every token weighs the same where transformers and TRL weigh ranks or micro batches; faults and their mending."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tests.helpers.equivalence_grid import TOLERANCE, write_subject
from tests.helpers.grid import grid
from tests.helpers.tiny import write_recipe, write_rows

STEPS = 4


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> list[str]:
    """The grid's recipe with an evaluation before a few steps; neither split divides into its batches."""
    path = write_subject(tmp_path_factory.mktemp("weighting"))
    keys = json.loads(path.read_text()) | {"max_steps": STEPS, "per_device_train_batch_size": 4, "save_model": False}
    keys |= {"eval_strategy": "steps", "eval_steps": STEPS, "eval_on_start": True, "per_device_eval_batch_size": 4}
    path.write_text(json.dumps(keys))
    return [str(path)]


@pytest.fixture(scope="module")
def plain(one, recipe, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("plain")
    argv = [*recipe, "--output_dir", str(folder / "out")]
    trained = one.run("equivalence_cases.train_plainly", argv=argv, folder=str(folder))[0]
    return trained | {"evaluation": one.run("equivalence_cases.evaluate_plainly", argv=argv)[0]}


def apart(losses: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


@pytest.mark.parametrize("strategy", [grid("ddp"), "zero3"])
def test_evaluation_is_token_weighted(two, recipe, plain, tmp_path, strategy):
    argv = [*recipe, "--output_dir", str(tmp_path / "out")]
    argv += [] if strategy == "ddp" else ["--deepspeed", f"ds_configs/{strategy}.json"]
    found = two.run("train", argv=argv)[0]["metrics"]
    assert apart(found["loss_history"], plain["losses"]) <= TOLERANCE
    before, after = (entry["loss"] for entry in found["eval_history"])
    assert before == pytest.approx(plain["evaluation"], rel=TOLERANCE) and after < before - 0.1


def test_the_first_token_of_a_row_counts_in_no_evaluation(one, two, tmp_path):
    """Rows of text, whose first token has a label and no loss."""
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


def losses(group, recipe: Path, out: Path, *more: str, case: str = "train") -> tuple[list[float], list[float]]:
    """The losses of a run in training and in evaluation."""
    argv = [str(recipe), "--output_dir", str(out / f"{case}-{group.world_size}"), *more, "--overwrite", "true"]
    found = group.run(case, argv=argv)[0]["metrics"]
    return found["loss_history"], [entry["loss"] for entry in found["eval_history"]]


def test_packed_rows_that_are_repeated_have_no_loss(one, two, tmp_path):
    """In a micro batch of 4 packed rows stand in one, and the last ones of an epoch are repetitions."""
    recipe = write_recipe(
        tmp_path, dataset_name=str(write_rows(tmp_path / "few", count=55)), packing=True, max_length=64, bf16=False,
        global_batch_size=8, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=9,
        eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    plain = losses(one, recipe, tmp_path, "--per_device_train_batch_size", "8")
    found = losses(two, recipe, tmp_path)
    assert apart(found[0], plain[0]) <= TOLERANCE and apart(found[1], plain[1]) <= TOLERANCE
    repeated = losses(two, recipe, tmp_path, case="equivalence_cases.train_with_repeated_rows")
    assert apart(repeated[0], plain[0]) > 100 * TOLERANCE and apart(repeated[1], plain[1]) > TOLERANCE


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
        found = losses(group, recipe, tmp_path)
        assert apart(found[0], plain[0]) <= TOLERANCE and apart(found[1], plain[1]) <= TOLERANCE
    assert "21 rows" in (tmp_path / "train-2" / "recipe.resolved.yaml").read_text(), "its start is audited"
