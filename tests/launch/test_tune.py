"""`zero-recipes tune` with real runs: one candidate trains, one is refused."""

import yaml

from tests.helpers.tiny import ROOT, write_recipe
from tests.helpers.two_ranks import run_of_sweep
from zero_recipes.cli import main as cli
from zero_recipes.cli import sweep
from zero_recipes.metrics.schema import Metrics


def test_what_runs_is_measured_and_written_and_what_does_not_is_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sweep, "_run", run_of_sweep)
    keys = {"max_length": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}  # one split, no packs
    recipe = write_recipe(tmp_path, save_model=True, eval_strategy="steps", eval_steps=1, sample_prompts=2, **keys)
    argv = ["tune", str(recipe), "--strategies", "zero2,zero2_autocast", "--output_dir", str(tmp_path / "runs")]
    assert cli.main(argv) == 0
    told, new = capsys.readouterr().out, recipe.with_suffix(".tuned.yaml")
    ran = Metrics.read(tmp_path / "runs" / "zero2" / "metrics.json")
    assert len(ran.loss_history) == 12 and not ran.eval_history and not list((tmp_path / "runs").rglob("*.safetensors"))
    assert "zero2_autocast, as it is: refused" in new.read_text() and "ZR193" in told
    assert yaml.safe_load(new.read_text()) == yaml.safe_load(recipe.read_text())
    assert cli.main(["check", str(new), "--config_file", "zero2.yaml"]) == 0
