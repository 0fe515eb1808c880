"""Old recipes and pasted ds_configs pass after `check --upgrade`."""

import json
from pathlib import Path

import pytest
import yaml

from zero_recipes.cli import main as cli
from zero_recipes.cli.upgrade import runnable_ds_config, upgrade

ROOT = Path(__file__).resolve().parents[2]

# short files of our own in the form of two well-known repositories
HANDBOOK = """\
# Model arguments
model_name_or_path: ./tiny_world/base
torch_dtype: bfloat16 # half the memory
use_flash_attention_2: false

# Data training arguments
dataset_name: ./tiny_world
preprocessing_num_workers: 2

# SFT trainer config
bf16: true
evaluation_strategy: epoch
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: False
learning_rate: 2.0e-05
max_seq_length: 128
max_steps: -1
num_train_epochs: 1
output_dir: {output}
overwrite_output_dir: true
save_strategy: "no"
warmup_ratio: 0.1
logging_dir: runs
"""

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


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A working directory whose ./tiny_world has the base model and rows with prompt and completion."""
    folder = tmp_path / "tiny_world"
    folder.mkdir()
    (folder / "base").symlink_to(ROOT / "tiny_world" / "base")
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"prompt": "Say it.", "completion": " It."}\n')
    monkeypatch.chdir(tmp_path)


def test_the_handbooks_form(tmp_path, world, capsys):
    old = tmp_path / "old.yaml"
    old.write_text(HANDBOOK.format(output=tmp_path / "out"))
    assert cli.main(["check", str(old)]) == 2
    assert cli.main(["check", str(old), "--upgrade"]) == 0, capsys.readouterr().out
    text = (tmp_path / "old.upgraded.yaml").read_text()
    assert yaml.safe_load(text) == {
        "model_name_or_path": "./tiny_world/base",
        "dtype": "bfloat16",
        "dataset_name": "./tiny_world",
        "dataset_num_proc": 2,
        "bf16": True,
        "eval_strategy": "epoch",
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "learning_rate": 2e-5,
        "max_length": 128,
        "max_steps": -1,
        "num_train_epochs": 1,
        "output_dir": str(tmp_path / "out"),
        "save_strategy": "no",
        "warmup_steps": 0.1,
    }
    assert "# use_flash_attention_2: removed, it was False" in text and "# logging_dir: removed, it was 'runs'" in text
    assert old.read_text() == HANDBOOK.format(output=tmp_path / "out"), "the old file was touched"


def test_a_recipe_of_today_needs_no_upgrade():
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        assert upgrade(path) == (path.read_text(), [])


@pytest.mark.parametrize(
    "old, new",
    [
        ({"seed": 1, "logging_dir": "a", "max_steps": 5}, {"seed": 1, "max_steps": 5}),
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


def test_a_file_for_trl_is_one_that_trls_parser_takes(tmp_path):
    """With keys of ours and of nobody's: what is left, TRL's own parser takes as it stands."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    old = tmp_path / "old.yaml"
    old.write_text(
        HANDBOOK.format(output=tmp_path / "out") + "global_batch_size: 8\nuse_cpu: true\nbeta: 0.1\n"
        "save_model: true\nper_device_train_batch_size: 3\n"
    )
    assert cli.main(["check", str(old), "--upgrade", "--for-trl"]) == 0
    text = (tmp_path / "old.trl.yaml").read_text()
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    script, training, model, _ = parser.parse_args_and_config(["--config", str(tmp_path / "old.trl.yaml")])
    assert (script.dataset_name, training.per_device_train_batch_size) == ("./tiny_world", 3)
    assert (model.dtype, training.warmup_steps, training.max_length) == ("bfloat16", 0.1, 128)
    assert "# beta: removed, it was 0.1" in text and "# global_batch_size: removed, it was 8" in text


def test_a_pasted_ds_config_becomes_one_that_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    pasted = tmp_path / "pasted.json"
    pasted.write_text(PASTED)
    said = ["check", "recipes/tiny.yaml", "--deepspeed", str(pasted), "--num_processes", "2"]
    assert cli.main(said) == 2
    assert cli.main([*said, "--upgrade"]) == 0, capsys.readouterr().out
    assert 'gradient_clipping: "auto", it was 0.5' in capsys.readouterr().out
    upgraded = tmp_path / "pasted.upgraded.json"
    zero = {"overlap_comm": True, "reduce_bucket_size": 5e7, "stage3_prefetch_bucket_size": 50_000_000, "stage": 3}
    written = json.loads(upgraded.read_text())
    assert written["zero_optimization"] == {**zero, "stage3_gather_16bit_weights_on_model_save": True}
    assert written["fp16"] == {"enabled": "auto", "loss_scale": 0} and written["aio"] == {"block_size": 1048576}
    assert not {"optimizer", "scheduler", "zero_alow_untested_optimizer"} & set(written)
    said[3] = str(upgraded)
    assert cli.main([*said, "--upgrade"]) == 0 and "written" not in capsys.readouterr().out


def test_a_pasted_path_of_another_machines_disk_is_left_to_the_recipe():
    block = {"device": "nvme", "nvme_path": "/somebody/elses"}
    pasted = {"zero_optimization": {"stage": 3, "offload_param": block, "offload_optimizer": block}}
    zero = runnable_ds_config(pasted)["zero_optimization"]
    assert zero["stage3_prefetch_bucket_size"] == 0, "DeepSpeed's prefetcher does not know parameters on NVMe"
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "auto"
