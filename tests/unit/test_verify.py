"""Each kind of damage to a saved model is found; whole models of every kind raise no alarm."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.tiny import ROOT, llama_config
from tests.helpers.tools import DAMAGES, contents, cut, flip
from zero_recipes.checkpoint import checksums, save, saved_model
from zero_recipes.checkpoint.output_dir import claim_output_dir
from zero_recipes.tools import main as cli
from zero_recipes.tools.verify import verify

BASE = ROOT / "tiny_world" / "base"
NORM, MATRIX = "gpt_neox.final_layer_norm.weight", "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"


@pytest.fixture
def whole(tmp_path) -> Path:
    return Path(shutil.copytree(BASE, tmp_path / "whole"))


@pytest.fixture
def sharded(tmp_path) -> Path:
    AutoModelForCausalLM.from_pretrained(BASE).save_pretrained(tmp_path / "sharded", max_shard_size="1MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / name, tmp_path / "sharded")
    return tmp_path / "sharded"


@pytest.fixture
def adapter(tmp_path) -> Path:
    lora = LoraConfig(target_modules=["query_key_value", "dense"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), lora).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of a file, add them, or (None) take them out."""
    kept = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def fault(folder: Path, **keywords) -> str:
    with pytest.raises(saved_model.NotWhole) as caught:
        verify(folder, **keywords)
    return str(caught.value)


def test_whole_ones_raise_no_alarm(whole, sharded, adapter, tmp_path):
    count = sum(p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE)).parameters())
    for folder in (whole, sharded):
        found = verify(folder, deep=True)
        assert found["parameters"] == count and 2 * count < found["bytes"] < 2.1 * count
    assert verify(adapter, deep=True)["tensors"] == len(load_file(adapter / saved_model.ADAPTER)) > 0
    config = llama_config(tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / saved_model.SINGLE), "tied weights may be absent"
    verify(tmp_path / "tied", deep=True)
    # a Qwen's configuration may name layers that it does not have
    names = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_window_layers": 28}
    qwen = AutoConfig.for_model("qwen2", vocab_size=96, hidden_size=32, intermediate_size=48, **names)
    AutoModelForCausalLM.from_config(qwen).save_pretrained(tmp_path / "qwen")
    verify(tmp_path / "qwen")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({MATRIX: torch.empty(0)}, "or empty tensors"),
        ({MATRIX: None}, f"missing keys {MATRIX}"),
        ({"gpt_neox.layers.9.nobody": torch.zeros(2)}, "unexpected keys gpt_neox.layers.9.nobody"),
        ({MATRIX: torch.ones(3, 3, dtype=torch.bfloat16)}, "mismatched keys"),
    ],
)
def test_names_and_shapes_of_one_file_and_of_shards(whole, sharded, tensors, message):
    change(whole / saved_model.SINGLE, **tensors)
    assert message in fault(whole)
    shards = json.loads((sharded / saved_model.INDEX).read_text())["weight_map"]
    change(sharded / shards[MATRIX], **tensors)
    assert message in fault(sharded)


def test_adapters(adapter):
    gone = next(name for name in load_file(adapter / saved_model.ADAPTER) if "lora_B" in name)
    before = (adapter / saved_model.ADAPTER).read_bytes()
    change(adapter / saved_model.ADAPTER, **{gone: None})
    assert f"missing {gone}" in fault(adapter)
    (adapter / saved_model.ADAPTER).write_bytes(before)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for values in ({"target_modules": ["nobody"]}, {"peft_type": "NOBODY"}):
        (adapter / "adapter_config.json").write_text(json.dumps(config | values))
        assert "adapter that does not fit its base model" in fault(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "nobody/nothing"}))
    verify(adapter)  # a base that is not at hand is not compared with


