"""Each kind of damage to a saved model is found by name; whole models of every kind raise no alarm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.helpers.tiny import ROOT
from zero_recipes.checkpoint import manifest
from zero_recipes.checkpoint.verify import ADAPTER, INDEX, SINGLE, NotWhole, verify
from zero_recipes.cli import main as cli

BASE = ROOT / "tiny_world" / "base"
NORM, MATRIX = "gpt_neox.final_layer_norm.weight", "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"


@pytest.fixture
def whole(tmp_path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "whole"))


@pytest.fixture
def sharded(tmp_path) -> Path:
    AutoModelForCausalLM.from_pretrained(BASE).save_pretrained(tmp_path / "sharded", max_shard_size="1MB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    return tmp_path / "sharded"


@pytest.fixture
def adapter(tmp_path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(BASE)
    tuned = get_peft_model(model, LoraConfig(target_modules=["query_key_value", "dense"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def tied(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of a file, add them, or (None) take them out."""
    kept = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def said(folder: Path, deep: bool = False) -> str:
    with pytest.raises(NotWhole) as caught:
        verify(folder, deep)
    return str(caught.value)


def test_whole_ones_raise_no_alarm(whole, sharded, adapter, tmp_path):
    count = sum(p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE)).parameters())
    for folder in (whole, sharded):
        assert verify(folder, deep=True)["parameters"] == count
    assert verify(whole)["bytes"] == 2 * count
    lora_a_and_b = verify(adapter, deep=True)["tensors"]
    assert lora_a_and_b == len(load_file(adapter / ADAPTER)) > 0
    small = tied(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(small / SINGLE), "tied weights may be absent"
    assert verify(small, deep=True)["tensors"] > 0


def test_absent_and_empty(whole, tmp_path):
    change(whole / SINGLE, **{MATRIX: torch.empty(0)})
    assert f"{MATRIX} is empty (1 in all)" in said(whole)
    (whole / SINGLE).unlink()
    assert "no weights" in said(whole)
    assert "no weights" in said(tmp_path / "nowhere")


def test_names_shapes_and_dtypes(whole):
    path, original = whole / SINGLE, load_file(whole / SINGLE)
    for tensors, word in (
        ({MATRIX: None}, f"missing keys {MATRIX}"),
        ({"gpt_neox.layers.9.nobody": torch.zeros(2)}, "unexpected keys gpt_neox.layers.9.nobody"),
        ({MATRIX: torch.ones(3, 3, dtype=torch.bfloat16)}, "mismatched keys"),
        ({MATRIX: original[MATRIX].float()}, f"{MATRIX} is F32 (1 in all), config.json says BF16"),
    ):
        save_file(original, path, metadata={"format": "pt"})
        change(path, **tensors)
        assert word in said(whole)


@pytest.mark.parametrize("cut", [-1, -100_000, 100, 5, 0])
def test_a_file_that_was_cut_off(whole, cut):
    path = whole / SINGLE
    path.write_bytes(path.read_bytes()[:cut])
    assert "model.safetensors is cut off or damaged" in said(whole)


def test_a_header_that_does_not_fit_its_file(whole):
    path = whole / SINGLE
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def rewritten(**entry) -> bytes:
        text = json.dumps(header | {MATRIX: header[MATRIX] | entry}).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    start, end = header[MATRIX]["data_offsets"]
    for damaged in (
        rewritten(data_offsets=[start + len(data), end + len(data)]),  # past the end of the file
        rewritten(shape=[1, 1]),
        rewritten(dtype="F32"),
        b"\xff" * 8 + data[8:],
        data[:8] + b"[" + data[9:],
    ):
        path.write_bytes(damaged)
        assert "cut off or damaged" in said(whole)


def test_shards_and_their_index(sharded):
    index = json.loads((sharded / INDEX).read_text())
    _, second, *_ = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == second)
    kept = (sharded / second).read_bytes()
    change(sharded / second, **{name: None})
    assert f"{name} is not in {second}" in said(sharded)
    (sharded / second).write_bytes(kept)
    change(sharded / second, stranger=torch.ones(1))
    assert "stranger is in no entry of the index" in said(sharded)
    (sharded / second).write_bytes(kept[:-5])
    assert f"{second} is cut off" in said(sharded)
    (sharded / second).unlink()
    assert f"the index names {second}, which is not there" in said(sharded)
    (sharded / INDEX).write_text("{")
    assert "cannot be read" in said(sharded)


def test_adapters(adapter):
    path, original = adapter / ADAPTER, load_file(adapter / ADAPTER)
    gone = next(name for name in original if "lora_B" in name)
    change(path, **{gone: None})
    assert f"missing {gone}" in said(adapter)
    change(path, **{gone: original[gone][:-1].clone()})
    assert f"of another shape {gone}" in said(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "nobody/nothing"}))
    save_file(original, path)
    verify(adapter)
    change(path, **{gone: None})
    assert f"missing {gone}" in said(adapter), "without the base each lora_A has its lora_B"
    (adapter / "adapter_config.json").unlink()
    assert "adapter_config.json cannot be read" in said(adapter)


def test_numbers_are_read_only_by_deep(whole, adapter, capsys):
    path, matrix = whole / SINGLE, load_file(whole / SINGLE)[MATRIX]
    for value, word in ((float("nan"), "1 numbers that are NaN or infinite"), (float("-inf"), "NaN or infinite")):
        broken = matrix.clone()
        broken[1, 2] = value
        change(path, **{MATRIX: broken})
        verify(whole)
        assert f"{MATRIX} has" in said(whole, deep=True) and word in said(whole, deep=True)
    change(path, **{MATRIX: torch.zeros_like(matrix)})
    assert f"{MATRIX} is all zero" in said(whole, deep=True)
    assert cli.main(["verify", str(whole)]) == 0 and cli.main(["verify", str(whole), "--deep"]) == 1
    assert "is all zero" in capsys.readouterr().err
    change(path, **{MATRIX: matrix, NORM: torch.zeros_like(load_file(path)[NORM])})
    verify(whole, deep=True)  # a vector of zeros may be meant
    original = load_file(adapter / ADAPTER)
    untrained = {name: torch.zeros_like(tensor) for name, tensor in original.items() if "lora_B" in name}
    change(adapter / ADAPTER, **untrained)
    assert "is all zero" in said(adapter, deep=True)


def test_weights_without_a_config(whole):
    (whole / "config.json").unlink()
    assert "no model can be made of it" in said(whole)


def test_a_checkpoint_is_whole_with_all_files_of_its_manifest(whole):
    states = whole / "global_step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states.parent.mkdir()
    states.write_bytes(b"0" * 100)
    manifest.begin(whole)
    assert "not written to its end" in said(whole)
    manifest.write(whole, {"step": 7})
    verify(whole, deep=True)
    states.write_bytes(b"0" * 99)
    assert "99 bytes; 100 were written" in said(whole)
    states.unlink()
    assert f"lacks global_step7/{states.name}" in said(whole)
