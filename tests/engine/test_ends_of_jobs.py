"""The end of a job: what cannot end well is refused before weights are loaded, and what is trained is not lost."""

import json

import pytest
from transformers import AutoTokenizer, GPT2Config

from tests.helpers import cases, ending_cases
from tests.helpers.metric_module import write_metric
from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, arguments, write_recipe, write_rows
from zero_recipes.checks.rules import EVALUATION_GIVES
from zero_recipes.metrics.read_runs import read_samples


def test_a_run_is_refused_where_its_rows_make_too_few_steps(two, tmp_path):
    """Sixteen rows in steps of four: four steps."""
    keys = {"dataset_name": str(write_rows(tmp_path / "few", 16)), "max_steps": -1, "num_train_epochs": 1}
    path = write_recipe(tmp_path, **keys, warmup_steps=50)
    out = tmp_path / "out"
    for said in two.run(ending_cases.refusal_of, argv=arguments(path, "ddp", out)):
        assert "[ZR174]" in said and "warmup_steps 50 of 4 steps: the learning rate never reaches its peak" in said
    assert not out.exists()
    metrics = two.run(cases.train, argv=arguments(path, "ddp", out, "--warmup_steps", "0.03"))[0]["metrics"]
    assert len(metrics["loss_history"]) == 4, "the fix"
    assert "\nsteps         16 rows, 4 steps in 1 epoch (1 of them warm-up)\n" in two.log(0, 10**6)


def test_a_run_is_refused_where_its_rows_are_longer_than_the_models_positions(two, tmp_path):
    path = write_recipe(tmp_path, max_steps=1)
    sizes = {"vocab_size": 1031, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2Config(**sizes, n_positions=64, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "out"
    argv = arguments(path, "ddp", out, "--model_name_or_path", str(tmp_path / "gpt2"))
    for said in two.run(ending_cases.refusal_of, argv=argv):
        assert "[ZR175]" in said and "64 positions" in said
    metrics = two.run(cases.train, argv=[*argv, "--max_length", "64"])[0]["metrics"]
    assert metrics["status"] == "ok", "the fix"


def test_a_metric_that_fails_loses_no_answer(two, tmp_path):
    """Of any answer but the one that it is tried with."""
    metric = str(write_metric(tmp_path, "failing", "return {'failing': 1 / int(predictions[0] == 'word')}"))
    keys = {"sample_prompts": 3, "sample_max_new_tokens": 2, "sample_metrics": [metric, "exact_match"]}
    path = write_recipe(tmp_path, save_model=True, max_steps=1, trust_remote_code=True, **keys)
    out = tmp_path / "out"
    ranks = two.run(ending_cases.ending, argv=arguments(path, "zero2", out))
    assert [rank["error"] for rank in ranks] == [None, None] and ranks[0]["metrics"]["status"] == "ok"
    rows = read_samples(out / "samples.jsonl")
    assert [row.scores_after for row in rows] == [{"failing": None, "exact_match": 0.0}] * 3
    assert [row.errors for row in rows] == [{metric: "ZeroDivisionError: division by zero"}] * 3
    said = two.log(0, 10**6)
    assert "raises an error for an empty answer: ZeroDivisionError" in said and "[ZR177]" in said, "before training"
    assert "no score of 3 of 3 rows, where it fails: ZeroDivisionError: division by zero" in said


BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_strategy": "steps", "max_steps": 1}
BEST |= {"load_best_model_at_end": True, "sample_prompts": 0}


@pytest.mark.parametrize("tokens", ["logging_steps", grid("micro_batch")])
def test_an_evaluation_gives_what_the_check_takes_for_its_results(two, tmp_path, tokens):
    path = write_recipe(tmp_path, **BEST, metric_for_best_model="eval_mean_token_accuracy", token_metrics=tokens)
    ranks = two.run(ending_cases.ending_without_rules, argv=arguments(path, "ddp", tmp_path / "out"))
    assert [rank["error"] for rank in ranks] == [None, None]
    allowed = {f"eval_{name}" for name in EVALUATION_GIVES}
    given = {*ranks[0]["evaluated"][0]}
    assert given - allowed == {"epoch"}, "transformers adds eval_ to a name without it"
    assert allowed - given == {"eval_aux_loss", "eval_model_preparation_time"}, "of experts, and of other evaluations"


def test_a_best_metric_that_is_missing_fails_in_the_evaluation(two, tmp_path):
    path = write_recipe(tmp_path, **BEST, metric_for_best_model="eval_f1")
    ranks = two.run(ending_cases.ending_without_rules, argv=arguments(path, "ddp", tmp_path / "out"))
    assert ranks[0]["metrics"]["failure"]["phase"] == "eval" and "eval_f1" in ranks[0]["metrics"]["error"]


LORA = {"use_peft": True, "lora_target_modules": ["all-linear"], "dtype": "bfloat16"}


@pytest.mark.parametrize("strategy, keys", [("zero2", {}), grid("fsdp2", {}), grid("ddp", LORA)])
def test_the_fix_of_a_resume_from_a_model_alone_works(two, tmp_path, strategy, keys):
    path = write_recipe(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True, **keys)
    out = tmp_path / "out"
    argv = arguments(path, strategy, out)
    two.run(cases.train, argv=argv)
    checkpoint = out / "checkpoint-3"
    resumes = [*argv, "--resume_from_checkpoint"]
    for said in two.run(ending_cases.refusal_of, argv=[*resumes, "true"]):
        assert "[ZR178]" in said and str(checkpoint) in said
    for said in two.run(ending_cases.refusal_of, argv=[*resumes, str(checkpoint)]):
        assert "[ZR178]" in said
    model = checkpoint
    if keys:
        from zero_recipes.tools import main as cli

        assert cli.main(["export", str(checkpoint)]) == 0
        model = checkpoint.with_name("checkpoint-3-export")
    fixed = ["--model_name_or_path", str(model), "--random_weights", "false", "--resume_from_checkpoint", "false"]
    again = two.run(cases.train, argv=[*arguments(path, strategy, tmp_path / "new"), *fixed])[0]["metrics"]
    first = json.loads((out / "metrics.json").read_text())
    assert again["status"] == "ok" and again["loss_history"][0] < first["loss_history"][0]