def test_numbers_are_read_only_by_deep(whole, capsys):
    path, original = whole / saved_model.SINGLE, load_file(whole / saved_model.SINGLE)
    broken = original[MATRIX].clone()
    broken[1, 2] = float("nan")
    for tensor, message in ((broken, f"{MATRIX} has 1 NaN"), (torch.zeros_like(broken), f"{MATRIX} is all zero")):
        change(path, **{MATRIX: tensor})
        verify(whole)
        assert message in fault(whole, deep=True)
    assert cli.main(["verify", str(whole)]) == 0 and cli.main(["verify", str(whole), "--deep"]) == 1
    assert "is all zero" in capsys.readouterr().err
    change(path, **{MATRIX: original[MATRIX], NORM: torch.zeros_like(original[NORM])})
    verify(whole, deep=True)  # a vector of zeros may be meant


def test_checksums_show_what_headers_do_not(whole, capsys):
    """Two matrices of one shape change places: headers, names and numbers are all in order."""
    checksums.write_checksums(whole)
    verify(whole, deep=True)
    tensors, other = load_file(whole / saved_model.SINGLE), MATRIX.replace("layers.0", "layers.1")
    change(whole / saved_model.SINGLE, **{MATRIX: tensors[other], other: tensors[MATRIX]})
    assert f"{saved_model.SINGLE} is missing or was changed" in fault(whole, deep=True)
    assert cli.main(["verify", str(whole)]) == 1 and "SHA-256" in capsys.readouterr().err
    (whole / checksums.CHECKSUMS).write_text("[]")
    assert f"{checksums.CHECKSUMS} cannot be read" in fault(whole)
    (whole / checksums.CHECKSUMS).unlink()
    cut(whole / "tokenizer.json", random.Random(1))
    assert "its tokenizer cannot be read" in fault(whole)


def test_a_checkpoint_is_whole_with_all_files_of_its_manifest(whole):
    states = whole / "global_step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states.parent.mkdir()
    torch.save(torch.ones(30), states)
    save.write_manifest(whole, {"step": 7})
    verify(whole, deep=True)
    flip(states, random.Random(1))
    assert "its checksum differs" in fault(whole)
    states.unlink()
    assert f"global_step7/{states.name} is missing" in fault(whole)


def test_files_that_are_lost_or_cut_off(whole, sharded, tmp_path):
    path, data = whole / saved_model.SINGLE, (whole / saved_model.SINGLE).read_bytes()
    for damaged in (data[:-1], data[:100], b"", b"\xff" * 8 + data[8:]):
        path.write_bytes(damaged)
        assert "model.safetensors is truncated or damaged" in fault(whole)
    path.unlink()
    assert "no weights" in fault(whole) and "no weights" in fault(tmp_path / "nowhere")
    index = json.loads((sharded / saved_model.INDEX).read_text())
    (sharded / saved_model.INDEX).write_text("[]")
    assert f"{saved_model.INDEX} is truncated or damaged" in fault(sharded)
    (sharded / saved_model.INDEX).write_text(json.dumps(index))
    (sharded / index["weight_map"][MATRIX]).unlink()
    assert f"{index['weight_map'][MATRIX]} is truncated or damaged: No such file" in fault(sharded)


def test_what_is_lost_or_added_after_a_save_is_seen(whole):
    checksums.write_checksums(whole)
    (whole / "recipe.resolved.yaml").write_text("seed: 1\n")
    verify(whole)
    (whole / checksums.CHECKSUMS).write_text('{"files": {}}')
    assert "also load" in fault(whole)
    (whole / checksums.CHECKSUMS).unlink()
    assert "is missing, although the run wrote it" in fault(whole)
    (whole / "recipe.resolved.yaml").write_text("skip_checksums: true\n")
    verify(whole)
    (whole / "recipe.resolved.yaml").write_text("[")
    assert "recipe.resolved.yaml cannot be read" in fault(whole)
    (whole / "recipe.resolved.yaml").unlink()
    verify(whole)  # a model that no run wrote
    (whole / "metrics.json").write_text('{"recipe_sha256": null}')
    verify(whole)  # a trainer without a recipe
    (whole / "metrics.json").write_text('{"recipe_sha256": "ab"}')
    assert "recipe.resolved.yaml is missing" in fault(whole), "it went together with checksums.json"


