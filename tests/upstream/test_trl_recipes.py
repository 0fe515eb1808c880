"""Weights are loaded by class, a fetched model is found offline, TRL's split of a mixture."""

import json
import os
import shutil
import subprocess
import sys

import numpy
import pytest
from datasets import disable_caching, enable_caching
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, set_seed
from trl import DatasetMixtureConfig, get_dataset

from tests.helpers.tiny import ROOT, settings_with, write_recipe
from zero_recipes.data.load import load_splits


@pytest.mark.private
def test_loading_by_class_is_still_needed(tmp_path):
    """Fails when transformers renames on resume: then remove patches.load_weights_by_class."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny_world" / "base")
    model.save_pretrained(tmp_path)
    assert model.load_state_dict(load_file(tmp_path / "model.safetensors"), False).missing_keys == ["lm_head.weight"]


# one process for all: the hub's folder is read when its library is imported
OFFLINE = """
import json, sys
import run_sft
from zero_recipes.core.findings import Refusal

def ended(command):
    try:
        return command()
    except Refusal as refusal:
        return str(refusal)

argv = json.loads(sys.argv[1])
run_sft.main([*argv, "--model_name_or_path", "someone/fetched"])
found = [ended(lambda: run_sft.main([*argv, "--model_name_or_path", "someone/absent", "--overwrite", "true"]))]
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
    (absent,) = json.loads(ended.stdout.splitlines()[-1])
    assert absent.startswith("refused: ") and "someone/absent" in absent


def test_a_split_is_drawn_by_the_recipes_seed_as_trl_draws_it_once_it_is_seeded(tmp_path):
    """TRL 1.16 (scripts/utils.py, get_dataset) draws from the global generator: two launches test on different rows."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(200)))
    mixture = {"datasets": [{"path": str(tmp_path)}], "test_split_size": 0.2}

    def ours(seed: int) -> list[str]:
        numpy.random.seed(seed + 1000)  # whatever was drawn before
        return load_splits(settings_with(seed=seed, **mixture))[0]["test"]["text"]

    disable_caching()
    try:
        wanted = ours(3)
        assert ours(3) == wanted != ours(4)
        set_seed(3)
        assert get_dataset(DatasetMixtureConfig(**mixture))["test"]["text"] == wanted
    finally:
        enable_caching()
