"""Old recipes pass after `check --upgrade`, their comments and order kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from zero_recipes.cli import main as cli
from zero_recipes.cli.upgrade import upgrade
from zero_recipes.config import recipe_keys

ROOT = Path(__file__).resolve().parents[2]

# short files of our own in the form of two well-known repositories
HANDBOOK = """\
# Model arguments
model_name_or_path: ./tiny_world/base
torch_dtype: bfloat16 # half the memory
use_flash_attention_2: false

# Data training arguments
dataset_mixer:
  # the only one
  ./tiny_world: 1.0
dataset_splits:
- train
- test
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
save_strategy: no
warmup_ratio: 0.1
logging_dir: runs
"""
OPEN_R1 = """\
# Model arguments
model_name_or_path: ./tiny_world/base
model_revision: main
torch_dtype: bfloat16
attn_implementation: sdpa

# Data
dataset_name: ./tiny_world
dataset_num_proc: 2

bf16: true
do_eval: false
eval_strategy: 'no'
gradient_accumulation_steps: 1
gradient_checkpointing: true
hub_strategy: every_save
learning_rate: 4.0e-05
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
packing: false
max_seq_length: 256
output_dir: {output}
overwrite_output_dir: true
per_device_train_batch_size: 2
report_to:
- none
seed: 42
warmup_ratio: 0.03
"""


def test_the_handbooks_form(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    old = tmp_path / "old.yaml"
    old.write_text(HANDBOOK.format(output=tmp_path / "out"))
    assert cli.main(["check", str(old)]) == 2
    assert cli.main(["check", str(old), "--upgrade"]) == 0, capsys.readouterr().out
    text = (tmp_path / "old.upgraded.yaml").read_text()
    assert yaml.safe_load(text) == {
        "model_name_or_path": "./tiny_world/base",
        "dtype": "bfloat16",
        "dataset_name": "./tiny_world",
        "dataset_train_split": "train",
        "dataset_test_split": "test",
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
    for kept in (
        "# Model arguments\n",
        "# half the memory",
        "# the only one",
        "# Data training arguments\n",
        "# SFT trainer",
    ):
        assert kept in text
    assert "# use_flash_attention_2: false" in text and "# logging_dir: runs" in text
    assert old.read_text() == HANDBOOK.format(output=tmp_path / "out"), "the old file was touched"


def test_open_r1s_form(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    old = tmp_path / "old.yaml"
    old.write_text(OPEN_R1.format(output=tmp_path / "out"))
    assert cli.main(["check", str(old), "--upgrade"]) == 0


def test_a_mixture_and_a_file_of_today(tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text("dataset_mixer:\n  a/b: 0.5\n  c/d: 0.5\ngroup_by_length: true\nmax_length: 5\nmax_seq_length: 9\n")
    text, said = upgrade(old)
    new = yaml.safe_load(text)
    assert [(d["path"], d["fraction"]) for d in new["datasets"]] == [("a/b", 0.5), ("c/d", 0.5)]
    assert new["train_sampling_strategy"] == "group_by_length" and new["max_length"] == 5
    assert any("max_seq_length: removed" in sentence for sentence in said)
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        assert upgrade(path) == (path.read_text(), []), "a recipe of today needs no upgrade"
    assert set(recipe_keys.key_types()) >= {"activation_checkpointing", "activation_checkpointing_kwargs"}


@pytest.mark.parametrize(
    "old, new",
    [
        ("seed: 1\n\nlogging_dir: a  # there\n\n# The next part\nmax_steps: 5\n",
         "seed: 1\n\n# logging_dir: a  # there\n\n# The next part\nmax_steps: 5\n"),
        ("group_by_length:   true # batches\nbf16: False\nlabel_names:\n    - a\n",
         "train_sampling_strategy: group_by_length # batches\nbf16: False\nlabel_names:\n    - a\n"),
        ("'max_seq_length' : 5", "max_length : 5"),
        ("save_strategy: off # never", 'save_strategy: "no" # never'),
        ("{max_seq_length: 5}", "{max_seq_length: 5}"),
        ("dataset_mixer: a/b\n", "datasets: a/b\n"),
        ("packing: &off false\nadafactor: *off\n", "packing: &off false\nadafactor: *off\n"),
    ],
)  # fmt: skip
def test_only_what_must_change_is_changed(tmp_path, old, new):
    """To the letter, the comments after a removed key and lists at their indentation included."""
    (tmp_path / "old.yaml").write_text(old)
    assert upgrade(tmp_path / "old.yaml")[0] == new


def test_the_next_sections_title_outlives_a_removed_key(tmp_path):
    (tmp_path / "old.yaml").write_text(
        "dataset_mixer:\n  # the only one\n  a/b: 1.0\ndataset_splits: [c]\n# SFT\nseed: 1\n"
    )
    assert upgrade(tmp_path / "old.yaml")[0] == (
        "  # the only one\ndataset_name: a/b\ndataset_train_split: c\n# SFT\nseed: 1\n"
    )
