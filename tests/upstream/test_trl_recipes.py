"""An adapter is whole, weights are loaded by class, a fetched model is found offline, TRL's split of a mixture."""

import json
import os
import shutil
import subprocess
import sys

import numpy
import pytest
import torch
from datasets import disable_caching, enable_caching
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from trl import DatasetMixtureConfig, get_dataset

from tests.helpers.seeded import grid
from tests.helpers.tiny import ROOT, named, settings_with, write_model, write_recipe, write_rows
from zero_recipes.checkpoint.verify import verify
from zero_recipes.data.load import load_splits


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3", "fsdp2"])
def test_the_lora_recipe_makes_a_whole_adapter(two, tmp_path, strategy):
    """recipes/pythia-lora.yaml on a small model of the same kind: every matrix of the adapter, trained, loads again."""
    model, rows = write_model(tmp_path / "model"), write_rows(tmp_path / "rows")
    argv = ["recipes/pythia-lora.yaml", "--model_name_or_path", str(model), "--dataset_name", str(rows)]
    argv += ["--random_weights", "true", "--max_steps", "2", "--sample_prompts", "0", "--max_length", "64"]
    argv += ["--activation_checkpointing", "false", "--warmup_steps", "0"]
    metrics = two.run("train", argv=[*argv, "--output_dir", str(tmp_path / "out"), *named(strategy)])[0]["metrics"]
    hidden, intermediate = 64, 101  # tests/helpers/tiny.py; two layers, rank 16, A and B of four matrices each
    wanted = 2 * 16 * ((hidden + 3 * hidden) + 2 * hidden + 2 * (hidden + intermediate))
    assert (metrics["strategy"], metrics["trainable_parameters"]) == (strategy, wanted)
    assert verify(tmp_path / "out")["parameters"] == wanted, "the adapter is not complete"
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(adapter) == 16 and all(t.abs().max() > 0 for t in adapter.values()), "B begins at zero and must move"
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "out")).state_dict()
    assert all(torch.equal(loaded[name.replace(".weight", ".default.weight")], t) for name, t in adapter.items())


@pytest.mark.private
def test_loading_by_class_is_still_needed(two, tmp_path):
    """Fails when transformers renames on resume: then remove patches.load_weights_by_class."""
    assert two.run("names_lost_on_resume", folder=str(tmp_path / "saved"))[0] == ["lm_head.weight"]


# one process for all: the hub's folder is read when its library is imported
OFFLINE = """
import json, sys
import run_sft
from zero_recipes.cli import main as cli
from zero_recipes.core.findings import Refusal

def ended(command):
    try:
        return command()
    except Refusal as refusal:
        return str(refusal)

argv = json.loads(sys.argv[1])
run_sft.main([*argv, "--model_name_or_path", "someone/fetched"])
found = [ended(lambda: run_sft.main([*argv, "--model_name_or_path", "someone/absent", "--overwrite", "true"]))]
found += [ended(lambda name=name: cli.main(["fetch", f"recipes/{name}.yaml"])) for name in ("tiny", "pythia")]
print(json.dumps(found))
"""


def test_a_fetched_model_is_found_offline_and_an_absent_one_refused(tmp_path):
    cached = tmp_path / "home" / "hub" / "models--someone--fetched"  # as huggingface_hub leaves it after a download
    shutil.copytree(ROOT / "tiny_world" / "base", cached / "snapshots" / "abc123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc123")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    argv = [str(write_recipe(tmp_path, random_weights=False, max_steps=1)), "--output_dir", str(tmp_path / "out")]
    command = [sys.executable, "-c", OFFLINE, json.dumps(argv)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    absent, fetched, unreachable = json.loads(ended.stdout.splitlines()[-1])
    assert "refused: the model someone/absent" in absent and "zero-recipes fetch" in absent
    assert fetched == 0 and "./tiny_world/base: 2.38 MB" in ended.stdout
    assert unreachable == 2 and "HF_HUB_OFFLINE" in ended.stderr


def test_trls_split_is_drawn_from_the_global_generator(tmp_path):
    """TRL 1.16, scripts/utils.py, get_dataset. Fails once TRL seeds it: load_splits then need not call set_seed."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(200)))
    mixture = DatasetMixtureConfig(datasets=[{"path": str(tmp_path)}], test_split_size=0.2)

    def drawn(seed: int) -> list[str]:
        numpy.random.seed(seed)
        return get_dataset(mixture)["test"]["text"]

    def ours(seed: int) -> list[str]:
        numpy.random.seed(seed + 1000)  # whatever was drawn before
        settings = settings_with(seed=seed, datasets=[{"path": str(tmp_path)}], test_split_size=0.2)
        return load_splits(settings)[0]["test"]["text"]

    disable_caching()
    try:
        assert drawn(1) != drawn(2), "two launches of `trl sft` test on different rows"
        assert ours(3) == ours(3) != ours(4)
        set_seed(3)
        assert get_dataset(mixture)["test"]["text"] == ours(3), "TRL's own split, once it is seeded"
    finally:
        enable_caching()
