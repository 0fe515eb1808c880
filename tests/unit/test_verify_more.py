"""What else makes a saved model another one: its tokenizer, its ids, files beside it, names that were exchanged."""

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
from transformers import AutoModelForCausalLM

from tests.helpers.damage import cut, flip, lose, mutations, zero
from tests.helpers.tiny import ROOT, llama_config
from zero_recipes.checkpoint.saved_files import CHECKSUMS, write_checksums
from zero_recipes.checkpoint.verify import ADAPTER, INDEX, SINGLE, NotWhole, verify
from zero_recipes.cli import main as cli

BASE = ROOT / "tiny_world" / "base"
MATRIX = "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"
SEED, ROUNDS = int(os.environ.get("DAMAGE_SEED", 12)), int(os.environ.get("DAMAGE_ROUNDS", 1))


@pytest.fixture
def whole(tmp_path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "whole"))


@pytest.fixture
def sharded(whole, tmp_path) -> Path:
    folder = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(folder, max_shard_size="1MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(whole / name, folder)
    return folder


def said(folder: Path, **keywords) -> str:
    with pytest.raises(NotWhole) as caught:
        verify(folder, **keywords)
    return str(caught.value)


def change(path: Path, **values) -> None:
    """Of a JSON file; None takes a key away."""
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", [MATRIX, "embed_out.weight", "gpt_neox.final_layer_norm.bias"])
def test_integers_where_the_class_has_numbers(whole, dtype, name):
    tensors = load_file(whole / SINGLE)
    save_file(tensors | {name: tensors[name].to(dtype)}, whole / SINGLE, metadata={"format": "pt"})
    assert f"{name} is " in (found := said(whole)) and "fraction" in found


def test_masks_of_earlier_versions_may_stand_there(whole):
    """transformers ignores them, whatever their type."""
    tensors = load_file(whole / SINGLE)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    save_file(tensors | {"gpt_neox.layers.0.attention.bias": mask}, whole / SINGLE, metadata={"format": "pt"})
    verify(whole)


def test_tokenizers(whole):
    verify(whole)
    text = (whole / "tokenizer.json").read_text()
    (whole / "tokenizer.json").write_text(text[: len(text) // 2])
    assert "its tokenizer cannot be read" in said(whole)
    (whole / "tokenizer.json").unlink()
    assert "tokenizer" in said(whole)
    (whole / "tokenizer_config.json").unlink()
    assert verify(whole)["notes"] == ["no tokenizer stands beside it"]
    assert cli.main(["verify", str(whole)]) == 0


def test_ends_beyond_the_vocabulary(whole):
    rows = json.loads((whole / "config.json").read_text())["vocab_size"]
    for name in ("config.json", "generation_config.json"):
        before = (whole / name).read_text()
        for end in (rows, [0, rows + 7], -1):
            change(whole / name, eos_token_id=end)
            assert f"{name}'s eos_token_id" in (found := said(whole)) and "beyond its" in found
        (whole / name).write_text(before)
    verify(whole)
    change(whole / "tokenizer_config.json", eos_token="<|another end|>")
    assert "the tokenizer's end '<|another end|>'" in said(whole)


@pytest.mark.parametrize("weight_map", [[], ["a"], "x", 3, None, {"a": 1}, {"a": ["b"]}, {"a": None}])
def test_an_index_that_is_none(sharded, weight_map):
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "cannot be read" in said(sharded)
    for text in ("[]", "null", '"a"', "", "{", "[" * 100_000):
        (sharded / INDEX).write_text(text)
        assert "cannot be read" in said(sharded)


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 5},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": "two"},
        {"num_attention_heads": 0},
        {"num_attention_heads": 7},
        {"hidden_size": 3},
        {"hidden_size": None, "model_type": "nobody"},
        {"model_type": ["gpt_neox"]},
        {"layer_types": ["full_attention"]},
        {"vocab_size": -4},
        {"dtype": "float3"},
        {"quantization_config": []},
        {"rope_parameters": "none", "rope_scaling": 4},
    ],
)
def test_a_config_that_contradicts_the_weights_or_itself(whole, values):
    change(whole / "config.json", **values)
    assert said(whole)


def test_a_stale_model_beside_the_shards(whole, sharded):
    shutil.copy(whole / SINGLE, sharded / SINGLE)
    assert f"it holds {SINGLE} and {INDEX}, two models" in said(sharded)
    (sharded / SINGLE).unlink()
    shutil.copy(whole / SINGLE, sharded / "model-00009-of-00009.safetensors")
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    notes = verify(sharded)["notes"]
    assert notes == [
        "model-00009-of-00009.safetensors beside it is not read",
        "pytorch_model.bin beside it is not read",
    ]


