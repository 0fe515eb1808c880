"""Recipes and ds_configs from elsewhere: what `check` says of them, and what `check --upgrade` makes of them."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.helpers.faults import Side
from zero_recipes.cli import main as cli
from zero_recipes.cli.upgrade import runnable_ds_config, upgrade
from zero_recipes.config import keys

# short texts of our own in the form of well-known projects
HANDBOOK = """\
torch_dtype: bfloat16 # half the memory
use_flash_attention_2: false
preprocessing_num_workers: 2
evaluation_strategy: "no"
gradient_checkpointing: true
max_seq_length: 128
warmup_ratio: 0.1
logging_dir: runs
"""
OTHERS = {
    "axolotl": "base_model: m\nval_set_size: 0.05\nsequence_len: 128\nmicro_batch_size: 4\nflash_attention: true\n",
    "LLaMA-Factory": "stage: sft\nfinetuning_type: lora\nlora_rank: 8\ndataset: alpaca_en_demo\ncutoff_len: 128\n",
}
# as pages print them: comments, Python's underscores, keys outside their block, sizes and an optimizer of another job
PASTED = """{
  "train_batch_size": 256, # on 8 GPUs
  "gradient_clipping": 0.5,
  "stage3_prefetch_bucket_size": 50_000_000,   // prefetch
  "zero_optimization": {"overlap_comm": true, "reduce_bucket_size": 5e7},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
  "fp16": {"enabled": true, "loss_scale": 0},
  "aio": {"block_size": 1048576, "thread_count": 2},
  "zero_alow_untested_optimizer": true,
}
"""


def test_a_recipe_of_the_handbooks_form_becomes_one_of_today(tmp_path, monkeypatch, capsys):
    Side(recipe=HANDBOOK, without=("max_length", "activation_checkpointing")).write(tmp_path)
    monkeypatch.chdir(tmp_path)
    path, check = Path("recipe.yaml"), ["check", "recipe.yaml"]
    old = path.read_text()
    assert cli.main(check) == 2
    assert cli.main([*check, "--upgrade"]) == 0, capsys.readouterr().out
    text = Path("recipe.upgraded.yaml").read_text()
    kept = {key: value for key, value in yaml.safe_load(old).items() if f"{key}:" not in HANDBOOK}
    today = {"dtype": "bfloat16", "dataset_num_proc": 2, "eval_strategy": "no", "activation_checkpointing": True}
    assert yaml.safe_load(text) == kept | today | {"max_length": 128, "warmup_steps": 0.1}
    assert "# use_flash_attention_2: removed, it was False" in text and "# logging_dir: removed, it was 'runs'" in text
    assert upgrade(Path("recipe.upgraded.yaml")) == (text, []) and path.read_text() == old


@pytest.mark.parametrize(
    "old, new",
    [
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
        ({"dataset_mixer": "a/b"}, {"datasets": "a/b"}),
        ({"dataset_mixer": {"a/b": 1.0}}, {"dataset_mixer": {"a/b": 1.0}}),
        ({"num_proc": 1, "preprocessing_num_workers": 2}, {"dataset_num_proc": 1}),
        ({"warmup_ratio": 0.1, "warmup_steps": 20}, {"warmup_steps": 20}),
        ({"use_flash_attention_2": False, "env": {"A": 1}}, {"env": {"A": 1}}),
    ],
)  # fmt: skip
def test_each_key_is_the_one_of_today(tmp_path, old, new):
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old, sort_keys=False))
    assert yaml.safe_load(upgrade(tmp_path / "old.yaml")[0]) == new


def test_a_pasted_ds_config_becomes_one_that_runs(tmp_path, monkeypatch, capsys):
    Side().write(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("pasted.json").write_text(PASTED)
    check = ["check", "recipe.yaml", "--num_processes", "2", "--deepspeed"]
    assert cli.main([*check, "pasted.json"]) == 2
    assert cli.main([*check, "pasted.json", "--upgrade"]) == 0, capsys.readouterr().out
    assert 'gradient_clipping: "auto", it was 0.5' in capsys.readouterr().out
    written = json.loads(Path("pasted.upgraded.json").read_text())
    zero = {"overlap_comm": True, "reduce_bucket_size": 5e7, "stage3_prefetch_bucket_size": 50_000_000, "stage": 3}
    assert written["zero_optimization"] == {**zero, "stage3_gather_16bit_weights_on_model_save": True}
    assert written["fp16"] == {"enabled": "auto", "loss_scale": 0} and written["aio"] == {"block_size": 1048576}
    assert not {"optimizer", "scheduler", "zero_alow_untested_optimizer"} & set(written)
    assert cli.main([*check, "pasted.upgraded.json", "--upgrade"]) == 0 and "written" not in capsys.readouterr().out

    block = {"device": "nvme", "nvme_path": "/another/machines"}
    elsewhere = {"zero_optimization": {"stage": 3, "offload_param": block, "offload_optimizer": block}}
    zero = runnable_ds_config(elsewhere)["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 0, "DeepSpeed's prefetcher does not know parameters on NVMe"
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "auto"


@pytest.mark.parametrize("trainer", OTHERS)
def test_check_says_how_each_key_of_another_trainer_is_called_here(trainer, tmp_path, capsys):
    path, table = tmp_path / "theirs.yml", keys.tables()["other_trainers"][trainer]
    path.write_text(OTHERS[trainer])
    assert cli.main(["check", str(path)]) == 2
    said = "".join(capsys.readouterr())
    theirs = [key for key in table if re.search(rf"^{key}:", OTHERS[trainer], re.MULTILINE)]
    assert len(theirs) > 3 and said.count(f"is a key of {trainer}") == len(theirs)
    for key in theirs:
        name = table[key].get("to")
        assert f"`{key}` in " in said and (f"Write `{name}`." in said or not name), key
    assert said.count("[ZR187]") == 1 and "ZR103" not in said
