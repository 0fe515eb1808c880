"""Each kind of damage to a saved model is found by name; whole models of every kind raise no alarm."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.helpers.damage import cut, flip, lose, zero
from tests.helpers.tiny import ROOT, llama_config
from zero_recipes.checkpoint.save import (
    ADAPTER,
    CHECKSUMS,
    INDEX,
    SINGLE,
    NotWhole,
    begin_checkpoint,
    write_checksums,
    write_manifest,
)
from zero_recipes.checkpoint.verify import verify
from zero_recipes.cli import main as cli

BASE = ROOT / "tiny_world" / "base"
NORM, MATRIX = "gpt_neox.final_layer_norm.weight", "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"
SEED, ROUNDS = int(os.environ.get("DAMAGE_SEED", 12)), int(os.environ.get("DAMAGE_ROUNDS", 1))


@pytest.fixture
def whole(tmp_path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "whole"))


@pytest.fixture
def sharded(tmp_path) -> Path:
    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(BASE).save_pretrained(folder, max_shard_size="1MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / name, folder)
    return folder


@pytest.fixture
def adapter(tmp_path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(BASE)
    tuned = get_peft_model(model, LoraConfig(target_modules=["query_key_value", "dense"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of a file, add them, or (None) take them out."""
    kept = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def change_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def said(folder: Path, **keywords) -> str:
    with pytest.raises(NotWhole) as caught:
        verify(folder, **keywords)
    return str(caught.value)


def test_whole_ones_raise_no_alarm(whole, sharded, adapter, tmp_path):
    count = sum(p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE)).parameters())
    for folder in (whole, sharded):
        found = verify(folder, deep=True)
        assert found["parameters"] == count and found["bytes"] == 2 * count and found["notes"] == []
    assert verify(adapter, deep=True)["tensors"] == len(load_file(adapter / ADAPTER)) > 0
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / SINGLE), "tied weights may be absent"
    assert verify(tmp_path / "tied", deep=True)["notes"] == ["no tokenizer lies beside it"]
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)  # of earlier versions: transformers ignores it
    change(whole / SINGLE, **{"gpt_neox.layers.0.attention.bias": mask})
    verify(whole)


def test_many_layers_of_a_config_are_no_fault(tmp_path):
    """Qwen names max_window_layers, which is more than a small model has of tensors."""
    config = llama_config()
    config.max_window_layers = 2800
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    verify(tmp_path)


def test_names_and_shapes(whole, tmp_path):
    path, original = whole / SINGLE, load_file(whole / SINGLE)
    for tensors, word in (
        ({MATRIX: torch.empty(0)}, f"{MATRIX} is empty (1 in all)"),
        ({MATRIX: None}, f"missing keys {MATRIX}"),
        ({"gpt_neox.layers.9.nobody": torch.zeros(2)}, "unexpected keys gpt_neox.layers.9.nobody"),
        ({MATRIX: torch.ones(3, 3, dtype=torch.bfloat16)}, "mismatched keys"),
    ):
        save_file(original, path, metadata={"format": "pt"})
        change(path, **tensors)
        assert word in said(whole)
    path.unlink()
    assert "no weights" in said(whole) and "no weights" in said(tmp_path / "nowhere")


def test_a_file_that_was_cut_off_or_whose_header_does_not_fit(whole):
    path, data = whole / SINGLE, (whole / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(header | {MATRIX: header[MATRIX] | {"shape": [1, 1]}}).encode()
    other_shape = len(text).to_bytes(8, "little") + text + data[8 + length :]
    for damaged in (data[:-1], data[:100], b"", other_shape, b"\xff" * 8 + data[8:]):
        path.write_bytes(damaged)
        assert "model.safetensors is cut off or damaged" in said(whole)


def test_shards_and_their_index(sharded, whole):
    index = json.loads((sharded / INDEX).read_text())
    _, second, *_ = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == second)
    kept = (sharded / second).read_bytes()
    for tensors, word in (
        ({name: None}, f"{name} is not where {INDEX} places it, {second}"),
        ({"stranger": torch.ones(1)}, f"stranger is not where {INDEX} places it, None"),
    ):
        change(sharded / second, **tensors)
        assert word in said(sharded)
        (sharded / second).write_bytes(kept)
    (sharded / second).unlink()
    assert f"{second} is cut off or damaged: No such file" in said(sharded)
    (sharded / second).write_bytes(kept)
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 100_000):
        (sharded / INDEX).write_text(text)
        assert f"{INDEX} cannot be read" in said(sharded)
    (sharded / INDEX).write_text(json.dumps(index))
    shutil.copy(whole / SINGLE, sharded / "model-00009-of-00009.safetensors")
    assert verify(sharded)["notes"] == ["model-00009-of-00009.safetensors beside it is not read"]
    shutil.copy(whole / SINGLE, sharded / SINGLE)
    assert f"it holds {SINGLE} and {INDEX}, two models" in said(sharded)


def test_adapters(adapter):
    path, original = adapter / ADAPTER, load_file(adapter / ADAPTER)
    gone = next(name for name in original if "lora_B" in name)
    strange = gone.replace("layers.0", "layers.9")
    for tensors, word in (
        ({gone: None}, f"missing {gone}"),
        ({gone: original[gone][:-1].clone()}, f"of another shape {gone}"),
        ({strange: torch.ones(2, 2)}, f"no part of this adapter: {strange}"),
    ):
        save_file(original, path)
        change(path, **tensors)
        assert word in said(adapter)
    save_file(original, path)
    before = (adapter / "adapter_config.json").read_text()
    for values in ({"target_modules": ["nobody"]}, {"peft_type": "NOBODY"}, {"r": 0}):
        change_json(adapter / "adapter_config.json", **values)
        assert "adapter" in said(adapter)
        (adapter / "adapter_config.json").write_text(before)
    change_json(adapter / "adapter_config.json", base_model_name_or_path="nobody/nothing")
    verify(adapter)  # a base that is not at hand is not compared with