def test_another_architecture_is_said(whole, capsys):
    change(whole / "config.json", architectures=["BertForMaskedLM"])
    assert cli.main(["verify", str(whole)]) == 0
    assert (
        "note: config.json names BertForMaskedLM; AutoModel makes GPTNeoXForCausalLM of it" in capsys.readouterr().out
    )
    change(whole / "config.json", architectures=None)
    assert verify(whole)["notes"] == []


def test_foreign_tensors_in_an_adapter(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(BASE)
    get_peft_model(model, LoraConfig(target_modules=["query_key_value"], init_lora_weights=False)).save_pretrained(
        tmp_path
    )
    verify(tmp_path)
    tensors = load_file(tmp_path / ADAPTER)
    for name in ("stranger", next(iter(tensors)).replace("layers.0", "layers.9").replace("query_key_value", "dense")):
        save_file(tensors | {name: torch.ones(2, 2)}, tmp_path / ADAPTER)
        assert f"no part of this adapter: {name}" in said(tmp_path)
    save_file(tensors, tmp_path / ADAPTER)
    for values in (
        {"target_modules": 3},
        {"peft_type": "NOBODY"},
        {"r": "x"},
        {"r": 0},
        {"target_modules": ["nobody"]},
    ):
        before = (tmp_path / "adapter_config.json").read_text()
        change(tmp_path / "adapter_config.json", **values)
        assert said(tmp_path)
        (tmp_path / "adapter_config.json").write_text(before)


def test_checksums_show_names_that_were_exchanged_and_bits_that_flipped(whole, capsys):
    """Two matrices of one shape change places: headers, names and numbers are all in order."""
    write_checksums(whole)
    document = json.loads((whole / CHECKSUMS).read_text())
    assert document["algorithm"] == "sha256" and {SINGLE, "config.json", "tokenizer.json"} <= set(document["files"])
    verify(whole, deep=True)
    tensors, other = load_file(whole / SINGLE), MATRIX.replace("layers.0", "layers.1")
    exchanged = tensors | {MATRIX: tensors[other], other: tensors[MATRIX]}
    save_file(exchanged, whole / SINGLE, metadata={"format": "pt"})
    assert f"{SINGLE} is not what was saved" in said(whole, deep=True)
    assert cli.main(["verify", str(whole)]) == 1 and "SHA-256" in capsys.readouterr().err
    assert cli.main(["verify", str(whole), "--skip_checksums"]) == 0
    save_file(tensors, whole / SINGLE, metadata={"format": "pt"})
    (whole / "generation_config.json").unlink()
    assert "generation_config.json is not there" in said(whole)


@pytest.mark.parametrize(
    "document", ["", "[]", "null", "{}", '{"algorithm": "md5", "files": {}}', '{"algorithm": "sha256", "files": []}']
)
def test_checksums_that_cannot_be_read(whole, document):
    (whole / CHECKSUMS).write_text(document)
    assert f"{CHECKSUMS} cannot be read" in said(whole)


def test_bytes_of_any_file_of_a_saved_model(sharded, tmp_path):
    """Every file in turn: whatever is damaged is found, and by NotWhole alone."""
    write_checksums(sharded)
    draw = random.Random(SEED)
    kept = sharded.rename(tmp_path / "kept")
    names = sorted(path.name for path in kept.iterdir())
    for name in names * ROUNDS:
        folder = Path(shutil.copytree(kept, tmp_path / "copy"))
        what = draw.choice([flip, flip, zero, cut, lose])(folder / name, draw)
        if name == CHECKSUMS and what == "deleted":
            verify(folder)
        else:
            assert said(folder), f"{name}: {what}"
        shutil.rmtree(folder)


def test_any_value_of_the_json_files_of_a_saved_model(whole):
    """Without checksums: found, or harmless; never another exception."""
    draw, tried, found = random.Random(SEED), 0, 0
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        before = (whole / name).read_text()
        every = list(mutations(json.loads(before), draw))
        for what, document in draw.sample(every, min(6 * ROUNDS, len(every))):
            (whole / name).write_text(json.dumps(document))
            tried += 1
            try:
                verify(whole)
            except NotWhole:
                found += 1
            except Exception as error:
                raise AssertionError(f"{name}: {what}: {type(error).__name__}: {error}") from error
        (whole / name).write_text(before)
    assert tried >= 18 * ROUNDS and found


def test_an_adapter_whose_base_has_got_more_rows(tmp_path):
    """As TRL makes it where the chat template comes from another model: new tokens, a resized base, a trained head."""
    base = AutoModelForCausalLM.from_config(llama_config())
    base.save_pretrained(tmp_path / "base")
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
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "adapter" / ADAPTER)
    assert f"missing {name}" in said(tmp_path / "adapter")
