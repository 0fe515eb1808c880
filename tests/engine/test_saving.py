"""A saved model is whole under every strategy, a broken one is recognised, and nothing that was saved is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers.grid import grid
from tests.helpers.tiny import llama_config, named, write_recipe
from zero_recipes.checkpoint.output_dir import refuse_occupied, saved_in
from zero_recipes.checkpoint.verify import verify
from zero_recipes.checks.lower_bounds import checkpoint_bytes
from zero_recipes.config import recipe as recipes
from zero_recipes.config.ds_config import DsConfig
from zero_recipes.config.strategy import Strategy
from zero_recipes.core.findings import Refusal

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", grid("zero0"), grid("zero3_offload"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("saving"), save_model=True, eval_strategy="steps", eval_steps=2)


@pytest.fixture(scope="module")
def saved(two, recipe, tmp_path_factory) -> dict[str, Path]:
    """One saved run for each strategy that is asked for, with samples generated before and after."""

    class Folders(dict):
        def __missing__(self, strategy: str) -> Path:
            self[strategy] = tmp_path_factory.mktemp(strategy) / "out"
            samples = ["--sample_prompts", "3", "--sample_max_new_tokens", "2", "--per_device_eval_batch_size", "2"]
            argv = [str(recipe), "--output_dir", str(self[strategy]), *named(strategy), *samples]
            assert two.run("train", argv=argv)[0]["metrics"]["strategy"] == strategy
            return self[strategy]

    return Folders()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_saved_model_loads_and_is_the_trained_one(saved, strategy):
    folder = saved[strategy]
    assert verify(folder, deep=True)["parameters"] == json.loads((folder / "metrics.json").read_text())["parameters"]
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    reference = AutoModelForCausalLM.from_pretrained(saved["zero1"], dtype=torch.float32)
    apart, whole = 0.0, 0.0
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        apart += (mine - wanted).square().sum().item()
        whole += wanted.square().sum().item()
    assert (apart / whole) ** 0.5 < 1e-2  # bf16 rounds to 4e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_samples_before_and_after_under_every_strategy(saved, strategy):
    rows = [json.loads(line) for line in (saved[strategy] / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert set(row) == {"prompt", "before", "after", "reference", "scores_before", "scores_after"}
        assert set(row["scores_after"]) == {"exact_match", "token_f1", "reference_loss"}
        assert row["scores_after"]["reference_loss"] < row["scores_before"]["reference_loss"]
    assert json.loads((saved[strategy] / "metrics.json").read_text())["eval_history"][0]["step"] == 2


def test_the_resolved_recipe_runs_again(two, saved, tmp_path):
    resolved = saved["zero2"] / "recipe.resolved.yaml"
    first = json.loads((saved["zero2"] / "metrics.json").read_text())
    again = two.run("train", argv=[str(resolved), "--output_dir", str(tmp_path / "again"), "--save_model", "false"])[0]
    assert again["metrics"]["strategy"] == "zero2"
    assert again["metrics"]["loss_history"] == pytest.approx(first["loss_history"], rel=1e-4)  # bf16


@pytest.mark.parametrize("strategy", [grid("ddp"), grid("zero2"), "zero3"])
def test_the_best_model_is_the_one_that_is_saved(two, tmp_path, strategy):
    """A learning rate that spoils the model: the first checkpoint is the best, and whole, its LM head included."""
    keys = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    keys |= {"load_best_model_at_end": True, "learning_rate": 3.0, "warmup_steps": 2, "bf16": False}
    path = write_recipe(tmp_path, save_model=True, **keys)
    named = [] if strategy == "ddp" else ["--deepspeed", f"ds_configs/{strategy}.json"]
    metrics = two.run("train", argv=[str(path), "--output_dir", str(tmp_path / "out"), *named])[0]["metrics"]
    losses = [evaluation["loss"] for evaluation in metrics["eval_history"]]
    best = losses.index(min(losses)) + 1
    assert best < 3, losses
    ours, wanted = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "out", tmp_path / "out" / f"checkpoint-{best}")
    )
    last = load_file(tmp_path / "out" / "checkpoint-3" / "model.safetensors")
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert not torch.equal(ours["embed_out.weight"], last["embed_out.weight"])


def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved["zero1"], tmp_path / "copy"))


def test_an_occupied_folder_is_refused_untouched(saved, tmp_path):
    folder = copied(saved, tmp_path)
    (folder / "checkpoint-2").mkdir()
    before = sorted(str(path) for path in folder.rglob("*"))
    with pytest.raises(Refusal) as caught:
        refuse_occupied(folder, None, False)
    assert "--resume_from_checkpoint true" in caught.value.fix and "--overwrite true" in caught.value.fix
    assert sorted(str(path) for path in folder.rglob("*")) == before
    assert [path.name for path in saved_in(folder)] == ["checkpoint-2", "model.safetensors", "metrics.json"]
    refuse_occupied(folder, "true", False)
    refuse_occupied(folder, None, True)
    refuse_occupied(tmp_path / "new", None, False)


def test_output_dir_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match="cannot be made"):
        refuse_occupied(tmp_path / "file" / "out", None, False)


@pytest.mark.parametrize("strategy", ["ddp", grid("zero2"), "zero3"])
def test_a_real_checkpoint_is_as_large_as_predicted(two, tmp_path, strategy):
    path = write_recipe(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    argv = [str(path), "--output_dir", str(tmp_path / "out")]
    argv += [] if strategy == "ddp" else ["--deepspeed", f"ds_configs/{strategy}.json"]
    psi = two.run("train", argv=argv)[0]["metrics"]["parameters"]
    written = [p for p in (tmp_path / "out" / "checkpoint-2").rglob("*") if p.suffix in (".safetensors", ".pt")]
    settings = recipes.parse_recipe(path, recipes.read_recipe_file(path), []).settings
    config = None if strategy == "ddp" else DsConfig({"zero_optimization": {"stage": int(strategy[-1])}})
    config_of_model = SimpleNamespace(dtype=torch.float16)
    predicted = checkpoint_bytes(Strategy(strategy, 2, config, "c.json"), settings, config_of_model, psi, 2)
    assert predicted < sum(p.stat().st_size for p in written) < 1.1 * predicted + 100_000


@pytest.mark.parametrize("strategy", [grid("ddp"), grid("zero0"), grid("zero1"), "zero2", "zero3", "fsdp2"])
def test_a_tied_head_is_saved_once_and_loads_equal(two, tmp_path, strategy):
    """Of the model in output_dir and of a checkpoint; DeepSpeed and FSDP2 gather copies of the one tensor."""
    torch.manual_seed(5)
    keys = {"random_weights": False, "save_model": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    path = write_recipe(tmp_path, bf16=False, **keys)
    AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    two.run("train", argv=[str(path), "--output_dir", str(tmp_path / "out"), *named(strategy)])
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == before.keys() and "lm_head.weight" not in saved
        assert verify(folder)["tensors"] == len(before)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert torch.equal(model.lm_head.weight, saved["model.embed_tokens.weight"])
    assert not torch.equal(saved["model.embed_tokens.weight"], before["model.embed_tokens.weight"]), "it has trained"


@pytest.mark.private
def test_saving_a_tied_head_once_is_still_our_work(two, tmp_path, monkeypatch):
    """Fails when transformers saves it once by itself: then remove compat.patches.without_aliases."""
    keys = {"random_weights": False, "save_model": True, "max_steps": 1}
    path = write_recipe(tmp_path, bf16=False, **keys)
    AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    argv = [str(path), "--output_dir", str(tmp_path / "out"), *named("zero2")]
    two.run("train_with_aliases", argv=argv)
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
