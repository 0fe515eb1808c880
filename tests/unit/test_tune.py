"""What `zero-recipes tune` tries, goes on with and writes; the runs themselves are made up."""

import re
from pathlib import Path

import pytest
import yaml

from tests.helpers.report_runs import metrics, save
from tests.helpers.tiny import write_recipe
from zero_recipes.cli import main as cli
from zero_recipes.cli import sweep, tune
from zero_recipes.core.findings import Refusal
from zero_recipes.plan.job import read_recipe


@pytest.fixture
def recipe(tmp_path):
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 256}
    return write_recipe(tmp_path, **keys)


@pytest.fixture
def ran(monkeypatch):
    """[(strategy, options)] of all runs. Packs are twice as fast, at stage 2 most; at stage 1 they are faster still,
    with another loss; a micro batch of 4 fails. Other load slows stage 2 down in the second round."""
    commands = []

    def run(command, folder, *_):
        words = dict(word[2:].split("=") for word in command if word.startswith("--") and "=" in word)
        strategy = Path(command[command.index("--config_file") + 1]).stem
        commands.append((strategy, words))
        if words.get("per_device_train_batch_size") == "4":
            return 1, "it broke"
        packed, steps = "packing" in words, int(words["max_steps"])
        odd = packed and strategy == "zero1"
        seconds = {"zero1": 0.1 if odd else 1.0, "zero2": 0.9}.get(strategy, 1.0) / (2 if packed else 1)
        seconds *= 10 if packed and strategy == "zero2" and steps == 24 else 1
        timed = {"median": seconds, "p90": seconds, "warmup_steps_excluded": 2}
        tokens = {"all": 100 * steps, "non_padding": 100 * steps, "supervised": steps}
        history = [2.0 if odd else 1.0] * steps
        save(folder, metrics(strategy, step_seconds=timed, tokens=tokens, loss_history=history))
        return 0, ""

    monkeypatch.setattr(sweep, "_run", run)
    monkeypatch.setattr(tune.Host, "memory", lambda host: (64 * 10**9, ""))  # whatever else this machine does
    return commands


def test_the_fastest_with_the_same_loss_is_written(recipe, tmp_path, ran, capsys):
    argv = ["tune", str(recipe), "--output_dir", str(tmp_path / "runs"), "--strategies", "ddp,zero1,zero2"]
    assert cli.main(argv) == 0
    new = recipe.with_suffix(".tuned.yaml")
    text, table = new.read_text(), capsys.readouterr().out
    before, after = yaml.safe_load(recipe.read_text()), yaml.safe_load(text)
    length, passes = after["max_length"], after["gradient_accumulation_steps"]
    changed = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": passes, "packing": True}
    assert after == before | changed | {"max_length": length}
    mean = tune.rows_at_hand(read_recipe(recipe, []).settings, recipe).mean
    assert 4 * mean <= passes * length < 5 * mean, "a step has other tokens"
    assert "--config_file accelerate_configs/zero2.yaml" in text
    odd = {str(w) for s, w in ran if s == "zero1" and "packing" in w and w["max_steps"] == "12"}
    assert table.count("another loss") == len(odd)
    assert table.count(" failed ") == 3 and "zero2, 4 x 1: failed" in text
    rounds = [sum(words["max_steps"] == str(steps) for _, words in ran) for steps in (12, 24, 48)]
    assert (
        rounds[0] == len(set(re.findall(r"^#   (.*):", text, re.M))) and rounds[0] > 2 * rounds[1] > 2 * rounds[2] > 0
    )
    assert cli.main(argv) == 2 and "ZR863" in capsys.readouterr().err


def test_a_recipe_that_recomputes_is_tried_without_and_a_large_model_with_larger_buckets(recipe, tmp_path, ran):
    read = read_recipe(recipe, ["--activation_checkpointing", "true", "--max_length", "16"])
    found = tune.candidates(read, 2, 10**12, "cpu", ["ddp", "zero2"])
    assert not found[0].values and [run.strategy for run in found if not run.values] == ["ddp", "zero2"]
    assert {"activation_checkpointing": False} in [run.values for run in found]
    assert not any("packing" in run.values or run.ds_config for run in found), "rows are cut"
    with pytest.raises(Refusal, match="ZR862"):
        tune.candidates(read, 2, 10**6, "cpu", None)
    job = tune.job_of(read, tune.model_config(read.settings), "zero2", sweep.launched_ds_config(
        tune.launched_environment(Path("accelerate_configs/zero2.yaml"), 2), "bf16")[0], 2)  # fmt: skip
    assert tune.buckets(job, 10**9) == [{}, {"zero_optimization.reduce_bucket_size": 200_000_000}]
