"""A run begins with the checkpoint's weights, all of them and no others, or it is refused; rows are made once."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.helpers import cases, ending_cases
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, settings_with, write_recipe
from tests.helpers.tools import contents, refusal_of
from zero_recipes.model import load

NAME, QUERY = "model.safetensors", "gpt_neox.layers.1.attention.query_key_value.weight"
RENAMED = QUERY.replace("query_key_value", "qkv")
# of Pythia's checkpoints, which today's GPTNeoX ignores
OLD_BUFFERS = {"bias": torch.ones(1, 1, 256, 256, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
OLD_BUFFERS |= {"rotary_emb.inv_freq": torch.ones(2)}
OLD_BUFFERS = {f"gpt_neox.layers.0.attention.{name}": tensor for name, tensor in OLD_BUFFERS.items()}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """One step on a model with weights."""
    folder = tmp_path_factory.mktemp("loading")
    path = write_recipe(folder, random_weights=False, max_steps=1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    return path


def with_tensors(recipe: Path, folder: Path, strategy: str, **tensors: torch.Tensor | None) -> list[str]:
    """The recipe's arguments with a copy of its model that has other tensors (None: that it lacks)."""
    copy = Path(shutil.copytree(recipe.parent / "model", folder / f"model-{len(list(folder.iterdir()))}"))
    held = {name: tensor for name, tensor in (load_file(copy / NAME) | tensors).items() if tensor is not None}
    save_file(held, copy / NAME, metadata={"format": "pt"})
    return arguments(recipe, strategy, folder / "out", "--model_name_or_path", str(copy), "--overwrite", "true")


@pytest.mark.parametrize("strategy", [grid("ddp"), "zero3"])  # the two ways of transformers to load
def test_other_tensors_are_refused_by_name_unless_the_recipe_allows_them(two, recipe, tmp_path, strategy):
    query, out = load_file(recipe.parent / "model" / NAME)[QUERY], tmp_path / "out"
    shorter = with_tensors(recipe, tmp_path, strategy, **{QUERY: query[:-3].clone()})
    for said in two.run(ending_cases.refusal_of, argv=shorter):
        assert said.endswith(f"mismatched keys {QUERY} [ZR408]")
    assert not out.exists(), "a run that is refused leaves nothing"
    out.mkdir()
    (out / "metrics.json").write_text('{"status": "ok"}')
    before = contents(out)
    renamed = with_tensors(recipe, tmp_path, strategy, **{QUERY: None, RENAMED: query}, **OLD_BUFFERS)
    for said in two.run(ending_cases.refusal_of, argv=renamed):
        missing, unexpected = said.splitlines()
        assert missing.endswith(f"missing keys {QUERY} [ZR408]")
        assert unexpected.endswith(f"unexpected keys {RENAMED} [ZR408]")
    for said in two.run(ending_cases.refusal_of, argv=[*renamed, "--allow_keys", QUERY]):
        assert "missing" not in said and "unexpected keys" in said
    assert contents(out) == before, "refused before the folder is touched"
    two.run(cases.train, argv=[*renamed, "--allow_keys", QUERY, RENAMED])


def test_another_attention_than_the_requested_one_is_refused(recipe, monkeypatch):
    """By the model, once it is built."""
    built = AutoModelForCausalLM.from_config

    def from_config(*arguments, **keywords):
        model = built(*arguments, **keywords)
        model.config._attn_implementation = "another"
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    settings = settings_with(random_weights=True, attn_implementation="eager", dtype="float32")
    refusal = refusal_of(load.load_model, AutoConfig.from_pretrained(recipe.parent / "model"), settings)
    assert refusal.codes == ["ZR406"] and "eager was requested" in refusal.findings[0].what


def test_rows_are_made_once_by_one_process_and_kept(two, tmp_path):
    """Rank 0 tokenises both splits, rank 1 nothing; a second run finds them, a run with other arguments does not."""
    path = write_recipe(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    argv = [str(path), "--output_dir", str(tmp_path / "out"), "--overwrite", "true"]
    cache = str(tmp_path / "cache")
    assert two.run(cases.splits_tokenised, argv=argv, cache=cache) == [2, 0]
    assert two.run(cases.splits_tokenised, argv=argv, cache=cache) == [0, 0]
    assert two.run(cases.splits_tokenised, argv=[*argv, "--max_length", "99"], cache=cache) == [2, 0]
    assert (tmp_path / "out.previous" / "metrics.json").is_file(), "an overwritten run is kept"


def test_the_row_of_the_padding_token_is_trained_as_it_was_loaded_at_stage_3(two, tmp_path):
    """Youtu's class writes zeros over it, and at stage 3 raised: it has no rows there."""
    recipe = write_recipe(tmp_path, random_weights=False, max_steps=1, bf16=False, learning_rate=0.0, save_model=True)
    sizes = {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "kv_lora_rank": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "pad_token_id": 1}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["youtu"](**sizes, bos_token_id=0, eos_token_id=0))
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path / "model")
    two.run(cases.train, argv=arguments(recipe, "zero3", tmp_path / "out"))
    name = "model.embed_tokens.weight"
    saved = load_file(tmp_path / "out" / NAME)[name]
    torch.testing.assert_close(saved[1], load_file(tmp_path / "model" / NAME)[name][1])