def test_an_adapter_whose_base_has_got_more_rows(tmp_path):
    """As TRL makes it where the chat template comes from another model: new tokens, a resized base, a trained head."""
    AutoModelForCausalLM.from_config(llama_config()).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(1408)
    config = LoraConfig(
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        trainable_token_indices={"embed_tokens": [1382, 1383]},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / ADAPTER)
    assert {tensor.shape[0] for tensor in tensors.values()} >= {1408, 2}
    verify(tmp_path / "adapter")
    name = next(name for name in tensors if "trainable_tokens_delta" in name)
    save_file(tensors | {name: torch.ones(3, 64)}, tmp_path / "adapter" / ADAPTER)
    assert f"of another shape {name}" in said(tmp_path / "adapter")


def test_numbers_are_read_only_by_deep(whole, capsys):
    path, original = whole / SINGLE, load_file(whole / SINGLE)
    broken = original[MATRIX].clone()
    broken[1, 2] = float("nan")
    for tensor, word in ((broken, f"{MATRIX} has 1 numbers"), (torch.zeros_like(broken), f"{MATRIX} is all zero")):
        change(path, **{MATRIX: tensor})
        verify(whole)
        assert word in said(whole, deep=True)
    assert cli.main(["verify", str(whole)]) == 0 and cli.main(["verify", str(whole), "--deep"]) == 1
    assert "is all zero" in capsys.readouterr().err
    change(path, **{MATRIX: original[MATRIX], NORM: torch.zeros_like(original[NORM])})
    verify(whole, deep=True)  # a vector of zeros may be meant


def test_configs_and_tokenizers(whole):
    rows = json.loads((whole / "config.json").read_text())["vocab_size"]
    for name, values, word in (
        ("config.json", {"num_hidden_layers": 1}, "unexpected keys"),
        ("config.json", {"num_attention_heads": 7}, "no model can be made of it"),
        ("config.json", {"model_type": "nobody"}, "no model can be made of it"),
        ("config.json", {"eos_token_id": [0, rows + 7]}, f"eos_token_id {rows + 7} of config.json is beyond its"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id -1 of generation_config.json"),
        ("tokenizer_config.json", {"eos_token": "<|another end|>"}, "of the tokenizer is beyond its"),
    ):
        before = (whole / name).read_text()
        change_json(whole / name, **values)
        assert word in said(whole), name
        (whole / name).write_text(before)
    text = (whole / "tokenizer.json").read_text()
    (whole / "tokenizer.json").write_text(text[: len(text) // 2])
    assert "its tokenizer cannot be read" in said(whole)
    (whole / "config.json").unlink()
    assert "no model can be made of it" in said(whole)


def test_checksums_show_what_headers_do_not(whole, capsys):
    """Two matrices of one shape change places: headers, names and numbers are all in order."""
    write_checksums(whole)
    files = json.loads((whole / CHECKSUMS).read_text())["files"]
    assert {SINGLE, "config.json", "tokenizer.json"} <= files.keys()
    verify(whole, deep=True)
    tensors, other = load_file(whole / SINGLE), MATRIX.replace("layers.0", "layers.1")
    change(whole / SINGLE, **{MATRIX: tensors[other], other: tensors[MATRIX]})
    assert f"{SINGLE} is not what was saved" in said(whole, deep=True)
    assert cli.main(["verify", str(whole)]) == 1 and "SHA-256" in capsys.readouterr().err
    assert cli.main(["verify", str(whole), "--skip_checksums"]) == 0
    save_file(tensors, whole / SINGLE, metadata={"format": "pt"})
    (whole / "generation_config.json").unlink()
    assert "generation_config.json is not there" in said(whole)
    for text in ("", "[]", "{}"):
        (whole / CHECKSUMS).write_text(text)
        assert f"{CHECKSUMS} cannot be read" in said(whole)


def test_bytes_of_any_file_of_a_saved_model(sharded, tmp_path):
    """Every file in turn: whatever is damaged is found, and by NotWhole alone."""
    write_checksums(sharded)
    draw, kept = random.Random(SEED), sharded.rename(tmp_path / "kept")
    for name in sorted(path.name for path in kept.iterdir() if path.name != CHECKSUMS) * ROUNDS:
        folder = Path(shutil.copytree(kept, tmp_path / "copy"))
        draw.choice([flip, zero, cut, lose])(folder / name, draw)
        assert said(folder)
        shutil.rmtree(folder)


def test_a_checkpoint_is_whole_with_all_files_of_its_manifest(whole):
    states = whole / "global_step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states.parent.mkdir()
    torch.save(torch.ones(30), states)
    begin_checkpoint(whole)
    assert "not written to its end" in said(whole)
    write_manifest(whole, {"step": 7})
    assert verify(whole, deep=True)["notes"] == []
    flip(states, random.Random(1))
    assert "its checksum is another" in said(whole)
    states.unlink()
    assert f"lacks global_step7/{states.name}" in said(whole)
