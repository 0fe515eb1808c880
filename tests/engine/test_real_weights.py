"""Real pretrained weights on real Alpaca rows: the same loss under stages 2 and 3, a model that has learned."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from tests.helpers.grid import grid
from tests.helpers.tiny import named
from zero_recipes.checkpoint.verify import verify


@pytest.fixture(scope="module")
def runs(two, fixtures, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("real")
    rows = (fixtures / "alpaca_2k.jsonl").read_text().splitlines()
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("\n".join(rows[:400]) + "\n")
    (folder / "rows" / "test.jsonl").write_text("\n".join(rows[-60:]) + "\n")
    recipe = folder / "real.yaml"
    recipe.write_text(
        json.dumps(
            {
                "model_name_or_path": str(fixtures / "stories260K"),
                "dataset_name": str(folder / "rows"),
                "dataset_format": "alpaca",
                "bf16": False,
                "max_length": 384,
                "per_device_train_batch_size": 4,
                "per_device_eval_batch_size": 15,
                "gradient_accumulation_steps": 2,
                "learning_rate": 2.0e-3,
                "max_steps": 12,
                "activation_checkpointing": False,
                "logging_steps": 10,
                "eval_strategy": "steps",
                "eval_steps": 12,
                "eval_on_start": True,
                "save_strategy": "no",
                "report_to": "none",
                "sample_prompts": 3,
                "sample_max_new_tokens": 4,
            }
        )
    )

    class Runs(dict):
        def __missing__(self, strategy: str) -> dict:
            argv = [str(recipe), "--output_dir", str(folder / strategy), *named(strategy)]
            self[strategy] = two.run("train", argv=argv)[0]["metrics"] | {"folder": folder / strategy}
            return self[strategy]

    return Runs()


@pytest.mark.grid  # of random weights: test_equivalence.py
def test_the_same_loss_under_stages_2_and_3(runs):
    assert runs["zero3"]["loss_history"] == pytest.approx(runs["zero2"]["loss_history"], rel=1e-5)


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3"])
def test_held_out_loss_falls_and_the_model_loads(runs, strategy):
    metrics = runs[strategy]
    start, *_, end = metrics["eval_history"]
    assert (start["step"], end["step"]) == (0, 12)
    assert end["loss"] < start["loss"] - 0.5
    assert verify(metrics["folder"])["parameters"] >= metrics["parameters"]  # a tied head may be there twice, or once
    AutoModelForCausalLM.from_pretrained(metrics["folder"])
    rows = [json.loads(line) for line in (metrics["folder"] / "samples.jsonl").read_text().splitlines()]
    mean = {
        key: sum(row[key]["reference_loss"] for row in rows) / len(rows) for key in ("scores_before", "scores_after")
    }
    assert mean["scores_after"] < mean["scores_before"]