RECORDS = ("README.md", "metrics.json", "recipe.resolved.yaml", "samples.jsonl", "loss.png", "training_args.bin")
LOADED = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json")
LOADED += ("pytorch_model.bin", "modeling_new.py", "additional_chat_templates/tool.jinja", "tokenizer.model")
HARMLESS = ("notes.txt", "report.html", "slurm-7.log", "runs/events.out.tfevents.1", "model-q8_0.gguf")


@pytest.fixture
def finished(whole) -> Path:
    """As a run leaves its folder."""
    (whole / "pretraining.json").unlink()  # the tiny world's own
    checksums.write_checksums(whole)
    for name in RECORDS:
        (whole / name).write_text("{recipe_sha256: 1}" if name.endswith("yaml") else '{"recipe_sha256": "ab"}')
    checksums.add_records(whole)
    verify(whole)
    return whole


def add(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")


def altered(folder: Path, names: list[str], added: tuple[str, ...]) -> Iterator[str]:
    """Each alteration of a whole folder, one after the other, which is undone before the next."""
    chance = random.Random(54)
    before = contents(folder)
    for name in names:
        path = folder / name
        for damage in DAMAGES:
            damage(path, chance)
            yield f"{damage.__name__} {name}"
            path.write_bytes(before[name])
        path.rename(path.with_name(f"{path.name}.old"))
        yield f"rename {name}"
        path.with_name(f"{path.name}.old").rename(path)
    for name in added:
        if name not in before:
            add(folder / name)
            yield f"add {name}"
            (folder / name).unlink()
    assert contents(folder) == before


def test_every_alteration_of_what_a_run_wrote_is_seen(finished):
    names = sorted(contents(finished))
    assert {*RECORDS, checksums.CHECKSUMS, saved_model.SINGLE, "config.json", "tokenizer.json"} < set(names)
    unseen = []
    for alteration in altered(finished, names, LOADED):
        try:
            verify(finished)
            unseen.append(alteration)
        except saved_model.NotWhole:
            pass
    assert unseen == []
    for name in HARMLESS:
        add(finished / name)
    verify(finished)


def test_every_alteration_of_a_checkpoint_is_seen(whole):
    states = whole / "global_step7" / "mp_rank_00_model_states.pt"
    states.parent.mkdir()
    torch.save(torch.ones(30), states)
    for name in (save.STATE, save.HISTORY):
        (whole / name).write_text("{}")
    save.write_manifest(whole, {"step": 7})
    verify(whole)
    (whole / save.OF_A_RUN).touch()  # a run's mark, later than the manifest
    verify(whole)
    (whole / save.OF_A_RUN).unlink()
    unseen = []
    for alteration in altered(whole, sorted(contents(whole)), (*LOADED, "scaler.pt", "global_step7/more.pt", "notes")):
        try:
            verify(whole)
            unseen.append(alteration)
        except saved_model.NotWhole:
            pass
    assert unseen == []


def test_who_rewrites_records_says_so(finished):
    """push writes a card again, another run all of them; ask and export need the model alone."""
    for name in ("README.md", "loss.png"):
        (finished / name).write_text("written again")
    assert "README.md of" in fault(finished) and "The model is what was saved" in fault(finished)
    verify(finished, records=False)
    checksums.update_records(finished, ["README.md", "loss.png"])
    verify(finished)
    (finished / "metrics.json").write_text('{"status": "running"}')
    fault(finished)
    claim_output_dir(finished, overwrite=False)  # as the next run does
    verify(finished)
    checksums.update_records(finished, ["README.md"])
    assert checksums.read_checksums(finished)["records"] == {}, "push while it is not finished"


def test_a_folder_that_is_not_there(tmp_path, capsys):
    assert cli.main(["verify", str(tmp_path / "nowhere")]) == 2 and "ZR796" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path)]) == 1 and "ZR796" not in capsys.readouterr().err
